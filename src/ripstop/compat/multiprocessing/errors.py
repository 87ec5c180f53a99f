"""torch.distributed.elastic.multiprocessing.errors: failures of workers, and the error files that report them.

Torch's are the names, the error file's format and the layout of a `ChildFailedError`'s text.  ripstop adds: (1) an
error file that is truncated, binary or very long is a message and never an exception; (2) recording never hides the
error that it records; (3) failures of the same second are ordered by the time stamps of their files; (4) an existing
error file is renamed, not overwritten.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ripstop.diagnostics.evidence import parse_error_evidence
from ripstop.model.text_formatting import signal_name
from ripstop.system.safe_files import rename_existing
from ripstop.workers import error_file as recording

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]

_NOT_AVAILABLE = "<N/A>"
_MAX_ERROR_FILE_BYTES = 16 << 20  # torch limits messages nowhere
_ROOT_CAUSE = "Root Cause (first observed failure):"
_MAX_RULE_WIDTH = 60

P = ParamSpec("P")
R = TypeVar("R")
GlobalRank = int
log = logging.getLogger(__name__)


# error files --------------------------------------------------------------------------------------------------------


def read_multiprocessing_error_file(path: str) -> tuple[dict[str, Any], float] | None:
    """An error file's content, always with a `message`, and when it was written; None if there is no file."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return None
            data = file.read(_MAX_ERROR_FILE_BYTES)
    except OSError as error:
        if not Path(path).is_file():
            return None
        return {"message": f"error file {path} cannot be read: {error.strerror}"}, time.time()
    return _multiprocessing_error_data(data, status.st_size), status.st_mtime


def _multiprocessing_error_data(data: bytes, size: int) -> dict[str, Any]:
    if not data:
        return {"message": ""}
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, dict) and isinstance(content.get("message"), str | dict):
        return content
    return {"message": parse_error_evidence(data[: 1 << 20], size).message}


# failures -----------------------------------------------------------------------------------------------------------


@dataclass
class ProcessFailure:
    """One worker's failure, from its error file, or else from its exit code and the present time.

    `message` is the error file's: a text, or a dict with `message` and `extraInfo`.  `error_file` is `<N/A>` if the
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
        if (found := read_multiprocessing_error_file(self.error_file)) is None:
            self.error_file = _NOT_AVAILABLE
        else:
            self.error_file_data, self._at = found
            self.message = self.error_file_data["message"]
            self.timestamp = _multiprocessing_failure_timestamp(self.error_file_data, self._at)
        if not self.message:
            self._set_message_from_exit()

    def _set_message_from_exit(self) -> None:
        if self.exitcode < 0:
            self.message = f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}"
            return
        self.error_file_data["errorTraits"] = {"category": "system_terminated_error", "retryability": "False"}
        self.message = (
            f"exited with code {self.exitcode} and wrote no error file; "
            "for a traceback decorate the main function with @ripstop.record"
        )

    def signal_name(self) -> str:
        """The name, such as `SIGTERM`; `<N/A>` for a worker that no signal ended."""
        if self.exitcode >= 0:
            return _NOT_AVAILABLE
        name = signal_name(-self.exitcode)
        return name if not name[3:].isdecimal() else _NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """The time as YYYY-MM-DD_HH:MM:SS, in this machine's time zone."""
        return datetime.fromtimestamp(self.timestamp).isoformat(sep="_")


def _multiprocessing_failure_timestamp(content: dict[str, Any], written: float) -> int:
    message = content["message"]
    extra = message.get("extraInfo") if isinstance(message, dict) else content
    try:
        seconds = int(extra["timestamp"])  # type: ignore[index]
    except (KeyError, TypeError, ValueError, OverflowError):
        return int(written)
    return seconds if 0 <= seconds < 1 << 36 else int(written)  # the range of datetime


def _multiprocessing_failure_time(failure: ProcessFailure) -> float:
    """The time of the failure, with fractions of a second if both clocks agree."""
    at: float = getattr(failure, "_at", failure.timestamp)
    return at if 0 <= at - failure.timestamp < 2 else failure.timestamp


