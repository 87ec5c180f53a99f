"""The worker processes of one round on this node: started together, stopped together, with all their descendants.

How a group ends
-   `stop` first signals the workers' process groups, because recovery waits for this, and then searches for leftovers.
-   A worker that still runs after the grace is killed.  A suspended one is continued so that it takes the signal.
-   `stop` returns when every process of the workers' sessions, and every orphan that the agent has adopted, has ended.
    If all workers had exited with 0, such leftovers get SIGTERM and the grace too, since they may still work for a job
    that succeeded.  Otherwise they are killed at once.
-   An agent runs one group at a time, because an adopted orphan does not show which group it came from.  For the same
    reason an agent inside a program leaves orphans alone that have their own session (`processes.py`, rule 5).
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
from ripstop.workers.processes import KILL_TIMEOUT_S, Children, ProcessExit
from ripstop.workers.spawner import ProcessSpec, Starter

MAX_GENERATIONS = 8  # between a worker and a descendant outside of its session


class Exit(ProcessExit, frozen=True):
    """A worker's end."""

    local_rank: int


class Group:
    """`specs` are in the order of local ranks; `on_exit` is called once for each worker, in the event loop."""

    def __init__(
        self, children: Children, spawner: Starter, specs: Sequence[ProcessSpec], on_exit: Callable[[Exit], None]
    ) -> None:
        self._children = children
        self._spawner = spawner
        self._specs = specs
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
        """Start all workers, or none and raise StartError; CancelledError if stopped meanwhile."""
        if self._stopping:
            raise asyncio.CancelledError
        self._start = asyncio.ensure_future(self._spawn())
        await self._start

    async def _spawn(self) -> None:
        self._pids = tuple(await self._spawner.spawn(self._specs))
        for pid in self._pids:
            try:
                self._children.watch(pid, self._ended)
            except StartError:
                self._children.kill(self._pids[len(self._live) + 1 :])  # nothing would report their end
                raise
            self._live.add(pid)
            self._all_ended.clear()

    def _ended(self, end: ProcessExit) -> None:
        self._live.discard(end.pid)
        self._failed |= end.exitcode != 0
        if not self._live:
            self._all_ended.set()
        rank = self._pids.index(end.pid)
        self._on_exit(Exit(end.pid, end.exitcode, end.signal, end.at, end.max_rss, rank))

    def rank_of(self, pid: int) -> int | None:
        """The local rank of the live worker that this process is or descends from, by its session or its ancestors'."""
        for _ in range(MAX_GENERATIONS):
            process = None if pid in self._live else linux.read_process(pid)
            if process is None:
                break
            pid = process.session if process.session in self._live else process.parent
        return self._pids.index(pid) if pid in self._live else None

    def send(self, pid: int, signum: int) -> None:
        """Signal one process, if it belongs to a live worker."""
        with suppress(OSError):  # it has ended, or must not be signalled
            pidfd = os.pidfd_open(pid)
            try:
                if self.rank_of(pid) is not None:
                    signal.pidfd_send_signal(pidfd, signum)
            finally:
                os.close(pidfd)

    def signal(self, signum: int) -> None:
        """Signal the process group of every live worker."""
        for pid in self._live:  # not reaped yet, so the pids are still theirs
            try:
                os.killpg(pid, signum)
            except ProcessLookupError:  # multiprocessing has just started it: it leads no group yet
                os.kill(pid, signum)

    async def stop(self, grace: float, signum: int = SIGTERM) -> None:
        """End all workers and their descendants.  May be called again, also meanwhile with a shorter grace."""
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
            await self._wait_ended(grace)
        self.signal(SIGKILL)
        if not await self._wait_ended(KILL_TIMEOUT_S):
            raise StartError(
                f"workers must have ended before others replace them: {sorted(self._live)} still exist "
                f"{KILL_TIMEOUT_S:g} s after SIGKILL; they hang in the kernel (see /proc/PID/stack): restart this "
                "machine."
            )
        await self._children.end_trees(self._pids, began + grace - time.monotonic() if succeeded else 0.0)

    async def _wait_ended(self, timeout: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._all_ended.wait()
        return self._all_ended.is_set()
