"""The events that the coordinator records; `events.py` has the agents' events and the rules.  Pure."""

from ripstop.model.event_base import EventBase
from ripstop.model.field_types import Int64


class JobStarted(EventBase, frozen=True):
    """A coordinator began to lead the job.  `version` is its version of ripstop.

    `coordinator_node` is the node that runs the coordinator; it is empty for a separate process.  If the coordinator is
    elected (`is_elected`), the job does not depend on this node.
    """

    run_id: str
    version: str
    coordinator_node: str
    min_nodes: Int64
    max_nodes: Int64
    max_restarts: Int64
    is_elected: bool = False


class NodeJoined(EventBase, frozen=True):
    """A node with `slots` workers (`--nproc-per-node`) joined the job.  It may not be ready yet."""

    name: str
    host: str
    slots: Int64


class NodeRejected(EventBase, frozen=True):
    """The coordinator rejected a node."""

    name: str
    why: str


class NodeLeaving(EventBase, frozen=True):
    """A node stops its workers and leaves the job."""

    name: str
    why: str


class NodeGone(EventBase, frozen=True):
    """A node is no longer part of the job.  `lost` is true if the node was lost, and false if it left."""

    name: str
    why: str
    lost: bool


class NodeUnhealthy(EventBase, frozen=True):
    """A node became unhealthy."""

    name: str
    problems: tuple[str, ...]


class NodeHealthy(EventBase, frozen=True):
    """A node is healthy again."""

    name: str


class NodeQuarantined(EventBase, frozen=True):
    """A node failed too often, or was replaced as a straggler, and is in quarantine for `seconds`."""

    name: str
    why: str
    seconds: float


class NodeReleased(EventBase, frozen=True):
    """A node's quarantine is over."""

    name: str


class UnhealthyNodeRetained(EventBase, frozen=True):
    """An unhealthy or quarantined node keeps its place in the round."""

    name: str
    why: str


class RoundFormed(EventBase, frozen=True):
    """A new round starts.  `nodes` are in the order of group ranks; `store` is the address of the round's store."""

    round: Int64
    nodes: tuple[str, ...]
    world_size: Int64
    store: str
    restarts: Int64
    why: str


class RankRequestDenied(EventBase, frozen=True):
    """A node did not get the group rank that it requested (`--node-rank`)."""

    round: Int64
    name: str
    requested_rank: Int64
    rank: Int64
    why: str


class RoundFound(EventBase, frozen=True):
    """A new coordinator found a running round of this many nodes, and waits a limited time for them to rejoin."""

    round: Int64
    nodes: Int64


class RoundResumed(EventBase, frozen=True):
    """A new coordinator found a running round, and all its nodes have rejoined.  Training was not interrupted."""

    round: Int64
    nodes: Int64


class RoundEnded(EventBase, frozen=True):
    """A round is over.  The next round starts after at least `delay` seconds."""

    round: Int64
    cause: str
    why: str
    delay: float


class BudgetCharged(EventBase, frozen=True):
    """A failure was charged to `--max-restarts`, or a hang to `--max-infra-restarts`.

    `used` of `limit` restarts are used now.  If `allowed` is false, no restart was left, and the job fails.
    """

    round: Int64
    cause: str
    used: Int64
    limit: Int64
    allowed: bool
    why: str


class HangDiagnosed(EventBase, frozen=True):
    """A round hangs, and its nodes were inspected.  `suspects` are the ranks that probably caused the hang."""

    round: Int64
    suspects: tuple[Int64, ...]
    why: str


class StragglerDetected(EventBase, frozen=True):
    """The other ranks wait for these ranks of a node; `seconds` is how long they have waited.

    A step takes `step_time` seconds.  It would take `median` seconds if these ranks were as fast as the median rank.
    """

    round: Int64
    name: str
    ranks: tuple[Int64, ...]
    step_time: float
    median: float
    seconds: float
    why: str


class StragglerEnded(EventBase, frozen=True):
    """The other ranks do not wait for these ranks any more, or their round has ended.

    `seconds` is the time since `straggler_detected`.
    """

    round: Int64
    name: str
    ranks: tuple[Int64, ...]
    seconds: float
    why: str


class BudgetRefunded(EventBase, frozen=True):
    """The coordinator takes the last charge back, because the loss of this node caused the failure."""

    round: Int64
    name: str


class ScaleRequested(EventBase, frozen=True):
    """An operator requested this number of nodes."""

    nodes: Int64
    accepted: bool
    why: str


class JobClosing(EventBase, frozen=True):
    """The job has failed or an operator stopped it.  Agents stop their workers and send evidence.

    A job that succeeds closes without this event.
    """

    outcome: str
    why: str


class JobClosed(EventBase, frozen=True):
    """The job is over."""

    outcome: str
    why: str
    rounds: Int64
    restarts: Int64


class StateReplicated(EventBase, frozen=True):
    """Every node of the round has copied its part of a commit to another node.

    `state` is the name of the `train.State`, and `commit` is the number of the commit.  The event is recorded for the
    first such commit of a round.
    """

    round: Int64
    state: str
    commit: Int64
    bytes: Int64


class OperatorAction(EventBase, frozen=True):
    """An operator sent a command.  `by` is the operator, and `result` is the reply."""

    action: str
    by: str
    result: str
