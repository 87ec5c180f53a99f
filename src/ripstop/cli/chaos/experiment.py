"""Decides when `ripstop chaos` injects its faults, and when the job has healed from each.  Pure.

Rules:

1. One fault at a time: a fault is due at its time, but not before the one before it is over, and the job trains.
2. The job trains if every node of its latest round has started its workers, and a worker has reported a step in that
   round.  If no worker has reported a step in any round, started workers are enough.
3. A fault is healed when a later round trains.  A fault that the round can survive is also healed if the fault is over
   and every worker that reports progress has made some since; the samples of two reads are compared.
4. A fault that is not healed in time is not healed, and the experiment goes on.  A fault that cannot be injected in
   time, or because the job is over, is not injected.
5. Times are those of the caller's clock: clocks of nodes may differ.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ripstop.cli.chaos.plan import ScheduledFault
from ripstop.cli.chaos.results import Outcome, Result
from ripstop.model import events

SAMPLE_INTERVAL_S = 0.5
MAX_ROUNDS = 100  # that are remembered


# inputs ---------------------------------------------------------------------------------------------------------------


class Injected(Struct, frozen=True):
    """The job's reply to `Inject`; `skipped` is why the fault was not injected."""

    id: str = ""
    node: str = ""
    rank: int = -1
    round: int = 0
    skipped: str = ""


class Sampled(Struct, frozen=True):
    """The job's status and usage; `at` tells one collection of samples from another."""

    round: int
    nodes: tuple[str, ...]  # of the round
    at: float
    progress: Mapping[int, tuple[int | None, float | None]]  # by rank: step, seconds since its last heartbeat
    is_complete: bool  # every rank of the round is in it


class Tick(Struct, frozen=True):
    """A deadline has passed."""


Input = events.EventRecord | Injected | Sampled | Tick


# commands -------------------------------------------------------------------------------------------------------------


class Inject(Struct, frozen=True):
    """Choose the target and inject the fault, then report `Injected`."""

    fault: ScheduledFault


class Sample(Struct, frozen=True):
    """Read the job's status and usage, then report `Sampled` if it replies."""


class Report(Struct, frozen=True):
    """A fault has its result."""

    result: Result


class Finish(Struct, frozen=True):
    """All faults have their results."""


Command = Inject | Sample | Report | Finish


class _Open(Struct):
    """The fault that is being injected, or that has not healed."""

    fault: ScheduledFault
    since: float
    reply: Injected | None = None
    is_over: bool = False
    is_reported: bool = False


