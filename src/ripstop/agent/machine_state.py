"""The settings and the states of the agent's state machine (`machine.py`).  Pure data."""

from enum import Enum

from msgspec import Struct, field

from ripstop.model.config import DRAIN_TIMEOUT_S, Timing
from ripstop.model.round import Node, RankBy
from ripstop.protocol.messages import Status

SIGTERM = 15
TERMINAL_SIGNALS = (2, 3)  # SIGINT, SIGQUIT: a person waits


class AgentSettings(Struct, frozen=True):
    """This node and the job's settings.  `node.host` may be empty until the link finds this node's address."""

    node: Node
    min_nodes: int
    max_nodes: int
    timing: Timing = field(default_factory=Timing)
    rank_by: RankBy = RankBy.JOIN
    health_interval: float = 30.0
    drain_timeout: float = DRAIN_TIMEOUT_S  # for a final commit, before this node leaves; 0: it leaves at once
    has_checkpoints: bool = False  # commits are written to disk too
    store_port: int = 0  # the port that the user fixed for the store; 0: a new free port for every round


class WorkersState(Enum):
    """The state of this node's workers."""

    IDLE = "idle"
    RUNNING = "running"
    FAILED = "failed"
    SUCCEEDED = "succeeded"
    STOPPING = "stopping"
    OVER = "over"


REPORTED_STATUS = {
    WorkersState.RUNNING: Status.RUNNING,
    WorkersState.FAILED: Status.FAILED,
    WorkersState.SUCCEEDED: Status.SUCCEEDED,
}
