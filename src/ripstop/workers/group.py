"""The worker processes of this node: started together, stopped together, with all their descendants.

A group can outlive its round (`replace`): some workers go on in place, and others take the places of the rest.

How a group ends
-   `stop` first signals the workers' process groups, because recovery waits for this, and then searches for leftovers.
-   A worker that still runs after the grace is killed.  A suspended one is continued so that it takes the signal.
-   `stop` returns when every process of the workers' sessions, and every orphan that the agent has adopted, has ended.
    If all workers had exited with 0, such leftovers get SIGTERM and the grace too, since they may still work for a job
    that succeeded.  Otherwise they are killed at once.
-   A worker that SIGKILL does not end hangs in the kernel (D state).  `stop` and `replace` wait for it once, for
    `KILL_TIMEOUT_S`, end the others, and raise UnkillableError.
-   `replace` leaves adopted orphans alone: they may come from a worker that goes on.
-   An agent runs one group at a time, because an adopted orphan does not show which group it came from.  For the same
    reason an agent inside a program leaves orphans alone that have their own session (`processes.py`, rule 5).
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from signal import SIGCONT, SIGKILL, SIGTERM

from ripstop.model.errors import StartError, UnkillableError
from ripstop.system import linux
from ripstop.workers.processes import KILL_TIMEOUT_S, Children, ProcessExit
from ripstop.workers.spawner import ProcessSpec, WorkerSpawner

MAX_GENERATIONS = 8  # between a worker and a descendant outside of its session


class Exit(ProcessExit, frozen=True):
    """A worker's end."""

    local_rank: int


class Group:
    """`specs` are in the order of local ranks; `on_exit` is called once for each worker, in the event loop."""

    def __init__(
        self, children: Children, spawner: WorkerSpawner, specs: Sequence[ProcessSpec], on_exit: Callable[[Exit], None]
    ) -> None:
        self._children = children
        self._spawner = spawner
        self._specs = specs
        self.on_exit = on_exit
        self._start: asyncio.Task[None] | None = None
        self._pids: tuple[int, ...] = ()
        self._live: set[int] = set()
        self._failed = False
        self._stopping = False
        self._sent: set[int] = set()
        self._discarded: set[int] = set()  # live workers that are being replaced
        self._unkillable: set[int] = set()  # live workers that SIGKILL did not end
        self._has_ended = asyncio.Event()  # some worker

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
        self._watch(self._pids)

    def _watch(self, pids: Sequence[int]) -> None:
        for number, pid in enumerate(pids):
            try:
                self._children.watch(pid, self._ended)
            except StartError:
                self._children.kill(pids[number + 1 :])  # nothing would report their end
                raise
            self._live.add(pid)

    @property
    def live(self) -> dict[int, int]:
        """The pids of the workers that run, by local rank."""
        return {rank: pid for rank, pid in enumerate(self._pids) if pid in self._live}

    async def replace(self, specs: Mapping[int, ProcessSpec], grace: float) -> None:
        """End the workers of these local ranks, if they run, and start others in their places; see `start`.

        The exits of the old ones are not reported.  A start or replacement in progress is cancelled first.
        """
        await self._cancel_start()
        if self._stopping:
            raise asyncio.CancelledError
        self._start = asyncio.ensure_future(self._replace(specs, grace))
        await self._start

    async def _cancel_start(self) -> None:
        """Repeated until no start is in progress: another caller that waited may have begun one."""
        while self._start is not None and not self._start.done():
            self._start.cancel()
            await asyncio.wait([self._start])

    def discard(self, ranks: Collection[int]) -> None:
        """Report no exit of these workers any more: `replace` follows."""
        self._discarded |= {pid for rank, pid in self.live.items() if rank in ranks}

    async def _replace(self, specs: Mapping[int, ProcessSpec], grace: float) -> None:
        old = {self._pids[rank] for rank in specs}
        await self._end(old & self._live, grace)
        if not specs:
            return
        new = await self._spawner.spawn(list(specs.values()))
        pids = list(self._pids)
        for rank, pid in zip(specs, new, strict=True):
            pids[rank] = pid
        self._pids = tuple(pids)
        self._failed = False
        self._watch(new)
        await self._children.end_trees(old, 0.0, with_adopted=False)  # last: all ranks wait for the new worker

    async def _end(self, pids: set[int], grace: float) -> None:
        """End these live workers, whose exits nobody needs to know."""
        if not pids:
            return
        self._discarded |= pids
        for signum, timeout in ((SIGTERM, grace), (SIGKILL, KILL_TIMEOUT_S)):
            if timeout > 0:
                self.signal(signum, pids & self._live)
                self.signal(SIGCONT, pids & self._live)
                if await self._wait_until(lambda: not pids & self._live, timeout):
                    return
        raise self._unkillable_error(pids)

    def _ended(self, end: ProcessExit) -> None:
        self._live.discard(end.pid)
        self._has_ended.set()
        if end.pid in self._discarded:
            self._discarded.discard(end.pid)
            return
        self._failed |= end.exitcode != 0
        rank = self._pids.index(end.pid)
        self.on_exit(Exit(end.pid, end.exitcode, end.signal, end.at, end.max_rss, rank))

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

    def signal(self, signum: int, pids: Collection[int] | None = None) -> None:
        """Signal the process groups of these live workers; of all, if none are given."""
        for pid in self._live if pids is None else pids:  # not reaped yet, so the pids are still theirs
            try:
                os.killpg(pid, signum)
            except ProcessLookupError:  # multiprocessing has just started it: it leads no group yet
                os.kill(pid, signum)

    async def stop(self, grace: float, signum: int = SIGTERM) -> None:
        """End all workers and their descendants.  May be called again, also meanwhile with a shorter grace."""
        began = time.monotonic()
        self._stopping = True
        await self._cancel_start()
        succeeded = not self._live and not self._failed
        if self._live and grace > 0:
            if signum not in self._sent:
                self._sent.add(signum)
                self.signal(signum)
            self.signal(SIGCONT)
            await self._wait_ended(grace)
        self.signal(SIGKILL)
        error = None if await self._wait_ended(KILL_TIMEOUT_S) else self._unkillable_error(self._live)
        await self._children.end_trees(self._pids, began + grace - time.monotonic() if succeeded else 0.0)
        if error is not None:
            raise error

    def _unkillable_error(self, pids: set[int]) -> UnkillableError:
        stuck = pids & self._live
        self._unkillable |= stuck
        return UnkillableError(tuple(sorted(stuck)), KILL_TIMEOUT_S)

    async def _wait_ended(self, timeout: float) -> bool:
        """Whether all workers have ended.  It does not wait again for those that SIGKILL did not end."""
        await self._wait_until(lambda: self._live <= self._unkillable, timeout)
        return not self._live

    async def _wait_until(self, is_done: Callable[[], bool], timeout: float) -> bool:
        """Wait for the ends of workers."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not is_done():
                    self._has_ended.clear()
                    await self._has_ended.wait()
        return is_done()
