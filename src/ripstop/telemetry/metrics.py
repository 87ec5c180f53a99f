"""What there is to count in a job, reduced from its entries: the numbers behind `/metrics`.  Pure.

Rules: (1) nothing is counted that is not an event: the event files tell the same story; (2) what the coordinator says
counts only when it said it itself; (3) labels come from short lists, so that their number is bounded.

A coordinator that takes over starts from what agents tell it again.
"""

from bisect import bisect_left
from collections import Counter

from msgspec import Struct, field

from ripstop.model.config import MAX_NODES
from ripstop.model.events import (
    BudgetCharged,
    BudgetRefunded,
    CheckpointSaved,
    EventRecord,
    FirstStep,
    NodeGone,
    NodeJoined,
    NodeRejected,
    Recovered,
    RoundEndCause,
    RoundEnded,
    RoundFormed,
    WorkerFailed,
    kind,
)
from ripstop.telemetry.goodput import Goodput

STAGES = ("detect", "decide", "stop", "start", "first_step")
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)  # seconds


class Histogram(Struct):
    """How many observations were at most so large."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))  # the last: larger than all bounds
    sum: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(BOUNDS, value)] += 1
        self.sum += value


class Totals(Struct):
    """The counts of one job; `on` takes its entries in the journal's order."""

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
    checkpoints: int = 0
    checkpoint: tuple[int, float] | None = None  # the latest: its step, and when
    goodput: Goodput = field(default_factory=Goodput)
    _recovered: dict[str, int] = field(default_factory=dict)  # the round in which each node last recovered

    def on(self, entry: EventRecord) -> None:
        """Something happened in the job."""
        self.events[kind(entry.event)] += 1
        self.goodput.on(entry)
        if entry.node:
            self._of_agent(entry)
        else:
            self._of_coordinator(entry)

    def _of_coordinator(self, entry: EventRecord) -> None:
        match entry.event:
            case RoundFormed():
                self.rounds += 1
            case RoundEnded(cause=cause):
                self.restarts[cause] += 1
            case BudgetCharged(allowed=allowed):
                self.charged += allowed  # a charge that was refused costs nothing, and ends the job
            case BudgetRefunded():
                self.refunded += 1
            case NodeJoined():
                self.nodes_joined += 1
            case NodeRejected():
                self.nodes_rejected += 1
            case NodeGone(name, _, lost):
                self.nodes_lost += lost
                self.nodes_left += not lost
                self._recovered.pop(name, None)

    def _of_agent(self, entry: EventRecord) -> None:
        match entry.event:
            case WorkerFailed():
                self.worker_failures += 1
            case Recovered(round, detect, decide, stop, start):
                self._recovered[entry.node] = round
                if len(self._recovered) > MAX_NODES:  # names that never joined
                    del self._recovered[next(iter(self._recovered))]
                for stage, seconds in zip(STAGES, (detect, decide, stop, start), strict=False):
                    if seconds > 0:  # it had a part in it
                        self.recovery[stage].observe(seconds)
            case FirstStep(round=round, seconds=seconds):
                if self._recovered.get(entry.node) == round:  # a first step after a first start heals nothing
                    self.recovery["first_step"].observe(seconds)
            case CheckpointSaved(step=step):
                if self.checkpoint is None or self.checkpoint[0] != step:  # every rank may say it
                    self.checkpoints += 1
                    self.checkpoint = (step, entry.at)
