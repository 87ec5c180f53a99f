"""The types of the job's state machine (`job.py`): its settings, input events and output commands.  Pure data."""

from msgspec import Struct, field

from ripstop.model.config import Budget, QuarantineLimits, StragglerLimits, Timing
from ripstop.model.events import Event
from ripstop.model.failure import JobEnd
from ripstop.model.operator_commands import OperatorCommand
from ripstop.model.round import RankBy
from ripstop.protocol.messages import FromAgent, FromCoordinator


class JobSettings(Struct, frozen=True):
    """The settings of a job that its coordinator needs."""

    run_id: str
    min_nodes: int
    max_nodes: int
    timing: Timing = field(default_factory=Timing)
    budget: Budget = field(default_factory=Budget)
    fixed_ranks: bool = False
    own: str = ""  # the node in the coordinator's process
    rank_by: RankBy = RankBy.JOIN
    quarantine: QuarantineLimits = field(default_factory=QuarantineLimits)
    stragglers: StragglerLimits = field(default_factory=StragglerLimits)
    allow_chaos: bool = False  # operators may inject faults
    target: int | None = None  # nodes that the job uses until an operator scales it; None: as many as possible
    is_elected: bool = False  # another node can become the coordinator; `own` is connected as all others are


class Predecessor(Struct, frozen=True):
    """What a coordinator that succeeds another one knows about it.

    `round` is the newest round of the job.  `node` is the former coordinator's node if it was in that round; `is_lost`:
    its process has ended, or was silent for a lease.
    """

    round: int
    node: str = ""
    is_lost: bool = False


# events ---------------------------------------------------------------------------------------------------------------


class NodeMessage(Struct, frozen=True):
    """A message from an authenticated node."""

    node: str
    message: FromAgent


class NodeDisconnected(Struct, frozen=True):
    """`closed_by_node`: a FIN or RST came from the node, without a Close frame: its agent has probably ended."""

    node: str
    closed_by_node: bool = False


class Tick(Struct, frozen=True):
    """A deadline has passed."""


class Progressed(Struct, frozen=True):
    """A worker of this node reported a step or a checkpoint in this round."""

    node: str
    round: int


class StragglerFound(Struct, frozen=True):
    """The ranks of this round wait for a rank of this node, which a spare should replace."""

    node: str
    round: int
    why: str


JobInput = NodeMessage | NodeDisconnected | Tick | Progressed | StragglerFound | OperatorCommand


# commands -------------------------------------------------------------------------------------------------------------


class Send(Struct, frozen=True):
    node: str
    message: FromCoordinator


class Disconnect(Struct, frozen=True):
    """Close a node's connection, after all messages to it are sent."""

    node: str


class RecordEvent(Struct, frozen=True):
    """Add an event to the journal and the log."""

    event: Event


class JobEnded(Struct, frozen=True):
    """The job is over, and every reachable node has the report."""

    report: JobEnd


JobCommand = Send | Disconnect | RecordEvent | JobEnded
