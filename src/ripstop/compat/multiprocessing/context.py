"""Groups of workers that start and stop together: `PContext`, and `SubprocessContext` for commands.

Names, signatures and all-or-nothing results are torch's.  Also as with torch: from the first start on, the signals that
end a process raise `SignalException` in the main thread.  Rules: (1) a worker's exit is a readable file descriptor, so
nothing polls; (2) a worker that fails takes its process group with it, before its pid is reused; (3) closing sends a
signal, waits, sends SIGKILL, and reports the processes that are still there after that.
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
from ripstop.compat.multiprocessing.subprocess_handler import (
    SubprocessHandler,
    get_subprocess_handler,
    send_subprocess_handler_signal,
)
from ripstop.compat.multiprocessing.tail_log import TailLog

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
KILL_TIMEOUT_S = 10.0  # a process that is alive this long after SIGKILL hangs in the kernel

log = logging.getLogger(__name__)


class SignalException(Exception):
    """The process received the signal `sigval`."""

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval


def raise_signal_exception(signum: int, _: FrameType | None) -> None:
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


def validate_context_ranks(d: Mapping[int, Any], nprocs: int, what: str) -> None:
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
        validate_context_ranks(logs.stdouts, self.nprocs, "stdouts")
        validate_context_ranks(logs.stderrs, self.nprocs, "stderrs")
        self.stdouts = logs.stdouts
        self.stderrs = logs.stderrs
        self.error_files = logs.error_files
        self.filtered_stdout = _open_filtered_context_output(logs.filtered_stdout, duplicate_stdout_filters)
        self.filtered_stderr = _open_filtered_context_output(logs.filtered_stderr, duplicate_stderr_filters)
        tail = partial(TailLog, name, log_line_prefixes=log_line_prefixes)
        self._tail_logs: list[TailLog] = []
        for files, console, filtered, words in (
            (logs.tee_stdouts, sys.stdout, self.filtered_stdout, duplicate_stdout_filters),
            (logs.tee_stderrs, sys.stderr, self.filtered_stderr, duplicate_stderr_filters),
        ):
            self._tail_logs.append(tail(files, console))
            if filtered is not None and words:
                self._tail_logs.append(
                    tail(files, filtered, log_line_filter=partial(_context_output_matches_filter, words))
                )

    def start(self) -> None:
        """Start the processes; in the main thread, also make the signals that end a process raise exceptions."""
        if threading.current_thread() is threading.main_thread():
            _install_context_signal_handlers()
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


def _open_filtered_context_output(path: str, words: list[str] | None) -> TextIO | None:
    return Path(path).open("w", encoding="utf-8", errors="replace", buffering=1) if words else None


def _context_output_matches_filter(words: list[str], line: str) -> bool:
    return any(word in line for word in words)


def _install_context_signal_handlers() -> None:
    for name in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", _SIGNALS).split(","):
        try:
            signal.signal(signal.Signals[name.strip()], raise_signal_exception)
        except KeyError:
            log.warning("TORCHELASTIC_SIGNALS_TO_HANDLE: there is no signal %r; write SIGTERM,SIGINT", name)
        except (OSError, ValueError) as error:
            log.warning("TORCHELASTIC_SIGNALS_TO_HANDLE: %s cannot be handled: %s", name.strip(), error)


class SupervisedContext(PContext):
    """Workers that are processes of this machine, whatever starts them."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: Any = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        filters = duplicate_stdout_filters, duplicate_stderr_filters
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes, *filters)
        self._numa_options = numa_options
        self._processes: dict[int, Any] = {}  # by local rank
        self._exit_fds: dict[int, int] = {}  # of running workers, by local rank: readable when the worker has exited
        self._failures: dict[int, ProcessFailure] = {}
        self._result: RunProcsResult | None = None

    @abc.abstractmethod
    def _start_worker(self, rank: int) -> int:
        """Start a worker; return a new descriptor that becomes readable when it exits."""

    @abc.abstractmethod
    def _reap_context_worker(self, rank: int) -> int:
        """Exit code of a worker that has exited; negative for a signal."""

    @abc.abstractmethod
    def _finish(self) -> RunProcsResult:
        """Close the context and return the result: a worker has failed, or all have exited."""

    def _has_returned(self, rank: int) -> bool:
        """False if the worker's exit is a failure even with exit code 0."""
        return True

    def _start(self) -> None:
        if self.pids():
            raise ValueError("this context has been started already; make a new one for every start")
        for rank in range(self.nprocs):
            self._exit_fds[rank] = self._start_worker(rank)

    def _poll(self) -> RunProcsResult | None:
        if self._result is None:
            self._reap_exited()
            if self._failures or not self._exit_fds:
                self._result = self._finish()
        return self._result

    def _wait_for_change(self, timeout: float | None, period: float) -> None:
        wait(list(self._exit_fds.values()), timeout)

    def _reap_exited(self) -> None:
        pids = self.pids()
        for rank, fd in list(self._exit_fds.items()):
            if not wait([fd], 0):
                continue
            returned = self._has_returned(rank)
            if not returned or self._has_failed(pids[rank]):
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pids[rank], signal.SIGKILL)  # rule 2
            code = self._reap_context_worker(rank)
            os.close(self._exit_fds.pop(rank))
            if code or not returned:
                self._failures[rank] = ProcessFailure(rank, pids[rank], code, self.error_files[rank])

    @staticmethod
    def _has_failed(pid: int) -> bool:
        """Whether an exited worker failed; does not reap it."""
        try:
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            return False  # a child of the fork server, or reaped already
        return end is not None and (end.si_code != os.CLD_EXITED or end.si_status != 0)

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        self._reap_exited()
        pids = self.pids()
        for rank in self._exit_fds:
            log.warning("sending %s to process %s", death_sig.name, pids[rank])
            send_subprocess_handler_signal(pids[rank], death_sig)
        for rank in self._running_after(timeout):
            log.warning("process %s is alive %s s after %s: sending SIGKILL", pids[rank], timeout, death_sig.name)
            send_subprocess_handler_signal(pids[rank], signal.SIGKILL)
        for rank in self._running_after(KILL_TIMEOUT_S):
            log.error(
                "process %s is alive %s s after SIGKILL and is left behind; it hangs in the kernel (a GPU, a network "
                "file system), and the machine may need a restart",
                pids[rank],
                KILL_TIMEOUT_S,
            )
        self._reap_exited()

    def _running_after(self, timeout: float) -> list[int]:
        """Wait until all workers have exited; return the ranks of those that have not in time."""
        deadline = time.monotonic() + timeout
        running = {fd: rank for rank, fd in self._exit_fds.items()}
        while running and (exited := wait(list(running), max(0.0, deadline - time.monotonic()))):
            for fd in exited:
                running.pop(int(fd))  # type: ignore[arg-type]
        return list(running.values())

    def _log_failure(self, failure: ProcessFailure, what: str) -> None:
        log.error(
            "failed (exitcode: %s) local_rank: %s (pid: %s) of %s",
            failure.exitcode,
            failure.local_rank,
            failure.pid,
            what,
        )


class SubprocessContext(SupervisedContext):
    """Processes that run a command."""

    @property
    def subprocess_handlers(self) -> dict[int, SubprocessHandler]:
        return self._processes

    def pids(self) -> dict[int, int]:
        return {rank: handler.proc.pid for rank, handler in self.subprocess_handlers.items()}

    def _start_worker(self, rank: int) -> int:
        files = self.stdouts[rank], self.stderrs[rank]
        handler = self._processes[rank] = get_subprocess_handler(
            str(self.entrypoint), self.args[rank], self.envs[rank], *files, rank, self._numa_options
        )
        return os.pidfd_open(handler.proc.pid)

    def _reap_context_worker(self, rank: int) -> int:
        return self.subprocess_handlers[rank].proc.wait()

    def _finish(self) -> RunProcsResult:
        """As with torch, the failures include the workers that `close` stops."""
        first = next(iter(self._failures.values()), None)
        self.close()
        if first is not None:
            self._log_failure(first, f"binary: {self.entrypoint}")
        values = dict.fromkeys(range(self.nprocs)) if first is None else {}
        return RunProcsResult(values, self._failures, self.stdouts, self.stderrs)
