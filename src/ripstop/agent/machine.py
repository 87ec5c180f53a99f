"""One node's decisions: what to start, stop, report, and when to give up.  Pure.

`Agent.on(event, now)` changes the state and returns commands; `deadline()` says when it wants a `Tick`.  The driver
(`driver.py`) owns the processes, the link to the coordinator and the clock.  Rules:

1.  At most one group of workers exists, of the round the agent holds.  The next is started when it is gone.
2.  Only a round newer than any heard of is started; a `StandBy` ends its round and older ones.  So messages may come
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

from enum import Enum

from msgspec import Struct, field
from msgspec.structs import replace

from ripstop.agent.health.assessment import HealthProblem
from ripstop.diagnostics.failure_report import trim
from ripstop.model.config import Timing
from ripstop.model.failure import Failure, JobReport
from ripstop.model.round import Node, Outcome, Place, RankBy
from ripstop.protocol.messages import (
    Assign,
    Closed,
    Closing,
    Drain,
    Failed,
    FromAgent,
    FromCoordinator,
    Inspect,
    Inspected,
    Join,
    Leaving,
    Left,
    Problems,
    Ready,
    Rejected,
    StandBy,
    Status,
    Stopped,
    Succeeded,
)

SIGTERM = 15
SIGNALS = {1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 10: "SIGUSR1", 12: "SIGUSR2", SIGTERM: "SIGTERM"}
FAREWELL = 5.0  # seconds for a coordinator to tell an end that is known
HUSH = 5.0  # seconds before a wait for the coordinator is worth a word


class AgentSettings(Struct, frozen=True):
    """Who this node is, and what the job was started with.  `node.host` may be empty until the link tells it."""

    node: Node
    min_nodes: int
    max_nodes: int
    timing: Timing = field(default_factory=Timing)
    rank_by: RankBy = RankBy.JOIN
    health_interval: float = 30.0


# events ---------------------------------------------------------------------------------------------------------------


class CoordinatorConnected(Struct, frozen=True):
    """The coordinator can be spoken to; `host` is this node's address as seen from there."""

    host: str


class CoordinatorLost(Struct, frozen=True):
    """The coordinator cannot be reached; the link keeps trying."""

    why: str


class CoordinatorMessage(Struct, frozen=True):
    """The coordinator said something."""

    message: FromCoordinator


class WarmupDone(Struct, frozen=True):
    """Workers can be started at once."""


class HealthChecked(Struct, frozen=True):
    """What is wrong with this node, if anything."""

    problems: tuple[HealthProblem, ...]


class StorePortReady(Struct, frozen=True):
    """This port listens for a store."""

    port: int


class WorkersFailed(Struct, frozen=True):
    """Workers of this round died, could not be started, or hang."""

    round: int
    failures: tuple[Failure, ...]


class WorkersInspected(Struct, frozen=True):
    """This is where the workers of this round are."""

    round: int
    failures: tuple[Failure, ...]


class WorkersFinished(Struct, frozen=True):
    """All workers of this round exited 0."""

    round: int


class WorkersGone(Struct, frozen=True):
    """Nothing is left of this round's workers."""

    round: int


class Signalled(Struct, frozen=True):
    """Somebody wants this agent to end."""

    signum: int


class Tick(Struct, frozen=True):
    """A deadline has passed."""


AgentInput = (
    CoordinatorConnected | CoordinatorLost | CoordinatorMessage | WarmupDone | HealthChecked | StorePortReady
    | WorkersFailed | WorkersInspected | WorkersFinished | WorkersGone | Signalled | Tick
)  # fmt: skip


# commands -------------------------------------------------------------------------------------------------------------


class SendToCoordinator(Struct, frozen=True):
    """Say this to the coordinator."""

    message: FromAgent


class OpenStorePort(Struct, frozen=True):
    """Have a new port listen for a round's store, and come back with `StorePortReady`.

    It takes the place of a port that was offered before and is not in use by started workers.
    """


class StartWorkers(Struct, frozen=True):
    """Start the workers of this place; none are there now.  Group rank 0 serves the store, on the port it offered."""

    place: Place
    why: str


class StopWorkers(Struct, frozen=True):
    """Stop the workers, whatever they do, and come back with `WorkersGone`."""

    round: int
    signum: int
    grace: float
    why: str


class InspectWorkers(Struct, frozen=True):
    """Find out where the workers are, and come back with `WorkersInspected`."""

    round: int


