"""`PContext`, the base of all groups of workers, and the result of a group.

Names, signatures and all-or-nothing results are torch's.  Also as with torch: from the first start on, the signals that
end a process raise `SignalException` in the main thread.
"""

from __future__ import annotations

import abc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from ripstop.compat.multiprocessing.errors import ProcessFailure
from ripstop.compat.multiprocessing.logs_specs import LogsSpecs
from ripstop.compat.multiprocessing.tail_log import TailLog

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"

log = logging.getLogger(__name__)


class SignalException(Exception):
    """The process received the signal `sigval`."""

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval


def raise_signal(signum: int, _: FrameType | None) -> None:
    sigval = signal.Signals(signum)
    raise SignalException(f"Process {os.getpid()} got signal: {sigval}", sigval=sigval)


@dataclass
class RunProcsResult:
    """Results by local rank: all workers returned, or some failed.  A command's return value is None."""

    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)

    def is_failed(self) -> bool:
        return bool(self.failures)


def validate_full_rank(d: Mapping[int, Any], nprocs: int, what: str) -> None:
    if set(d) != set(range(nprocs)):
        raise RuntimeError(
            f"{what}, local rank mapping mismatch, expected: {set(range(nprocs))}, actual: {set(d)}; "
            "give one entry for each local rank from 0 on"
        )


class PContext(abc.ABC):
    """A group of processes that start and stop together.

    A subclass implements `_start`, `_poll`, `_close` and `pids`; `wait` then calls `_poll` every `period` seconds.
    """

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        self.name = name
        self.entrypoint = entrypoint
        self.args = args
        self.envs = envs
        self.nprocs = len(args)
        logs = logs_specs.reify(envs)
        validate_full_rank(logs.stdouts, self.nprocs, "stdouts")
        validate_full_rank(logs.stderrs, self.nprocs, "stderrs")
        self.stdouts = logs.stdouts
        self.stderrs = logs.stderrs
        self.error_files = logs.error_files
        self.filtered_stdout = _open_filtered(logs.filtered_stdout, duplicate_stdout_filters)
        self.filtered_stderr = _open_filtered(logs.filtered_stderr, duplicate_stderr_filters)
        tail = partial(TailLog, name, log_line_prefixes=log_line_prefixes)
        self._tail_logs = [tail(logs.tee_stdouts, sys.stdout), tail(logs.tee_stderrs, sys.stderr)]
        for files, target, needles in (
            (logs.tee_stdouts, self.filtered_stdout, duplicate_stdout_filters),
            (logs.tee_stderrs, self.filtered_stderr, duplicate_stderr_filters),
        ):
            if target is not None and needles:
                self._tail_logs.append(tail(files, target, log_line_filter=partial(_has_any, tuple(needles))))

    def start(self) -> None:
        """Start the processes; in the main thread, also make the signals that end a process raise exceptions."""
        if threading.current_thread() is threading.main_thread():
            _handle_signals()
        else:
            log.warning(
                "workers are started in a thread that is not the main thread: signals to this process are not handled, "
                "and commands do not die with it; call close()"
            )
        self._start()
        for tail in self._tail_logs:
            tail.start()

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """The result when all workers succeeded or one failed; None after `timeout` seconds (negative: no timeout)."""
        deadline = None if timeout < 0 else time.monotonic() + timeout
        while (result := self._poll()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            self._wait_for_change(left, period)
        return result

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """Stop all processes: send `death_sig` (SIGTERM), then SIGKILL to those alive after `timeout` seconds."""
        try:
            self._close(death_sig=death_sig or signal.SIGTERM, timeout=timeout)
        finally:
            for tail in self._tail_logs:
                tail.stop()
            for file in (self.filtered_stdout, self.filtered_stderr):
                if file is not None:
                    file.close()

    def _wait_for_change(self, timeout: float | None, period: float) -> None:
        """Wait until `_poll` may have a result."""
        time.sleep(period if timeout is None else min(period, timeout))

    @abc.abstractmethod
    def _start(self) -> None:
        """Start the processes."""

    @abc.abstractmethod
    def _poll(self) -> RunProcsResult | None:
        """The result, if there is one; does not wait."""

    @abc.abstractmethod
    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        """Stop the processes."""

    @abc.abstractmethod
    def pids(self) -> dict[int, int]:
        """By local rank."""


def _open_filtered(path: str, needles: list[str] | None) -> TextIO | None:
    return Path(path).open("w", encoding="utf-8", errors="replace", buffering=1) if needles else None


def _has_any(needles: tuple[str, ...], line: str) -> bool:
    return any(needle in line for needle in needles)


def _handled_signals() -> list[signal.Signals]:
    found = []
    for name in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", _SIGNALS).split(","):
        try:
            found.append(signal.Signals[name.strip()])
        except KeyError:
            log.warning("TORCHELASTIC_SIGNALS_TO_HANDLE: there is no signal %r; write SIGTERM,SIGINT", name)
    return found


def _handle_signals() -> None:
    for signum in _handled_signals():
        try:
            signal.signal(signum, raise_signal)
        except (OSError, ValueError) as error:
            log.warning("TORCHELASTIC_SIGNALS_TO_HANDLE: %s cannot be handled: %s", signum.name, error)
