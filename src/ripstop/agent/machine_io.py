"""The settings, inputs and commands of the agent's state machine (`machine.py`).  Pure data."""

from enum import Enum

from msgspec import Struct, field

from ripstop.agent.health.assessment import HealthProblem
from ripstop.model.config import Timing
from ripstop.model.failure import Failure, JobReport
from ripstop.model.round import Node, Place, RankBy
from ripstop.protocol.messages import FromAgent, FromCoordinator, LastCommit, Status

SIGTERM = 15
SIGNAL_NAMES = {1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 10: "SIGUSR1", 12: "SIGUSR2", SIGTERM: "SIGTERM"}
TERMINAL_SIGNALS = (2, 3)  # SIGINT, SIGQUIT: a person waits


class AgentSettings(Struct, frozen=True):
    """This node and the job's settings.  `node.host` may be empty until the link finds this node's address."""

    node: Node
    min_nodes: int
    max_nodes: int
    timing: Timing = field(default_factory=Timing)
    rank_by: RankBy = RankBy.JOIN
    health_interval: float = 30.0
    drain_timeout: float = 20.0  # for a last commit, before this node leaves; 0: it leaves at once
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


def signal_name(signum: int) -> str:
    return SIGNAL_NAMES.get(signum, f"signal {signum}")


# inputs ---------------------------------------------------------------------------------------------------------------


class CoordinatorConnected(Struct, frozen=True):
    """The coordinator can be reached; `host` is the address from which this node reaches it."""

    host: str


class CoordinatorLost(Struct, frozen=True):
    """The coordinator cannot be reached; the link keeps trying."""

    why: str


class CoordinatorMessage(Struct, frozen=True):
    """The coordinator sent this message."""

    message: FromCoordinator


class WarmupDone(Struct, frozen=True):
    """Workers can be started without delay."""


class HealthChecked(Struct, frozen=True):
    """The problems that a health check found; empty for a healthy node."""

    problems: tuple[HealthProblem, ...]


class StorePortReady(Struct, frozen=True):
    """This port listens for a store, and the other takes copies of training state (0: none)."""

    port: int
    replica_port: int = 0


class WorkersFailed(Struct, frozen=True):
    """Workers of this round exited, could not be started, or hang."""

    round: int
    failures: tuple[Failure, ...]


class WorkersInspected(Struct, frozen=True):
    """The stacks of the workers of this round."""

    round: int
    failures: tuple[Failure, ...]


class WorkersSucceeded(Struct, frozen=True):
    """All workers of this round exited 0."""

    round: int


class WorkersStopped(Struct, frozen=True):
    """No process of this round's workers is left."""

    round: int


class FirstCommit(Struct, frozen=True):
    """A worker of this round has a `train.State` and makes its first commit."""

    round: int


class LastCommitDone(Struct, frozen=True):
    """All workers of this round wait after its last commit, or cannot make it."""

    round: int
    commits: tuple[LastCommit, ...] = ()
    why_not: str = ""


class PreemptionNoticed(Struct, frozen=True):
    """This machine will be taken away, says this file or URL."""

    source: str


class SignalReceived(Struct, frozen=True):
    """The agent received a signal that asks it to end."""

    signum: int


class Tick(Struct, frozen=True):
    """A deadline has passed."""


AgentInput = (
    CoordinatorConnected | CoordinatorLost | CoordinatorMessage | WarmupDone | HealthChecked | StorePortReady
    | WorkersFailed | WorkersInspected | WorkersSucceeded | WorkersStopped | FirstCommit | LastCommitDone
    | PreemptionNoticed | SignalReceived | Tick
)  # fmt: skip


# commands -------------------------------------------------------------------------------------------------------------


class SendToCoordinator(Struct, frozen=True):
    """Send this message to the coordinator."""

    message: FromAgent


class OpenStorePort(Struct, frozen=True):
    """Listen on a port for the store of a later round, then report `StorePortReady`.

    Port 0 is any free port.  A port opened before that no started workers use is closed first.  If the port cannot be
    opened and `is_required`, the agent ends with that error; otherwise the driver retries.
    """

    port: int = 0
    is_required: bool = False


class StartWorkers(Struct, frozen=True):
    """Start the workers of this place; none exist now.  Group rank 0 serves the store on the port it offered."""

    place: Place
    why: str


class StopWorkers(Struct, frozen=True):
    """Stop the workers of this round in any state, then report `WorkersStopped`."""

    round: int
    signum: int
    grace: float
    why: str


class MakeLastCommit(Struct, frozen=True):
    """Let the workers of this round make one more commit, and wait; then report `LastCommitDone`."""

    round: int


class InspectWorkers(Struct, frozen=True):
    """Read the workers' stacks, then report `WorkersInspected`."""

    round: int


class LogLine(Struct, frozen=True):
    """Log a line for the node's operator."""

    text: str
    is_warning: bool = False


class ExitAgent(Struct, frozen=True):
    """End the agent with this exit code."""

    code: int
    why: str = ""
    report: JobReport | None = None


AgentCommand = (
    SendToCoordinator | OpenStorePort | StartWorkers | StopWorkers | MakeLastCommit | InspectWorkers | LogLine
    | ExitAgent
)  # fmt: skip
