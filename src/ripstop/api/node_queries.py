"""Send queries to the nodes of a job, with a limited number at a time.

Rules: (1) a query that a node cannot take in time fails with the reason; (2) a query to many nodes returns each node's
reply or error.  The queries themselves are in `agent/query_handler.py`.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from ripstop.api.job_interface import JobInterface
from ripstop.model.errors import QueryFailed

MAX_QUERIES_PER_NODE = 4  # at a time, without those that wait for new output
MAX_CONCURRENT_NODES = 512  # of one query to many nodes

T = TypeVar("T")


class NodeQueries:
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
            return await ask(job, node, query, argument, timeout_s)
        finally:
            limit.release()


async def ask(job: JobInterface, node: str, query: str, argument: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Send a query at once, without a limit, and return the node's reply."""
    reply: dict[str, Any] = json.loads(await job.ask(node, query, json.dumps(argument), timeout_s))
    return reply


async def ask_all(
    nodes: Iterable[str], ask_one: Callable[[str], Awaitable[T]], seconds: float
) -> dict[str, T | QueryFailed]:
    """Query many nodes concurrently; each node's reply, or the error, after at most `seconds`."""
    limit = asyncio.Semaphore(MAX_CONCURRENT_NODES)

    async def reply_of(node: str) -> T | QueryFailed:
        try:
            async with limit:
                return await ask_one(node)
        except QueryFailed as error:
            return error

    tasks = {node: asyncio.create_task(reply_of(node)) for node in nodes}
    try:
        if tasks:
            await asyncio.wait(tasks.values(), timeout=seconds)
        return {node: task.result() if task.done() else _late(node, seconds) for node, task in tasks.items()}
    finally:
        for task in tasks.values():
            task.cancel()


def _late(node: str, seconds: float) -> QueryFailed:
    return QueryFailed(f"node {node} did not reply in {seconds:g} s; try again")
