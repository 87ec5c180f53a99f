"""The error file of a failed worker, in the format of torch's `record`, without torch.

The launcher sets its path in TORCHELASTIC_ERROR_FILE and reads it after the worker has ended
(`diagnostics/evidence.py`).  Rules: (1) recording never hides the exception: a write error is only printed to stderr;
(2) a file is written completely or not at all; only a device or a mounted file (Kubernetes' /dev/termination-log),
which cannot be replaced, is overwritten; (3) the size is limited, however long the exception's text is.
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
_MAX_MESSAGE_CHARS = 16_000  # with the traceback, below 1 MiB even if JSON needs twelve bytes for each
_MAX_TRACEBACK_CHARS = 64_000
_NOT_REPLACEABLE_ERRORS = {errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS}

P = ParamSpec("P")
R = TypeVar("R")


def record(function: Callable[P, R]) -> Callable[P, R]:
    """Write an exception that leaves `function`, the program's main function, to the worker's error file.

    A crash of the interpreter itself (a segmentation fault) prints the Python stacks to stderr.
    """

    @wraps(function)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
        show_crashes()
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if path := error_file_path():
                write_error_file(path, error_file_content(error))
            raise

    return recorded


def error_file_path() -> str | None:
    """The path of this process's error file; None if the launcher has set none."""
    return os.environ.get(ERROR_FILE) or None


def show_crashes() -> None:
    """Print the Python stacks of all threads if the interpreter crashes."""
    import faulthandler

    try:
        faulthandler.enable(all_threads=True)
    except Exception:  # sys.stderr is no file, as in a notebook or a test
        with suppress(Exception):
            os.fstat(2)
            faulthandler.enable(2, all_threads=True)


def error_file_content(error: BaseException) -> dict[str, Any]:
    """The content of an error file."""
    import traceback

    stack = "".join(traceback.format_exception(type(error), error, error_file_traceback(error.__traceback__)))
    return {
        "message": {
            "message": _error_file_excerpt(f"{type(error).__name__}: {_error_file_message(error)}", _MAX_MESSAGE_CHARS),
            "extraInfo": {
                "py_callstack": _error_file_excerpt(stack, _MAX_TRACEBACK_CHARS),
                "timestamp": str(int(time.time())),
            },
        }
    }


def error_file_traceback(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without ripstop's frames at its beginning, if it has others."""
    inner = trace
    while inner is not None and str(inner.tb_frame.f_globals.get("__name__")).startswith("ripstop."):
        inner = inner.tb_next
    return inner or trace


def write_error_file(path: str, content: Any) -> None:
    """Write an error file, or print why not (rule 1)."""
    import json

    try:
        text = json.dumps(content)
        target = os.path.realpath(path)  # a link stays, and its target is written
        if _is_special_error_file(target):
            _overwrite_error_file(target, text)
            return
        try:
            _replace_error_file(target, text)
        except OSError as error:
            if error.errno not in _NOT_REPLACEABLE_ERRORS or not os.path.exists(target):  # noqa: PTH110
                raise
            _overwrite_error_file(target, text)
    except Exception as error:
        with suppress(Exception):
            sys.stderr.write(f"ripstop: the error file cannot be written: {type(error).__name__}: {error}\n")


def _is_special_error_file(path: str) -> bool:
    """Whether something other than a regular file exists there."""
    try:
        return not stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _replace_error_file(path: str, text: str) -> None:
    draft = f"{path}.{os.getpid()}"
    try:
        with open(draft, "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(text)
        os.rename(draft, path)  # noqa: PTH104
    except OSError:
        with suppress(OSError):
            os.unlink(draft)  # noqa: PTH108
        raise


def _overwrite_error_file(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC)  # fails for a pipe without a reader
    os.set_blocking(fd, True)
    with open(fd, "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write(text)


def _error_file_message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as flaw:
        return f"<its text cannot be made: {type(flaw).__name__}>"


def _error_file_excerpt(text: str, size: int) -> str:
    """The first third and the last two thirds: a traceback's end is where it failed."""
    return text if len(text) <= size else f"{text[: size // 3]}\n  …\n{text[-size * 2 // 3 :]}"
