"""What the coordinator's machine is told, and what it wants done.  Pure data; `machine.py` decides between the two."""

from ripstop.model import events as observe
from ripstop.model.failure import JobReport
from ripstop.model.operator_commands import OperatorCommand
from ripstop.model.values import dataclass
from ripstop.protocol.messages import FromAgent, FromCoordinator

# events ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeMessage:
    """An authenticated node said something."""

    node: str
    message: FromAgent


@dataclass(frozen=True, slots=True)
class NodeDisconnected:
    """A node's connection closed."""

    node: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A deadline has passed."""


@dataclass(frozen=True, slots=True)
class Progressed:
    """A worker of this node has reported a step or a checkpoint of this round."""

    node: str
    round: int


JobInput = NodeMessage | NodeDisconnected | Tick | Progressed | OperatorCommand


# commands -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Tell a node."""

    node: str
    message: FromCoordinator


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close a node's connection, after what was sent to it."""

    node: str


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """What operators should know."""

    event: observe.Event


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job is over and everybody who can know it does."""

    report: JobReport


JobCommand = Send | Disconnect | RecordEvent | JobEnded
