"""The interface between the API and a job, and the error of a rejected request."""

from typing import Protocol

from ripstop.model.errors import RipstopError
from ripstop.model.events import Event
from ripstop.model.operator_commands import OperatorCommand
from ripstop.model.status import JobStatus, NodeStatus
from ripstop.telemetry.journal import Journal


class JobInterface(Protocol):
    """What the API needs of a job; the coordinator implements it."""

    journal: Journal

    @property
    def decides(self) -> bool: ...

    def status(self) -> JobStatus: ...

    def record(self, event: Event) -> None: ...

    async def ask(self, node: str, query: str, argument: str = ..., timeout_s: float = ..., /) -> str: ...

    async def metrics(self) -> bytes: ...

    def apply_command(self, command: OperatorCommand, /) -> None: ...

    async def goodput(self) -> float | None: ...


class RequestRefused(RipstopError):
    """A rejected request: the HTTP status and the reason."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def nodes_in_round(status: JobStatus) -> list[NodeStatus]:
    return [node for node in status.nodes if node.first_rank >= 0]


def node_of_rank(status: JobStatus, rank: int) -> NodeStatus:
    for node in nodes_in_round(status):
        if node.first_rank <= rank < node.first_rank + node.slots:
            return node
    if not status.world_size:
        raise RequestRefused(409, f"the job is {status.phase} ({status.why}), so it has no ranks; try again later")
    raise RequestRefused(404, f"there is no rank {rank}: the job has ranks 0 to {status.world_size - 1}")
