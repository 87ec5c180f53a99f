"""The input events and the output commands of the job's state machine (`job.py`).  Pure data."""

from msgspec import Struct

from ripstop.model.events import Event
from ripstop.model.failure import JobReport
from ripstop.model.operator_commands import OperatorCommand
from ripstop.protocol.messages import FromAgent, FromCoordinator

# events ---------------------------------------------------------------------------------------------------------------


class NodeMessage(Struct, frozen=True):
    """A message from an authenticated node."""

    node: str
    message: FromAgent


class NodeDisconnected(Struct, frozen=True):
    """A node's connection closed."""

    node: str


class Tick(Struct, frozen=True):
    """A deadline has passed."""


class Progressed(Struct, frozen=True):
    """A worker of this node reported a step or a checkpoint in this round."""

    node: str
    round: int


JobInput = NodeMessage | NodeDisconnected | Tick | Progressed | OperatorCommand


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

    report: JobReport


JobCommand = Send | Disconnect | RecordEvent | JobEnded
