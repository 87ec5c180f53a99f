"""The interface between the API and a job: the job, queries to its nodes, rejected requests.

Rules: (1) a query that a node cannot take in time fails with the reason; (2) a query to many nodes returns each node's
reply or error.  `agent/query_handler.py` answers the queries.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from ripstop.api.replies import HistoryColumns, Usage
from ripstop.model.errors import QueryFailed, RipstopError
from ripstop.model.events import Event
from ripstop.model.operator_commands import OperatorCommand
from ripstop.model.status import JobStatus, NodeStatus
from ripstop.telemetry.journal import Journal

MAX_QUERIES_PER_NODE = 4  # at a time, without those that wait for new output
MAX_CONCURRENT_NODES = 512  # of one query to many nodes

T = TypeVar("T")


class JobInterface(Protocol):
    """What the API needs of a job; the coordinator implements it."""

    journal: Journal

    @property
    def decides(self) -> bool: ...

    @property
    def allows_chaos(self) -> bool: ...

    def status(self) -> JobStatus: ...

    def record(self, event: Event) -> None: ...

    async def ask(self, node: str, query: str, argument: str = ..., timeout_s: float = ..., /) -> str: ...

    async def metrics(self) -> bytes: ...

    def apply_command(self, command: OperatorCommand, /) -> None: ...

    async def full_status(self) -> JobStatus: ...

    async def usage(self) -> Usage: ...

    def history_columns(self) -> HistoryColumns: ...


class RequestRefused(RipstopError):
    """A rejected request: the HTTP status and the reason."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def find_job_node_of_rank(status: JobStatus, rank: int) -> NodeStatus:
    for node in status.nodes_in_round:
        if node.first_rank <= rank < node.first_rank + node.slots:
            return node
    if not status.world_size:
        raise RequestRefused(409, f"the job is {status.phase} ({status.why}), so it has no ranks; try again later")
    raise RequestRefused(404, f"there is no rank {rank}: the job has ranks 0 to {status.world_size - 1}")


# queries --------------------------------------------------------------------------------------------------------------


class LimitedJobQueries:
    """Limits the queries to each node: replies share the connection of the node's heartbeats."""

    def __init__(self) -> None:
        self._limits: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # of nodes with queries

    async def ask(
        self, job: JobInterface, node: str, query: str, argument: dict[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        """Wait until the node is below its limit, then send the query and return the reply."""
        limit = self._limits.setdefault(node, asyncio.Semaphore(MAX_QUERIES_PER_NODE))
        try:
            async with asyncio.timeout(timeout_s):
                await limit.acquire()
        except TimeoutError:
            why = f"node {node} is busy with other queries since {timeout_s:g} s; try again later"
            raise QueryFailed(why) from None
        try:
            return await self.ask_at_once(job, node, query, argument, timeout_s)
        finally:
            limit.release()

    @staticmethod
    async def ask_at_once(
        job: JobInterface, node: str, query: str, argument: dict[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        """Send a query without the limit, and return the node's reply."""
        reply: dict[str, Any] = json.loads(await job.ask(node, query, json.dumps(argument), timeout_s))
        return reply


async def query_job_nodes(
    nodes: Iterable[str], ask_one: Callable[[str], Awaitable[T]], seconds: float
) -> dict[str, T | QueryFailed]:
    """Query many nodes concurrently; each node's reply, or the error, after at most `seconds`."""
    names = list(nodes)
    replies: dict[str, T | QueryFailed] = {}
    unasked = iter(names)  # shared by all tasks

    async def ask_in_turn() -> None:
        for node in unasked:
            try:
                replies[node] = await ask_one(node)
            except QueryFailed as error:
                replies[node] = error.with_traceback(None)  # its frames refer to `replies`: a reference cycle

    tasks = [asyncio.create_task(ask_in_turn()) for _ in names[:MAX_CONCURRENT_NODES]]
    try:
        if tasks:
            done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        return {node: replies[node] if node in replies else _job_query_timeout(node, seconds) for node in names}
    finally:
        for task in tasks:
            task.cancel()


def _job_query_timeout(node: str, seconds: float) -> QueryFailed:
    return QueryFailed(f"node {node} did not reply in {seconds:g} s; try again")
