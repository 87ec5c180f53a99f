"""What a job is at this moment, for people and programs to read.  Pure data."""

from enum import StrEnum

from msgspec import Struct


class Phase(StrEnum):
    """Where the job is."""

    GATHERING = "gathering"  # no live round: one forms as soon as it can
    RECOVERING = "recovering"  # agents tell of a round this coordinator does not know
    RUNNING = "running"
    CLOSING = "closing"  # it has failed; the evidence is coming in
    CLOSED = "closed"


class NodeState(StrEnum):
    """What a node does."""

    RUNNING = "running"  # it has a place in the round
    DONE = "done"  # its workers all exited 0
    READY = "ready"  # for the next round, while there is none
    SPARE = "spare"  # ready, and outside the round
    WARMING = "warming"  # not ready yet
    UNHEALTHY = "unhealthy"
    QUARANTINED = "quarantined"
    LEAVING = "leaving"
    ABSENT = "absent"  # its connection closed, and it may be back in a moment


class NodeStatus(Struct, frozen=True):
    """One node.

    Ranks are -1 outside the round.  `unfit`: why it is not to be counted on, though it may be in the round.  `pids` are
    those of its workers, by local rank; none where they do not run, or have not been told yet.
    """

    name: str
    host: str
    slots: int
    role: str
    state: NodeState
    group_rank: int = -1
    first_rank: int = -1
    unfit: str = ""
    pids: tuple[int, ...] = ()


class JobStatus(Struct, frozen=True):
    """One job.  `seconds` is how long its phase lasts by now, `why` the reason for it; `last_failure` what failed last.

    `restarts` counts all failures and hangs that were ever healed; `charged` are the failures that stand against
    `max_restarts` now.  `goodput` is the share of the job's time that was spent in steps that were kept; None where
    nobody has reported a step, or nobody was asked.
    """

    run_id: str
    phase: Phase
    why: str
    seconds: float
    round: int
    world_size: int
    restarts: int
    max_restarts: int
    min_nodes: int
    max_nodes: int
    target: int
    nodes: tuple[NodeStatus, ...]
    last_failure: str = ""
    charged: int = 0
    goodput: float | None = None
