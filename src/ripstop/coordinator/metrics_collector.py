"""A job's numbers: for `/metrics`, asks every node what it is doing, and makes a page of that and of what the
coordinator knows; for the goodput in a job's status, asks the one node whose word counts how far it has come.

Nothing is asked unless somebody wants to know.  Rules: (1) nodes are asked at once, so many at a time, and a node that
does not answer in `PATIENCE` is missing from the page; (2) readers that come while one is being served, or within
`FRESH` seconds, get the same page; (3) the page of a large job is made in a thread, in turns with the event loop.
"""

import asyncio
import copy
import json
import time
from collections.abc import Mapping
from contextlib import suppress

from ripstop.api.node_queries import ask_all
from ripstop.coordinator.service import Coordinator
from ripstop.model.errors import ProtocolError, QueryFailed
from ripstop.model.status import JobStatus
from ripstop.model.usage import NodeSample, StepSample
from ripstop.protocol.codec import reader
from ripstop.telemetry.metrics import Totals

HASTE = 0.5  # seconds for the node that tells the goodput: a status is wanted, whatever it is
PATIENCE = 1.0  # seconds for one node
WHOLE = 3.0  # and for all of them
FRESH = 1.0  # seconds

_read = reader(NodeSample)
_read_step = reader(StepSample)


class MetricsCollector:
    """Makes the page of one coordinator, and knows its goodput."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._making: asyncio.Task[bytes] | None = None
        self._made = 0.0

    async def page(self) -> bytes:
        """The metrics as they are, or were a moment ago."""
        now = asyncio.get_running_loop().time()
        if self._making is None or (self._making.done() and now - self._made >= FRESH):
            self._making = asyncio.create_task(self._make(), name="ripstop-metrics")
        return await asyncio.shield(self._making)  # a reader that leaves takes nothing from the others

    async def goodput(self) -> float:
        """By now, or as far as the job was last seen."""
        found = self._coordinator.totals.goodput
        if (reporter := found.reporter) is not None:
            node, rank = reporter
            with suppress(QueryFailed, ProtocolError):
                asked = self._coordinator.ask(node, "step", json.dumps({"rank": rank}), patience=HASTE)
                seen = _read_step(await asked)
                found.on_step(seen.round, node, rank, seen.step, seen.at)
        return found.spent(time.time()).ratio

    async def _make(self) -> bytes:
        try:
            status = self._coordinator.status()
            samples = await self._samples([node.name for node in status.nodes])
            totals = self._coordinator.totals
            for name, node in samples.items():
                for rank in node.ranks:
                    if rank.step is not None and rank.age is not None:
                        totals.goodput.on_step(node.round, name, rank.rank, rank.step, node.at - rank.age)
            return await asyncio.to_thread(_page, copy.deepcopy(totals), status, samples, time.time())
        finally:
            self._made = asyncio.get_running_loop().time()

    async def _samples(self, nodes: list[str]) -> dict[str, NodeSample]:
        """Of those that answer; the others are missing, and the page says so."""

        async def ask(node: str) -> NodeSample:
            text = await self._coordinator.ask(node, "sample", patience=PATIENCE)
            try:
                return _read(text)  # as it comes: all of a large job at once would take long
            except ProtocolError as error:
                raise QueryFailed(f"node {node} cannot be understood: {error}") from error

        answers = await ask_all(nodes, ask, WHOLE)
        return {node: answer for node, answer in answers.items() if isinstance(answer, NodeSample)}


def _page(totals: Totals, status: JobStatus, samples: Mapping[str, NodeSample], now: float) -> bytes:
    from ripstop.telemetry.prometheus import page  # prometheus_client: where somebody asks, and in the thread

    return page(totals, status, samples, now)
