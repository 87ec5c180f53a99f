"""What the API needs of a job, and the ways in which a job says no."""

import asyncio
import json
from typing import Any, Protocol
from weakref import WeakValueDictionary

from ripstop.errors import NoAnswer, RipstopError
from ripstop.observe.events import Event
from ripstop.observe.journal import Journal
from ripstop.observe.status import JobStatus, NodeStatus
from ripstop.observe.wishes import Wish

AT_ONCE = 4  # questions that one node answers at a time; waiting for something to happen is none of its work


class Steerable(Protocol):
    """A job, as the API sees it; the coordinator is one."""

    journal: Journal

    @property
    def decides(self) -> bool: ...

    def status(self) -> JobStatus: ...

    def record(self, event: Event) -> None: ...

    async def ask(self, node: str, question: str, argument: str = "", patience: float = ...) -> str: ...

    async def metrics(self) -> bytes: ...

    def steer(self, wish: Wish) -> None: ...

    async def goodput(self) -> float | None: ...


class Refused(RipstopError):
    """A request that gets no more than a status and a word."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Questions:
    """Asks nodes, each so much at a time: answers share the connection by which a node shows that it lives."""

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # while somebody asks

    async def ask(
        self, job: Steerable, node: NodeStatus, question: str, details: dict[str, Any], patience: float
    ) -> dict[str, Any]:
        """The node's answer, once it is this question's turn."""
        turns = self._turns.setdefault(node.name, asyncio.Semaphore(AT_ONCE))
        try:
            async with asyncio.timeout(patience):
                await turns.acquire()
        except TimeoutError:
            why = f"node {node.name} had so much to answer that this was not asked in {patience:g} s; ask later"
            raise NoAnswer(why) from None
        try:
            return await ask(job, node, question, details, patience)
        finally:
            turns.release()


async def ask(
    job: Steerable, node: NodeStatus, question: str, details: dict[str, Any], patience: float
) -> dict[str, Any]:
    """The node's answer; the question is at the node at once, and may wait there."""
    answer: dict[str, Any] = json.loads(await job.ask(node.name, question, json.dumps(details), patience))
    return answer


def placed(status: JobStatus) -> list[NodeStatus]:
    """The nodes that have ranks."""
    return [node for node in status.nodes if node.first_rank >= 0]


def node_of(status: JobStatus, rank: int) -> NodeStatus:
    """Where a rank is."""
    for node in placed(status):
        if node.first_rank <= rank < node.first_rank + node.slots:
            return node
    if not status.world_size:
        raise Refused(409, f"the job is {status.phase} ({status.why}), so there are no ranks now; ask again later")
    raise Refused(404, f"there is no rank {rank}: the job has ranks 0 to {status.world_size - 1}")
