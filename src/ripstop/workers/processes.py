"""The agent's children: who they are, how their end is learnt, and how the orphans of their children are put to rest.

Rules
1.  A pid is claimed by whoever started it, and only its owner reaps it.  The registry is the module's, since children
    belong to the process and not to any object in it.
2.  A child's end is its pidfd becoming readable.  Nothing polls.
3.  The agent is a subreaper: every orphan below a worker becomes the agent's child.  Such an adopted child is known by
    its session, which is never the agent's own; a plain subprocess of the agent's, in the agent's session, is left
    alone.
4.  A newborn worker, named NEWBORN until its starter has claimed it, is nobody's orphan while births are expected.
5.  Within a program that launches, an unknown child may be the program's own, or another launch's: there, only what is
    in the workers' sessions or below them is ended.  Dead orphans are buried where they are sure to be orphans: a child
    that was started here is in our session, or leads its own.

asyncio is imported late: the spawner needs the registry before it needs a loop.
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
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec import Struct

from ripstop.model.errors import StartError
from ripstop.system import linux

if TYPE_CHECKING:
    pass

log = logging.getLogger("ripstop.workers")

UNKILLABLE = 60.0  # seconds after SIGKILL until a process is given up: it hangs in the kernel

_claimed: set[int] = set()
_endings: dict[int, Callable[[], int]] = {}
_expected = 0
_guests = 0
_was_subreaper = False  # before the first of the guests
_counting = threading.Lock()  # launches of one program may overlap, each in a thread of its own


def claim(pid: int, ending: Callable[[], int] | None = None) -> None:
    """This child has an owner, who will reap it.

    `ending` is for a process that is another's child: it waits for the end and gives a return code as subprocess does.
    """
    _claimed.add(pid)
    if ending is not None:
        _endings[pid] = ending


def cannot_start(who: str, error: OSError) -> StartError:
    """Why there is no process for this."""
    scarce = error.errno in (errno.EAGAIN, errno.ENOMEM)
    remedy = "raise `ulimit -u`, or the container's limits" if scarce else "see that it is there and executable"
    return StartError(
        f"for {who} a Python interpreter is needed, and {sys.executable} does not start: {error.strerror}; {remedy}."
    )


@contextmanager
def births_expected() -> Iterator[None]:
    """Newborns seen meanwhile will be claimed, or are left over if not by the end of it."""
    global _expected
    with _counting:
        _expected += 1
    try:
        yield
    finally:
        with _counting:
            _expected -= 1


@contextmanager
def within_a_program() -> Iterator[None]:
    """For an agent in a process that is not its own (rule 5); the last one to leave no longer adopts orphans."""
    global _guests, _was_subreaper
    with _counting:
        if _guests == 0:
            _was_subreaper = linux.is_subreaper()
        _guests += 1
    try:
        yield
    finally:
        with _counting:
            _guests -= 1
            if _guests == 0 and not _was_subreaper:
                linux.stop_being_subreaper()


def reap(pid: int) -> tuple[int | None, int | None, int]:
    """Waits for a child of ours that has ended, or is about to: (exit code, signal, peak memory in bytes)."""
    if ending := _endings.pop(pid, None):
        _claimed.discard(pid)
        returncode = ending()
        return (returncode, None, 0) if returncode >= 0 else (None, -returncode, 0)
    try:
        _, status, usage = os.wait4(pid, 0)
    except ChildProcessError:  # reaped behind our back, so how it ended cannot be known
        return 255, None, 0
    finally:
        _claimed.discard(pid)
    memory = usage.ru_maxrss * 1024
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status), memory
    return os.WEXITSTATUS(status), None, memory


class ProcessExit(Struct, frozen=True):
    """How a child ended; one of `exitcode` and `signal` is set.  `at` is wall-clock time, `max_rss` bytes."""

    pid: int
    exitcode: int | None
    signal: int | None
    at: float
    max_rss: int

    @property
    def returncode(self) -> int:
        """As subprocess has it: a signal's number is negative."""
        return -(self.signal or 0) if self.exitcode is None else self.exitcode


