"""Computes the spans of a job's traces from its event records.  Pure.

Without a parent span, every recovery is a trace of its own: in the trace of a job that runs for days, a recovery of one
second would be too small to see.

    recovery                 from the fault until the workers of all nodes run, or make steps, again
      node                   one for each node, with the phases of `Recovered`
        detect · decide · stop · wait · start · first_step · restore

The job is a trace, too: `job`, with its `round`s.  A recovery has a link to its job, and a round has a link to the next
recovery.  With a parent span, all spans belong to the parent's trace: the job below the parent, rounds and recoveries
below the job.  Rules:

1. Each span is returned once, when it ends.  Only `first_step` and `restore` may be returned after the spans that
   contain them: in a job in which no worker reported a step before.
2. Only what this coordinator saw from the beginning has a span.  Records that nodes send again to a new coordinator
   have none.
3. Times come from the node that recorded the event.  Times of different nodes are as accurate as their clocks.
4. Ids are hashes of a seed and a name, so that a link can point to a span that has not ended.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b

from msgspec import Struct, field

from ripstop.model import events
from ripstop.model.event_json import to_dict
from ripstop.model.events import Event, EventRecord, RoundEndCause, event_kind
from ripstop.model.round import Outcome
from ripstop.telemetry.goodput import Goodput

MAX_EVENTS = 32  # of one span: a round keeps its latest events, a recovery its first
ANY_ROUND = 0  # not the number of a round
FAULT_CAUSES = (RoundEndCause.APPLICATION, RoundEndCause.INFRASTRUCTURE, RoundEndCause.NODE_LOST)

Value = str | int | float | bool | tuple[str, ...] | tuple[int, ...]
Attributes = dict[str, Value]
Phase = tuple[str, float, float]  # name, start, end


class Context(Struct, frozen=True):
    """The ids of a span's trace and of the span, in hexadecimal digits."""

    trace: str
    span: str


class SpanEvent(Struct, frozen=True):
    at: float
    name: str
    attributes: Attributes


class Span(Struct, frozen=True):
    """`parent` is the id of the containing span, or empty; `error` is empty unless the span failed."""

    context: Context
    parent: str
    name: str
    start: float
    end: float
    attributes: Attributes
    events: tuple[SpanEvent, ...] = ()
    links: tuple[Context, ...] = ()
    error: str = ""


class _Round(Struct):
    """The current round; the nodes of a resumed round are unknown."""

    number: int
    start: float
    attributes: Attributes
    nodes: frozenset[str] | None = None
    records: deque[EventRecord] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))


class _NodeRecovery(Struct):
    """The part of one node in a recovery."""

    context: Context
    start: float
    end: float
    is_ended: bool = False


class _Recovery(Struct):
    """From round `number` to round `next`, which is 0 until it is formed."""

    number: int
    context: Context
    start: float
    end: float
    attributes: Attributes
    links: tuple[Context, ...]
    records: list[EventRecord]
    old_nodes: frozenset[str] | None  # None: unknown
    next: int = 0
    nodes: frozenset[str] = frozenset()  # of the next round
    started: dict[str, tuple[float, events.WorkersStarted]] = field(default_factory=dict)  # when, and which workers
    recovered: dict[str, _NodeRecovery] = field(default_factory=dict)  # nodes whose workers run again
    is_ended: bool = False

    def had_member(self, node: str) -> bool:
        """A spare was not in the old round: the time before its start is no part of the recovery."""
        return self.old_nodes is None or node in self.old_nodes


