"""A job's metrics, usage, history and goodput, from queries to the nodes and from the coordinator's own totals.

Nodes are queried for a request, and every few seconds for the history.  Rules: (1) nodes are queried concurrently, and
a node that does not reply in `NODE_TIMEOUT_S` is missing; (2) requests during a collection, or within `CACHE_S` seconds
after it, share it; (3) the metrics page is rendered in a thread, so that a large job does not block the event loop;
(4) goodput needs a query to one node only, the one whose steps count.
"""

import asyncio
import copy
import json
import time
from collections.abc import Mapping
from contextlib import suppress

from msgspec import Struct

from ripstop.api.job_interface import query_job_nodes
from ripstop.api.replies import GpuColumns, RankColumns, Usage
from ripstop.coordinator.driver import Coordinator
from ripstop.model.errors import ProtocolError, QueryFailed
from ripstop.model.status import JobStatus
from ripstop.model.usage import NodeSample, StepSample
from ripstop.protocol.codec import decode_protocol_record
from ripstop.telemetry.history import history_point
from ripstop.telemetry.metrics import Totals

STEP_TIMEOUT_S = 0.5  # for the node whose steps count: a status must not wait longer
NODE_TIMEOUT_S = 1.0
ALL_NODES_TIMEOUT_S = 3.0
CACHE_S = 1.0


class Collection(Struct):
    """The samples of the nodes that replied, by node; and the metrics page made from them, once it is requested."""

    status: JobStatus
    samples: Mapping[str, NodeSample]
    at: float
    page: asyncio.Task[bytes] | None = None


class MetricsCollector:
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._collection: asyncio.Task[Collection] | None = None
        self._collected_at = 0.0

    async def page(self) -> bytes:
        """The current metrics, at most `CACHE_S` seconds old."""
        collection = await self._current()
        if collection.page is None:
            totals = copy.deepcopy(self._coordinator.totals)
            rendering = asyncio.to_thread(_render_collected_metrics, collection, totals, time.time())
            collection.page = asyncio.create_task(rendering, name="ripstop-metrics")
        return await asyncio.shield(collection.page)

    async def usage(self) -> Usage:
        """What the workers do and use now, at most `CACHE_S` seconds old."""
        collection = await self._current()
        own_times = self._coordinator.stragglers.own_times()
        return _collected_usage(collection, self._coordinator.totals.checkpoint, own_times)

    async def extend_history(self) -> None:
        """Add the current samples to the job's history."""
        collection = await self._current()
        goodput = self._coordinator.totals.goodput
        ratio = goodput.spent(collection.at).ratio if goodput.has_steps else None
        self._coordinator.history.add(history_point(collection.samples.values(), ratio, collection.at))
        self._coordinator.on_samples(collection.status.round, collection.samples)

    async def progress(self) -> tuple[float, float | None]:
        """The goodput, of the last known step if the node does not reply, and the age of the last commit if known."""
        goodput = self._coordinator.totals.goodput
        commit_age = None
        if goodput.reporter is not None:
            node, rank = goodput.reporter
            with suppress(QueryFailed, ProtocolError):
                reply = self._coordinator.ask(node, "step", json.dumps({"rank": rank}), STEP_TIMEOUT_S)
                sample = decode_protocol_record(await reply, StepSample)
                goodput.on_step(sample.round, node, rank, sample.step, sample.at)
                commit_age = sample.commit_age
        return goodput.spent(time.time()).ratio, commit_age

    async def _current(self) -> Collection:
        now = asyncio.get_running_loop().time()
        if self._collection is None or (self._collection.done() and now - self._collected_at >= CACHE_S):
            self._collection = asyncio.create_task(self._collect(), name="ripstop-samples")
        return await asyncio.shield(self._collection)  # a client that disconnects cancels nothing

    async def _collect(self) -> Collection:
        try:
            status = self._coordinator.status()
            samples = await self._samples([node.name for node in status.nodes])
            totals = self._coordinator.totals
            for name, node in samples.items():
                for rank in node.ranks:
                    if rank.step is not None and rank.step_age is not None:
                        totals.goodput.on_step(node.round, name, rank.rank, rank.step, node.at - rank.step_age)
            return Collection(status, samples, time.time())
        finally:
            self._collected_at = asyncio.get_running_loop().time()

    async def _samples(self, nodes: list[str]) -> dict[str, NodeSample]:
        """The samples of the nodes that reply; the page reports the others as missing."""

        async def ask(node: str) -> NodeSample:
            text = await self._coordinator.ask(node, "sample", timeout_s=NODE_TIMEOUT_S)
            try:
                # one at a time: all replies of a large job at once would block
                return decode_protocol_record(text, NodeSample)
            except ProtocolError as error:
                raise QueryFailed(f"the reply of node {node} cannot be read: {error}") from error

        replies = await query_job_nodes(nodes, ask, ALL_NODES_TIMEOUT_S)
        return {node: reply for node, reply in replies.items() if isinstance(reply, NodeSample)}


def _render_collected_metrics(collection: Collection, totals: Totals, now: float) -> bytes:
    from ripstop.telemetry.prometheus import prometheus_page  # imports prometheus_client: only when needed

    return prometheus_page(totals, collection.status, collection.samples, now)


def _collected_usage(
    collection: Collection, checkpoint: tuple[int, float] | None, own_times: Mapping[int, float]
) -> Usage:
    """The samples of the current round's ranks, and of all GPUs, as columns."""
    status, samples = collection.status, collection.samples
    current = [sample for sample in samples.values() if sample.round == status.round]
    ranks = sorted((rank for sample in current for rank in sample.ranks), key=lambda rank: rank.rank)
    gpus = [(name, gpu) for name, sample in samples.items() for gpu in sample.gpus]
    step, saved_at = checkpoint or (None, None)
    return Usage(
        at=collection.at,
        round=status.round,
        checkpoint_step=step,
        checkpoint_at=saved_at,
        ranks=RankColumns(
            rank=[rank.rank for rank in ranks],
            step=[rank.step for rank in ranks],
            step_time=[round(1 / rank.steps_per_second, 6) if rank.steps_per_second else None for rank in ranks],
            own_time=[None if rank.rank not in own_times else round(own_times[rank.rank], 6) for rank in ranks],
            age=[None if rank.age is None else round(rank.age, 3) for rank in ranks],
            memory=[rank.memory for rank in ranks],
            cpu=[rank.cpu for rank in ranks],
        ),
        gpus=GpuColumns(
            node=[name for name, _ in gpus],
            index=[gpu.index for _, gpu in gpus],
            utilisation=[gpu.utilisation for _, gpu in gpus],
            memory_used=[gpu.memory_used for _, gpu in gpus],
            memory_total=[gpu.memory_total for _, gpu in gpus],
            temperature=[gpu.temperature for _, gpu in gpus],
            power=[gpu.power for _, gpu in gpus],
        ),
        missing=[node.name for node in status.nodes if node.name not in samples],
    )
