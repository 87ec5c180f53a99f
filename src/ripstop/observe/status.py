"""What a job is at this moment, for people and programs to read.  Pure data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node.  `state`: running, done, spare, warming, unhealthy, quarantined, leaving or absent.

    Ranks are -1 outside the round.  `trouble`: why it is not to be counted on, though it may be in the round.
    """

    name: str
    host: str
    slots: int
    role: str
    state: str
    group_rank: int = -1
    first_rank: int = -1
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One job.  `phase` is the coordinator's, `seconds` how long it lasts by now, `why` the reason for it."""

    run_id: str
    phase: str
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
