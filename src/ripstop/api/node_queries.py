"""How the nodes of a job are asked: each so much at a time, and many at once.

Rules: (1) a question that a node does not get to in time fails, and says so; (2) who asks many nodes learns of each
what it answers, or why it does not.  What can be asked is the agent's (`agent/queries.py`).
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from ripstop.api.job_interface import JobInterface
from ripstop.model.errors import QueryFailed

AT_ONCE = 4  # questions that one node answers at a time; waiting for something to happen is none of its work
NODES_AT_ONCE = 512  # nodes that are asked the same

T = TypeVar("T")


class NodeQueries:
    """Asks nodes, each so much at a time: answers share the connection by which a node shows that it lives."""

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # while somebody asks

    async def ask(
        self, job: JobInterface, node: str, question: str, details: dict[str, Any], patience: float
    ) -> dict[str, Any]:
        """The node's answer, once it is this question's turn."""
        turns = self._turns.setdefault(node, asyncio.Semaphore(AT_ONCE))
        try:
            async with asyncio.timeout(patience):
                await turns.acquire()
        except TimeoutError:
            why = f"node {node} had so much to answer that this was not asked in {patience:g} s; ask later"
            raise QueryFailed(why) from None
        try:
            return await ask(job, node, question, details, patience)
        finally:
            turns.release()


async def ask(job: JobInterface, node: str, question: str, details: dict[str, Any], patience: float) -> dict[str, Any]:
    """The node's answer; the question is at the node at once, and may wait there."""
    answer: dict[str, Any] = json.loads(await job.ask(node, question, json.dumps(details), patience))
    return answer


async def ask_all(
    nodes: Iterable[str], question: Callable[[str], Awaitable[T]], seconds: float
) -> dict[str, T | QueryFailed]:
    """What each of many nodes answers, or why it does not, within so many seconds; many are asked at a time."""
    turns = asyncio.Semaphore(NODES_AT_ONCE)

    async def answer(node: str) -> T | QueryFailed:
        try:
            async with turns:
                return await question(node)
        except QueryFailed as why:
            return why

    asked = {node: asyncio.create_task(answer(node)) for node in nodes}
    try:
        if asked:
            await asyncio.wait(asked.values(), timeout=seconds)
        return {node: task.result() if task.done() else _late(node, seconds) for node, task in asked.items()}
    finally:
        for task in asked.values():
            task.cancel()


def _late(node: str, seconds: float) -> QueryFailed:
    return QueryFailed(f"node {node} did not answer in {seconds:g} s; ask again")
