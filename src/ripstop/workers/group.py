"""The worker processes of one round on this node: started together, stopped together, to the last grandchild.

How a group ends
-   `stop` signals the workers' process groups first and looks around later: recovery waits for this.
-   A worker that is still there after the grace is killed.  A stopped one is woken to take the signal.
-   Then every process of the workers' sessions, and every orphan of theirs that the agent has adopted, wherever it hid,
    is gone before `stop` returns.  If all workers had exited 0 by themselves, such leftovers get SIGTERM and the grace
    too, since they may be at work for a job that succeeded; otherwise they are killed at once.
-   An agent runs one group at a time: adopted orphans do not say whose they were.  For the same reason an agent within
    a program that launches leaves those alone that have a session of their own (`process.py`, rule 5).
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from signal import SIGCONT, SIGKILL, SIGTERM

from ripstop.model.errors import StartError
from ripstop.system import linux
from ripstop.workers.processes import UNKILLABLE, Children, ProcessExit, reap
from ripstop.workers.spawner import ProcessSpec, Starter

GENERATIONS = 8  # between a worker and whoever belongs to it, outside of its session


class Exit(ProcessExit, frozen=True):
    """A worker's end."""

    local_rank: int


class Group:
    """Births in the order of local ranks; `on_exit` is called once for each worker, in the event loop."""

    def __init__(
        self, children: Children, spawner: Starter, births: Sequence[ProcessSpec], on_exit: Callable[[Exit], None]
    ) -> None:
        self._children = children
        self._spawner = spawner
        self._births = births
        self._on_exit = on_exit
        self._start: asyncio.Task[None] | None = None
        self._pids: tuple[int, ...] = ()
        self._live: set[int] = set()
        self._failed = False
        self._stopping = False
        self._sent: set[int] = set()
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    @property
    def pids(self) -> tuple[int, ...]:
        """In the order of local ranks; empty before the start."""
        return self._pids

    async def start(self) -> None:
        """Starts the workers, or raises StartError and has started none; CancelledError if stopped meanwhile."""
        if self._stopping:
            raise asyncio.CancelledError
        self._start = asyncio.ensure_future(self._begin())
        await self._start

    async def _begin(self) -> None:
        self._pids = tuple(await self._spawner.spawn(self._births))
        for pid in self._pids:
            try:
                self._children.watch(pid, self._ended)
            except OSError as error:
                self._abandon(self._pids[len(self._live) :])
                raise StartError(
                    f"every worker needs a file descriptor of the agent's: {error.strerror}; raise `ulimit -n`."
                ) from error
            self._live.add(pid)
            self._all_ended.clear()

    def _abandon(self, unwatched: Sequence[int]) -> None:
        """Nobody would hear of the end of these."""
        for pid in unwatched:
            os.kill(pid, SIGKILL)
            reap(pid)

    def _ended(self, end: ProcessExit) -> None:
        self._live.discard(end.pid)
        self._failed |= end.exitcode != 0
        if not self._live:
            self._all_ended.set()
        rank = self._pids.index(end.pid)
        self._on_exit(Exit(end.pid, end.exitcode, end.signal, end.at, end.max_rss, rank))

    def rank_of(self, pid: int) -> int | None:
        """The local rank of the live worker that this process is, or belongs to: by its session, or its parents'."""
        for _ in range(GENERATIONS):
            process = None if pid in self._live else linux.look(pid)
            if process is None:
                break
            pid = process.session if process.session in self._live else process.parent
        return self._pids.index(pid) if pid in self._live else None

    def send(self, pid: int, signum: int) -> None:
        """To one process, if it is a live worker's."""
        with suppress(OSError):  # it is gone, or stays whatever we do
            pidfd = os.pidfd_open(pid)
            try:
                if self.rank_of(pid) is not None:
                    signal.pidfd_send_signal(pidfd, signum)
            finally:
                os.close(pidfd)

    def signal(self, signum: int) -> None:
        """To the process group of every live worker."""
        for pid in self._live:  # not reaped yet, so the numbers are still theirs
            try:
                os.killpg(pid, signum)
            except ProcessLookupError:  # born by multiprocessing a moment ago: it leads no group yet
                os.kill(pid, signum)

    async def stop(self, grace: float, signum: int = SIGTERM) -> None:
        """Ends all workers and all that descends from them.  May be called again, also meanwhile with less patience."""
        began = time.monotonic()
        self._stopping = True
        if self._start is not None and not self._start.done():
            self._start.cancel()
            await asyncio.wait([self._start])
        succeeded = not self._live and not self._failed
        if self._live and grace > 0:
            if signum not in self._sent:
                self._sent.add(signum)
                self.signal(signum)
            self.signal(SIGCONT)
            try:
                async with asyncio.timeout(grace):
                    await self._all_ended.wait()
            except TimeoutError:
                pass
        self.signal(SIGKILL)
        try:
            async with asyncio.timeout(UNKILLABLE):
                await self._all_ended.wait()
        except TimeoutError:
            raise StartError(
                f"workers must be gone before others take their place: {sorted(self._live)} are there "
                f"{UNKILLABLE:g} s after SIGKILL; they hang in the kernel (see /proc/PID/stack): restart this machine."
            ) from None
        patience = began + grace - time.monotonic() if succeeded else 0.0
        await self._children.end_trees(self._pids, patience)
