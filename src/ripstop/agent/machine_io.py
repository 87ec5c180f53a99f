"""The inputs and commands of the agent's state machine (`machine.py`).  Pure data."""

from msgspec import Struct

from ripstop.agent.health.assessment import HealthProblem
from ripstop.model.failure import Failure, JobEnd
from ripstop.model.round import Place
from ripstop.protocol.messages import FinalCommit, FromAgent, FromCoordinator

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


class WorkersUnkillable(Struct, frozen=True):
    """SIGKILL did not end a worker of this round."""

    round: int
    why: str


class WorkerRegistered(Struct, frozen=True):
    """A worker of this round can go on in place: it has entered its training function (`train.elastic`)."""

    round: int
    local_rank: int


class WorkerReformed(Struct, frozen=True):
    """A worker that goes on in place has left the code of its last round, and enters this one."""

    round: int
    local_rank: int


class WorkerLostPeer(Struct, frozen=True):
    """A worker that can go on in place has lost the connection to another worker of this round."""

    round: int


class WorkerLeft(Struct, frozen=True):
    """A worker cannot go on in place any more.  `has_exited`: with 0, although it was to go on in this round."""

    round: int
    local_rank: int
    has_exited: bool = False


class FirstCommit(Struct, frozen=True):
    """A worker of this round has a `train.State` and makes its first commit."""

    round: int


class FinalCommitDone(Struct, frozen=True):
    """All workers of this round wait after its final commit, or cannot make it."""

    round: int
    commits: tuple[FinalCommit, ...] = ()
    why_not: str = ""


class StateLost(Struct, frozen=True):
    """A worker that went on in place in this round has no commit to restore: only a new process can begin again."""

    round: int
    why: str


class PreemptionNoticed(Struct, frozen=True):
    """A file or URL says that this machine will be preempted."""

    source: str


class SignalReceived(Struct, frozen=True):
    """The agent received a signal that asks it to end."""

    signum: int


class Tick(Struct, frozen=True):
    """A deadline has passed."""


AgentInput = (
    CoordinatorConnected | CoordinatorLost | CoordinatorMessage | WarmupDone | HealthChecked | StorePortReady
    | WorkersFailed | WorkersInspected | WorkersSucceeded | WorkersStopped | WorkersUnkillable | WorkerRegistered
    | WorkerReformed | WorkerLostPeer | WorkerLeft | FirstCommit | FinalCommitDone | StateLost | PreemptionNoticed
    | SignalReceived
    | Tick
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


class ReformWorkers(Struct, frozen=True):
    """The workers with these local ranks go on in place; stop the others that exist, and start new ones instead.

    Report `WorkerReformed` for each that goes on.
    """

    place: Place
    why: str
    kept: tuple[int, ...]
    grace: float


class ReplaceWorkers(Struct, frozen=True):
    """Kill the workers with these local ranks, and start others in their places of this round."""

    round: int
    local_ranks: tuple[int, ...]


class MakeFinalCommit(Struct, frozen=True):
    """Let the workers of this round make one more commit, and wait; then report `FinalCommitDone`."""

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
    report: JobEnd | None = None


AgentCommand = (
    SendToCoordinator | OpenStorePort | StartWorkers | StopWorkers | ReformWorkers | ReplaceWorkers | MakeFinalCommit
    | InspectWorkers | LogLine | ExitAgent
)  # fmt: skip
