"""The status of a job, for operators and programs.  Pure data."""

from enum import StrEnum

from msgspec import Struct

from ripstop.model.usage import StandbySample


class Phase(StrEnum):
    """Phase of a job."""

    GATHERING = "gathering"  # no live round; one is formed as soon as possible
    RECOVERING = "recovering"  # a new coordinator waits for the nodes of a round that it found
    RUNNING = "running"
    CLOSING = "closing"  # it has failed or is ending; agents stop their workers and send evidence
    CLOSED = "closed"


class NodeState(StrEnum):
    """State of a node."""

    RUNNING = "running"  # it has a place in the round
    DONE = "done"  # its workers all exited 0
    READY = "ready"  # ready for the next round, while there is none
    SPARE = "spare"  # ready, but not in the round
    WARMING = "warming"  # not ready yet
    UNHEALTHY = "unhealthy"
    QUARANTINED = "quarantined"
    LEAVING = "leaving"
    ABSENT = "absent"  # its connection is closed; it may reconnect


class NodeStatus(Struct, frozen=True):
    """One node.

    Ranks are -1 outside the round.  `unfit` is why the node is unhealthy or quarantined; it may still be in the round.
    `pids` are its workers by local rank; empty if none run, or the agent has not reported them yet.  `standbys` are no
    workers: they wait, warmed up, to become those of the next round.
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
    standbys: tuple[StandbySample, ...] = ()


class ReplicationStatus(Struct, frozen=True):
    """The copies of one `train.State` on other nodes: their commit, and how far it is behind.

    `commits` and `seconds` are None while the current round has no complete set.  `bytes` counts what was copied.
    """

    state: str
    round: int
    number: int
    commits: int | None
    seconds: float | None
    bytes: int


class StragglerStatus(Struct, frozen=True):
    """Ranks of one node that the others wait for, since `seconds`.

    A step takes `step_time`, and would take `median` if these ranks were like the median one.  `evidence` is what the
    node's hardware and kernel say.
    """

    node: str
    ranks: tuple[int, ...]
    step_time: float
    median: float
    seconds: float
    evidence: str


class JobStatus(Struct, frozen=True):
    """One job.  `seconds` is the duration of its phase so far, `why` the reason for it.

    `restarts` counts all restarts after failures and hangs; `charged` counts the failures in the budget's window, of
    which `max_restarts` are allowed.  `goodput` is the fraction of the job's time spent in steps that were kept; None
    if no worker has reported a step, or no agent was queried.  `commit_age` is the time since the last commit of
    `train.State`, `restored_from` where this round's ranks found theirs: "memory", "peer" or "disk".  `kept` is the
    number of workers that went on in place in the last recovery; None if there was none.
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
    replication: tuple[ReplicationStatus, ...] = ()
    commit_age: float | None = None
    restored_from: tuple[str, ...] = ()
    stragglers: tuple[StragglerStatus, ...] = ()
    kept: int | None = None

    @property
    def nodes_in_round(self) -> list[NodeStatus]:
        return [node for node in self.nodes if node.first_rank >= 0]

    def has_node(self, name: str) -> bool:
        return any(node.name == name for node in self.nodes)
