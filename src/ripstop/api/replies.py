"""The bodies of the API's replies; the OpenAPI schemas are generated from them.  Pure data."""

from typing import Any

from msgspec import Struct

from ripstop.model.failure import CollectiveProgress
from ripstop.model.status import NodeStatus


class Members(Struct, frozen=True):
    """The job's nodes."""

    members: tuple[NodeStatus, ...]


class RankStatus(Struct, frozen=True):
    """One worker.  `pid` is null if its node did not report it."""

    rank: int
    node: str
    local_rank: int
    pid: int | None
    state: str


class Ranks(Struct, frozen=True):
    """The job's workers, ordered by rank."""

    ranks: tuple[RankStatus, ...]


class RankColumns(Struct, frozen=True):
    """What workers do and use, one entry a worker in each column; null if unknown.

    `step` is the latest step that the worker reported, `step_time` the seconds of a step, `own_time` what a step would
    take if no other worker were slower, `age` the seconds since its last heartbeat.  `memory` (bytes) and `cpu`
    (seconds since its start) include its child processes.
    """

    rank: list[int]
    step: list[int | None]
    step_time: list[float | None]
    own_time: list[float | None]
    age: list[float | None]
    memory: list[int]
    cpu: list[float]


class GpuColumns(Struct, frozen=True):
    """The GPUs of all nodes, one entry a GPU in each column.  `utilisation` is a fraction of 1, `power` in watts."""

    node: list[str]
    index: list[int]
    utilisation: list[float | None]
    memory_used: list[int | None]
    memory_total: list[int | None]
    temperature: list[int | None]
    power: list[float | None]


class Usage(Struct, frozen=True):
    """The workers of the current round and the GPUs.  `missing` are the nodes that did not reply in time."""

    at: float
    round: int
    checkpoint_step: int | None
    checkpoint_at: float | None
    ranks: RankColumns
    gpus: GpuColumns
    missing: list[str]


class HistoryColumns(Struct, frozen=True):
    """The job over time, one entry a point in each column; null if unknown.

    Step times are in seconds.  `memory` is that of the largest worker in bytes, `gpu` the mean utilisation, and
    `gpu_memory` the highest use of one GPU's memory.
    """

    at: list[float]
    step_time_p50: list[float | None]
    step_time_p99: list[float | None]
    goodput: list[float | None]
    memory: list[float | None]
    gpu: list[float | None]
    gpu_memory: list[float | None]


class EventFields(Struct, frozen=True):
    """The fields that every event has; each kind has more."""

    number: int
    v: int
    seq: int
    at: float
    node: str
    kind: str


class EventPage(Struct, frozen=True):
    """Events in order.  `last` is the number to continue from."""

    events: tuple[EventFields, ...]
    last: int
    more: bool


class LogText(Struct, frozen=True):
    """A part of a worker's log.  `next` is the offset to continue from."""

    rank: int
    node: str
    stream: str
    round: int
    offset: int
    next: int
    text: str


class WorkerStack(Struct, frozen=True):
    """One worker's stack.

    `collectives` are its process groups, from torch's flight recorder; `recorder` is the reason if there are none.
    """

    node: str
    rank: int
    pid: int = 0
    stack: str = ""
    wchan: str = ""
    state: str = ""
    source: str = ""
    collectives: tuple[CollectiveProgress, ...] = ()
    recorder: str = ""


class UnansweredNode(Struct, frozen=True):
    """A node that did not report its workers' stacks."""

    node: str
    why: str


class Stacks(Struct, frozen=True):
    """The workers' stacks."""

    stacks: tuple[WorkerStack, ...]
    unanswered: tuple[UnansweredNode, ...]


class FaultReply(Struct, frozen=True):
    """An injected fault: its id in events, its node and its round; or why it was skipped."""

    id: str
    node: str
    round: int
    skipped: str


class Done(Struct, frozen=True):
    """The effect of a command."""

    done: str


class Error(Struct, frozen=True):
    """Why the request was rejected: the rule, the value seen, the remedy."""

    error: str


Description = dict[str, Any]  # OpenAPI
