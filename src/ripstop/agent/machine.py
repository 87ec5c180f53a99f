"""One node's decisions: what to start, stop, report, and when to give up.  Pure.

`Agent.on(event, now)` changes the state and returns commands; `deadline()` says when it wants a `Tick`.  The driver
(`driver.py`) owns the processes, the link to the coordinator and the clock.  Rules:

1.  At most one group of workers exists, of the round the agent holds.  The next is started when it is gone.
2.  Only a round newer than any heard of is started; a `Hold` ends its round and older ones.  So messages may come
    late, twice or in another order.
3.  Whatever happens is told to the coordinator, not acted on: it decides.  What could not be told is in the next
    `Join`.  An offered port that is unused when the link breaks is replaced: a round that uses it may have been lost
    with the link.
4.  Healthy workers go on while the coordinator is away.  Only an agent that needs it and cannot find it gives up; if
    its workers have all succeeded by then, so has it.
5.  A signal means leaving: tell it, stop the workers with that signal, say good-bye, exit 128 + n.  A second one means
    now.
6.  A node offers nothing to the job before it was found healthy once, and does not wait for that longer than for a
    coordinator.  From then on it tells what is wrong with it: whether it is needed all the same is not its to decide.
"""

from dataclasses import field, replace
from enum import Enum

from ripstop.agent.health import Problem
from ripstop.config import Timing
from ripstop.observe.failure import Failure, Report
from ripstop.observe.report import trim
from ripstop.rendezvous.messages import (
    Assign,
    Closed,
    Closing,
    Depart,
    Failed,
    FromAgent,
    FromCoordinator,
    Hold,
    Inspect,
    Inspected,
    Join,
    Leave,
    Leaving,
    Problems,
    Ready,
    Rejected,
    Status,
    Stopped,
    Succeeded,
)
from ripstop.round import Node, Outcome, Place, RankBy
from ripstop.values import dataclass

SIGTERM = 15
SIGNALS = {1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 10: "SIGUSR1", 12: "SIGUSR2", SIGTERM: "SIGTERM"}
FAREWELL = 5.0  # seconds for a coordinator to tell an end that is known
HUSH = 5.0  # seconds before a wait for the coordinator is worth a word


@dataclass(frozen=True, slots=True)
class Settings:
    """Who this node is, and what the job was started with.  `node.host` may be empty until the link tells it."""

    node: Node
    min_nodes: int
    max_nodes: int
    timing: Timing = field(default_factory=Timing)
    rank_by: RankBy = RankBy.JOIN
    health_interval: float = 30.0


# events ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Linked:
    """The coordinator can be spoken to; `host` is this node's address as seen from there."""

    host: str


@dataclass(frozen=True, slots=True)
class Unlinked:
    """The coordinator cannot be reached; the link keeps trying."""

    why: str


@dataclass(frozen=True, slots=True)
class Got:
    """The coordinator said something."""

    message: FromCoordinator


@dataclass(frozen=True, slots=True)
class Warmed:
    """Workers can be started at once."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What is wrong with this node, if anything."""

    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class Offered:
    """This port listens for a store."""

    port: int


@dataclass(frozen=True, slots=True)
class WorkersFailed:
    """Workers of this round died, could not be started, or hang."""

    round: int
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class WorkersSeen:
    """This is where the workers of this round are."""

    round: int
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class WorkersDone:
    """All workers of this round exited 0."""

    round: int


@dataclass(frozen=True, slots=True)
class WorkersStopped:
    """Nothing is left of this round's workers."""

    round: int


@dataclass(frozen=True, slots=True)
class Signalled:
    """Somebody wants this agent to end."""

    signum: int


@dataclass(frozen=True, slots=True)
class Tick:
    """A deadline has passed."""


Event = (
    Linked | Unlinked | Got | Warmed | Checked | Offered
    | WorkersFailed | WorkersSeen | WorkersDone | WorkersStopped | Signalled | Tick
)  # fmt: skip


# commands -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tell:
    """Say this to the coordinator."""

    message: FromAgent


@dataclass(frozen=True, slots=True)
class OfferStore:
    """Have a new port listen for a round's store, and come back with `Offered`.

    It takes the place of a port that was offered before and is not in use by started workers.
    """


@dataclass(frozen=True, slots=True)
class Start:
    """Start the workers of this place; none are there now.  Group rank 0 serves the store, on the port it offered."""

    place: Place
    why: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the workers, whatever they do, and come back with `WorkersStopped`."""

    round: int
    signum: int
    grace: float
    why: str


@dataclass(frozen=True, slots=True)
class LookAtWorkers:
    """Find out where the workers are, and come back with `WorkersSeen`."""

    round: int


@dataclass(frozen=True, slots=True)
class Say:
    """A line for the node's operator."""

    text: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Quit:
    """The agent is finished."""

    code: int
    why: str = ""
    report: Report | None = None


