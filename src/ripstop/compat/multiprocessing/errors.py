"""torch.distributed.elastic.multiprocessing.errors: failures of workers, and how they travel from process to process.

What is torch's: the names, the error file's format and the layout of a `ChildFailedError`'s text.  What is ours:
(1) an error file that is cut off, binary or endless is a message and never an exception; (2) recording never hides the
error it records; (3) failures of the same second are told apart by the finer clock of their files; (4) an error file
that is in the way is moved aside, not destroyed.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ripstop.diagnostics.evidence import parse_error_file, signal_name
from ripstop.workers import error_file as recording

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]

_NOT_AVAILABLE = "<N/A>"
_READ = 16 << 20  # of an error file: torch writes messages of any length
_ROOT_CAUSE = "Root Cause (first observed failure):"
_BOX = 60  # the widest rule in a report

P = ParamSpec("P")
R = TypeVar("R")
GlobalRank = int
log = logging.getLogger(__name__)


# error files --------------------------------------------------------------------------------------------------------


def read_error_file(path: str) -> tuple[dict[str, Any], float] | None:
    """What an error file says and when it was written; None when there is none.  There is always a `message`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if not Path(path).is_file():
            return None
        return {"message": f"error file {path} cannot be read: {error.strerror}"}, time.time()
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        try:
            data = file.read(_READ)
        except OSError as error:
            return {"message": f"error file {path} cannot be read: {error.strerror}"}, status.st_mtime
    return _content(data, status.st_size), status.st_mtime


def _content(data: bytes, size: int) -> dict[str, Any]:
    import json

    if not data:
        return {"message": ""}
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, dict) and isinstance(content.get("message"), str | dict):
        return content
    return {"message": parse_error_file(data[: 1 << 20], size).message}


# failures -----------------------------------------------------------------------------------------------------------


@dataclass
class ProcessFailure:
    """One worker's failure; what its error file does not say is made up from its exit code and the time.

    `message` is the error file's: a text, or a dict with `message` and `extraInfo`.  `error_file` is `<N/A>` when the
    worker wrote none.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    error_file_data: dict[str, Any] = field(init=False)
    message: Any = field(init=False)
    timestamp: int = field(init=False)
    _at: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._at = time.time()
        self.timestamp = int(self._at)
        self.error_file_data, self.message = {"message": "<NONE>"}, ""
        if (said := read_error_file(self.error_file)) is None:
            self.error_file = _NOT_AVAILABLE
        else:
            self.error_file_data, self._at = said
            self.message = self.error_file_data["message"]
            self.timestamp = _timestamp(self.error_file_data, self._at)
        if not self.message:
            self._explain_by_exit()

    def _explain_by_exit(self) -> None:
        if self.exitcode < 0:
            self.message = f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}"
            return
        self.error_file_data["errorTraits"] = {"category": "system_terminated_error", "retryability": "False"}
        self.message = (
            f"exited with code {self.exitcode} and wrote no error file; "
            "for a traceback decorate the main function with @ripstop.record"
        )

    def signal_name(self) -> str:
        """`SIGTERM` and the like, `<N/A>` for a worker that no signal ended."""
        if self.exitcode >= 0:
            return _NOT_AVAILABLE
        name = signal_name(-self.exitcode)
        return name if not name[3:].isdecimal() else _NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """The time as YYYY-MM-DD_HH:MM:SS, in this machine's time zone."""
        from datetime import datetime

        return datetime.fromtimestamp(self.timestamp).isoformat(sep="_")


def _timestamp(content: dict[str, Any], written: float) -> int:
    message = content["message"]
    extra = message.get("extraInfo") if isinstance(message, dict) else content
    try:
        seconds = int(extra["timestamp"])  # type: ignore[index]
    except (KeyError, TypeError, ValueError, OverflowError):
        return int(written)
    return seconds if 0 <= seconds < 1 << 36 else int(written)  # what datetime can show


def _moment(failure: ProcessFailure) -> float:
    """When it happened, finer than whole seconds where both clocks agree."""
    at: float = getattr(failure, "_at", failure.timestamp)
    return at if 0 <= at - failure.timestamp < 2 else failure.timestamp


