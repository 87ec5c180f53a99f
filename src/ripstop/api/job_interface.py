"""What the API needs of a job, and the ways in which a job says no."""

from typing import Protocol

from ripstop.model.errors import RipstopError
from ripstop.model.events import Event
from ripstop.model.operator_commands import OperatorCommand
from ripstop.model.status import JobStatus, NodeStatus
from ripstop.telemetry.journal import Journal


class JobInterface(Protocol):
    """A job, as the API sees it; the coordinator is one."""

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
    """A request that gets no more than a status and a word."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def placed(status: JobStatus) -> list[NodeStatus]:
    """The nodes that have ranks."""
    return [node for node in status.nodes if node.first_rank >= 0]


def node_of(status: JobStatus, rank: int) -> NodeStatus:
    """Where a rank is."""
    for node in placed(status):
        if node.first_rank <= rank < node.first_rank + node.slots:
            return node
    if not status.world_size:
        raise RequestRefused(
            409, f"the job is {status.phase} ({status.why}), so there are no ranks now; ask again later"
        )
    raise RequestRefused(404, f"there is no rank {rank}: the job has ranks 0 to {status.world_size - 1}")