class Experiment:
    """`coordinator` is the node that hosts the coordinator now; empty: none."""

    def __init__(self, schedule: tuple[ScheduledFault, ...], heal_within: float, now: float) -> None:
        self._waiting = list(schedule)
        self._heal_within = heal_within
        self._start = now
        self._open: _Open | None = None
        self._idle_since = now
        self._sample_at = now
        self._samples: list[Sampled] = []  # since the last fault began or ended
        self._is_finished = False
        self._closed = ""
        self.coordinator = ""
        self._rounds: dict[int, tuple[str, ...]] = {}  # the nodes of each round
        self._started: dict[int, set[str]] = {}
        self._stepped: set[int] = set()  # rounds in which a worker has reported a step
        self._ended: set[str] = set()  # ids of faults that are over

    def deadline(self) -> float | None:
        if self._is_finished:
            return None
        if self._open is not None:
            return min(self._sample_at, self._heal_deadline(self._open))
        due = self._start + self._waiting[0].at
        return due if self._trains() else min(self._sample_at, self._latest_injection())

    def on(self, event: Input, now: float) -> list[Command]:
        if self._is_finished:
            return []
        out: list[Command] = []
        match event:
            case events.EventRecord():
                self._on_event(event)
            case Injected():
                out += self._on_injected(event, now)
            case Sampled():
                self._on_sample(event)
        return [*out, *self._advance(now)]

    # what happens in the job ------------------------------------------------------------------------------------------

    def _on_event(self, record: events.EventRecord) -> None:
        match record.event:
            case events.JobStarted(coordinator_node=node) if not record.node:
                self.coordinator = node
            case events.RoundFormed(round, nodes) if not record.node:
                self._rounds[round] = nodes
                for known in (self._rounds, self._started):
                    while len(known) > MAX_ROUNDS:
                        del known[min(known)]
            case events.WorkersStarted(round):
                self._started.setdefault(round, set()).add(record.node)
            case events.FirstStep(round):
                self._stepped.add(round)
            case events.FaultEnded(id):
                self._ended.add(id)
            case events.JobClosed(outcome, why) if not record.node:
                self._closed = f"the job is over: {outcome}: {why}"

    def _on_sample(self, sample: Sampled) -> None:
        """Samples tell what the events did not: the coordinator keeps only the latest ones."""
        self._samples.append(sample)
        if self._open is None and _has_progress_since_fault(self._samples, sample.round):
            self._rounds.setdefault(sample.round, sample.nodes)
            self._started.setdefault(sample.round, set()).update(sample.nodes)
            if any(step is not None for step, _ in sample.progress.values()):
                self._stepped.add(sample.round)

    def _trains(self, after: int = 0) -> int:
        """The number of the latest round, if it trains and is later than this one; otherwise 0 (rule 2)."""
        round = max(self._rounds, default=0)
        has_started = set(self._rounds.get(round, ())) <= self._started.get(round, set())
        has_stepped = round in self._stepped or not self._stepped
        return round if round > after and has_started and has_stepped else 0

    def _on_injected(self, reply: Injected, now: float) -> list[Command]:
        assert self._open is not None and self._open.reply is None, "a reply belongs to the fault being injected"
        if reply.skipped:
            return self._close(Outcome.SKIPPED, now, node=reply.node, rank=reply.rank, why=reply.skipped)
        self._open.reply = reply
        self._samples = []
        return []

    # decisions --------------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> list[Command]:
        out: list[Command] = []
        if self._open is not None and self._open.reply is not None:
            out += self._judge(self._open, self._open.reply, now)
        if self._open is None:
            out += self._next(now)
        needs_samples = self._open.reply is not None if self._open is not None else not self._trains()
        if needs_samples and not self._is_finished and now >= self._sample_at:
            self._sample_at = now + SAMPLE_INTERVAL_S
            out.append(Sample())
        return out

    def _judge(self, open: _Open, reply: Injected, now: float) -> list[Command]:
        """Rule 3; the fault stays open until it is over, so that the next one comes after it (rule 1)."""
        if not open.is_over and reply.id in self._ended:
            open.is_over = True
            self._samples = []
        out: list[Command] = []
        if not open.is_reported:
            later = self._trains(after=reply.round)
            if later:
                out = self._report(Outcome.HEALED, now, round=later, restarted=True)
            elif (
                not open.fault.spec.kind.is_fatal
                and open.is_over
                and _has_progress_since_fault(self._samples, reply.round)
            ):
                out = self._report(Outcome.HEALED, now, round=reply.round)
            elif self._closed:
                out = self._report(Outcome.NOT_HEALED, now, why=self._closed)
            elif now >= self._heal_deadline(open):
                out = self._report(Outcome.NOT_HEALED, now, why=f"not within {self._heal_within:g} s")
        is_over = open.is_over or open.fault.spec.kind.is_fatal or self._closed or now >= self._heal_deadline(open)
        if open.is_reported and is_over:
            self._open, self._idle_since = None, now
        return out

    def _heal_deadline(self, open: _Open) -> float:
        return open.since + open.fault.spec.seconds + self._heal_within

    def _next(self, now: float) -> list[Command]:
        if not self._waiting:
            self._is_finished = True
            return [Finish()]
        why = self._closed
        if not why and not self._trains() and now >= self._latest_injection():
            why = f"the job did not train for {self._heal_within:g} s"
        if why:
            self._open = _Open(self._waiting.pop(0), now)
            return [*self._close(Outcome.NOT_INJECTED, now, why=why), *self._next(now)]
        if now >= self._start + self._waiting[0].at and self._trains():
            self._open = _Open(self._waiting.pop(0), now)
            return [Inject(self._open.fault)]
        return []

    def _latest_injection(self) -> float:
        return max(self._start + self._waiting[0].at, self._idle_since) + self._heal_within

    def _close(self, outcome: Outcome, now: float, **facts: Any) -> list[Command]:
        out = self._report(outcome, now, **facts)
        self._open, self._idle_since = None, now
        return out

    def _report(self, outcome: Outcome, now: float, **facts: Any) -> list[Command]:
        open = self._open
        assert open is not None, "only the open fault gets a result"
        open.is_reported = True
        if open.reply is not None:
            facts |= {"node": open.reply.node, "rank": open.reply.rank}
        if outcome is Outcome.HEALED:
            facts["seconds"] = now - open.since
        fault = open.fault
        return [Report(Result(fault.number, fault.spec.kind, outcome, open.since - self._start, **facts))]


def _has_progress_since_fault(samples: list[Sampled], round: int) -> bool:
    """Whether every worker that reports progress made some between two collections after the fault.

    The first sample may have been collected before the end of the fault, so the second one is the base.
    """
    distinct = list({sample.at: sample for sample in samples}.values())
    if len(distinct) < 3:
        return False
    base, last = distinct[1], distinct[-1]
    return (
        (base.round, last.round) == (round, round)
        and last.is_complete
        and all(
            rank in base.progress
            and _rank_has_progress_since_fault(base.progress[rank][0], step, age, last.at - base.at)
            for rank, (step, age) in last.progress.items()
        )
    )


def _rank_has_progress_since_fault(before: int | None, step: int | None, age: float | None, elapsed: float) -> bool:
    if step is None and age is None:
        return True  # it reports nothing
    has_stepped = step is not None and before is not None and step > before
    return has_stepped or (age is not None and age < elapsed)
