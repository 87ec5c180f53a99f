"""Collects from the event records of a job what its report needs, in one pass.  Pure.

Rules: (1) records may be of the whole job or of one node, and may end anywhere; (2) what is kept is bounded: of rounds,
failures, nodes and actions the latest, while all of them are counted; (3) of several runs with one id, the last one
counts.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ripstop.diagnostics.evidence_events import Evidence, evidence_from_event
from ripstop.model import events, fault_injection
from ripstop.model.events import MAX_TEXT, EventRecord, RoundEndCause
from ripstop.model.failure import Failure, Hang
from ripstop.model.text_formatting import truncate
from ripstop.protocol.limits import event_record_within_limits
from ripstop.report.model import Action, Loss, NodeReport, Phases, StragglerReport
from ripstop.telemetry.goodput import MAX_OPEN_ROUNDS, Goodput, RoundSteps

MAX_ROUNDS = MAX_OPEN_ROUNDS  # of which at least the latest half is kept
MAX_FAILURES = 64  # of one round that are kept
MAX_EVIDENCE_CHARS = 4 << 20  # of all tracebacks and log lines; those of the oldest failures are dropped
MAX_NODES = 10_000
MAX_ACTIONS = 1000
MAX_SETTINGS = 256
MAX_STRAGGLERS = 1000
MAX_STRAGGLER_RANKS = 64  # of one node
MAX_RECENT = 10_000
PLANNED = frozenset({RoundEndCause.NODE_JOINED, RoundEndCause.SCALED, RoundEndCause.OPERATOR})


def collect_facts(records: Iterable[EventRecord]) -> "Facts":
    """The facts of the last run."""
    facts = Facts()
    for record in records:
        facts.take(record)
        if facts.is_other_run:
            facts = Facts(earlier_runs=facts.earlier_runs + 1, records=facts.recent or ())
    return facts


class FailedWorkerFacts(Struct):
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


class RoundFacts(Struct):
    """One round, as far as its records have been read."""

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
    workers: dict[int, FailedWorkerFacts] = field(default_factory=dict)
    failures: int = 0

    def phases(self, previous: "RoundFacts | None") -> Phases:
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


class Facts:
    """What the records say about one run.  They are taken in order, each kind that matters by its own method."""

    def __init__(self, earlier_runs: int = 0, records: Iterable[EventRecord] = ()) -> None:
        self.earlier_runs = earlier_runs
        self.is_other_run = False  # the latest record shows that `recent` are records of another run
        self.recent: list[EventRecord] | None = None  # since a coordinator began, until its first round
        self.count = 0
        self.run_id = ""
        self.job_started: events.JobStarted | None = None
        self.first_at, self.last_at = math.inf, -math.inf  # the first and the last record, by any clock
        self.coordinator_times: tuple[float, float] | None = None  # its first and last record
        self.closing: tuple[str, str] | None = None
        self.closed: events.JobClosed | None = None
        self._recoveries: dict[str, tuple[int, Phases]] = {}  # the latest of each node: the round, and the phases
        self.departed: dict[str, str] = {}  # nodes that leave or left, and why
        self.ended_agents: dict[str, events.AgentEnded] = {}
        self.rounds: dict[int, RoundFacts] = {}
        self.round_count = 0
        self.highest_round = 0
        self.restarts = 0
        self.charged = 0
        self.worker_failures = 0
        self.lost_nodes = 0
        self._evidence: deque[tuple[FailedWorkerFacts, int]] = deque()
        self._evidence_chars = 0
        self.nodes: dict[str, NodeReport] = {}
        self.node_count = 0
        self.node_rounds: Counter[str] = Counter()
        self.node_failures: Counter[str] = Counter()
        self.actions: deque[Action] = deque(maxlen=MAX_ACTIONS)
        self.action_count = 0
        self.stragglers: deque[StragglerReport] = deque(maxlen=MAX_STRAGGLERS)
        self.straggler_count = 0
        self.checkpoints = 0
        self.checkpoint: tuple[int, float] | None = None
        self.programs: Counter[str] = Counter()
        self.settings: Counter[str] = Counter()
        self.versions: Counter[tuple[str, str]] = Counter()
        self.goodput = Goodput()
        self.losses: dict[str, Loss] = {}  # of rounds that are no longer kept
        self._handlers = _Handlers(
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
                (events.StragglerDetected, self._on_straggler),
                (events.StragglerEnded, self._on_straggler_ended),
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
        if at < self.first_at:
            self.first_at = at
        if at > self.last_at:
            self.last_at = at
        if not record.node:
            first, last = self.coordinator_times or (at, at)
            self.coordinator_times = min(first, at), max(last, at)
            self.goodput.on(record)
        if handler := self._handlers[type(record.event)]:
            handler(record, record.event)
        if self.recent is not None:
            self.recent.append(record)
            if len(self.recent) > MAX_RECENT:
                self.recent = None

    # the job ----------------------------------------------------------------------------------------------------------

    def _on_job_started(self, record: EventRecord, event: events.JobStarted) -> None:
        if self.job_started is not None:  # another coordinator, perhaps of another run that has the same id
            self._act(record.at, "coordinator", "a new coordinator took over")
            self.recent = []
            self.is_other_run = self.closed is not None
        self.job_started, self.run_id = event, event.run_id
        self.versions["ripstop", event.version] += 0

    def _on_closing(self, record: EventRecord, event: events.JobClosing) -> None:
        self.closing = event.outcome, event.why

    def _on_closed(self, record: EventRecord, event: events.JobClosed) -> None:
        self.closed = event
        self._end_round(self.rounds.get(self.highest_round), record.at, "", event.why)

    def _on_scale(self, record: EventRecord, event: events.ScaleRequested) -> None:
        result = "" if event.accepted else f" rejected: {event.why}"
        self._act(record.at, "scale", f"scale to {event.nodes} nodes{result}")

    def _on_operator(self, record: EventRecord, event: events.OperatorAction) -> None:
        self._act(record.at, "operator", f"{event.action} by {event.by}: {event.result}")

    def _on_fault_injected(self, record: EventRecord, event: events.FaultInjected) -> None:
        self._act(record.at, "injected", fault_injection.describe_fault_injection(event.fault, record.node, event.rank))

    def _act(self, at: float, kind: str, text: str) -> None:
        self.action_count += 1
        self.actions.append(Action(at, kind, _truncated_fact_text(text)))

    # nodes ------------------------------------------------------------------------------------------------------------

    def _on_joined(self, record: EventRecord, event: events.NodeJoined) -> None:
        known = self.nodes.get(event.name)
        if known is not None:  # it rejoined
            self.nodes[event.name] = replace(
                known, host=event.host, slots=event.slots, gone_at=None, is_lost=False, why_gone=""
            )
            self.departed.pop(event.name, None)
        else:
            self._add_node(event.name, event.host, event.slots, record.at)

    def _add_node(self, name: str, host: str, slots: int, at: float) -> None:
        self.node_count += 1
        if len(self.nodes) < MAX_NODES:
            self.nodes[name] = NodeReport(name, host, slots, at)

    def _change_node(self, name: str, **changes: Any) -> None:
        if node := self.nodes.get(name):
            self.nodes[name] = replace(node, **changes)

    def _on_leaving(self, record: EventRecord, event: events.NodeLeaving) -> None:
        self._depart(event.name, event.why)
        self._act(record.at, "node left", f"node {event.name} is leaving: {event.why}")

    def _on_gone(self, record: EventRecord, event: events.NodeGone) -> None:
        self.lost_nodes += event.lost
        if event.lost:
            self._act(record.at, "node lost", f"node {event.name} {event.why}")
        self._change_node(event.name, gone_at=record.at, is_lost=event.lost, why_gone=_truncated_fact_text(event.why))
        self._depart(event.name, event.why)

    def _depart(self, name: str, why: str) -> None:
        if len(self.departed) < MAX_NODES:
            self.departed.setdefault(name, why)
        round = self.rounds.get(self.highest_round)
        if round is not None and round.departure is None:
            round.departure = (name, _truncated_fact_text(why))

    def _on_unhealthy(self, record: EventRecord, event: events.NodeUnhealthy) -> None:
        if node := self.nodes.get(event.name):
            self._change_node(
                event.name, unhealthy=node.unhealthy + 1, problems=tuple(map(_truncated_fact_text, event.problems[:8]))
            )
        self._act(record.at, "unhealthy", f"node {event.name} is unhealthy: {'; '.join(event.problems[:8])}")

    def _on_healthy(self, record: EventRecord, event: events.NodeHealthy) -> None:
        self._act(record.at, "healthy", f"node {event.name} is healthy again")

    def _on_quarantined(self, record: EventRecord, event: events.NodeQuarantined) -> None:
        if node := self.nodes.get(event.name):
            self._change_node(event.name, quarantines=node.quarantines + 1)
        self._act(record.at, "quarantine", f"node {event.name} is in quarantine for {event.seconds:g} s: {event.why}")

    def _on_agent_started(self, record: EventRecord, event: events.AgentStarted) -> None:
        self.run_id = self.run_id or event.run_id
        if record.node not in self.nodes:
            self._add_node(record.node, event.host, 0, record.at)
        self._change_node(
            record.node, version=event.version, python=event.python, torch=event.torch, kernel=event.kernel
        )
        found = ("ripstop", event.version), ("python", event.python), ("torch", event.torch), ("kernel", event.kernel)
        for name, version in found:
            if version and len(self.versions) < MAX_SETTINGS:
                self.versions[name, version] += 1
        for known, texts in ((self.programs, (event.program,)), (self.settings, event.settings)):
            if len(known) < MAX_SETTINGS:
                known.update(filter(None, texts))

    def _on_agent_ended(self, record: EventRecord, event: events.AgentEnded) -> None:
        if len(self.ended_agents) < MAX_NODES:
            self.ended_agents[record.node] = event

    # rounds -----------------------------------------------------------------------------------------------------------

    def _round(self, number: int, at: float) -> RoundFacts | None:
        """The round; None if it is too old to be kept."""
        round = self.rounds.get(number)
        if round is None and number > self.highest_round - MAX_ROUNDS // 2:
            round = self.rounds[number] = RoundFacts(number, at)
            self.round_count += 1
            self.highest_round = max(self.highest_round, number)
            if len(self.rounds) > MAX_ROUNDS:
                self._settle_oldest()
        return round

    def _settle_oldest(self) -> None:
        """Move the time of the older half of the rounds to the totals."""
        steps, numbers = self.goodput.rounds(), sorted(self.rounds)
        for number, following in pairwise(numbers[: MAX_ROUNDS // 2 + 1]):
            old = self.rounds.pop(number)
            add_loss_fact(self.losses, old, self.rounds[following].phases(old), steps.get(number))

    def _on_formed(self, record: EventRecord, event: events.RoundFormed) -> None:
        if self.recent is not None and event.round <= self.highest_round:
            self.is_other_run = True  # within one run, round numbers only grow
            return
        self.recent = None
        if round := self._round(event.round, record.at):
            round.formed_at, round.nodes, round.world_size = record.at, len(event.nodes), event.world_size
            round.why = _truncated_fact_text(event.why)
        self.node_rounds.update(name for name in event.nodes if name in self.nodes)

    def _on_found(self, record: EventRecord, event: events.RoundFound) -> None:
        self.recent = None
        if round := self._round(event.round, record.at):
            round.nodes = round.nodes or event.nodes

    def _on_ended(self, record: EventRecord, event: events.RoundEnded) -> None:
        self.restarts += event.cause not in PLANNED
        self._end_round(self._round(event.round, record.at), record.at, event.cause, event.why)

    def _end_round(self, round: RoundFacts | None, at: float, cause: str, why: str) -> None:
        if round is not None and round.ended_at is None:
            round.ended_at, round.cause, round.why_ended = at, _truncated_fact_text(cause), _truncated_fact_text(why)

    def _on_charged(self, record: EventRecord, event: events.BudgetCharged) -> None:
        if round := self._round(event.round, record.at):
            budget = "" if event.cause == RoundEndCause.APPLICATION else f" for {event.cause} failures"
            used = f"{event.used} of {event.limit} restarts{budget} are used"
            round.decision = f"restarted; {used}" if event.allowed else f"not restarted; {used}"
        if event.cause == RoundEndCause.APPLICATION:
            self.charged = event.used

    def _on_diagnosed(self, record: EventRecord, event: events.HangDiagnosed) -> None:
        if round := self._round(event.round, record.at):
            round.hang = replace(event, suspects=event.suspects[:MAX_FAILURES], why=_truncated_fact_text(event.why))

    def _on_straggler(self, record: EventRecord, event: events.StragglerDetected) -> None:
        self.straggler_count += 1
        ranks, times = event.ranks[:MAX_STRAGGLER_RANKS], (event.step_time, event.median)
        self.stragglers.append(
            StragglerReport(
                event.round, _truncated_fact_text(event.name), ranks, record.at, *times, _truncated_fact_text(event.why)
            )
        )

    def _on_straggler_ended(self, record: EventRecord, event: events.StragglerEnded) -> None:
        ended = event.round, _truncated_fact_text(event.name), event.ranks[:MAX_STRAGGLER_RANKS]
        for number, found in enumerate(self.stragglers):
            if (found.round, found.node, found.ranks) == ended and found.ended_at is None:
                self.stragglers[number] = replace(found, ended_at=record.at)

    def _on_started(self, record: EventRecord, event: events.WorkersStarted) -> None:
        if round := self._round(event.round, record.at - event.seconds):
            round.world_size = round.world_size or event.world_size
            round.nodes = round.nodes or 1
            round.why = round.why or _truncated_fact_text(event.why)
            round.started = max(round.started, event.seconds)

    def _on_recovered(self, record: EventRecord, event: events.Recovered) -> None:
        phases = Phases(event.detect, event.decide, event.stop, max(0.0, event.wait), event.start)
        if len(self._recoveries) < MAX_NODES or record.node in self._recoveries:
            self._recoveries[record.node] = (event.round, phases)
        self._compare_recovery(self._round(event.round, record.at), phases)

    def _on_first_step(self, record: EventRecord, event: events.FirstStep) -> None:
        self.goodput.on(record)
        if round := self._round(event.round, record.at):
            round.first_step = max(round.first_step, event.seconds)
            number, phases = self._recoveries.get(record.node, (0, Phases()))
            if number == event.round:
                self._compare_recovery(round, replace(phases, first_step=event.seconds))

    def _compare_recovery(self, round: RoundFacts | None, phases: Phases) -> None:
        if round is not None and (round.slowest is None or phases.total > round.slowest.total):
            round.slowest = phases

    def _on_steps_done(self, record: EventRecord, event: events.StepsDone) -> None:
        self.goodput.on(record)

    def _on_checkpoint(self, record: EventRecord, event: events.CheckpointSaved) -> None:
        if self.checkpoint is None or self.checkpoint[0] != event.step:  # every rank may report it
            self.checkpoints += 1
            self.checkpoint = (event.step, record.at)

    def _on_stopping(self, record: EventRecord, event: events.WorkersStopping) -> None:
        if (round := self._round(event.round, record.at)) and not self.coordinator_times:  # a file of one node
            self._end_round(round, record.at, "", event.why)

    # failures ---------------------------------------------------------------------------------------------------------

    def _worker(self, record: EventRecord, number: int, rank: int, why: str, pid: int) -> FailedWorkerFacts | None:
        round = self._round(number, record.at)
        if round is None:
            return None
        worker = round.workers.get(rank)
        if worker is None:
            round.failures += 1
            if len(round.workers) < MAX_FAILURES:
                worker = round.workers[rank] = FailedWorkerFacts(
                    rank, record.node, record.at, _truncated_fact_text(why), pid
                )
        return worker

    def _on_failed(self, record: EventRecord, event: events.WorkerFailed) -> None:
        self.worker_failures += 1
        if record.node in self.nodes:
            self.node_failures[record.node] += 1
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
        record = event_record_within_limits(record)  # a file may be anybody's
        assert isinstance(record.event, events.WorkerEvidence)
        event = record.event
        worker.evidence = evidence_from_event(event)
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


def add_loss_fact(losses: dict[str, Loss], ended: RoundFacts, phases: Phases, steps: RoundSteps | None) -> None:
    """Add the downtime after a round, and its repeated steps, to those of the same cause."""
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


def _truncated_fact_text(text: str) -> str:
    """A text that is kept: a file may be anybody's."""
    return truncate(text, MAX_TEXT)
