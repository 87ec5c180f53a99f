"""What a worker leaves behind when it fails: the error file, in the format of torch's `record`, without torch.

The launcher names the file in TORCHELASTIC_ERROR_FILE and reads it when the worker is dead (`diagnostics/evidence.py`).
Rules: (1) recording never hides the exception itself: what cannot be written is said on stderr, and that is all;
(2) a file is there whole or not at all; only what is there already and cannot be replaced, a device or a mounted file
(Kubernetes' /dev/termination-log), is written in place; (3) it is short enough for its reader, whatever the exception
says.
"""

import errno
import os
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_MESSAGE = 16_000  # characters; with the traceback's, below 1 MiB even if JSON needs twelve bytes for each
_TRACEBACK = 64_000
_NOT_REPLACEABLE = {errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS}

P = ParamSpec("P")
R = TypeVar("R")


def record(function: Callable[P, R]) -> Callable[P, R]:
    """Has an exception that leaves `function` written to the worker's error file; for the program's main function.

    A crash of the interpreter itself (a segmentation fault) shows the Python stacks on stderr.
    """

    @wraps(function)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
        show_crashes()
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if path := error_file():
                write(path, describe(error))
            raise

    return recorded


def error_file() -> str | None:
    """Where this process is to write its failure; None when nobody asked."""
    return os.environ.get(ERROR_FILE) or None


def show_crashes() -> None:
    """Print the Python stacks of all threads if the interpreter crashes."""
    import faulthandler

    try:
        faulthandler.enable(all_threads=True)
    except Exception:  # Python's stderr is no file: a notebook's, a test's
        with suppress(Exception):
            os.fstat(2)
            faulthandler.enable(2, all_threads=True)


def describe(error: BaseException) -> dict[str, Any]:
    """The content of an error file."""
    import traceback

    stack = "".join(traceback.format_exception(type(error), error, users_part(error.__traceback__)))
    return {
        "message": {
            "message": _shortened(f"{type(error).__name__}: {_text(error)}", _MESSAGE),
            "extraInfo": {
                "py_callstack": _shortened(stack, _TRACEBACK),
                "timestamp": str(int(time.time())),
            },
        }
    }


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of ours at its beginning, if there are others."""
    inner = trace
    while inner is not None and str(inner.tb_frame.f_globals.get("__name__")).startswith("ripstop."):
        inner = inner.tb_next
    return inner or trace


def write(path: str, content: Any) -> None:
    """Write an error file, or say why not (rule 1)."""
    import json

    try:
        text = json.dumps(content)
        target = os.path.realpath(path)  # what a link leads to is written, and the link stays
        if _is_special(target):
            _overwrite(target, text)
            return
        try:
            _replace(target, text)
        except OSError as error:
            if error.errno not in _NOT_REPLACEABLE or not os.path.exists(target):  # noqa: PTH110
                raise
            _overwrite(target, text)
    except Exception as error:
        _say(f"the error file cannot be written: {type(error).__name__}: {error}")


def _is_special(path: str) -> bool:
    """Whether there is something else than a plain file."""
    try:
        return not stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _replace(path: str, text: str) -> None:
    draft = f"{path}.{os.getpid()}"
    try:
        with open(draft, "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(text)
        os.rename(draft, path)  # noqa: PTH104
    except OSError:
        with suppress(OSError):
            os.unlink(draft)  # noqa: PTH108
        raise


def _overwrite(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe that nobody reads is refused
    os.set_blocking(fd, True)
    with open(fd, "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write(text)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as flaw:
        return f"<its text cannot be made: {type(flaw).__name__}>"


def _shortened(text: str, size: int) -> str:
    """The beginning and, twice as much, the end: of a traceback, where it started and where it broke."""
    return text if len(text) <= size else f"{text[: size // 3]}\n  …\n{text[-size * 2 // 3 :]}"


def _say(text: str) -> None:
    with suppress(Exception):
        sys.stderr.write(f"ripstop: {text}\n")