class Spans:
    """The spans of one job; `on` takes its records in the journal's order."""

    def __init__(self, run_id: str, seed: bytes, parent: Context | None = None) -> None:
        self._seed = seed
        self._parent = parent
        self._common: Attributes = {"ripstop.run_id": run_id}
        self._job = Context(parent.trace if parent else self._id(16, "job"), self._id(8, "job"))
        self._start: float | None = None
        self._round: _Round | None = None
        self._recovery: _Recovery | None = None  # the current one, or the last
        self._nodes_with_steps: set[str] = set()  # nodes whose workers report steps
        self._goodput = Goodput()
        self._closed: tuple[float, events.JobClosed] | None = None

    def on(self, record: EventRecord) -> list[Span]:
        """Return the spans that end with this event."""
        self._goodput.on(record)
        self._keep(record)
        return list(self._of_node(record) if record.node else self._of_coordinator(record))

    def end(self) -> list[Span]:
        """Return the job's span.  Not at `JobClosed`: nodes report their last steps after it."""
        if self._closed is None or self._start is None:
            return []
        at, closed = self._closed
        about: Attributes = {
            "ripstop.outcome": closed.outcome,
            "ripstop.rounds": closed.rounds,
            "ripstop.restarts_used": closed.restarts,
        }
        if self._goodput.has_steps:
            about["ripstop.goodput"] = self._goodput.spent(at).ratio
        parent = self._parent.span if self._parent else ""
        return [Span(self._job, parent, "job", self._start, at, self._common | about, error=_job_span_error(closed))]

    # events of the coordinator ----------------------------------------------------------------------------------------

    def _of_coordinator(self, record: EventRecord) -> Iterator[Span]:
        if self._start is None:
            self._start = record.at
        match record.event:
            case events.RoundFormed(number, nodes, world, store, restarts, why):
                about: Attributes = {
                    "ripstop.nodes": len(nodes), "ripstop.world_size": world, "ripstop.store": store,
                    "ripstop.restarts_used": restarts, "ripstop.why": why,
                }  # fmt: skip
                self._round = _Round(number, record.at, about, frozenset(nodes))
                if (recovery := self._current_recovery()) is not None:
                    recovery.next, recovery.nodes, recovery.end = number, frozenset(nodes), record.at
                    recovery.attributes |= {"ripstop.next_round": number, "ripstop.restarts_used": restarts}
            case events.RoundResumed(number, nodes):
                self._round = _Round(number, record.at, {"ripstop.nodes": nodes})
            case events.RoundEnded(number, cause, why):
                yield from self._abort_recovery(record.at, why)
                begun = self._new_recovery(number, record.at, cause, why)
                yield from self._end_round(record.at, cause, why if cause in FAULT_CAUSES else "", (begun.context,))
                self._recovery = begun
            case events.JobClosed(outcome, why) as closed:
                yield from self._abort_recovery(record.at, why)
                yield from self._end_round(record.at, outcome, _job_span_error(closed), ())
                self._closed = (record.at, closed)

    def _new_recovery(self, number: int, at: float, cause: str, why: str) -> _Recovery:
        root = f"recovery {number}"
        context = Context(self._job.trace if self._parent else self._id(16, root), self._id(8, root))
        links: tuple[Context, ...] = () if self._parent else (self._job,)
        last = self._recovery
        if last is not None and last.next == number and set(last.recovered) < last.nodes:
            links += (last.context,)  # the last recovery failed; this one continues it
        records = list(self._round.records) if self._round else []
        about: Attributes = {"ripstop.round": number, "ripstop.cause": cause, "ripstop.why": why}
        old_nodes = self._round.nodes if self._round else None
        about |= _culprit_span_attributes(cause, records) | _budget_span_attributes(records)
        return _Recovery(number, context, at, at, about, links, records, old_nodes)

    def _end_round(self, at: float, cause: str, error: str, links: tuple[Context, ...]) -> Iterator[Span]:
        if (round := self._round) is None:
            return
        self._round = None
        about = self._common | {"ripstop.round": round.number} | round.attributes | {"ripstop.cause": cause}
        context = Context(self._job.trace, self._id(8, f"round {round.number}"))
        explanation = _events_explaining_span(round.records)
        links = () if self._parent else links
        yield Span(context, self._job.span, "round", round.start, at, about, explanation, links, error)

    # events of nodes --------------------------------------------------------------------------------------------------

    def _of_node(self, record: EventRecord) -> Iterator[Span]:
        if isinstance(record.event, events.FirstStep):
            self._nodes_with_steps.add(record.node)
        recovery = self._recovery
        if recovery is None:
            return
        match record.event:
            case events.WorkersStarted(number) as started if self._is_awaited(record, number):
                recovery.started[record.node] = (record.at, started)
                if not started.pause or not recovery.had_member(record.node):
                    phases = [("start", record.at - started.seconds, record.at)]
                    yield from self._on_workers_run(record.node, recovery, phases)
            case events.Recovered(number) as recovered if self._is_awaited(record, number):
                if record.node in recovery.started and recovery.had_member(record.node):
                    ran, started = recovery.started[record.node]
                    if recovered.kept:  # its last worker went on after the others had started
                        ran = record.at
                        recovery.started[record.node] = ran, started
                    phases = list(_span_phases(ran, recovered))
                    yield from self._on_workers_run(record.node, recovery, phases)
            case events.StateRestored(number, rank, source, step, seconds) if (
                number == recovery.next and record.node in recovery.recovered
            ):
                about: Attributes = {"ripstop.rank": rank, "ripstop.source": source, "ripstop.step": step}
                phase = ("restore", record.at - max(0.0, seconds), record.at)
                yield self._phase(recovery, record.node, phase, f"restore {source}", about)
            case events.FirstStep(number) as first if number == recovery.next and record.node in recovery.recovered:
                yield from self._on_first_step(record, recovery, first)

    def _is_awaited(self, record: EventRecord, number: int) -> bool:
        recovery = self._current_recovery()
        return recovery is not None and number == recovery.next and record.node not in recovery.recovered

    def _on_workers_run(self, node: str, recovery: _Recovery, phases: list[Phase]) -> Iterator[Span]:
        """Return the spans of a node whose workers run again after these phases."""
        at, _ = recovery.started[node]
        context = Context(recovery.context.trace, self._id(8, f"recovery {recovery.number} {node}"))
        start = min((start for _, start, _ in phases), default=at)
        part = recovery.recovered[node] = _NodeRecovery(context, start, at)
        for ordinal, phase in enumerate(phases):
            yield self._phase(recovery, node, phase, f"{ordinal} {phase[0]}", {})
        if node not in self._nodes_with_steps:
            yield self._node_span(recovery, node, part)
        yield from self._finish_if_done(recovery)

    def _on_first_step(self, record: EventRecord, recovery: _Recovery, first: events.FirstStep) -> Iterator[Span]:
        part = recovery.recovered[record.node]
        end = max(part.end, record.at)
        about: Attributes = {"ripstop.rank": first.rank, "ripstop.step": first.step}
        phase = ("first_step", end - max(0.0, first.seconds), end)
        yield self._phase(recovery, record.node, phase, "first_step", about)
        if not part.is_ended:
            part.end = end
            yield self._node_span(recovery, record.node, part)
        yield from self._finish_if_done(recovery)

    def _phase(self, recovery: _Recovery, node: str, phase: Phase, unique: str, about: Attributes) -> Span:
        """`unique` distinguishes phases of one name."""
        part = recovery.recovered[node]
        context = Context(part.context.trace, self._id(8, f"recovery {recovery.number} {node} {unique}"))
        attributes = self._common | {"ripstop.round": recovery.number, "ripstop.node": node} | about
        return Span(context, part.context.span, *phase, attributes)

    def _node_span(self, recovery: _Recovery, node: str, part: _NodeRecovery) -> Span:
        part.is_ended = True
        _, started = recovery.started[node]
        about = self._common | {"ripstop.round": recovery.number, "ripstop.node": node}
        about |= {"ripstop.first_rank": started.first_rank, "ripstop.workers": len(started.pids)}
        return Span(part.context, recovery.context.span, "node", part.start, part.end, about)

    # the end of a recovery --------------------------------------------------------------------------------------------

    def _current_recovery(self) -> _Recovery | None:
        return None if self._recovery is None or self._recovery.is_ended else self._recovery

    def _finish_if_done(self, recovery: _Recovery) -> Iterator[Span]:
        """A recovery ends when all nodes run, and the nodes that report steps have reported one."""
        parts = recovery.recovered
        if not recovery.is_ended and all(node in parts and parts[node].is_ended for node in recovery.nodes):
            yield self._recovery_span(recovery, "")

    def _abort_recovery(self, at: float, why: str) -> Iterator[Span]:
        """End the current recovery, if there is one, before all its nodes run."""
        if (recovery := self._current_recovery()) is None:
            return
        for node, part in recovery.recovered.items():
            if not part.is_ended:
                yield self._node_span(recovery, node, part)
        error = ""
        if not recovery.next:
            error = f"no other round was formed: {why}"
        elif missing := len(recovery.nodes - recovery.recovered.keys()):
            error = f"round {recovery.next} ended before {missing} of its {len(recovery.nodes)} nodes ran: {why}"
        if error:
            recovery.end = max(recovery.end, at)
        yield self._recovery_span(recovery, error)

    def _recovery_span(self, recovery: _Recovery, error: str) -> Span:
        recovery.is_ended = True
        start = min([recovery.start, *(part.start for part in recovery.recovered.values())])
        end = max([recovery.end, *(part.end for part in recovery.recovered.values())])
        parent = self._job.span if self._parent else ""
        about = self._common | recovery.attributes
        explanation = _events_explaining_span(recovery.records)
        return Span(recovery.context, parent, "recovery", start, end, about, explanation, recovery.links, error)

    # events that explain the end of a round ---------------------------------------------------------------------------

    def _keep(self, record: EventRecord) -> None:
        """Add a record that explains the end of a round to that round, or to the recovery from it."""
        if (number := self._explained_round(record.event)) is None:
            return
        if self._round is not None and number in (ANY_ROUND, self._round.number):
            self._round.records.append(record)
        elif (recovery := self._current_recovery()) is not None and len(recovery.records) < MAX_EVENTS:
            recovery.records.append(record)

    def _explained_round(self, event: Event) -> int | None:
        """The round whose end this event may explain; `ANY_ROUND`: the current one; None: no round."""
        match event:
            case events.WorkerFailed(number) | events.WorkerHangs(number) | events.TimersMissed(number):
                return number
            case events.HangDiagnosed(number) | events.BudgetCharged(number) | events.BudgetRefunded(number):
                return number
            case events.RoundFormed(number) | events.RoundEnded(number) | events.FaultInjected(round=number):
                return number
            case events.NodeGone(name) | events.NodeLeaving(name) | events.NodeUnhealthy(name):
                nodes = self._round.nodes if self._round else None
                return ANY_ROUND if nodes is None or name in nodes else None
            case events.JobClosing() | events.OperatorAction():
                return ANY_ROUND
        return None

    def _id(self, size: int, name: str) -> str:
        return blake2b(f"{size} {name}".encode(), digest_size=size, key=self._seed).hexdigest()


