"""What agents and the coordinator say to each other.

Every message is a frozen dataclass; `codec.py` turns it into JSON and back.  Nothing here is a decision.

Handshake, the coordinator first:  Challenge → Hello → Welcome | Rejected.  Then the agent joins, and both talk freely.
What an agent says of a round carries the round's number.  A `Join` tells the agent's whole state, so that a message
lost with a connection is never missed and a coordinator that knows nothing can learn the job from its agents.
"""

from enum import StrEnum
from typing import get_args

from ripstop.model.failure import Failure, JobReport
from ripstop.model.round import Node, Outcome, Place, RankBy
from ripstop.model.values import dataclass

VERSION = 1


# the handshake ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Challenge:
    """Coordinator: prove that you know the job's secret."""

    nonce: str


@dataclass(frozen=True, slots=True)
class Hello:
    """Agent: the proof, who I am, and a challenge in return."""

    run_id: str
    node: str
    nonce: str
    proof: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """Coordinator: I know the secret too; a peer silent for `lease` seconds is lost; my clock says `time`."""

    proof: str
    lease: float
    time: float


@dataclass(frozen=True, slots=True)
class Rejected:
    """Coordinator: not you, and why; `final` means that trying again will not help."""

    why: str
    final: bool = True


# agent → coordinator ------------------------------------------------------------------------------------------------


class Status(StrEnum):
    """What an agent's workers are doing in the round it holds."""

    IDLE = "idle"
    RUNNING = "running"
    FAILED = "failed"
    SUCCEEDED = "succeeded"


@dataclass(frozen=True, slots=True)
class Ready:
    """My workers can start at once, and this port listens for the store of a round after this one.

    `after` is the highest round I had heard of; an offer is good for the connection over which it was made.
    """

    store_port: int
    after: int


@dataclass(frozen=True, slots=True)
class Join:
    """I want to be part of the job, or still am: this is all I know.  The first word over a connection, and only that.

    `min_nodes`, `max_nodes` and `rank_by` are what the job was started with here; it must be the same everywhere.
    `newest` is the highest round I ever heard of and `restarts` the most failures healed; `held` is the round whose
    workers I have, or will start when older ones are gone; `closing` is what I was told of the job's end, by a
    coordinator that may be gone now; `problems` are why I should not be counted on, and `health_interval` how many
    seconds I let pass between two looks for them.
    """

    node: Node
    min_nodes: int
    max_nodes: int
    rank_by: RankBy = RankBy.JOIN
    newest: int = 0
    restarts: int = 0
    ready: Ready | None = None
    held: Place | None = None
    status: Status = Status.IDLE
    failures: tuple[Failure, ...] = ()
    closing: "Closing | None" = None
    problems: tuple[str, ...] = ()
    health_interval: float = 30.0


@dataclass(frozen=True, slots=True)
class Problems:
    """Why I should not be counted on, as I have just found; nothing: I can be."""

    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker of mine died in this round."""

    round: int
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class Inspected:
    """Where my workers of this round are, as `Inspect` asked; none when I have none."""

    round: int
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class Succeeded:
    """All my workers of this round exited 0."""

    round: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """I was told to stop; my workers are being stopped.  Do not count on me for another round."""

    why: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """My workers are gone, as `Closing` asked; this is how they died."""

    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class Left:
    """My last word."""

    why: str


@dataclass(frozen=True, slots=True)
class Events:
    """What happened here, as lines of JSON (`model/events.py`); lines that were told before may be among them."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """What was asked for, as JSON; or why it cannot be had."""

    number: int
    body: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """I am alive; both sides say it."""


# coordinator → agent ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assign:
    """This round is committed and this is your place in it; stop whatever you run of an older one."""

    place: Place
    why: str


@dataclass(frozen=True, slots=True)
class StandBy:
    """There is no round for you now: stop what you run of this round or an older one, and wait."""

    round: int
    why: str


@dataclass(frozen=True, slots=True)
class Drain:
    """An operator wants you to leave the job: stop your workers and go."""

    why: str


@dataclass(frozen=True, slots=True)
class Inspect:
    """This round hangs on another node: tell where your workers are, before they are stopped."""

    round: int


@dataclass(frozen=True, slots=True)
class Query:
    """An operator wants to know something of you; answer under this number.  It changes nothing."""

    number: int
    question: str
    argument: str = ""


@dataclass(frozen=True, slots=True)
class Closing:
    """The job has failed or is to end: stop your workers and tell how they died."""

    why: str
    outcome: Outcome = Outcome.FAILED


@dataclass(frozen=True, slots=True)
class Closed:
    """The job is over."""

    report: JobReport


Handshake = Challenge | Hello | Welcome | Rejected
FromAgent = (
    Join | Ready | Problems | Failed | Inspected | Succeeded | Leaving | Stopped | Left | Events | Reply | Heartbeat
)
FromCoordinator = Assign | StandBy | Drain | Inspect | Query | Closing | Closed | Rejected | Heartbeat
Message = Handshake | FromAgent | FromCoordinator

FROM_AGENT: tuple[type[FromAgent], ...] = get_args(FromAgent)
FROM_COORDINATOR: tuple[type[FromCoordinator], ...] = get_args(FromCoordinator)