class ChildFailedError(Exception):
    """Workers failed; `record` copies the first failure's error file to the parent's own."""

    def __init__(self, name: str, failures: dict[GlobalRank, ProcessFailure]) -> None:
        if not failures:
            raise AssertionError("a ChildFailedError needs failures, and got none; give {rank: ProcessFailure}")
        self.name = name
        self.failures = failures
        super().__init__(self.format_msg())

    def __reduce__(self) -> tuple[type[ChildFailedError], tuple[str, dict[GlobalRank, ProcessFailure]]]:
        return type(self), (self.name, self.failures)

    def get_first_failure(self) -> tuple[GlobalRank, ProcessFailure]:
        rank = min(self.failures, key=lambda rank: _multiprocessing_failure_time(self.failures[rank]))
        return rank, self.failures[rank]

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """The report: one block for each failure, the first failure last."""
        host = socket.getfqdn()  # once: the lookup may be slow
        first, _ = self.get_first_failure()
        title = f"{self.name} FAILED"
        blocks = {}
        for index, (rank, failure) in enumerate(self.failures.items()):
            facts = _multiprocessing_failure_facts(rank, failure, host)
            blocks[rank] = f"[{index}]:\n" + "\n".join(f"  {label:<10}: {value}" for label, value in facts)
        lines = [title, *(line for block in blocks.values() for line in block.split("\n"))]
        width = min(_MAX_RULE_WIDTH, max(len(line) for line in lines))
        others = [block for rank, block in blocks.items() if rank != first] or ["  <NO_OTHER_FAILURES>"]
        edge, rule = boarder_delim * width, section_delim * width
        return "\n".join(("", edge, title, rule, "Failures:", *others, rule, _ROOT_CAUSE, blocks[first], edge))


def _multiprocessing_failure_facts(rank: int, failure: ProcessFailure, host: str) -> Iterator[tuple[str, str]]:
    name = failure.signal_name()
    yield "time", failure.timestamp_isoformat()
    yield "host", host
    yield "rank", f"{rank} (local_rank: {failure.local_rank})"
    yield "exitcode", f"{failure.exitcode} (pid: {failure.pid})" + (f" ({name})" if name != _NOT_AVAILABLE else "")
    yield "error_file", failure.error_file
    yield "traceback", _multiprocessing_failure_traceback(failure.message)


def _multiprocessing_failure_traceback(message: Any) -> str:
    if not isinstance(message, dict):
        return str(message)
    extra = message.get("extraInfo")
    callstack = extra.get("py_callstack") if isinstance(extra, dict) else None
    return str(callstack or message.get("message", _NOT_AVAILABLE)).replace("\n", "\n  ")


# in the worker ------------------------------------------------------------------------------------------------------


class ErrorHandler:
    """Writes a worker's exception to the file that TORCHELASTIC_ERROR_FILE names.

    To record in another way, override `initialize` and `record_exception`, and pass an instance to `record`.
    """

    def _get_error_file_path(self) -> str | None:
        return recording.error_file_path()

    def initialize(self) -> None:
        """Called before the code whose errors are recorded."""
        recording.show_crashes()

    def record_exception(self, e: BaseException) -> None:
        """Write the exception to the error file; without one, log it."""
        if path := self._get_error_file_path():
            recording.write_error_file(path, recording.error_file_content(e))
        else:
            log.info("no error file is written (%s is not set): %s: %s", recording.ERROR_FILE, type(e).__name__, e)

    def override_error_code_in_rootcause_data(
        self, rootcause_error_file: str, rootcause_error: dict[str, Any], error_code: int = 0
    ) -> None:
        """Add the exit code to a child's error: a child that a signal ended could not write it."""
        if isinstance(rootcause_error.get("message"), dict):
            rootcause_error["message"]["errorCode"] = error_code
        else:
            log.warning("%s cannot take the exit code %s: its message is a string", rootcause_error_file, error_code)

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Copy a child's error file, with its exit code, to this process's own."""
        if (found := read_multiprocessing_error_file(rootcause_error_file)) is None:
            log.error("the child's error file %s does not exist and is not copied", rootcause_error_file)
            return
        content, _ = found
        if error_code:
            self.override_error_code_in_rootcause_data(rootcause_error_file, content, error_code)
        if path := self._get_error_file_path():
            self._keep_existing(path)
            recording.write_error_file(path, content)
            log.info("copied the child's error file %s to %s", rootcause_error_file, path)
        else:
            log.error("%s is not copied, because this process has no error file: %s", rootcause_error_file, content)

    def _keep_existing(self, path: str) -> None:
        try:
            if kept := rename_existing(Path(path)):
                log.warning("error file %s exists; it is kept as %s", path, kept)
        except OSError as error:
            log.warning("error file %s exists and is overwritten: %s", path, error.strerror)


def get_error_handler() -> ErrorHandler:
    """The default handler of `record`."""
    return ErrorHandler()


def record(fn: Callable[P, R], error_handler: ErrorHandler | None = None) -> Callable[P, R | None]:
    """Record an exception that leaves `fn`; use it once in a process, around the main function.

    As with torch, `sys.exit(0)` inside returns None, and a `ChildFailedError` copies its child's error file.
    `ripstop.record` does neither.
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
