"""The supervision loop that `SubprocessContext` and `MultiprocessContext` share.

Rules: (1) a worker's exit is a readable file descriptor, so nothing polls; (2) a worker that fails takes its process
group with it, before its pid is reused; (3) closing sends a signal, waits, sends SIGKILL, and reports the processes
that are still there after that.
"""

from __future__ import annotations

import abc
import logging
import os
import signal
import time
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from ripstop.compat.multiprocessing.context import PContext, RunProcsResult
from ripstop.compat.multiprocessing.errors import ProcessFailure

KILL_TIMEOUT_S = 10.0  # a process that is alive this long after SIGKILL hangs in the kernel

log = logging.getLogger(__name__)


class SupervisedContext(PContext):
    """Workers that are processes of this machine, whatever starts them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._exit_fds: dict[int, int] = {}  # of running workers, by local rank: readable when the worker has exited
        self._failures: dict[int, ProcessFailure] = {}
        self._result: RunProcsResult | None = None

    @abc.abstractmethod
    def _start_worker(self, rank: int) -> int:
        """Start a worker; return a new descriptor that becomes readable when it exits."""

    @abc.abstractmethod
    def _signal_worker(self, rank: int, signum: signal.Signals) -> None:
        """Send a signal to the worker and its process group."""

    @abc.abstractmethod
    def _reap_worker(self, rank: int) -> int:
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
            if not returned or _has_failed(pids[rank]):
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pids[rank], signal.SIGKILL)  # rule 2
            code = self._reap_worker(rank)
            os.close(self._exit_fds.pop(rank))
            if code or not returned:
                self._failures[rank] = ProcessFailure(rank, pids[rank], code, self.error_files[rank])

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        self._reap_exited()
        pids, running = self.pids(), {fd: rank for rank, fd in self._exit_fds.items()}
        for rank in running.values():
            log.warning("sending %s to process %s", death_sig.name, pids[rank])
            self._signal_worker(rank, death_sig)
        wait_for_exits(running, timeout)
        for rank in running.values():
            log.warning("process %s is alive %s s after %s: sending SIGKILL", pids[rank], timeout, death_sig.name)
            self._signal_worker(rank, signal.SIGKILL)
        wait_for_exits(running, KILL_TIMEOUT_S)
        for rank in running.values():
            log.error(
                "process %s is alive %s s after SIGKILL and is left behind; it hangs in the kernel (a GPU, a network "
                "file system), and the machine may need a restart",
                pids[rank],
                KILL_TIMEOUT_S,
            )
        self._reap_exited()


def _has_failed(pid: int) -> bool:
    """Whether an exited child failed; does not reap it."""
    try:
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return False  # a child of the fork server, or reaped already
    return end is not None and (end.si_code != os.CLD_EXITED or end.si_status != 0)


def wait_for_exits(running: dict[int, int], timeout: float) -> None:
    """Wait for these descriptors, and remove those that become readable."""
    deadline = time.monotonic() + timeout
    while running and (exited := wait(list(running), max(0.0, deadline - time.monotonic()))):
        for fd in exited:
            running.pop(int(fd))  # type: ignore[arg-type]
