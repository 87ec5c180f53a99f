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

    `standings` are its process groups, from torch's flight recorder; `recorder` is the reason if there are none.
    """

    node: str
    rank: int
    pid: int = 0
    stack: str = ""
    wchan: str = ""
    state: str = ""
    source: str = ""
    standings: tuple[CollectiveProgress, ...] = ()
    recorder: str = ""


class UnansweredNode(Struct, frozen=True):
    """A node that did not report its workers' stacks."""

    node: str
    why: str


class Stacks(Struct, frozen=True):
    """The workers' stacks."""

    stacks: tuple[WorkerStack, ...]
    unanswered: tuple[UnansweredNode, ...]


class Done(Struct, frozen=True):
    """The effect of a command."""

    done: str


class Error(Struct, frozen=True):
    """Why the request was rejected: the rule, the value seen, the remedy."""

    error: str


Description = dict[str, Any]  # OpenAPI
