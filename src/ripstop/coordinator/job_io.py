"""What the coordinator's machine is told, and what it wants done.  Pure data; `machine.py` decides between the two."""

from msgspec import Struct

from ripstop.model import events as observe
from ripstop.model.failure import JobReport
from ripstop.model.operator_commands import OperatorCommand
from ripstop.protocol.messages import FromAgent, FromCoordinator

# events ---------------------------------------------------------------------------------------------------------------


class NodeMessage(Struct, frozen=True):
    """An authenticated node said something."""

    node: str
    message: FromAgent


class NodeDisconnected(Struct, frozen=True):
    """A node's connection closed."""

    node: str


class Tick(Struct, frozen=True):
    """A deadline has passed."""


class Progressed(Struct, frozen=True):
    """A worker of this node has reported a step or a checkpoint of this round."""

    node: str
    round: int


JobInput = NodeMessage | NodeDisconnected | Tick | Progressed | OperatorCommand


# commands -------------------------------------------------------------------------------------------------------------


class Send(Struct, frozen=True):
    """Tell a node."""

    node: str
    message: FromCoordinator


class Disconnect(Struct, frozen=True):
    """Close a node's connection, after what was sent to it."""

    node: str


class RecordEvent(Struct, frozen=True):
    """What operators should know."""

    event: observe.Event


class JobEnded(Struct, frozen=True):
    """The job is over and everybody who can know it does."""

    report: JobReport


JobCommand = Send | Disconnect | RecordEvent | JobEnded
