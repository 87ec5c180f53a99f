"""The agent's children: who owns each, how the agent learns that one has ended, and how orphans are ended.

Rules
1.  The code that starts a child claims its pid, and only the owner reaps it.
2.  A pidfd reports the end of a child.  Nothing polls.  What follows needs file descriptors: a few are reserved for it.
3.  The agent is a subreaper: every orphan below a worker becomes the agent's child.  Such an adopted child has another
    session than the agent.  An unclaimed child in the agent's own session is a plain subprocess and is left alone.
4.  A pending worker (named PENDING until it is claimed) is no orphan while a start is in progress.
5.  Inside a program that launches, an unclaimed child may belong to the program or to another launch.  Only processes
    in the workers' sessions, or below them, are ended.  Dead orphans are reaped if they cannot be such a child: a child
    that this process started is in its session, leads its own, or is pending.

asyncio is imported late: the spawner claims the zygote before there is an event loop.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from msgspec import Struct

from ripstop.model.errors import StartError
from ripstop.system import linux
from ripstop.system.descriptors import DescriptorReserve
from ripstop.workers.zygote.title import PENDING

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger("ripstop.workers")

KILL_TIMEOUT_S = 30.0  # a process that is still there this long after SIGKILL hangs in the kernel
_PENDING_NAME = PENDING.decode()


def process_start_error(purpose: str, error: OSError) -> StartError:
    """The error for a process that could not be started."""
    scarce = error.errno in (errno.EAGAIN, errno.ENOMEM)
    remedy = "raise `ulimit -u`, or the container's limits" if scarce else "check that it exists and is executable"
    return StartError(
        f"{purpose}: a Python interpreter is needed, and {sys.executable} does not start: {error.strerror}; {remedy}."
    )


class ProcessExit(Struct, frozen=True):
    """How a child ended; one of `exitcode` and `signal` is set.  `at` is wall-clock time, `max_rss` bytes."""

    pid: int
    exitcode: int | None
    signal: int | None
    at: float
    max_rss: int

    @property
    def returncode(self) -> int:
        """As in subprocess: the number of a signal is negative."""
        return -(self.signal or 0) if self.exitcode is None else self.exitcode


class Children:
    """The children of one agent.  `open` it in the agent's event loop; until then it only claims and reaps.

    `in_program` is for an agent in a process that is not its own (rule 5).
    """

    def __init__(self, *, in_program: bool = False) -> None:
        self._in_program = in_program
        self._claimed: set[int] = set()
        self._waiters: dict[int, Callable[[], int]] = {}
        self._starts = 0  # starts in progress
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pidfds: dict[int, int] = {}
        self._session = os.getsid(0)
        self._unkillable: set[int] = set()
        self.spared: set[int] = set()  # sessions whose orphans are not ended with the workers: those of live standbys
        self._descriptors = DescriptorReserve()
        self._handles_sigchld = False

    # ownership ------------------------------------------------------------------------------------------------------

    def claim(self, pid: int, wait: Callable[[], int] | None = None) -> None:
        """Record that this child has an owner, who will reap it.

        For a process that is not this process's child, `wait` waits for its end and returns subprocess's return code.
        """
        self._claimed.add(pid)
        if wait is not None:
            self._waiters[pid] = wait

    def reap(self, pid: int) -> tuple[int | None, int | None, int]:
        """Wait for a claimed child to end: (exit code, signal, peak memory in bytes)."""
        if wait := self._waiters.pop(pid, None):
            self._claimed.discard(pid)
            returncode = wait()
            return (returncode, None, 0) if returncode >= 0 else (None, -returncode, 0)
        try:
            _, status, usage = os.wait4(pid, 0)
        except ChildProcessError:  # other code has reaped it, so its exit code is unknown
            return 255, None, 0
        finally:
            self._claimed.discard(pid)
        memory = usage.ru_maxrss * 1024
        if os.WIFSIGNALED(status):
            return None, os.WTERMSIG(status), memory
        return os.WEXITSTATUS(status), None, memory

    def kill(self, pids: Iterable[int]) -> None:
        """Kill and reap these claimed children.  They die side by side: one with a CUDA context takes 0.1 s or more."""
        pids = tuple(pids)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            self.reap(pid)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Pending workers seen meanwhile are going to be claimed (rule 4)."""
        self._starts += 1
        try:
            yield
        finally:
            self._starts -= 1

    # the event loop -------------------------------------------------------------------------------------------------

    def open(self) -> Children:
        """Begin to adopt orphans and to watch children, in the running event loop."""
        import asyncio

        if self._in_program:
            linux.hold_subreaper()
        else:
            linux.become_subreaper()
        self._loop = asyncio.get_running_loop()
        self._descriptors.ensure()
        self._handles_sigchld = threading.current_thread() is threading.main_thread()
        if self._handles_sigchld:
            self._loop.add_signal_handler(signal.SIGCHLD, self._reap_adopted)
        return self

    def close(self) -> None:
        """Stop watching; the children live on.  May be called again."""
        if self._loop is None:
            return
        for pid in list(self._pidfds):
            self.unwatch(pid)
        if self._handles_sigchld:
            self._loop.remove_signal_handler(signal.SIGCHLD)
        self._loop = None
        self._descriptors.close()
        if self._in_program:
            linux.release_subreaper()

    def watch(self, pid: int, on_end: Callable[[ProcessExit], None]) -> None:
        """Claim this child; call `on_end` once, when it has ended and was reaped.

        StartError: no file descriptor is left to watch it, so it was killed.
        """
        assert self._loop is not None, "open comes first"
        self.claim(pid)
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # another process's child, already reaped
            self._loop.call_soon(self._report_end, pid, on_end)
            return
        except OSError as error:
            self.kill([pid])
            raise StartError(
                f"the agent needs a file descriptor for every process it starts: {error.strerror}; raise `ulimit -n`."
            ) from error
        self._pidfds[pid] = pidfd
        self._loop.add_reader(pidfd, self._ended, pid, on_end)

    def _ended(self, pid: int, on_end: Callable[[ProcessExit], None]) -> None:
        self.unwatch(pid)
        self._report_end(pid, on_end)

    def _report_end(self, pid: int, on_end: Callable[[ProcessExit], None]) -> None:
        at = time.time()
        self._descriptors.ensure()
        exitcode, signum, memory = self.reap(pid)
        on_end(ProcessExit(pid, exitcode, signum, at, memory))

    def unwatch(self, pid: int) -> None:
        """Stop watching this child, which stays claimed: another owner will watch it."""
        assert self._loop is not None
        pidfd = self._pidfds.pop(pid)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)

    # orphans --------------------------------------------------------------------------------------------------------

    async def end_trees(self, sessions: Iterable[int], grace: float, *, with_adopted: bool = True) -> None:
        """End every process of these sessions, and every adopted child with its descendants; return when none is left.

        Without `with_adopted`, only those of the sessions.  Inside a program, adopted children are left alone (rule 5).
        With a `grace`, processes get SIGTERM and that many seconds first; without, SIGKILL at once.
        """
        wanted = frozenset(sessions)
        if grace > 0 and await self._signal_leftovers(wanted, signal.SIGTERM, grace, with_adopted):
            return
        while not await self._signal_leftovers(wanted, signal.SIGKILL, KILL_TIMEOUT_S, with_adopted):
            pass

    async def _signal_leftovers(
        self, sessions: frozenset[int], signum: signal.Signals, timeout: float, with_adopted: bool
    ) -> bool:
        """Signal all leftovers and wait for their end.  True if there were none."""
        import asyncio

        leftovers = self._leftovers(sessions, with_adopted)
        pidfds = {pid: pidfd for pid in leftovers if (pidfd := _open_pidfd(pid)) is not None}
        try:
            for pid, pidfd in pidfds.items():
                if not _signal_process(pidfd, signum):
                    self._give_up(pid, "it runs as another user")
            async with asyncio.timeout(timeout):
                for pid, pidfd in pidfds.items():
                    if pid not in self._unkillable:
                        await self._readable(pidfd)
        except TimeoutError:
            if signum == signal.SIGKILL:
                for pid in set(self._leftovers(sessions, with_adopted)) & pidfds.keys():
                    self._give_up(pid, f"it is still there {timeout:g} s after SIGKILL")
        finally:
            for pidfd in pidfds.values():
                os.close(pidfd)
        self._reap_adopted()
        return not leftovers

    def _give_up(self, pid: int, why: str) -> None:
        self._unkillable.add(pid)
        log.warning("pid=%d cannot be ended: %s", pid, why)

    def _leftovers(self, sessions: frozenset[int], with_adopted: bool) -> list[int]:
        """The processes in these sessions, adopted children, and descendants of both."""
        with_adopted = with_adopted and not self._in_program
        if not with_adopted and not linux.has_processes(sessions):
            # Usually so in a recovery in place: a failed worker leaves no process.  The surviving workers wait for
            # this, and reading all of /proc would delay them.
            return []
        alive = {process.pid: process for process in linux.processes() if not process.dead}
        sessions -= alive.keys()  # their leaders have ended: a process with such a pid now is unrelated
        adopted = {
            process.pid
            for process in alive.values()
            if with_adopted and process.session not in self.spared and self._is_adopted(process)
        }
        found: set[int] = set()
        for process in alive.values():
            line: list[int] = []
            ancestor: linux.LinuxProcess | None = process
            while ancestor is not None and ancestor.pid not in found:
                line.append(ancestor.pid)
                if ancestor.session in sessions or ancestor.pid in adopted:
                    found.update(line)
                    break
                ancestor = alive.get(ancestor.parent)
            else:
                if ancestor is not None:
                    found.update(line)
        return sorted(found - self._unkillable)

    def _is_adopted(self, process: linux.LinuxProcess) -> bool:
        return (
            process.parent == os.getpid()
            and process.pid not in self._claimed
            and process.session != self._session
            and not (self._in_program and process.session == process.pid)
            and not ((self._starts or self._in_program) and process.name == _PENDING_NAME)
        )

    def _reap_adopted(self) -> None:
        self._descriptors.ensure()
        for process in linux.children():
            if process.dead and self._is_adopted(process):
                with suppress(ChildProcessError):  # another launch of this program has reaped it
                    os.waitpid(process.pid, os.WNOHANG)

    async def _readable(self, fd: int) -> None:
        from ripstop.system.blocking_calls import settle

        assert self._loop is not None
        ended = self._loop.create_future()
        self._loop.add_reader(fd, settle, ended, None)
        try:
            await ended
        finally:
            self._loop.remove_reader(fd)


def _open_pidfd(pid: int) -> int | None:
    """None if the process has ended.  The number may be a thread's by now, for which kernels return other errors."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in (errno.ESRCH, errno.EINVAL, errno.ENOENT):
            raise
        return None


def _signal_process(pidfd: int, signum: signal.Signals) -> bool:
    """False if this user must not signal the process."""
    try:
        signal.pidfd_send_signal(pidfd, signum)
        if signum != signal.SIGKILL:
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)  # a stopped process takes no other signal
    except ProcessLookupError:
        pass
    except PermissionError:
        return False
    return True