def _span_phases(at: float, recovered: events.Recovered) -> Iterator[Phase]:
    """The phases of a node, in order, until its workers ran at time `at`: name, start, end."""
    lengths = [(name, max(0.0, getattr(recovered, name))) for name in events.RECOVERY_PHASES]
    begins = at - sum(seconds for _, seconds in lengths)
    for name, seconds in lengths:
        if seconds > 0:
            yield name, begins, begins + seconds
        begins += seconds


def _job_span_error(closed: events.JobClosed) -> str:
    return "" if closed.outcome == Outcome.SUCCEEDED else closed.why


def _events_explaining_span(records: Iterable[EventRecord]) -> tuple[SpanEvent, ...]:
    return tuple(
        SpanEvent(record.at, event_kind(record.event), _span_attributes_of_record(record)) for record in records
    )


def _span_attributes_of_record(record: EventRecord) -> Attributes:
    hidden = ("v", "seq", "at", "kind") if record.node else ("v", "seq", "at", "kind", "node")
    return {f"ripstop.{name}": value for name, value in to_dict(record).items() if name not in hidden}


def _culprit_span_attributes(cause: str, records: list[EventRecord]) -> Attributes:
    """The first worker that failed, or the node that left or was lost."""
    match cause:
        case RoundEndCause.APPLICATION | RoundEndCause.INFRASTRUCTURE:
            for record in records:
                if isinstance(record.event, events.WorkerFailed | events.WorkerHangs):
                    return {"ripstop.node": record.node, "ripstop.rank": record.event.rank}
        case RoundEndCause.NODE_LOST | RoundEndCause.NODE_LEFT | RoundEndCause.NODE_UNFIT:
            for record in reversed(records):
                if isinstance(record.event, events.NodeGone | events.NodeLeaving | events.NodeUnhealthy):
                    return {"ripstop.node": record.event.name}
    return {}


def _budget_span_attributes(records: list[EventRecord]) -> Attributes:
    charges = [record.event for record in records if isinstance(record.event, events.BudgetCharged)]
    return {"ripstop.restarts_limit": charges[-1].limit} if charges else {}