class ChildFailedError(Exception):
    """Workers failed; raised through `record`, it hands on the first failure's error file as the parent's own."""

    def __init__(self, name: str, failures: dict[GlobalRank, ProcessFailure]) -> None:
        if not failures:
            raise AssertionError("a ChildFailedError tells of failures, and got none; give {rank: ProcessFailure}")
        self.name = name
        self.failures = failures
        super().__init__(self.format_msg())

    def __reduce__(self) -> tuple[type[ChildFailedError], tuple[str, dict[GlobalRank, ProcessFailure]]]:
        return type(self), (self.name, self.failures)

    def get_first_failure(self) -> tuple[GlobalRank, ProcessFailure]:
        rank = min(self.failures, key=lambda rank: _moment(self.failures[rank]))
        return rank, self.failures[rank]

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """The report: one block a failure, the first failure last."""
        import socket

        host = socket.getfqdn()  # asked once: it may take its time
        first, _ = self.get_first_failure()
        title = f"{self.name} FAILED"
        blocks = {
            rank: f"[{index}]:\n" + "\n".join(f"  {label:<10}: {value}" for label, value in _facts(rank, failure, host))
            for index, (rank, failure) in enumerate(self.failures.items())
        }
        lines = [title, *(line for block in blocks.values() for line in block.split("\n"))]
        width = min(_BOX, max(len(line) for line in lines))
        others = [block for rank, block in blocks.items() if rank != first] or ["  <NO_OTHER_FAILURES>"]
        edge, rule = boarder_delim * width, section_delim * width
        return "\n".join(
            ("", edge, title, rule, "Failures:", *others, rule, _ROOT_CAUSE, blocks[first], edge),
        )


def _facts(rank: int, failure: ProcessFailure, host: str) -> Iterator[tuple[str, str]]:
    name = failure.signal_name()
    yield "time", failure.timestamp_isoformat()
    yield "host", host
    yield "rank", f"{rank} (local_rank: {failure.local_rank})"
    yield "exitcode", f"{failure.exitcode} (pid: {failure.pid})" + (f" ({name})" if name != _NOT_AVAILABLE else "")
    yield "error_file", failure.error_file
    yield "traceback", _traceback(failure.message)


def _traceback(message: Any) -> str:
    if not isinstance(message, dict):
        return str(message)
    extra = message.get("extraInfo")
    told = extra.get("py_callstack") if isinstance(extra, dict) else None
    return str(told or message.get("message", _NOT_AVAILABLE)).replace("\n", "\n  ")


# in the worker ------------------------------------------------------------------------------------------------------


class ErrorHandler:
    """Writes a worker's exception to the file that TORCHELASTIC_ERROR_FILE names.

    To record otherwise, override `initialize` and `record_exception`, and give an instance to `record`.
    """

    def _get_error_file_path(self) -> str | None:
        return recording.error_file()

    def initialize(self) -> None:
        """Called before the code whose errors are recorded."""
        recording.show_crashes()

    def record_exception(self, e: BaseException) -> None:
        """Write the exception to the error file; without one, log it."""
        if path := self._get_error_file_path():
            self._write(path, recording.describe(e))
        else:
            log.info("no error file is asked for (%s is not set): %s: %s", recording.ERROR_FILE, type(e).__name__, e)

    def override_error_code_in_rootcause_data(
        self, rootcause_error_file: str, rootcause_error: dict[str, Any], error_code: int = 0
    ) -> None:
        """Put the exit code into what a child wrote: one that a signal ended could not know it."""
        if isinstance(rootcause_error.get("message"), dict):
            rootcause_error["message"]["errorCode"] = error_code
        else:
            log.warning("%s has no place for the exit code %s: its message is a text", rootcause_error_file, error_code)

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Make a child's error file, with its exit code, this process's own."""
        if (said := read_error_file(rootcause_error_file)) is None:
            log.error("the child's error file %s is not there; there is nothing to hand on", rootcause_error_file)
            return
        content, _ = said
        if error_code:
            self.override_error_code_in_rootcause_data(rootcause_error_file, content, error_code)
        if path := self._get_error_file_path():
            self._move_aside(path)
            self._write(path, content)
            log.info("handed on the child's error file %s as %s", rootcause_error_file, path)
        else:
            log.error("no error file is asked for, so %s is not handed on: %s", rootcause_error_file, content)

    def _write(self, path: str, content: dict[str, Any]) -> None:
        recording.write(path, content)

    def _move_aside(self, path: str) -> None:
        if not Path(path).is_file():
            return
        number = 1
        while Path(aside := f"{path}.{number}").exists():
            number += 1
        try:
            Path(path).rename(aside)
        except OSError as error:
            log.warning("error file %s is there already, and is overwritten: %s", path, error.strerror)
        else:
            log.warning("error file %s is there already; it is kept as %s", path, aside)


def get_error_handler() -> ErrorHandler:
    """The handler that `record` uses when it is given none."""
    return ErrorHandler()


def record(fn: Callable[P, R], error_handler: ErrorHandler | None = None) -> Callable[P, R | None]:
    """Has an exception that leaves `fn` recorded; to be used once a process, around its main function.

    torch's quirks: `sys.exit(0)` inside is a normal return of None, and a `ChildFailedError` hands on its child's
    error file.  `ripstop.record` is the same without the quirks.
    """
    handler = error_handler or get_error_handler()

    @wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        handler.initialize()
        try:
            return fn(*args, **kwargs)
        except SystemExit as exit:
            if exit.code == 0:
                return None
            raise
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.error_file == _NOT_AVAILABLE:
                log.info("rank %s failed and wrote no error file; decorate its main function with @record", rank)
            else:
                handler.dump_error_file(failure.error_file, failure.exitcode)
            raise
        except Exception as error:
            handler.record_exception(error)
            raise

    return wrapper
