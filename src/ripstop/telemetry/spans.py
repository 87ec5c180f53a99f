"""What happens in a job as spans of traces: what takes time, within what, and why.  Pure.

Without a parent of the user's, every recovery is a trace of its own, for it would be a hairline in the picture of a job
that runs for days:

    recovery                 from what went wrong until the workers of all nodes run, or make steps, again
      node                   one for each node, with the phases that `Recovered` tells of
        detect · decide · stop · decide · start · first_step

`decide` is there twice where there was more to wait for when the old workers were gone.  The job itself is a trace
too: `job`, and in it `round`s.  A recovery is linked to its job, and a round to the recovery that follows it.  With a
parent, all are in the parent's trace: the job under it, rounds and recoveries under the job.

Rules: (1) a span is given once, when it is over; only `first_step` may come after those it belongs to, in a job that
had reported no step before; (2) only what this coordinator saw begin has a span: what nodes tell again to one that
takes over has none; (3) times are those of who saw it, so between nodes they are as good as their clocks; (4) ids are
made of a seed and of names, so that a link can lead to what is not over yet.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b

from msgspec import Struct, field

from ripstop.model.events import (
    BudgetCharged,
    BudgetRefunded,
    Event,
    EventRecord,
    FirstStep,
    HangDiagnosed,
    JobClosed,
    JobClosing,
    NodeGone,
    NodeLeaving,
    NodeUnhealthy,
    OperatorAction,
    Recovered,
    RoundEndCause,
    RoundEnded,
    RoundFormed,
    RoundResumed,
    TimersMissed,
    WorkerFailed,
    WorkerHangs,
    WorkersStarted,
    WorkersStopped,
    kind,
    to_dict,
)
from ripstop.model.round import Outcome
from ripstop.telemetry.goodput import Goodput

MOST_MOMENTS = 32  # of one span: of a round the latest, for its end is of interest, and of a recovery the first
LEAST = 0.001  # seconds of waiting that are worth a span of their own
ANY = 0  # no round has this number
FAULTS = (RoundEndCause.APPLICATION, RoundEndCause.INFRASTRUCTURE, RoundEndCause.NODE_LOST)

Value = str | int | float | bool | tuple[str, ...] | tuple[int, ...]
Attributes = dict[str, Value]


class Context(Struct, frozen=True):
    """A span's place: the ids of its trace and of itself, in hexadecimal digits."""

    trace: str
    span: str


class Moment(Struct, frozen=True):
    """Something that happened within a span."""

    at: float
    name: str
    attributes: Attributes


class Span(Struct, frozen=True):
    """What took time.  `parent` is the id of the span it is in, `error` what was bad about it; both may be empty."""

    context: Context
    parent: str
    name: str
    start: float
    end: float
    attributes: Attributes
    moments: tuple[Moment, ...] = ()
    links: tuple[Context, ...] = ()
    error: str = ""


class _Round(Struct):
    """The round that runs; `nodes` are not known of one that was resumed."""

    number: int
    start: float
    attributes: Attributes
    nodes: frozenset[str] | None = None
    noted: deque[EventRecord] = field(default_factory=lambda: deque(maxlen=MOST_MOMENTS))


class _Part(Struct):
    """What one node had to do with a recovery."""

    context: Context
    start: float
    end: float
    first_rank: int
    ranks: int
    given: bool = False  # its span


class _Recovery(Struct):
    """From the round `number` to the round `next`, which is 0 until it is formed."""

    number: int
    context: Context
    start: float
    end: float
    attributes: Attributes
    links: tuple[Context, ...]
    noted: list[EventRecord]
    before: frozenset[str] | None  # the nodes of the old round
    next: int = 0
    nodes: frozenset[str] = frozenset()  # of the next one
    stopped: dict[str, float] = field(default_factory=dict)  # when nothing was left of the old workers, by node
    started: dict[str, tuple[float, WorkersStarted]] = field(default_factory=dict)  # when, and which workers
    parts: dict[str, _Part] = field(default_factory=dict)
    over: bool = False


