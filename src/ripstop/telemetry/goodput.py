"""Computes the share of a job's time that was spent in steps that were kept.  Pure.

Workers report steps by numbers that grow over the whole job.  A round that begins at step `n` has restored a state from
before it: the steps from `n` on of earlier rounds are lost and are repeated.

**Goodput** is the time spent in kept steps, divided by the time since the job began, by the coordinator's clock.  In a
round, the time from the first reported step to the last is divided equally among the steps between.  Not part of it are
start-up, the first step (its beginning is not reported), lost steps, and the time between rounds.

Several nodes report the same steps; of each round, the reports of its lowest rank count.  Rules: (1) reports may arrive
late, repeatedly and in any order; (2) steps of the current round count as kept until a later round begins before them;
(3) a round whose end is not reported counts up to its last observed step.
"""

from msgspec import Struct

from ripstop.model.events import EventRecord, FirstStep, JobClosed, StepsDone

MAX_OPEN_ROUNDS = 1000  # the totals of older rounds are final


class Spent(Struct, frozen=True):
    """The time of a job in seconds: in kept steps, in lost steps, in total; and the number of lost steps."""

    kept: float
    lost: float
    wall: float
    steps_lost: int

    @property
    def ratio(self) -> float:
        return min(1.0, self.kept / self.wall) if self.wall > 0 else 0.0


class RoundSteps(Struct, frozen=True):
    """The steps of one round, the time between the first and the last, and the part of it that was lost."""

    first: int
    last: int
    seconds: float
    seconds_lost: float
    steps_lost: int


class _GoodputSteps(Struct, frozen=True):
    """Steps `first` to `last`, and the time between them, as reported by this rank."""

    rank: int
    first: int
    last: int
    seconds: float

    def split(self, limit: int | None) -> tuple[float, float, int]:
        """The seconds in kept steps (those below the limit) and in lost steps, and the number of lost steps."""
        steps = self.last - self.first
        if steps <= 0:
            return 0.0, 0.0, 0
        kept = steps if limit is None else min(steps, max(0, limit - 1 - self.first))
        kept_seconds = self.seconds * kept / steps
        return kept_seconds, self.seconds - kept_seconds, steps - kept


class _Round(Struct):
    first_step: int  # the lowest one of all workers
    began: tuple[int, str, int, float] | None = None  # the first step of the lowest rank: rank, node, step, time
    observed: _GoodputSteps | None = None  # while the round runs
    final: _GoodputSteps | None = None  # reported at its end


class Goodput:
    """Computes `Spent` from the records of a job."""

    def __init__(self) -> None:
        self._rounds: dict[int, _Round] = {}
        self._final_totals = (0.0, 0.0, 0)
        self._last_closed_round = 0
        self._began: float | None = None
        self._ended: float | None = None

    @property
    def has_steps(self) -> bool:
        return bool(self._rounds)

    @property
    def reporter(self) -> tuple[str, int] | None:
        """The node and the rank whose reports count in the latest round; None if its end is reported."""
        round = self._rounds[max(self._rounds)] if self._rounds else None
        if round is None or round.began is None or round.final is not None:
            return None
        rank, node, _, _ = round.began
        return node, rank

    def on(self, record: EventRecord) -> None:
        if not record.node:  # clocks of nodes may be wrong
            self._began = record.at if self._began is None else min(self._began, record.at)
        match record.event:
            case FirstStep(number, rank, step):
                if round := self._round(number, step):
                    began = (rank, record.node, step, record.at)
                    round.began = began if round.began is None else min(round.began, began)
            case StepsDone(number, rank, first, last, seconds):
                if (round := self._round(number, first)) and (round.final is None or rank < round.final.rank):
                    round.final = _GoodputSteps(rank, first, last, max(0.0, seconds))
            case JobClosed() if not record.node:
                self._ended = record.at

    def on_step(self, number: int, node: str, rank: int, step: int, at: float) -> None:
        """A worker of a running round has reached this step, at this time of its node's clock."""
        round = self._rounds.get(number)
        if round is not None and round.began is not None and round.began[:2] == (rank, node):
            first, began = round.began[2:]
            round.observed = _GoodputSteps(rank, first, step, max(0.0, at - began))

    def spent(self, now: float) -> Spent:
        """The totals at this time."""
        kept, lost, steps_lost = self._final_totals
        for steps in self.rounds().values():
            kept += steps.seconds - steps.seconds_lost
            lost += steps.seconds_lost
            steps_lost += steps.steps_lost
        end = now if self._ended is None else self._ended
        wall = max(0.0, end - self._began) if self._began is not None else 0.0
        return Spent(kept, lost, wall, steps_lost)

    def rounds(self) -> dict[int, RoundSteps]:
        """The steps of the latest rounds, by number; a later round may still turn kept steps into lost ones."""
        found: dict[int, RoundSteps] = {}
        limit: int | None = None
        for number in sorted(self._rounds, reverse=True):
            round = self._rounds[number]
            if steps := round.final or round.observed:
                kept, lost, steps_lost = steps.split(limit)
                found[number] = RoundSteps(steps.first, steps.last, kept + lost, lost, steps_lost)
            limit = round.first_step if limit is None else min(limit, round.first_step)
        return found

    def _round(self, number: int, first: int) -> _Round | None:
        """The round, which began at this step or before; None if its totals are final."""
        if number <= self._last_closed_round:
            return None
        round = self._rounds.setdefault(number, _Round(first))
        round.first_step = min(round.first_step, first)
        if len(self._rounds) > MAX_OPEN_ROUNDS:
            self._close(min(self._rounds))
        return self._rounds.get(number)

    def _close(self, number: int) -> None:
        round = self._rounds.pop(number)
        self._last_closed_round = number
        if steps := round.final or round.observed:
            limit = min((later.first_step for later in self._rounds.values()), default=None)
            kept, lost, steps_lost = self._final_totals
            more = steps.split(limit)
            self._final_totals = (kept + more[0], lost + more[1], steps_lost + more[2])
