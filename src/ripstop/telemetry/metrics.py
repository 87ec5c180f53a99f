"""Counts the events of a job for `/metrics`.  Pure.

Rules: (1) only events are counted, so the event files contain the same numbers; (2) events of the coordinator count
only if the coordinator recorded them; (3) labels come from short lists, so that their number is bounded.

A new coordinator starts with the records that agents send again.
"""

from bisect import bisect_left
from collections import Counter

from msgspec import Struct, field

from ripstop.model import events
from ripstop.model.config import MAX_NODES
from ripstop.model.events import RESTORE_SOURCES, EventRecord, RoundEndCause, event_kind
from ripstop.telemetry.goodput import Goodput

STAGES = (*events.RECOVERY_PHASES, "first_step")
BUCKET_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram(Struct):
    """The number of observations in each bucket."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKET_BOUNDS_S) + 1))  # the last: above all bounds
    sum: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(BUCKET_BOUNDS_S, value)] += 1
        self.sum += value


class Totals(Struct):
    """The counts of one job; `on` takes its records in the journal's order."""

    events: Counter[str] = field(default_factory=Counter)  # by kind
    rounds: int = 0
    restarts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(RoundEndCause, 0)))
    charged: int = 0
    refunded: int = 0
    worker_failures: int = 0
    nodes_joined: int = 0
    nodes_left: int = 0
    nodes_lost: int = 0
    nodes_rejected: int = 0
    recovery: dict[str, Histogram] = field(default_factory=lambda: {stage: Histogram() for stage in STAGES})
    inplace: int = 0
    recovered_round: int = 0  # the latest round that was a recovery; 0: none
    kept: int = 0  # the workers that went on in place in it
    checkpoints: int = 0
    checkpoint: tuple[int, float] | None = None  # the latest: step and time
    state_restores: dict[str, Histogram] = field(default_factory=dict)  # by source
    restored_from: dict[int, set[str]] = field(default_factory=dict)  # the sources of the latest round that restored
    goodput: Goodput = field(default_factory=Goodput)
    _recovered: dict[str, int] = field(default_factory=dict)  # the round in which each node last recovered

    def on(self, record: EventRecord) -> None:
        self.events[event_kind(record.event)] += 1
        self.goodput.on(record)
        if record.node:
            self._on_agent_event(record)
        else:
            self._on_coordinator_event(record)

    def _on_coordinator_event(self, record: EventRecord) -> None:
        match record.event:
            case events.RoundFormed():
                self.rounds += 1
            case events.RoundEnded(cause=cause):
                self.restarts[cause] += 1
            case events.BudgetCharged(allowed=allowed):
                self.charged += allowed  # a charge that is not allowed ends the job and is not counted
            case events.BudgetRefunded():
                self.refunded += 1
            case events.NodeJoined():
                self.nodes_joined += 1
            case events.NodeRejected():
                self.nodes_rejected += 1
            case events.NodeGone(name, _, lost):
                self.nodes_lost += lost
                self.nodes_left += not lost
                self._recovered.pop(name, None)

    def _on_agent_event(self, record: EventRecord) -> None:
        match record.event:
            case events.WorkerFailed():
                self.worker_failures += 1
            case events.Recovered(round, kept=kept) as recovered:
                self.inplace += kept > 0
                if round > self.recovered_round:
                    self.recovered_round, self.kept = round, 0
                if round == self.recovered_round:  # records may arrive late
                    self.kept += kept
                self._recovered[record.node] = round
                if len(self._recovered) > MAX_NODES:  # records may contain names of nodes that never joined
                    del self._recovered[next(iter(self._recovered))]
                for stage in events.RECOVERY_PHASES:
                    if (seconds := getattr(recovered, stage)) > 0:
                        self.recovery[stage].observe(seconds)
            case events.FirstStep(round=round, seconds=seconds):
                if self._recovered.get(record.node) == round:  # a first step after the first start is no recovery
                    self.recovery["first_step"].observe(seconds)
            case events.StateRestored(round=round, source=source, seconds=seconds) if source in RESTORE_SOURCES:
                self.state_restores.setdefault(source, Histogram()).observe(max(0.0, seconds))
                if round >= max(self.restored_from, default=0):
                    self.restored_from = {round: {source, *self.restored_from.get(round, ())}}
            case events.CheckpointSaved(step=step):
                if self.checkpoint is None or self.checkpoint[0] != step:  # every rank may report it
                    self.checkpoints += 1
                    self.checkpoint = (step, record.at)
