"""A group of workers that is waited for together: what functions and commands have in common.

What is torch's: names, signatures, all-or-nothing results, and SIGTERM and friends as `SignalException` in the main
thread from the first start on.
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
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from ripstop.compat.multiprocessing.errors import ProcessFailure
from ripstop.compat.multiprocessing.logs_specs import LogsSpecs
from ripstop.compat.multiprocessing.tail_log import TailLog

KILLED = 10.0  # seconds in which a process that was sent SIGKILL is gone, unless it hangs in the kernel
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"

log = logging.getLogger(__name__)


class SignalException(Exception):
    """The process was told to end; `sigval` is how."""

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval


def raise_signal(signum: int, _: FrameType | None) -> None:
    sigval = signal.Signals(signum)
    raise SignalException(f"Process {os.getpid()} got signal: {sigval}", sigval=sigval)


@dataclass
class RunProcsResult:
    """The end of a group, by local rank: all returned, or some failed.  A command's return value is None."""

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
    """A group of processes, started together and ended together.

    A context of one's own implements `_start`, `_poll`, `_close` and `pids`; `_poll` is then called every `period`.
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
        """Start the processes; from the main thread, also turn the signals that end a process into exceptions."""
        if threading.current_thread() is threading.main_thread():
            _handle_signals()
        else:
            log.warning(
                "workers are started from a thread that is not the main one: signals to this process are not handled, "
                "and commands do not end with it; close() them"
            )
        self._start()
        for tail in self._tail_logs:
            tail.start()

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """The result when all have succeeded or one has failed; None after `timeout` seconds (negative: never)."""
        deadline = None if timeout < 0 else time.monotonic() + timeout
        while (result := self._poll()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            self._await_news(left, period)
        return result

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """End all processes: `death_sig` (SIGTERM), and SIGKILL for those that are alive `timeout` seconds later."""
        try:
            self._close(death_sig=death_sig or signal.SIGTERM, timeout=timeout)
        finally:
            for tail in self._tail_logs:
                tail.stop()
            for file in (self.filtered_stdout, self.filtered_stderr):
                if file is not None:
                    file.close()

    def _await_news(self, timeout: float | None, period: float) -> None:
        """Wait until `_poll` may have more to tell."""
        time.sleep(period if timeout is None else min(period, timeout))

    @abc.abstractmethod
    def _start(self) -> None:
        """Start the processes."""

    @abc.abstractmethod
    def _poll(self) -> RunProcsResult | None:
        """The result if there is one by now; does not wait."""

    @abc.abstractmethod
    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        """End the processes."""

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


def kill_group(pid: int, signum: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)


def kill_leader(pid: int, signum: int) -> None:
    """With its group, if it leads one by now."""
    try:
        os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


def died_badly(pid: int) -> bool:
    """Whether a child of ours has ended otherwise than with 0; it stays to be waited for."""
    try:
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return False  # somebody else's child, or waited for already
    return end is not None and (end.si_code != os.CLD_EXITED or end.si_status != 0)


def await_all(running: dict[int, Any], timeout: float) -> None:
    """Wait for these descriptors; those that have ended are taken out."""
    deadline = time.monotonic() + timeout
    while running and (ended := wait(list(running), max(0.0, deadline - time.monotonic()))):
        for end in ended:
            running.pop(int(end))  # type: ignore[arg-type]


def abandoned(pid: int) -> None:
    log.error(
        "process %s is still there %s s after SIGKILL and is left behind; it hangs in the kernel (a GPU, a network "
        "file system), and the machine may need a restart",
        pid,
        KILLED,
    )