class Children:
    """Watches the agent's children.  One per agent, made while its event loop runs."""

    def __init__(self) -> None:
        import asyncio

        linux.become_subreaper()
        self._loop = asyncio.get_running_loop()
        self._pidfds: dict[int, int] = {}
        self._session = os.getsid(0)
        self._spared: set[int] = set()  # that cannot be ended
        self._handles_sigchld = threading.current_thread() is threading.main_thread()
        if self._handles_sigchld:
            self._loop.add_signal_handler(signal.SIGCHLD, self._reap_adopted)

    def watch(self, pid: int, on_end: Callable[[ProcessExit], None]) -> None:
        """Calls `on_end` once, when this claimed child has ended and was reaped."""
        claim(pid)
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # another's child, reaped already
            self._loop.call_soon(self._tell, pid, on_end)
            return
        self._pidfds[pid] = pidfd
        self._loop.add_reader(pidfd, self._ended, pid, on_end)

    def _ended(self, pid: int, on_end: Callable[[ProcessExit], None]) -> None:
        self._forget(pid)
        self._tell(pid, on_end)

    def _tell(self, pid: int, on_end: Callable[[ProcessExit], None]) -> None:
        at = time.time()
        exitcode, signum, memory = reap(pid)
        on_end(ProcessExit(pid, exitcode, signum, at, memory))

    def _forget(self, pid: int) -> None:
        pidfd = self._pidfds.pop(pid)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)

    async def end_trees(self, sessions: Iterable[int], grace: float) -> None:
        """Ends every process of these sessions and every adopted child with all below it; returns when none is left.

        Within a program, adopted children are spared (rule 5).

        With a `grace` they get SIGTERM first and that many seconds; without, SIGKILL at once.
        """
        wanted = frozenset(sessions)
        if grace > 0 and await self._end(wanted, signal.SIGTERM, grace):
            return
        while not await self._end(wanted, signal.SIGKILL, UNKILLABLE):
            pass

    async def _end(self, sessions: frozenset[int], signum: signal.Signals, patience: float | None) -> bool:
        """One pass: signals what is there, waits for it.  True when there was nothing."""
        import asyncio

        victims = self._leftovers(sessions)
        pidfds = {pid: pidfd for pid in victims if (pidfd := _open(pid)) is not None}
        try:
            for pid, pidfd in pidfds.items():
                if not _send(pidfd, signum):
                    self._spare(pid, "it runs as another user")
            async with asyncio.timeout(patience):
                for pid, pidfd in pidfds.items():
                    if pid not in self._spared:
                        await self._readable(pidfd)
        except TimeoutError:
            if signum == signal.SIGKILL:
                for pid in set(self._leftovers(sessions)) & pidfds.keys():
                    self._spare(pid, f"it is there {patience:g} s after SIGKILL")
        finally:
            for pidfd in pidfds.values():
                os.close(pidfd)
        self._reap_adopted()
        return not victims

    def _spare(self, pid: int, why: str) -> None:
        """Nothing more can be done about this process; the job goes on all the same."""
        self._spared.add(pid)
        log.warning("pid=%d cannot be ended: %s", pid, why)

    def _leftovers(self, sessions: frozenset[int]) -> list[int]:
        """What lives in these sessions, or is adopted, or descends from an adopted child."""
        alive = {process.pid: process for process in linux.processes() if not process.dead}
        sessions -= alive.keys()  # their leaders are gone: who has the number now is a stranger
        adopted = {process.pid for process in alive.values() if not _guests and self._is_adopted(process)}
        found: set[int] = set()
        for process in alive.values():
            line: list[int] = []
            above: linux.Process | None = process
            while above is not None and above.pid not in found:
                line.append(above.pid)
                if above.session in sessions or above.pid in adopted:
                    found.update(line)
                    break
                above = alive.get(above.parent)
            else:
                if above is not None:
                    found.update(line)
        return sorted(found - self._spared)

    def _is_adopted(self, process: linux.Process) -> bool:
        return (
            process.parent == os.getpid()
            and process.pid not in _claimed
            and process.session != self._session
            and not (_guests and process.session == process.pid)
            and not (_expected and process.name == linux.NEWBORN)
        )

    def _reap_adopted(self) -> None:
        for process in linux.children():
            if process.dead and self._is_adopted(process):
                os.waitpid(process.pid, os.WNOHANG)

    async def _readable(self, fd: int) -> None:
        from ripstop.system.blocking_calls import settle

        ended = self._loop.create_future()
        self._loop.add_reader(fd, settle, ended, None)
        try:
            await ended
        finally:
            self._loop.remove_reader(fd)

    def close(self) -> None:
        """Stops watching; the children live on."""
        for pid in list(self._pidfds):
            self._forget(pid)
        if self._handles_sigchld:
            self._loop.remove_signal_handler(signal.SIGCHLD)


def _open(pid: int) -> int | None:
    """None if it is gone; its number may be that of a thread by now, which kernels refuse in words of their own."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in (errno.ESRCH, errno.EINVAL, errno.ENOENT):
            raise
        return None


def _send(pidfd: int, signum: signal.Signals) -> bool:
    """Whether it may be signalled."""
    try:
        signal.pidfd_send_signal(pidfd, signum)
        if signum != signal.SIGKILL:
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)  # a stopped process takes no signal until it goes on
    except ProcessLookupError:
        pass
    except PermissionError:
        return False
    return True
