"""Builds the report of a job from its event records.  Pure.

Rules: (1) records may be of the whole job or of one node, and may end anywhere; (2) durations come from one clock each:
the coordinator's, or a node's own measurements; (3) what is kept is bounded: of rounds, failures, nodes and actions the
latest, while all of them are counted; (4) of several runs with one id, the last one counts; (5) the root cause of a
round is the one that the coordinator decided on, or else the likeliest one by `diagnostics/failure_report.py`.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ripstop.diagnostics.evidence_events import Evidence, from_event
from ripstop.diagnostics.failure_report import how, order, tail_without_traceback
from ripstop.model import events, fault_injection
from ripstop.model.events import MAX_TEXT, EventRecord, RoundEndCause
from ripstop.model.failure import Failure, Hang
from ripstop.model.text_formatting import rank_list, truncate
from ripstop.protocol.limits import bounded_record
from ripstop.report.model import (
    Action,
    Incident,
    JobResult,
    Loss,
    NodeReport,
    Phases,
    Report,
    RoundReport,
    Setting,
    Summary,
    TimeSpent,
    WorkerReport,
)
from ripstop.telemetry.goodput import MAX_OPEN_ROUNDS, Goodput, RoundSteps

MAX_ROUNDS = MAX_OPEN_ROUNDS  # of which at least the latest half is kept
MAX_FAILURES = 64  # of one round that are kept
MAX_EVIDENCE_CHARS = 4 << 20  # of all tracebacks and log lines; those of the oldest failures are dropped
MAX_NODES = 10_000
MAX_ACTIONS = 1000
MAX_SETTINGS = 256
MAX_RECENT = 10_000
PLANNED = frozenset({RoundEndCause.NODE_JOINED, RoundEndCause.SCALED, RoundEndCause.OPERATOR})
STARTUP = "start-up"
MAX_TITLE = 500
MAX_MESSAGE = 4000


class NoEvents(Exception):
    """There is no record to make a report of."""


def build_report(records: Iterable[EventRecord], notes: Iterable[str] = ()) -> Report:
    """The report of a job; raises `NoEvents`.  `notes` are remarks about the source."""
    builder = _Builder()
    for record in records:
        builder.take(record)
        if builder.is_other_run:
            builder = _Builder(earlier_runs=builder.earlier_runs + 1, records=builder.recent or ())
    if not builder.count:
        raise NoEvents("there are no events")
    return builder.report(tuple(notes))


class _Worker(Struct):
    """A worker that failed: its event, and its evidence if it was recorded."""

    rank: int
    node: str
    at: float
    why: str
    pid: int = 0
    evidence: Evidence | None = None

    def failure(self, round: int) -> Failure:
        if self.evidence:
            return self.evidence.failure
        return Failure(self.rank, 0, round, "", self.at, self.pid or None, exitcode=1, message=self.why)


class _Round(Struct):
    number: int
    formed_at: float
    nodes: int = 0
    world_size: int = 0
    why: str = ""
    started: float = 0.0  # the slowest node's seconds until its workers ran
    first_step: float = 0.0  # and until its first step
    slowest: Phases | None = None  # the recovery of the node that had no training for longest
    ended_at: float | None = None
    cause: str = ""
    why_ended: str = ""
    decision: str = ""
    hang: events.HangDiagnosed | None = None
    departure: tuple[str, str] | None = None  # the first node that left or was lost, and why
    workers: dict[int, _Worker] = field(default_factory=dict)
    failures: int = 0

    def phases(self, previous: "_Round | None") -> Phases:
        """The downtime before this round."""
        if self.slowest is not None:
            return self.slowest
        gap = max(0.0, self.formed_at - (previous.ended_at or previous.formed_at)) if previous else 0.0
        return Phases(wait=gap, start=self.started, first_step=self.first_step)


class _Handlers(dict[type, Callable[[EventRecord, Any], None] | None]):
    """The handler for each class of events and its subclasses, None for the others."""

    def __missing__(self, cls: type) -> Callable[[EventRecord, Any], None] | None:
        self[cls] = found = next((self[base] for base in cls.__mro__ if base in self), None)
        return found


class _Builder:
    """Takes the records in order; `handlers` has a method for each kind that matters to the report."""

    def __init__(self, earlier_runs: int = 0, records: Iterable[EventRecord] = ()) -> None:
        self.earlier_runs = earlier_runs
        self.is_other_run = False  # the latest record shows that `recent` are records of another run
        self.recent: list[EventRecord] | None = None  # since a coordinator began, until its first round
        self.count = 0
        self._run_id = ""
        self._limits: events.JobStarted | None = None
        self._first, self._last = math.inf, -math.inf  # record, by any clock
        self._coordinator: tuple[float, float] | None = None  # its first and last record
        self._closing: tuple[str, str] | None = None
        self._closed: events.JobClosed | None = None
        self._pauses: dict[str, float] = {}  # the latest of each node
        self._recoveries: dict[str, tuple[int, Phases]] = {}  # the same: the round, and the phases
        self._left: dict[str, str] = {}  # nodes that leave or left, and why
        self._ended: dict[str, events.AgentEnded] = {}
        self._rounds: dict[int, _Round] = {}
        self._round_count = 0
        self._highest = 0
        self._restarts = 0
        self._charged = 0
        self._failures = 0
        self._lost_nodes = 0
        self._evidence: deque[tuple[_Worker, int]] = deque()
        self._evidence_chars = 0
        self._nodes: dict[str, NodeReport] = {}
        self._node_count = 0
        self._node_rounds: Counter[str] = Counter()
        self._node_failures: Counter[str] = Counter()
        self._actions: deque[Action] = deque(maxlen=MAX_ACTIONS)
        self._action_count = 0
        self._checkpoints = 0
        self._checkpoint: tuple[int, float] | None = None
        self._programs: Counter[str] = Counter()
        self._settings: Counter[str] = Counter()
        self._versions: Counter[tuple[str, str]] = Counter()
        self._goodput = Goodput()
        self._losses: dict[str, Loss] = {}  # of rounds that are no longer kept
        self.handlers = _Handlers(
            (
                (events.JobStarted, self._on_job_started),
                (events.NodeJoined, self._on_joined),
                (events.NodeLeaving, self._on_leaving),
                (events.NodeGone, self._on_gone),
                (events.NodeUnhealthy, self._on_unhealthy),
                (events.NodeHealthy, self._on_healthy),
                (events.NodeQuarantined, self._on_quarantined),
                (events.RoundFormed, self._on_formed),
                (events.RoundFound, self._on_found),
                (events.RoundEnded, self._on_ended),
                (events.BudgetCharged, self._on_charged),
                (events.HangDiagnosed, self._on_diagnosed),
                (events.ScaleRequested, self._on_scale),
                (events.OperatorAction, self._on_operator),
                (events.FaultInjected, self._on_fault_injected),
                (events.JobClosing, self._on_closing),
                (events.JobClosed, self._on_closed),
                (events.AgentStarted, self._on_agent_started),
                (events.WorkersStarted, self._on_started),
                (events.Recovered, self._on_recovered),
                (events.FirstStep, self._on_first_step),
                (events.StepsDone, self._on_steps_done),
                (events.CheckpointSaved, self._on_checkpoint),
                (events.WorkerFailed, self._on_failed),
                (events.WorkerHangs, self._on_hangs),
                (events.WorkerEvidence, self._on_evidence),
                (events.WorkersStopping, self._on_stopping),
                (events.AgentEnded, self._on_agent_ended),
            )
        )
        for record in records:
            self.take(record)

    def take(self, record: EventRecord) -> None:
        """Called once for each record, of which there may be millions."""
        self.count += 1
        at = record.at
        if at < self._first:
            self._first = at
        if at > self._last:
            self._last = at
        if not record.node:
            first, last = self._coordinator or (at, at)
            self._coordinator = min(first, at), max(last, at)
            self._goodput.on(record)
        if handler := self.handlers[type(record.event)]:
            handler(record, record.event)
        if self.recent is not None:
            self.recent.append(record)
            if len(self.recent) > MAX_RECENT:
                self.recent = None

    # the job ----------------------------------------------------------------------------------------------------------

    def _on_job_started(self, record: EventRecord, event: events.JobStarted) -> None:
        if self._limits is not None:  # another coordinator, perhaps of another run that has the same id
            self._act(record.at, "coordinator", "a new coordinator took over")
            self.recent = []
            self.is_other_run = self._closed is not None
        self._limits, self._run_id = event, event.run_id
        self._versions["ripstop", event.version] += 0

    def _on_closing(self, record: EventRecord, event: events.JobClosing) -> None:
        self._closing = event.outcome, event.why

    def _on_closed(self, record: EventRecord, event: events.JobClosed) -> None:
        self._closed = event
        self._end_round(self._rounds.get(self._highest), record.at, "", event.why)

    def _on_scale(self, record: EventRecord, event: events.ScaleRequested) -> None:
        result = "" if event.accepted else f" rejected: {event.why}"
        self._act(record.at, "scale", f"scale to {event.nodes} nodes{result}")

    def _on_operator(self, record: EventRecord, event: events.OperatorAction) -> None:
        self._act(record.at, "operator", f"{event.action} by {event.by}: {event.result}")

    def _on_fault_injected(self, record: EventRecord, event: events.FaultInjected) -> None:
        self._act(record.at, "injected", fault_injection.describe(event.fault, record.node, event.rank))

    def _act(self, at: float, kind: str, text: str) -> None:
        self._action_count += 1
        self._actions.append(Action(at, kind, _short(text)))

    # nodes ------------------------------------------------------------------------------------------------------------

    def _on_joined(self, record: EventRecord, event: events.NodeJoined) -> None:
        known = self._nodes.get(event.name)
        if known is not None:  # it rejoined
            self._nodes[event.name] = replace(
                known, host=event.host, slots=event.slots, gone_at=None, is_lost=False, why_gone=""
            )
            self._left.pop(event.name, None)
        else:
            self._add_node(event.name, event.host, event.slots, record.at)

    def _add_node(self, name: str, host: str, slots: int, at: float) -> None:
        self._node_count += 1
        if len(self._nodes) < MAX_NODES:
            self._nodes[name] = NodeReport(name, host, slots, at)

    def _change_node(self, name: str, **changes: Any) -> None:
        if node := self._nodes.get(name):
            self._nodes[name] = replace(node, **changes)

    def _on_leaving(self, record: EventRecord, event: events.NodeLeaving) -> None:
        self._depart(event.name, event.why)
        self._act(record.at, "node left", f"node {event.name} is leaving: {event.why}")

    def _on_gone(self, record: EventRecord, event: events.NodeGone) -> None:
        self._lost_nodes += event.lost
        if event.lost:
            self._act(record.at, "node lost", f"node {event.name} {event.why}")
        self._change_node(event.name, gone_at=record.at, is_lost=event.lost, why_gone=_short(event.why))
        self._depart(event.name, event.why)

    def _depart(self, name: str, why: str) -> None:
        if len(self._left) < MAX_NODES:
            self._left.setdefault(name, why)
        round = self._rounds.get(self._highest)
        if round is not None and round.departure is None:
            round.departure = (name, _short(why))

    def _on_unhealthy(self, record: EventRecord, event: events.NodeUnhealthy) -> None:
        if node := self._nodes.get(event.name):
            self._change_node(event.name, unhealthy=node.unhealthy + 1, problems=tuple(map(_short, event.problems[:8])))
        self._act(record.at, "unhealthy", f"node {event.name} is unhealthy: {'; '.join(event.problems[:8])}")

    def _on_healthy(self, record: EventRecord, event: events.NodeHealthy) -> None:
        self._act(record.at, "healthy", f"node {event.name} is healthy again")

    def _on_quarantined(self, record: EventRecord, event: events.NodeQuarantined) -> None:
        if node := self._nodes.get(event.name):
            self._change_node(event.name, quarantines=node.quarantines + 1)
        self._act(record.at, "quarantine", f"node {event.name} is in quarantine for {event.seconds:g} s: {event.why}")

    def _on_agent_started(self, record: EventRecord, event: events.AgentStarted) -> None:
        self._run_id = self._run_id or event.run_id
        if record.node not in self._nodes:
            self._add_node(record.node, event.host, 0, record.at)
        self._change_node(
            record.node, version=event.version, python=event.python, torch=event.torch, kernel=event.kernel
        )
        found = ("ripstop", event.version), ("python", event.python), ("torch", event.torch), ("kernel", event.kernel)
        for name, version in found:
            if version and len(self._versions) < MAX_SETTINGS:
                self._versions[name, version] += 1
        for known, texts in ((self._programs, (event.program,)), (self._settings, event.settings)):
            if len(known) < MAX_SETTINGS:
                known.update(filter(None, texts))

    def _on_agent_ended(self, record: EventRecord, event: events.AgentEnded) -> None:
        if len(self._ended) < MAX_NODES:
            self._ended[record.node] = event

    # rounds -----------------------------------------------------------------------------------------------------------

    def _round(self, number: int, at: float) -> _Round | None:
        """The round; None if it is too old to be kept."""
        round = self._rounds.get(number)
        if round is None and number > self._highest - MAX_ROUNDS // 2:
            round = self._rounds[number] = _Round(number, at)
            self._round_count += 1
            self._highest = max(self._highest, number)
            if len(self._rounds) > MAX_ROUNDS:
                self._settle_oldest()
        return round

    def _settle_oldest(self) -> None:
        """Move the time of the older half of the rounds to the totals."""
        steps, numbers = self._goodput.rounds(), sorted(self._rounds)
        for number, following in pairwise(numbers[: MAX_ROUNDS // 2 + 1]):
            old = self._rounds.pop(number)
            self._lose(self._losses, old, self._rounds[following].phases(old), steps.get(number))

    def _on_formed(self, record: EventRecord, event: events.RoundFormed) -> None:
        if self.recent is not None and event.round <= self._highest:
            self.is_other_run = True  # within one run, round numbers only grow
            return
        self.recent = None
        if round := self._round(event.round, record.at):
            round.formed_at, round.nodes, round.world_size = record.at, len(event.nodes), event.world_size
            round.why = _short(event.why)
        self._node_rounds.update(name for name in event.nodes if name in self._nodes)

    def _on_found(self, record: EventRecord, event: events.RoundFound) -> None:
        self.recent = None
        if round := self._round(event.round, record.at):
            round.nodes = round.nodes or event.nodes

    def _on_ended(self, record: EventRecord, event: events.RoundEnded) -> None:
        self._restarts += event.cause not in PLANNED
        self._end_round(self._round(event.round, record.at), record.at, event.cause, event.why)

    def _end_round(self, round: _Round | None, at: float, cause: str, why: str) -> None:
        if round is not None and round.ended_at is None:
            round.ended_at, round.cause, round.why_ended = at, _short(cause), _short(why)

    def _on_charged(self, record: EventRecord, event: events.BudgetCharged) -> None:
        if round := self._round(event.round, record.at):
            budget = "" if event.cause == RoundEndCause.APPLICATION else f" for {event.cause} failures"
            used = f"{event.used} of {event.limit} restarts{budget} are used"
            round.decision = f"restarted; {used}" if event.allowed else f"not restarted; {used}"
        if event.cause == RoundEndCause.APPLICATION:
            self._charged = event.used

    def _on_diagnosed(self, record: EventRecord, event: events.HangDiagnosed) -> None:
        if round := self._round(event.round, record.at):
            round.hang = replace(event, odd=event.odd[:MAX_FAILURES], why=_short(event.why))

    def _on_started(self, record: EventRecord, event: events.WorkersStarted) -> None:
        if round := self._round(event.round, record.at - event.seconds):
            round.world_size = round.world_size or event.world_size
            round.nodes = round.nodes or 1
            round.why = round.why or _short(event.why)
            round.started = max(round.started, event.seconds)
        if len(self._pauses) < MAX_NODES or record.node in self._pauses:
            self._pauses[record.node] = event.pause

    def _on_recovered(self, record: EventRecord, event: events.Recovered) -> None:
        wait = self._pauses.get(record.node, 0.0) - event.detect - event.decide - event.stop - event.start
        phases = Phases(event.detect, event.decide, event.stop, max(0.0, wait), event.start)
        if record.node in self._pauses:
            self._recoveries[record.node] = (event.round, phases)
        self._compare_recovery(self._round(event.round, record.at), phases)

    def _on_first_step(self, record: EventRecord, event: events.FirstStep) -> None:
        self._goodput.on(record)
        if round := self._round(event.round, record.at):
            round.first_step = max(round.first_step, event.seconds)
            number, phases = self._recoveries.get(record.node, (0, Phases()))
            if number == event.round:
                self._compare_recovery(round, replace(phases, first_step=event.seconds))

    def _compare_recovery(self, round: _Round | None, phases: Phases) -> None:
        if round is not None and (round.slowest is None or phases.total > round.slowest.total):
            round.slowest = phases

    def _on_steps_done(self, record: EventRecord, event: events.StepsDone) -> None:
        self._goodput.on(record)

    def _on_checkpoint(self, record: EventRecord, event: events.CheckpointSaved) -> None:
        if self._checkpoint is None or self._checkpoint[0] != event.step:  # every rank may report it
            self._checkpoints += 1
            self._checkpoint = (event.step, record.at)

    def _on_stopping(self, record: EventRecord, event: events.WorkersStopping) -> None:
        if (round := self._round(event.round, record.at)) and not self._coordinator:  # a file of one node
            self._end_round(round, record.at, "", event.why)

    # failures ---------------------------------------------------------------------------------------------------------

    def _worker(self, record: EventRecord, number: int, rank: int, why: str, pid: int) -> _Worker | None:
        round = self._round(number, record.at)
        if round is None:
            return None
        worker = round.workers.get(rank)
        if worker is None:
            round.failures += 1
            if len(round.workers) < MAX_FAILURES:
                worker = round.workers[rank] = _Worker(rank, record.node, record.at, _short(why), pid)
        return worker

    def _on_failed(self, record: EventRecord, event: events.WorkerFailed) -> None:
        self._failures += 1
        if record.node in self._nodes:
            self._node_failures[record.node] += 1
        self._worker(record, event.round, event.rank, event.why, event.pid)

    def _on_hangs(self, record: EventRecord, event: events.WorkerHangs) -> None:
        worker = self._worker(record, event.round, event.rank, event.sign, event.pid)
        if worker is not None and worker.evidence is None:
            hang = Hang(event.seconds, event.sign, "", event.where, False, "")
            message = f"{event.sign} for {event.seconds:.0f} s" + (f", {event.where}" if event.where else "")
            failure = Failure(event.rank, 0, event.round, "", record.at, event.pid, message=message, hang=hang)
            worker.evidence = Evidence(failure, is_recorded=False)

    def _on_evidence(self, record: EventRecord, event: events.WorkerEvidence) -> None:
        worker = self._worker(record, event.round, event.rank, event.message, event.pid)
        if worker is None or (worker.evidence is not None and worker.evidence.is_recorded):
            return  # a worker that hung may fail later, while it is stopped
        record = bounded_record(record)  # a file may be anybody's
        assert isinstance(record.event, events.WorkerEvidence)
        event = record.event
        worker.evidence = from_event(event)
        size = len(event.traceback) + sum(map(len, event.log_tail))
        self._evidence.append((worker, size))
        self._evidence_chars += size
        while self._evidence_chars > MAX_EVIDENCE_CHARS:
            old, chars = self._evidence.popleft()
            self._evidence_chars -= chars
            if old.evidence is not None:
                old.evidence = replace(
                    old.evidence, failure=replace(old.evidence.failure, traceback="", log_tail=("(left out)",))
                )

    # the report -------------------------------------------------------------------------------------------------------

    def report(self, notes: tuple[str, ...]) -> Report:
        began = self._coordinator[0] if self._coordinator else self._first
        result, why = self._result()
        ended = self._end_time(result)
        steps = self._goodput.rounds()
        rounds = self._round_reports(steps)
        incidents = self._incidents(result, rounds, steps)
        time = self._time_spent(began, ended, rounds, steps)
        cause = incidents[-1].title if incidents and incidents[-1].is_end else ""
        if not cause and result not in (JobResult.SUCCEEDED, JobResult.UNFINISHED):
            cause = why
        spent = self._goodput.spent(ended)
        done = {number: one for number, one in steps.items() if one.last > one.first}
        duration, count = sum(s.seconds for s in done.values()), sum(s.last - s.first for s in done.values())
        latest = self._rounds.get(self._highest)
        summary = Summary(
            run_id=self._run_id,
            result=result,
            why=why,
            cause=cause,
            began=began,
            ended=ended,
            seconds=max(0.0, ended - began),
            rounds=self._round_count,
            restarts=self._restarts,
            charged=self._charged,
            max_restarts=self._limits.max_restarts if self._limits else None,
            worker_failures=self._failures,
            nodes=self._node_count,
            nodes_lost=self._lost_nodes,
            world_size=latest.world_size if latest else 0,
            goodput=spent.ratio if self._goodput.has_steps and self._coordinator else None,
            last_step=max((one.last for one in steps.values()), default=None),
            seconds_per_step=duration / count if count else None,
            checkpoints=self._checkpoints,
            checkpoint_step=self._checkpoint[0] if self._checkpoint else None,
            checkpoint_at=self._checkpoint[1] if self._checkpoint else None,
        )
        return Report(
            summary=summary,
            time=time,
            incidents=incidents,
            rounds=rounds,
            nodes=self._node_reports(incidents),
            actions=tuple(self._actions),
            programs=tuple(self._programs)[:8],
            settings=_settings((*text.partition("=")[::2], count) for text, count in self._settings.items()),
            versions=_settings((*version, count) for version, count in self._versions.items()),
            notes=(*notes, *self._notes()),
            omitted=self._omitted(),
            events=self.count,
        )

    def _result(self) -> tuple[JobResult, str]:
        if self._closed is not None:
            return _result_of(self._closed.outcome), self._closed.why
        if self._closing is not None:
            return _result_of(self._closing[0]), self._closing[1]
        host = self._limits.coordinator_node if self._limits else ""
        if host and (host in self._left or host in self._ended):
            why = self._left.get(host) or self._ended[host].why
            return JobResult.INTERRUPTED, f"node {host}, which ran the coordinator, {_left(why)}"
        if self._coordinator is None and self._ended and self._ended.keys() >= self._nodes.keys():
            worst = max(self._ended.values(), key=lambda end: end.code)
            results = JobResult.FAILED if worst.code < 128 else JobResult.INTERRUPTED
            return results if worst.code else JobResult.SUCCEEDED, worst.why
        if orphan := next((node for node in self._ended if self._coordinator and node not in self._left), ""):
            why = f"the process of the coordinator was killed, and node {orphan} ended without it"
            return JobResult.UNFINISHED, f"{why}: {self._ended[orphan].why}"
        return JobResult.UNFINISHED, (
            "the events have no end of the job: it still runs, or the process of its coordinator was killed "
            "(SIGKILL, out of memory, or a lost machine)"
        )

    def _end_time(self, result: JobResult) -> float:
        if self._coordinator and result is not JobResult.UNFINISHED:
            return self._coordinator[1]
        return self._last

    def _notes(self) -> Iterable[str]:
        if self.earlier_runs:
            yield f"The event file also has {self.earlier_runs} earlier runs of this id. This is the last one."
        if self._coordinator is None:
            yield "These are the events of single nodes: goodput, rounds and decisions are the coordinator's events."
        if not self._goodput.has_steps:
            yield "No worker reported a step, so goodput is unknown. Call ripstop.train.heartbeat(step) in the script."

    def _omitted(self) -> dict[str, int]:
        kept = {
            "rounds": (self._round_count, len(self._rounds)),
            "nodes": (self._node_count, len(self._nodes)),
            "actions": (self._action_count, len(self._actions)),
        }
        return {name: count - held for name, (count, held) in kept.items() if count > held}

    def _round_reports(self, steps: dict[int, RoundSteps]) -> tuple[RoundReport, ...]:
        found: list[RoundReport] = []
        previous: _Round | None = None
        for number in sorted(self._rounds):
            round = self._rounds[number]
            phases, own = round.phases(previous), steps.get(number)
            count = own.last - own.first if own else 0
            running_at = round.formed_at + phases.start + phases.first_step
            if previous is not None:
                fault_at = (previous.ended_at or round.formed_at) - phases.detect
                running_at = max(round.formed_at, fault_at + phases.total)
                found[-1] = replace(found[-1], trained_until=fault_at)
            found.append(
                RoundReport(
                    number=number,
                    formed_at=round.formed_at,
                    running_at=running_at,
                    trained_until=round.ended_at if round.ended_at is not None else self._last,
                    ended_at=round.ended_at,
                    nodes=round.nodes,
                    world_size=round.world_size,
                    why=round.why,
                    cause=round.cause,
                    why_ended=round.why_ended,
                    phases=phases,
                    first_step=own.first if own else None,
                    last_step=own.last if own else None,
                    seconds_per_step=own.seconds / count if own and count else None,
                    repeated=own.seconds_lost if own else 0.0,
                    repeated_steps=own.steps_lost if own else 0,
                )
            )
            previous = round
        return tuple(found)

    def _time_spent(
        self, began: float, ended: float, rounds: tuple[RoundReport, ...], steps: dict[int, RoundSteps]
    ) -> TimeSpent:
        losses = dict(self._losses)
        for before, after in pairwise(rounds):
            self._lose(losses, self._rounds[before.number], after.phases, steps.get(before.number))
        total = max(0.0, ended - began)
        downtime = min(total, sum(loss.phases.total for loss in losses.values()))
        first = rounds[0] if rounds and not self._losses else None
        startup = min(total - downtime, max(0.0, first.running_at - began)) if first else 0.0
        if first is not None:
            phases = Phases(
                wait=max(0.0, startup - first.phases.total),
                start=first.phases.start,
                first_step=first.phases.first_step,
            )
            losses[STARTUP] = Loss(STARTUP, 1, phases, 0.0, 0, startup)
        spent = self._goodput.spent(ended)
        has_steps = self._goodput.has_steps
        return TimeSpent(
            total=total,
            startup=startup,
            running=max(0.0, total - startup - downtime),
            downtime=downtime,
            in_steps=spent.kept if has_steps else None,
            repeated=spent.lost if has_steps else None,
            repeated_steps=spent.steps_lost,
            losses=tuple(sorted(losses.values(), key=lambda loss: -loss.total)),
        )

    def _lose(self, losses: dict[str, Loss], ended: _Round, phases: Phases, steps: RoundSteps | None) -> None:
        cause = ended.cause or "unknown"
        old = losses.get(cause, Loss(cause, 0, Phases(), 0.0, 0, 0.0))
        repeated, repeated_steps = (steps.seconds_lost, steps.steps_lost) if steps else (0.0, 0)
        summed = Phases(*(getattr(old.phases, f) + getattr(phases, f) for f in Phases.__struct_fields__))
        losses[cause] = Loss(
            cause,
            old.count + 1,
            summed,
            old.repeated + repeated,
            old.repeated_steps + repeated_steps,
            old.total + phases.total + repeated,
        )

    def _incidents(
        self, result: JobResult, rounds: tuple[RoundReport, ...], steps: dict[int, RoundSteps]
    ) -> tuple[Incident, ...]:
        downtime = {before.number: after.phases.total for before, after in pairwise(rounds)}
        found = []
        for number in sorted(self._rounds):
            round = self._rounds[number]
            is_end = number == self._highest and result not in (JobResult.SUCCEEDED, JobResult.UNFINISHED)
            incident = self._incident(round, is_end, result)
            if incident is not None:
                own = steps.get(number)
                repeated = (own.seconds_lost, own.steps_lost) if own else (0.0, 0)
                found.append(
                    replace(
                        incident,
                        downtime=downtime.get(number, 0.0),
                        repeated=repeated[0],
                        repeated_steps=repeated[1],
                    )
                )
        return tuple(found)

    def _incident(self, round: _Round, is_end: bool, result: JobResult) -> Incident | None:
        """What ended the round, if it was no plan (rule 5)."""
        if round.cause in PLANNED or (not round.workers and not round.departure and not round.hang):
            return None
        at = round.ended_at if round.ended_at is not None else self._last
        by_node = round.cause in (RoundEndCause.NODE_LOST, RoundEndCause.NODE_LEFT, RoundEndCause.NODE_UNFIT)
        is_node_gone = round.departure is not None and (by_node or (is_end and not round.workers))
        if not is_node_gone and not round.workers:
            return None
        ordered = self._ordered(round)
        root, victims, node = None, ordered, ""
        if is_node_gone and round.departure is not None:
            node, why = round.departure
            is_lost = node in self._nodes and self._nodes[node].is_lost
            title = f"node {node} was lost: {why.removeprefix('lost: ')}" if is_lost else f"node {node} {_left(why)}"
            cause = round.cause or (RoundEndCause.NODE_LOST if is_lost else RoundEndCause.NODE_LEFT)
        else:
            first, *victims = ordered
            root, node = self._worker_report(first, round.number), first.node
            if round.hang and first.rank in round.hang.odd:
                root = replace(root, how="the other ranks wait for it")
            at, title = root.at, _title(root, round.hang)
            cause = round.cause or (RoundEndCause.INFRASTRUCTURE if root.is_hang else RoundEndCause.APPLICATION)
        shown = tuple(self._worker_report(worker, round.number) for worker in victims)
        count = round.failures - (root is not None)
        decision = round.decision or ("restarted without the node, which costs no restart" if by_node else "")
        title, decision = truncate(title, MAX_TITLE), truncate(decision, MAX_MESSAGE)
        return Incident(round.number, at, cause, title, decision, is_end, node, root, shown, count, 0.0, 0.0, 0)

    def _ordered(self, round: _Round) -> list[_Worker]:
        """The failed workers, the root cause first."""
        if not round.workers:
            return []
        odd = round.hang.odd if round.hang else ()
        ranks = [failure.rank for failure in order(worker.failure(round.number) for worker in round.workers.values())]
        ranks.sort(key=lambda rank: rank not in odd)
        return [round.workers[rank] for rank in ranks]

    def _worker_report(self, worker: _Worker, round: int) -> WorkerReport:
        failure = worker.failure(round)
        node = self._nodes.get(worker.node)
        evidence = worker.evidence
        return WorkerReport(
            rank=worker.rank,
            node=worker.node,
            host=failure.host or (node.host if node else ""),
            at=failure.at,
            how=how(failure) if evidence else "failed",
            message=truncate(failure.message, MAX_MESSAGE),
            pid=failure.pid,
            local_rank=failure.local_rank if evidence else None,
            oom=failure.oom,
            collectives=evidence.collectives if evidence else "",
            is_hang=failure.hang is not None,
            traceback=failure.traceback,
            log_tail=tail_without_traceback(failure),
            files=evidence.files if evidence else (),
        )

    def _node_reports(self, incidents: tuple[Incident, ...]) -> tuple[NodeReport, ...]:
        roots = Counter(incident.node for incident in incidents)
        return tuple(
            replace(
                node,
                rounds=self._node_rounds[name],
                worker_failures=self._node_failures[name],
                root_causes=roots[name],
            )
            for name, node in self._nodes.items()
        )


def _title(root: WorkerReport, hang: events.HangDiagnosed | None) -> str:
    who = f"rank {root.rank} on {root.host}" if root.host else f"rank {root.rank}"
    if root.is_hang:
        odd = who if hang is None or len(hang.odd) < 2 else rank_list(sorted(hang.odd))
        return f"{odd} {'hung' if hang and hang.odd else 'made no progress'}: {hang.why if hang else root.message}"
    message = root.message.split("\n", 1)[0]
    return f"{who} {root.how}" if message in ("", root.how) else f"{who}: {message}"


def _short(text: str) -> str:
    """A text that is kept: a file may be anybody's."""
    return truncate(text, MAX_TEXT)


def _result_of(outcome: str) -> JobResult:
    """The result; of an outcome that this version does not know, that the job did not succeed."""
    return JobResult(outcome) if outcome in JobResult.__members__.values() else JobResult.FAILED


def _left(why: str) -> str:
    return why if why.startswith("left") else f"left: {why}"


def _settings(found: Iterable[tuple[str, str, int]]) -> tuple[Setting, ...]:
    return tuple(Setting(*one) for one in sorted(found))