class LogLine(Struct, frozen=True):
    """A line for the node's operator."""

    text: str
    warning: bool = False


class ExitAgent(Struct, frozen=True):
    """The agent is finished."""

    code: int
    why: str = ""
    report: JobReport | None = None


AgentCommand = SendToCoordinator | OpenStorePort | StartWorkers | StopWorkers | InspectWorkers | LogLine | ExitAgent


# state ----------------------------------------------------------------------------------------------------------------


class WorkersState(Enum):
    """What the workers of the held round are."""

    IDLE = "idle"
    RUNNING = "running"
    FAILED = "failed"
    SUCCEEDED = "succeeded"
    STOPPING = "stopping"
    OVER = "over"


STATUS = {
    WorkersState.RUNNING: Status.RUNNING,
    WorkersState.FAILED: Status.FAILED,
    WorkersState.SUCCEEDED: Status.SUCCEEDED,
}


class Agent:
    """The state of one node; see the rules above."""

    def __init__(self, settings: AgentSettings, now: float = 0.0) -> None:
        self.node = settings.node
        self.state = WorkersState.IDLE
        self.held: Place | None = None  # of the workers that exist, or existed last
        self._settings = settings
        self._newest = 0  # the highest round heard of
        self._restarts = 0  # the most failures healed, as told with a place
        self._next: tuple[Place, str] | None = None  # to start when the workers are gone
        self._warm = False
        self.admitted = False  # it was found healthy, once at least
        self._problems: tuple[HealthProblem, ...] = ()
        self._unfit: float | None = None  # since when it is not admitted for its problems
        self._ready: Ready | None = None  # the offer that no round uses
        self._offering = False  # it is being made
        self._failures: tuple[Failure, ...] = ()
        self._leaving = 0  # the signal
        self._closing: Closing | None = None  # what was said of the job's end
        self._end: ExitAgent | None = None  # what to do when the workers are gone
        self._linked = False
        self._ever_linked = False
        self._link_trouble = ""  # why the link is down
        self._stuck: float | None = now  # since when it needs a coordinator it cannot reach
        self._announced = False  # that it waits for it

    def on(self, event: AgentInput, now: float) -> list[AgentCommand]:
        """Take one event; the commands are to be executed in order."""
        if self.state is WorkersState.OVER:
            return []
        out = self._take(event, now)
        needs = not self._linked and self.state is not WorkersState.RUNNING
        if not needs:
            self._stuck = None
            self._announced = False
        elif self._stuck is None:
            self._stuck = now
        return out

    def deadline(self) -> float | None:
        """The time of the next `Tick`, if one is needed."""
        if self.state in (WorkersState.STOPPING, WorkersState.OVER):
            return None
        times = [] if self._unfit is None else [self._unfit + self._settings.timing.join]
        if self._stuck is not None:
            times.append(self._stuck + (self._patience() if self._announced else min(HUSH, self._patience())))
        return min(times, default=None)

    def unready(self) -> str:
        """Why this node can do nothing for its job at the moment; "" while it trains, or could at once."""
        if self._going():
            return "it is leaving, or the job is over"
        if self.state is WorkersState.RUNNING:
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
        alone = self.state is WorkersState.SUCCEEDED and self.held is not None and self.held.group_size == 1
        if self._closing or alone:
            return FAREWELL  # the end is known; the coordinator is wanted for its report only
        return timing.coordinator if self._ever_linked else timing.join

    def _take(self, event: AgentInput, now: float) -> list[AgentCommand]:
        match event:
            case CoordinatorConnected(host):
                return self._link(host)
            case CoordinatorLost(why):
                return self._unlink(why)
            case CoordinatorMessage(message):
                return self._hear(message)
            case WarmupDone():
                self._warm = True
                return self._offer()
            case HealthChecked(problems):
                return self._checked(problems, now)
            case StorePortReady(port):
                self._offering = False
                self._ready = Ready(port, after=self._newest)
                return [] if self._going() else self._tell(self._ready)
            case WorkersFailed(round, failures):
                return self._failed(round, failures)
            case WorkersInspected(round, failures):
                return self._tell(Inspected(round, trim(failures)))
            case WorkersFinished(round) if self._holds(round) and self.state is WorkersState.RUNNING:
                self.state = WorkersState.SUCCEEDED
                return self._tell(Succeeded(round))
            case WorkersGone(round) if self._holds(round) and self.state is WorkersState.STOPPING:
                return self._workers_gone()
            case Signalled(signum):
                return self._signalled(signum)
            case Tick():
                due = self.deadline()
                if due is not None and now >= due:
                    return self._wait_or_give_up(now)
        return []

    # health -----------------------------------------------------------------------------------------------------------

    def _checked(self, problems: tuple[HealthProblem, ...], now: float) -> list[AgentCommand]:
        before, self._problems = self._problems, problems
        if not problems:
            self.admitted, self._unfit = True, None
            out = [LogLine("healthy again"), *self._tell(Problems())] if before else []
            return [*out, *self._offer()]
        if not self.admitted and self._unfit is None:
            self._unfit = now
        if [problem.what for problem in before] == [problem.what for problem in problems]:
            return []
        wait = "" if self.admitted else f"; not ready for the job until that is mended, {self._join_time()} at most"
        return [LogLine(f"unhealthy: {'; '.join(self._words())}{wait}"), *self._tell(Problems(self._words()))]

    def _words(self) -> tuple[str, ...]:
        return tuple(problem.words for problem in self._problems)

    def _join_time(self) -> str:
        return f"{self._settings.timing.join:g} s"

    # the link ---------------------------------------------------------------------------------------------------------

    def _link(self, host: str) -> list[AgentCommand]:
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
        out: list[AgentCommand] = [SendToCoordinator(join)]
        if self._leaving:
            out.append(SendToCoordinator(Leaving(name_of(self._leaving))))
        elif self._end:
            out.append(SendToCoordinator(Leaving(self._end.why)))
        if again:
            out.append(LogLine("coordinator found again"))
        return out + self._offer()

    def _holding(self) -> tuple[Place | None, Status]:
        """The round that a `Join` speaks of: the one whose workers are here, or are about to be."""
        if self._next:
            return self._next[0], Status.RUNNING
        status = STATUS.get(self.state, Status.IDLE)
        return None if status is Status.IDLE else self.held, status

    def _unlink(self, why: str) -> list[AgentCommand]:
        self._link_trouble = why
        if not self._linked:
            return []
        self._linked = False
        self._ready = None  # rule 3
        return [LogLine(f"coordinator lost: {why}; workers go on, trying to reach it again"), *self._offer()]

    def _offer(self) -> list[AgentCommand]:
        promised = self._next is not None and self._next[0].group_rank == 0
        if not (self._warm and self.admitted and self.node.host):
            return []
        if self._ready or self._offering or promised or self._going():
            return []
        self._offering = True
        return [OpenStorePort()]

    def _going(self) -> bool:
        return bool(self._leaving or self._closing or self._end)

    def _tell(self, message: FromAgent) -> list[AgentCommand]:
        return [SendToCoordinator(message)] if self._linked else []  # rule 3: the next Join says it

    def _wait_or_give_up(self, now: float) -> list[AgentCommand]:
        if self._unfit is not None and now >= self._unfit + self._settings.timing.join:
            return self._quit(ExitAgent(1, f"unhealthy for {self._join_time()}: {'; '.join(self._words())}"))
        assert self._stuck is not None, "only who is stuck has a deadline"
        if now < self._stuck + self._patience():
            self._announced = True
            return [LogLine(f"waiting for the coordinator, {self._patience():g} s at most ({self._link_trouble})")]
        waited = f"{self._patience():g} s"
        if self._closing:
            return self._quit(ExitAgent(1, self._closing.why))
        if self.state is WorkersState.SUCCEEDED:
            return self._quit(ExitAgent(0, f"all workers of this node exited 0, and no coordinator asked for {waited}"))
        if self._ever_linked:
            why = f"no coordinator for {waited} while one was needed ({self._link_trouble}); raise coordinator_timeout"
        else:
            why = f"no coordinator for {waited} ({self._link_trouble}); is its node up, and the job not over?"
        return self._quit(ExitAgent(1, why))

    # the coordinator's word -------------------------------------------------------------------------------------------

    def _hear(self, message: FromCoordinator) -> list[AgentCommand]:
        match message:
            case Assign(place, why):
                return self._assigned(place, why)
            case StandBy(round, why):
                return self._hold(round, why)
            case Drain(why):
                return self._depart(why)
            case Inspect(round):
                here = self._holds(round) and self.state in (WorkersState.RUNNING, WorkersState.FAILED)
                return [InspectWorkers(round)] if here else self._tell(Inspected(round))
            case Closing(why):
                self._closing = message
                self._next = None
                return self._workers_gone() if self.state is WorkersState.IDLE else self._stop(why)
            case Closed(report):
                return self._closed(report)
            case Rejected(why):
                return self._quit(ExitAgent(2, why))
            case _:
                return []

    def _assigned(self, place: Place, why: str) -> list[AgentCommand]:
        host = place.group_rank == 0
        offered = self._ready is not None and self._ready.store_port == place.store.port
        if host and offered:
            self._ready = None  # it is that round's now, whether the round is started here or not
        if place.round <= self._newest or self._closing or self._going():
            return self._offer()  # rule 2
        if host and not offered:
            return []  # decided before the coordinator had read the `Join` of this connection, which will tell it
        self._newest, self._restarts = place.round, max(self._restarts, place.restarts)
        if self.state is WorkersState.IDLE:
            return self._start(place, why)
        self._next = (place, why)
        return [*self._stop(why), *self._offer()]

    def _hold(self, round: int, why: str) -> list[AgentCommand]:
        if round < self._newest:
            return []  # rule 2
        self._newest = round
        self._next = None
        return [LogLine(why), *self._stop(why), *self._offer()]

    # workers ----------------------------------------------------------------------------------------------------------

    def _start(self, place: Place, why: str) -> list[AgentCommand]:
        self.state = WorkersState.RUNNING
        self.held = place
        self._failures = ()
        return [StartWorkers(place, why), *self._offer()]

    def _failed(self, round: int, failures: tuple[Failure, ...]) -> list[AgentCommand]:
        if not self._holds(round):
            return []
        self._failures += failures
        if self.state in (WorkersState.RUNNING, WorkersState.FAILED):
            self.state = WorkersState.FAILED
            return self._tell(Failed(round, trim(failures)))
        return []  # stopping: it goes with `Stopped`

    def _stop(self, why: str, signum: int = SIGTERM) -> list[AgentCommand]:
        """Stop the workers, if there are any that are not being stopped."""
        if self.state in (WorkersState.IDLE, WorkersState.STOPPING) or self.held is None:
            return []
        self.state = WorkersState.STOPPING
        return [StopWorkers(self.held.round, signum, self._settings.timing.shutdown, why)]

    def _workers_gone(self) -> list[AgentCommand]:
        self.state = WorkersState.IDLE
        if self._end:
            return self._quit(self._end)
        if self._leaving:
            return self._quit(ExitAgent(128 + self._leaving, name_of(self._leaving)))
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

    def _signalled(self, signum: int) -> list[AgentCommand]:
        if self._leaving:
            if self.state is not WorkersState.STOPPING or self.held is None:
                return []
            return [
                LogLine("second signal: killing the workers"),
                StopWorkers(self.held.round, signum, 0.0, "second signal"),
            ]
        self._leaving = signum
        self._next = None
        why = name_of(signum)
        out = self._tell(Leaving(why))
        if self.state is WorkersState.IDLE:
            return [*out, *self._quit(ExitAgent(128 + signum, why))]
        return [*out, LogLine(f"{why}: stopping the workers and leaving"), *self._stop(why, signum)]

    def _depart(self, why: str) -> list[AgentCommand]:
        """An operator sends this node away, which is no failure of it."""
        if self._going():
            return []
        return [*self._tell(Leaving(why)), LogLine(f"{why}: leaving"), *self._quit(ExitAgent(0, why))]

    def _closed(self, report: JobReport) -> list[AgentCommand]:
        if report.outcome is not Outcome.SUCCEEDED:
            return self._quit(ExitAgent(1, report.why, report))
        end = self._quit(ExitAgent(0, report.why, report))
        if self.held is not None:
            return end
        why = (
            f"job={report.run_id} had ended ({report.why}) before this node had a place in it: this node ran no worker"
        )
        return [LogLine(why, warning=True), *end]

    def _quit(self, end: ExitAgent) -> list[AgentCommand]:
        """Go, after the workers."""
        self._end = ExitAgent(128 + self._leaving, end.why, end.report) if self._leaving and end.code else end
        self._next = None
        if self.state is not WorkersState.IDLE:
            return self._stop(end.why)
        self.state = WorkersState.OVER
        return [*self._tell(Left(self._end.why or f"exit {self._end.code}")), self._end]


def name_of(signum: int) -> str:
    """A signal as people write it."""
    return SIGNALS.get(signum, f"signal {signum}")
