"""What agents and the coordinator say to each other.

Every message is a frozen dataclass; `codec.py` turns it into JSON and back.  Nothing here is a decision.

Handshake, the coordinator first:  Challenge → Hello → Welcome | Rejected.  Then the agent joins, and both talk freely.
What an agent says of a round carries the round's number.  A `Join` tells the agent's whole state, so that a message
lost with a connection is never missed and a coordinator that knows nothing can learn the job from its agents.
"""

from enum import StrEnum
from typing import get_args

from msgspec import Struct

from ripstop.model.failure import Failure, JobReport
from ripstop.model.round import Node, Outcome, Place, RankBy

VERSION = 1


# the handshake ------------------------------------------------------------------------------------------------------


class Challenge(Struct, frozen=True):
    """Coordinator: prove that you know the job's secret."""

    nonce: str


class Hello(Struct, frozen=True):
    """Agent: the proof, who I am, and a challenge in return."""

    run_id: str
    node: str
    nonce: str
    proof: str


class Welcome(Struct, frozen=True):
    """Coordinator: I know the secret too; a peer silent for `lease` seconds is lost; my clock says `time`."""

    proof: str
    lease: float
    time: float


class Rejected(Struct, frozen=True):
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


class Ready(Struct, frozen=True):
    """My workers can start at once, and this port listens for the store of a round after this one.

    `after` is the highest round I had heard of; an offer is good for the connection over which it was made.
    """

    store_port: int
    after: int


class Join(Struct, frozen=True):
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


class Problems(Struct, frozen=True):
    """Why I should not be counted on, as I have just found; nothing: I can be."""

    problems: tuple[str, ...] = ()


class Failed(Struct, frozen=True):
    """A worker of mine died in this round."""

    round: int
    failures: tuple[Failure, ...]


class Inspected(Struct, frozen=True):
    """Where my workers of this round are, as `Inspect` asked; none when I have none."""

    round: int
    failures: tuple[Failure, ...] = ()


class Succeeded(Struct, frozen=True):
    """All my workers of this round exited 0."""

    round: int


class Leaving(Struct, frozen=True):
    """I was told to stop; my workers are being stopped.  Do not count on me for another round."""

    why: str


class Stopped(Struct, frozen=True):
    """My workers are gone, as `Closing` asked; this is how they died."""

    failures: tuple[Failure, ...] = ()


class Left(Struct, frozen=True):
    """My last word."""

    why: str


class Events(Struct, frozen=True):
    """What happened here, as lines of JSON (`model/events.py`); lines that were told before may be among them."""

    lines: tuple[str, ...]


class Reply(Struct, frozen=True):
    """What was asked for, as JSON; or why it cannot be had."""

    number: int
    body: str = ""
    error: str = ""


class Heartbeat(Struct, frozen=True):
    """I am alive; both sides say it."""


# coordinator → agent ------------------------------------------------------------------------------------------------


class Assign(Struct, frozen=True):
    """This round is committed and this is your place in it; stop whatever you run of an older one."""

    place: Place
    why: str


class StandBy(Struct, frozen=True):
    """There is no round for you now: stop what you run of this round or an older one, and wait."""

    round: int
    why: str


class Drain(Struct, frozen=True):
    """An operator wants you to leave the job: stop your workers and go."""

    why: str


class Inspect(Struct, frozen=True):
    """This round hangs on another node: tell where your workers are, before they are stopped."""

    round: int


class Query(Struct, frozen=True):
    """An operator wants to know something of you; answer under this number.  It changes nothing."""

    number: int
    question: str
    argument: str = ""


class Closing(Struct, frozen=True):
    """The job has failed or is to end: stop your workers and tell how they died."""

    why: str
    outcome: Outcome = Outcome.FAILED


class Closed(Struct, frozen=True):
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