class Spans:
    """Of one job; `on` takes its entries in the journal's order."""

    def __init__(self, run_id: str, seed: bytes, parent: Context | None = None) -> None:
        self._seed = seed
        self._parent = parent
        self._common: Attributes = {"ripstop.run_id": run_id}
        self._job = Context(parent.trace if parent else self._id(16, "job"), self._id(8, "job"))
        self._began: float | None = None
        self._round: _Round | None = None
        self._recovery: _Recovery | None = None  # the one that goes on, or the last
        self._reporting: set[str] = set()  # nodes whose workers have told of steps
        self._goodput = Goodput()
        self._closed: tuple[float, JobClosed] | None = None

    def on(self, entry: EventRecord) -> list[Span]:
        """Something happened: the spans that are over with it."""
        self._goodput.on(entry)
        self._note(entry)
        return list(self._of_node(entry) if entry.node else self._of_coordinator(entry))

    def end(self) -> list[Span]:
        """Nothing more will happen.  The job's span waits for it: nodes tell of their last steps when it is closed."""
        if self._closed is None or self._began is None:
            return []
        at, closed = self._closed
        about: Attributes = {
            "ripstop.outcome": closed.outcome,
            "ripstop.rounds": closed.rounds,
            "ripstop.restarts_used": closed.restarts,
        }
        if self._goodput.known:
            about["ripstop.goodput"] = self._goodput.spent(at).ratio
        parent = self._parent.span if self._parent else ""
        return [Span(self._job, parent, "job", self._began, at, self._common | about, error=_trouble(closed))]

    # the coordinator's ------------------------------------------------------------------------------------------------

    def _of_coordinator(self, entry: EventRecord) -> Iterator[Span]:
        if self._began is None:
            self._began = entry.at
        match entry.event:
            case RoundFormed(number, nodes, world, store, restarts, why):
                about: Attributes = {
                    "ripstop.nodes": len(nodes), "ripstop.world_size": world, "ripstop.store": store,
                    "ripstop.restarts_used": restarts, "ripstop.why": why,
                }  # fmt: skip
                self._round = _Round(number, entry.at, about, frozenset(nodes))
                if (recovery := self._open()) is not None:
                    recovery.next, recovery.nodes, recovery.end = number, frozenset(nodes), entry.at
                    recovery.attributes |= {"ripstop.next_round": number, "ripstop.restarts_used": restarts}
            case RoundResumed(number, nodes):
                self._round = _Round(number, entry.at, {"ripstop.nodes": nodes})
            case RoundEnded(number, cause, why):
                yield from self._give_up(entry.at, why)
                begun = self._begin(number, entry.at, cause, why)
                yield from self._end_round(entry.at, cause, why if cause in FAULTS else "", (begun.context,))
                self._recovery = begun
            case JobClosed(outcome, why) as closed:
                yield from self._give_up(entry.at, why)
                yield from self._end_round(entry.at, outcome, _trouble(closed), ())
                self._closed = (entry.at, closed)

    def _begin(self, number: int, at: float, cause: str, why: str) -> _Recovery:
        """The old round is over, and so is, for better or worse, the recovery that led to it."""
        root = f"recovery {number}"
        context = Context(self._job.trace if self._parent else self._id(16, root), self._id(8, root))
        links: tuple[Context, ...] = () if self._parent else (self._job,)
        last = self._recovery
        if last is not None and last.next == number and set(last.parts) < last.nodes:
            links += (last.context,)  # this one goes on with what that one did not achieve
        noted = list(self._round.noted) if self._round else []
        about: Attributes = {"ripstop.round": number, "ripstop.cause": cause, "ripstop.why": why}
        before = self._round.nodes if self._round else None
        about |= _culprit(cause, noted) | _budget(noted)
        return _Recovery(number, context, at, at, about, links, noted, before)

    def _end_round(self, at: float, cause: str, error: str, links: tuple[Context, ...]) -> Iterator[Span]:
        if (round := self._round) is None:
            return
        self._round = None
        about = self._common | {"ripstop.round": round.number} | round.attributes | {"ripstop.cause": cause}
        context = Context(self._job.trace, self._id(8, f"round {round.number}"))
        yield Span(
            context, self._job.span, "round", round.start, at, about, _moments(round.noted),
            () if self._parent else links, error,
        )  # fmt: skip

    # the nodes' -------------------------------------------------------------------------------------------------------

    def _of_node(self, entry: EventRecord) -> Iterator[Span]:
        if isinstance(entry.event, FirstStep):
            self._reporting.add(entry.node)
        recovery = self._recovery
        if recovery is None:
            return
        match entry.event:
            case WorkersStopped(number) if number == recovery.number:
                recovery.stopped[entry.node] = entry.at
            case WorkersStarted(number, pause=pause, seconds=seconds) as started if self._recovers(entry, number):
                recovery.started[entry.node] = (entry.at, started)
                if not pause or not self._was_there(recovery, entry.node):
                    yield from self._runs(entry.node, recovery, [("start", entry.at - seconds, entry.at)])
            case Recovered(number) as recovered if self._recovers(entry, number) and entry.node in recovery.started:
                if self._was_there(recovery, entry.node):
                    ran = recovery.started[entry.node][0]
                    phases = list(_phases(ran, recovered, recovery.stopped.get(entry.node)))
                    yield from self._runs(entry.node, recovery, phases)
            case FirstStep(number, rank, step, seconds) if number == recovery.next and entry.node in recovery.parts:
                yield from self._steps(entry, recovery, rank, step, seconds)

    def _recovers(self, entry: EventRecord, number: int) -> bool:
        recovery = self._open()
        return recovery is not None and number == recovery.next and entry.node not in recovery.parts

    @staticmethod
    def _was_there(recovery: _Recovery, node: str) -> bool:
        """What a spare was spared does not count as this recovery's."""
        return recovery.before is None or node in recovery.before

    def _runs(self, node: str, recovery: _Recovery, phases: list[tuple[str, float, float]]) -> Iterator[Span]:
        """The node's workers run again, after these phases."""
        at, started = recovery.started[node]
        context = Context(recovery.context.trace, self._id(8, f"recovery {recovery.number} {node}"))
        start = min((start for _, start, _ in phases), default=at)
        part = recovery.parts[node] = _Part(context, start, at, started.first_rank, len(started.pids))
        for ordinal, (name, begin, end) in enumerate(phases):
            yield self._phase(recovery, node, name, begin, end, ordinal=ordinal)
        if node not in self._reporting:
            yield self._node_span(recovery, node, part)
        yield from self._finish_if_done(recovery)

    def _steps(self, entry: EventRecord, recovery: _Recovery, rank: int, step: int, seconds: float) -> Iterator[Span]:
        part = recovery.parts[entry.node]
        end = max(part.end, entry.at)
        about: Attributes = {"ripstop.rank": rank, "ripstop.step": step}
        yield self._phase(recovery, entry.node, "first_step", end - max(0.0, seconds), end, about)
        if not part.given:
            part.end = end
            yield self._node_span(recovery, entry.node, part)
        yield from self._finish_if_done(recovery)

    def _phase(
        self,
        recovery: _Recovery,
        node: str,
        name: str,
        start: float,
        end: float,
        about: Attributes | None = None,
        *,
        ordinal: int | None = None,
    ) -> Span:
        """`ordinal` tells phases of one name apart."""
        part = recovery.parts[node]
        unique = name if ordinal is None else f"{ordinal} {name}"
        context = Context(part.context.trace, self._id(8, f"recovery {recovery.number} {node} {unique}"))
        attributes = self._common | {"ripstop.round": recovery.number, "ripstop.node": node} | (about or {})
        return Span(context, part.context.span, name, start, end, attributes)

    def _node_span(self, recovery: _Recovery, node: str, part: _Part) -> Span:
        part.given = True
        about: Attributes = {
            "ripstop.round": recovery.number, "ripstop.node": node,
            "ripstop.first_rank": part.first_rank, "ripstop.workers": part.ranks,
        }  # fmt: skip
        return Span(part.context, recovery.context.span, "node", part.start, part.end, self._common | about)

    # the end of a recovery --------------------------------------------------------------------------------------------

    def _open(self) -> _Recovery | None:
        return None if self._recovery is None or self._recovery.over else self._recovery

    def _finish_if_done(self, recovery: _Recovery) -> Iterator[Span]:
        """It is over when everybody runs, and those who tell of steps have told of one."""
        parts = recovery.parts
        if not recovery.over and all(node in parts and parts[node].given for node in recovery.nodes):
            yield self._recovery_span(recovery, "")

    def _give_up(self, at: float, why: str) -> Iterator[Span]:
        """The recovery, if one goes on, is over before all its nodes were done."""
        if (recovery := self._open()) is None:
            return
        yield from [self._node_span(recovery, node, part) for node, part in recovery.parts.items() if not part.given]
        error = ""
        if not recovery.next:
            error = f"no other round was formed: {why}"
        elif missing := len(recovery.nodes - recovery.parts.keys()):
            error = f"round {recovery.next} was over before {missing} of its {len(recovery.nodes)} nodes ran: {why}"
        if error:
            recovery.end = max(recovery.end, at)
        yield self._recovery_span(recovery, error)

    def _recovery_span(self, recovery: _Recovery, error: str) -> Span:
        recovery.over = True
        start = min([recovery.start, *(part.start for part in recovery.parts.values())])
        end = max([recovery.end, *(part.end for part in recovery.parts.values())])
        parent = self._job.span if self._parent else ""
        about = self._common | recovery.attributes
        moments = _moments(recovery.noted)
        return Span(recovery.context, parent, "recovery", start, end, about, moments, recovery.links, error)

    # what is noted ----------------------------------------------------------------------------------------------------

    def _note(self, entry: EventRecord) -> None:
        """Entries that say why are moments of the round they end, and of the recovery from it."""
        if (number := self._round_of(entry.event)) is None:
            return
        if self._round is not None and number in (ANY, self._round.number):
            self._round.noted.append(entry)
        elif (recovery := self._open()) is not None and len(recovery.noted) < MOST_MOMENTS:
            recovery.noted.append(entry)

    def _round_of(self, event: Event) -> int | None:
        """The round whose end this may explain; `ANY`: the one that runs, whichever it is; None: it explains none."""
        match event:
            case WorkerFailed(number) | WorkerHangs(number) | TimersMissed(number) | HangDiagnosed(number):
                return number
            case BudgetCharged(number) | BudgetRefunded(number) | RoundEnded(number) | RoundFormed(number):
                return number
            case NodeGone(name) | NodeLeaving(name) | NodeUnhealthy(name):
                nodes = self._round.nodes if self._round else None
                return ANY if nodes is None or name in nodes else None
            case JobClosing() | OperatorAction():
                return ANY
        return None

    def _id(self, size: int, name: str) -> str:
        return blake2b(f"{size} {name}".encode(), digest_size=size, key=self._seed).hexdigest()


