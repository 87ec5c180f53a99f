"""A job's metrics page and its goodput, from queries to the nodes and from the coordinator's own totals.

Nodes are queried only for a request.  Rules: (1) nodes are queried concurrently, and a node that does not reply in
`NODE_TIMEOUT_S` is missing from the page; (2) requests during a collection, or within `CACHE_S` seconds after it, get
the same page; (3) the page is rendered in a thread, so that a large job does not block the event loop; (4) goodput
needs a query to one node only, the one whose steps count.
"""

import asyncio
import copy
import json
import time
from collections.abc import Mapping
from contextlib import suppress

from ripstop.api.job_interface import ask_all
from ripstop.coordinator.coordinator import Coordinator
from ripstop.model.errors import ProtocolError, QueryFailed
from ripstop.model.status import JobStatus
from ripstop.model.usage import NodeSample, StepSample
from ripstop.protocol.codec import decode_record
from ripstop.telemetry.metrics import Totals

STEP_TIMEOUT_S = 0.5  # for the node whose steps count: a status must not wait longer
NODE_TIMEOUT_S = 1.0
ALL_NODES_TIMEOUT_S = 3.0
CACHE_S = 1.0


class MetricsCollector:
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._collection: asyncio.Task[bytes] | None = None
        self._collected_at = 0.0

    async def page(self) -> bytes:
        """The current metrics, at most `CACHE_S` seconds old."""
        now = asyncio.get_running_loop().time()
        if self._collection is None or (self._collection.done() and now - self._collected_at >= CACHE_S):
            self._collection = asyncio.create_task(self._collect(), name="ripstop-metrics")
        return await asyncio.shield(self._collection)  # a client that disconnects cancels nothing

    async def progress(self) -> tuple[float, float | None]:
        """The goodput, of the last known step if the node does not reply, and the age of the last commit if known."""
        goodput = self._coordinator.totals.goodput
        commit_age = None
        if goodput.reporter is not None:
            node, rank = goodput.reporter
            with suppress(QueryFailed, ProtocolError):
                reply = self._coordinator.ask(node, "step", json.dumps({"rank": rank}), STEP_TIMEOUT_S)
                sample = decode_record(await reply, StepSample)
                goodput.on_step(sample.round, node, rank, sample.step, sample.at)
                commit_age = sample.commit_age
        return goodput.spent(time.time()).ratio, commit_age

    async def _collect(self) -> bytes:
        try:
            status = self._coordinator.status()
            samples = await self._samples([node.name for node in status.nodes])
            totals = self._coordinator.totals
            for name, node in samples.items():
                for rank in node.ranks:
                    if rank.step is not None and rank.step_age is not None:
                        totals.goodput.on_step(node.round, name, rank.rank, rank.step, node.at - rank.step_age)
            return await asyncio.to_thread(_page, copy.deepcopy(totals), status, samples, time.time())
        finally:
            self._collected_at = asyncio.get_running_loop().time()

    async def _samples(self, nodes: list[str]) -> dict[str, NodeSample]:
        """The samples of the nodes that reply; the page reports the others as missing."""

        async def ask(node: str) -> NodeSample:
            text = await self._coordinator.ask(node, "sample", timeout_s=NODE_TIMEOUT_S)
            try:
                return decode_record(text, NodeSample)  # one at a time: all replies of a large job at once would block
            except ProtocolError as error:
                raise QueryFailed(f"the reply of node {node} cannot be read: {error}") from error

        replies = await ask_all(nodes, ask, ALL_NODES_TIMEOUT_S)
        return {node: reply for node, reply in replies.items() if isinstance(reply, NodeSample)}


def _page(totals: Totals, status: JobStatus, samples: Mapping[str, NodeSample], now: float) -> bytes:
    from ripstop.telemetry.prometheus import page  # imports prometheus_client: only when needed

    return page(totals, status, samples, now)
