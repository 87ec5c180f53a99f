"""What the coordinator's machine is told, and what it wants done.  Pure data; `machine.py` decides between the two."""

from ripstop.observe import events as observe
from ripstop.observe.failure import Report
from ripstop.observe.wishes import Wish
from ripstop.rendezvous.messages import FromAgent, FromCoordinator
from ripstop.values import dataclass

# events ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heard:
    """An authenticated node said something."""

    node: str
    message: FromAgent


@dataclass(frozen=True, slots=True)
class Gone:
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


Event = Heard | Gone | Tick | Progressed | Wish


# commands -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Tell a node."""

    node: str
    message: FromCoordinator


@dataclass(frozen=True, slots=True)
class Drop:
    """Close a node's connection, after what was sent to it."""

    node: str


@dataclass(frozen=True, slots=True)
class Record:
    """What operators should know."""

    event: observe.Event


@dataclass(frozen=True, slots=True)
class End:
    """The job is over and everybody who can know it does."""

    report: Report


Command = Send | Drop | Record | End