def _phases(at: float, told: Recovered, stopped: float | None) -> Iterator[tuple[str, float, float]]:
    """What a node did, one after the other, until its workers ran at this time: name, start, end.

    What `Recovered` calls the time to decide was before and after the old workers were stopped; when that was tells
    how much of it was before.
    """
    detect, decide, stop, start = (max(0.0, s) for s in (told.detect, told.decide, told.stop, told.start))
    known = at - start - stop - decide
    before = decide
    if stopped is not None and decide - (until := max(0.0, stopped - stop - known)) > LEAST:
        before = until
    lengths = (("detect", detect), ("decide", before), ("stop", stop), ("decide", decide - before), ("start", start))
    begins = known - detect
    for name, seconds in lengths:
        if seconds > 0:  # it had a part in it
            yield name, begins, begins + seconds
        begins += seconds


def _trouble(closed: JobClosed) -> str:
    return "" if closed.outcome == Outcome.SUCCEEDED else closed.why


def _moments(entries: Iterable[EventRecord]) -> tuple[Moment, ...]:
    return tuple(map(_moment, entries))


def _moment(entry: EventRecord) -> Moment:
    record = to_dict(entry)
    hidden = ("v", "seq", "at", "kind") if entry.node else ("v", "seq", "at", "kind", "node")
    about = {f"ripstop.{name}": value for name, value in record.items() if name not in hidden}
    return Moment(entry.at, kind(entry.event), about)


def _culprit(cause: str, noted: list[EventRecord]) -> Attributes:
    """Who is to be named for a round's end: the first worker at fault, or the node that went."""
    match cause:
        case RoundEndCause.APPLICATION | RoundEndCause.INFRASTRUCTURE:
            for entry in noted:
                if isinstance(entry.event, WorkerFailed | WorkerHangs):
                    return {"ripstop.node": entry.node, "ripstop.rank": entry.event.rank}
        case RoundEndCause.NODE_LOST | RoundEndCause.NODE_LEFT | RoundEndCause.NODE_UNFIT:
            for entry in reversed(noted):
                if isinstance(entry.event, NodeGone | NodeLeaving | NodeUnhealthy):
                    return {"ripstop.node": entry.event.name}
    return {}


def _budget(noted: list[EventRecord]) -> Attributes:
    charges = [entry.event for entry in noted if isinstance(entry.event, BudgetCharged)]
    return {"ripstop.restarts_limit": charges[-1].limit} if charges else {}
