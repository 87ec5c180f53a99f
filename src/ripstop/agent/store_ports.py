"""The store of the running round, and the port that this node offers for the store of a later one."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from ripstop.model.errors import StartError
from ripstop.model.round import Place
from ripstop.workers.processes import Children
from ripstop.workers.spawner import WorkerSpawner
from ripstop.workers.store import RoundStore

log = logging.getLogger("ripstop.agent")

STORE_PORT_RETRY_S = 1.0


class StorePorts:
    """`on_open` gets this node's host and the port that it can offer."""

    def __init__(
        self,
        environ: Mapping[str, str],
        children: Children,
        run_task: Callable[[Coroutine[None, None, None]], Any],
        on_open: Callable[[str, int], None],
    ) -> None:
        self._environ = environ
        self._children = children
        self._run_task = run_task
        self._on_open = on_open
        self._offered: RoundStore | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._store: RoundStore | None = None
        self._ending: dict[RoundStore, asyncio.TimerHandle] = {}  # stores of rounds that are over
        self._closing: set[RoundStore] = set()  # whose port the running round needs too

    def open(self, host: str, port: int, *, is_required: bool) -> None:
        """Listen for the store of a later round; StartError if that fails and the port is required."""
        if self._offered is not None:
            self._run_task(self._offered.close())
            self._offered = None
        try:
            self._offered = RoundStore(host, port)
        except StartError as error:
            if is_required:
                raise
            log.warning("no port for the next round's store, retrying: %s", error)
            retry = partial(self.open, host, port, is_required=False)
            self._retry = asyncio.get_running_loop().call_later(STORE_PORT_RETRY_S, retry)
            return
        self._on_open(host, self._offered.port)

    def take(self, place: Place) -> RoundStore | None:
        """This round begins: the node of rank 0 uses the port that it has offered.  Returns the last round's store."""
        last, self._store = self._store, None
        if place.group_rank == 0:
            self._store, self._offered = self._offered, None
        return last

    def start(self, place: Place) -> None:
        """Take the port for a round without workers of the last one, whose store has ended, unless it never served."""
        if (unused := self.take(place)) is not None:
            self._run_task(unused.close())

    def prepare(self, spawner: WorkerSpawner) -> None:
        """Start the next round's store now, if this node has the running round's: workers that stay need it at once."""
        if self._offered is not None and self._store is not None:
            self._offered.prepare(spawner, self._environ, self._children)

    async def replace(self, last: RoundStore | None, place: Place, delay: float) -> None:
        """End the last round's store after a delay, or now if this round has the same port (`--master-port`).

        A worker that goes on in place may be about to connect to the old store: torch would retry for half an hour.
        """
        if last is not None:
            if last.port == place.store.port:
                self._closing.add(last)
            else:
                self._ending[last] = asyncio.get_running_loop().call_later(delay, self._end, last)
        for store in list(self._closing):  # an earlier round, which this one has replaced, may wait for it too
            await store.close()
            self._closing.discard(store)

    def _end(self, store: RoundStore) -> None:
        del self._ending[store]
        self._run_task(store.close())

    def serve(self, place: Place, spawner: WorkerSpawner) -> None:
        if place.group_rank == 0:
            self._store = self._store or RoundStore(place.store.host, place.store.port)
            self._store.serve(spawner, self._environ, self._children)

    async def close_store(self) -> None:
        """The round is over."""
        if self._store is not None:
            await self._store.close()
            self._store = None

    async def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        await self.close_store()
        ending, self._ending = self._ending, {}
        for timer in ending.values():
            timer.cancel()
        for store in [*ending, *self._closing]:
            await store.close()
        if self._offered is not None:
            await self._offered.close()