Command = Tell | OfferStore | Start | Stop | LookAtWorkers | Say | Quit


# state ----------------------------------------------------------------------------------------------------------------


class State(Enum):
    """What the workers of the held round are."""

    IDLE = "idle"
    RUNNING = "running"
    FAILED = "failed"
    SUCCEEDED = "succeeded"
    STOPPING = "stopping"
    OVER = "over"


STATUS = {State.RUNNING: Status.RUNNING, State.FAILED: Status.FAILED, State.SUCCEEDED: Status.SUCCEEDED}


class Agent:
    """The state of one node; see the rules above."""

    def __init__(self, settings: Settings, now: float = 0.0) -> None:
        self.node = settings.node
        self.state = State.IDLE
        self.held: Place | None = None  # of the workers that exist, or existed last
        self._settings = settings
        self._newest = 0  # the highest round heard of
        self._restarts = 0  # the most failures healed, as told with a place
        self._next: tuple[Place, str] | None = None  # to start when the workers are gone
        self._warm = False
        self.admitted = False  # it was found healthy, once at least
        self._problems: tuple[Problem, ...] = ()
        self._unfit: float | None = None  # since when it is not admitted for its problems
        self._ready: Ready | None = None  # the offer that no round uses
        self._offering = False  # it is being made
        self._failures: tuple[Failure, ...] = ()
        self._leaving = 0  # the signal
        self._closing: Closing | None = None  # what was said of the job's end
        self._end: Quit | None = None  # what to do when the workers are gone
        self._linked = False
        self._ever_linked = False
        self._link_trouble = ""  # why the link is down
        self._stuck: float | None = now  # since when it needs a coordinator it cannot reach
        self._announced = False  # that it waits for it

    def on(self, event: Event, now: float) -> list[Command]:
        """Take one event; the commands are to be executed in order."""
        if self.state is State.OVER:
            return []
        out = self._take(event, now)
        needs = not self._linked and self.state is not State.RUNNING
        if not needs:
            self._stuck = None
            self._announced = False
        elif self._stuck is None:
            self._stuck = now
        return out

    def deadline(self) -> float | None:
        """The time of the next `Tick`, if one is needed."""
        if self.state in (State.STOPPING, State.OVER):
            return None
        times = [] if self._unfit is None else [self._unfit + self._settings.timing.join]
        if self._stuck is not None:
            times.append(self._stuck + (self._patience() if self._announced else min(HUSH, self._patience())))
        return min(times, default=None)

    def unready(self) -> str:
        """Why this node can do nothing for its job at the moment; "" while it trains, or could at once."""
        if self._going():
            return "it is leaving, or the job is over"
        if self.state is State.RUNNING:
            return ""
        if not self._warm:
            return "it is warming up"
        if not self._linked:
            return f"it has no coordinator: {self._link_trouble or 'not found yet'}"
        if self.admitted:
            return ""
        problems = "; ".join(problem.words for problem in self._problems)
        return f"it is unhealthy: {problems}" if problems else "its health is being looked at"

    def _patience(self) -> float:
        timing = self._settings.timing
        alone = self.state is State.SUCCEEDED and self.held is not None and self.held.group_size == 1
        if self._closing or alone:
            return FAREWELL  # the end is known; the coordinator is wanted for its report only
        return timing.coordinator if self._ever_linked else timing.join

    def _take(self, event: Event, now: float) -> list[Command]:
        match event:
            case Linked(host):
                return self._link(host)
            case Unlinked(why):
                return self._unlink(why)
            case Got(message):
                return self._hear(message)
            case Warmed():
                self._warm = True
                return self._offer()
            case Checked(problems):
                return self._checked(problems, now)
            case Offered(port):
                self._offering = False
                self._ready = Ready(port, after=self._newest)
                return [] if self._going() else self._tell(self._ready)
            case WorkersFailed(round, failures):
                return self._failed(round, failures)
            case WorkersSeen(round, failures):
                return self._tell(Inspected(round, trim(failures)))
            case WorkersDone(round) if self._holds(round) and self.state is State.RUNNING:
                self.state = State.SUCCEEDED
                return self._tell(Succeeded(round))
            case WorkersStopped(round) if self._holds(round) and self.state is State.STOPPING:
                return self._workers_gone()
            case Signalled(signum):
                return self._signalled(signum)
            case Tick():
                due = self.deadline()
                if due is not None and now >= due:
                    return self._wait_or_give_up(now)
        return []

    # health -----------------------------------------------------------------------------------------------------------

    def _checked(self, problems: tuple[Problem, ...], now: float) -> list[Command]:
        before, self._problems = self._problems, problems
        if not problems:
            self.admitted, self._unfit = True, None
            out = [Say("healthy again"), *self._tell(Problems())] if before else []
            return [*out, *self._offer()]
        if not self.admitted and self._unfit is None:
            self._unfit = now
        if [problem.what for problem in before] == [problem.what for problem in problems]:
            return []
        wait = "" if self.admitted else f"; not ready for the job until that is mended, {self._join_time()} at most"
        return [Say(f"unhealthy: {'; '.join(self._words())}{wait}"), *self._tell(Problems(self._words()))]

    def _words(self) -> tuple[str, ...]:
        return tuple(problem.words for problem in self._problems)

    def _join_time(self) -> str:
        return f"{self._settings.timing.join:g} s"

    # the link ---------------------------------------------------------------------------------------------------------

    def _link(self, host: str) -> list[Command]:
        again = self._ever_linked
        self._linked = self._ever_linked = True
        if not self.node.host:
            self.node = replace(self.node, host=host)
        held, status = self._holding()
        join = Join(
            node=self.node,
            min_nodes=self._settings.min_nodes,
            max_nodes=self._settings.max_nodes,
            rank_by=self._settings.rank_by,
            newest=self._newest,
            restarts=self._restarts,
            ready=None if self._going() else self._ready,
            held=held,
            status=status,
            failures=trim(self._failures) if status is Status.FAILED else (),
            closing=self._closing,
            problems=self._words(),
            health_interval=self._settings.health_interval,
        )
        out: list[Command] = [Tell(join)]
        if self._leaving:
            out.append(Tell(Leaving(name_of(self._leaving))))
        elif self._end:
            out.append(Tell(Leaving(self._end.why)))
        if again:
            out.append(Say("coordinator found again"))
        return out + self._offer()

    def _holding(self) -> tuple[Place | None, Status]:
        """The round that a `Join` speaks of: the one whose workers are here, or are about to be."""
        if self._next:
            return self._next[0], Status.RUNNING
        status = STATUS.get(self.state, Status.IDLE)
        return None if status is Status.IDLE else self.held, status

    def _unlink(self, why: str) -> list[Command]:
        self._link_trouble = why
        if not self._linked:
            return []
        self._linked = False
        self._ready = None  # rule 3
        return [Say(f"coordinator lost: {why}; workers go on, trying to reach it again"), *self._offer()]

    def _offer(self) -> list[Command]:
        promised = self._next is not None and self._next[0].group_rank == 0
        if not (self._warm and self.admitted and self.node.host):
            return []
        if self._ready or self._offering or promised or self._going():
            return []
        self._offering = True
        return [OfferStore()]

    def _going(self) -> bool:
        return bool(self._leaving or self._closing or self._end)

    def _tell(self, message: FromAgent) -> list[Command]:
        return [Tell(message)] if self._linked else []  # rule 3: the next Join says it

    def _wait_or_give_up(self, now: float) -> list[Command]:
        if self._unfit is not None and now >= self._unfit + self._settings.timing.join:
            return self._quit(Quit(1, f"unhealthy for {self._join_time()}: {'; '.join(self._words())}"))
        assert self._stuck is not None, "only who is stuck has a deadline"
        if now < self._stuck + self._patience():
            self._announced = True
            return [Say(f"waiting for the coordinator, {self._patience():g} s at most ({self._link_trouble})")]
        waited = f"{self._patience():g} s"
        if self._closing:
            return self._quit(Quit(1, self._closing.why))
        if self.state is State.SUCCEEDED:
            return self._quit(Quit(0, f"all workers of this node exited 0, and no coordinator asked for {waited}"))
        if self._ever_linked:
            why = f"no coordinator for {waited} while one was needed ({self._link_trouble}); raise coordinator_timeout"
        else:
            why = f"no coordinator for {waited} ({self._link_trouble}); is its node up, and the job not over?"
        return self._quit(Quit(1, why))

    # the coordinator's word -------------------------------------------------------------------------------------------

    def _hear(self, message: FromCoordinator) -> list[Command]:
        match message:
            case Assign(place, why):
                return self._assigned(place, why)
            case Hold(round, why):
                return self._hold(round, why)
            case Depart(why):
                return self._depart(why)
            case Inspect(round):
                here = self._holds(round) and self.state in (State.RUNNING, State.FAILED)
                return [LookAtWorkers(round)] if here else self._tell(Inspected(round))
            case Closing(why):
                self._closing = message
                self._next = None
                return self._workers_gone() if self.state is State.IDLE else self._stop(why)
            case Closed(report):
                return self._closed(report)
            case Rejected(why):
                return self._quit(Quit(2, why))
            case _:
                return []

    def _assigned(self, place: Place, why: str) -> list[Command]:
        host = place.group_rank == 0
        offered = self._ready is not None and self._ready.store_port == place.store.port
        if host and offered:
            self._ready = None  # it is that round's now, whether the round is started here or not
        if place.round <= self._newest or self._closing or self._going():
            return self._offer()  # rule 2
        if host and not offered:
            return []  # decided before the coordinator had read the `Join` of this connection, which will tell it
        self._newest, self._restarts = place.round, max(self._restarts, place.restarts)
        if self.state is State.IDLE:
            return self._start(place, why)
        self._next = (place, why)
        return [*self._stop(why), *self._offer()]

    def _hold(self, round: int, why: str) -> list[Command]:
        if round < self._newest:
            return []  # rule 2
        self._newest = round
        self._next = None
        return [Say(why), *self._stop(why), *self._offer()]

    # workers ----------------------------------------------------------------------------------------------------------

    def _start(self, place: Place, why: str) -> list[Command]:
        self.state = State.RUNNING
        self.held = place
        self._failures = ()
        return [Start(place, why), *self._offer()]

    def _failed(self, round: int, failures: tuple[Failure, ...]) -> list[Command]:
        if not self._holds(round):
            return []
        self._failures += failures
        if self.state in (State.RUNNING, State.FAILED):
            self.state = State.FAILED
            return self._tell(Failed(round, trim(failures)))
        return []  # stopping: it goes with `Stopped`

    def _stop(self, why: str, signum: int = SIGTERM) -> list[Command]:
        """Stop the workers, if there are any that are not being stopped."""
        if self.state in (State.IDLE, State.STOPPING) or self.held is None:
            return []
        self.state = State.STOPPING
        return [Stop(self.held.round, signum, self._settings.timing.shutdown, why)]

    def _workers_gone(self) -> list[Command]:
        self.state = State.IDLE
        if self._end:
            return self._quit(self._end)
        if self._leaving:
            return self._quit(Quit(128 + self._leaving, name_of(self._leaving)))
        if self._closing:
            return self._tell(Stopped(trim(self._failures)))
        if self._next:
            place, why = self._next
            self._next = None
            return self._start(place, why)
        return []

    def _holds(self, round: int) -> bool:
        return self.held is not None and self.held.round == round

    # the end ----------------------------------------------------------------------------------------------------------

    def _signalled(self, signum: int) -> list[Command]:
        if self._leaving:
            if self.state is not State.STOPPING or self.held is None:
                return []
            return [Say("second signal: killing the workers"), Stop(self.held.round, signum, 0.0, "second signal")]
        self._leaving = signum
        self._next = None
        why = name_of(signum)
        out = self._tell(Leaving(why))
        if self.state is State.IDLE:
            return [*out, *self._quit(Quit(128 + signum, why))]
        return [*out, Say(f"{why}: stopping the workers and leaving"), *self._stop(why, signum)]

    def _depart(self, why: str) -> list[Command]:
        """An operator sends this node away, which is no failure of it."""
        if self._going():
            return []
        return [*self._tell(Leaving(why)), Say(f"{why}: leaving"), *self._quit(Quit(0, why))]

    def _closed(self, report: Report) -> list[Command]:
        if report.outcome is not Outcome.SUCCEEDED:
            return self._quit(Quit(1, report.why, report))
        end = self._quit(Quit(0, report.why, report))
        if self.held is not None:
            return end
        why = (
            f"job={report.run_id} had ended ({report.why}) before this node had a place in it: this node ran no worker"
        )
        return [Say(why, warning=True), *end]

    def _quit(self, end: Quit) -> list[Command]:
        """Go, after the workers."""
        self._end = Quit(128 + self._leaving, end.why, end.report) if self._leaving and end.code else end
        self._next = None
        if self.state is not State.IDLE:
            return self._stop(end.why)
        self.state = State.OVER
        return [*self._tell(Leave(self._end.why or f"exit {self._end.code}")), self._end]


def name_of(signum: int) -> str:
    """A signal as people write it."""
    return SIGNALS.get(signum, f"signal {signum}")
