"""How much of a job's time went into steps that were kept.  Pure.

A step is known by its number, which workers report and which grows over the whole job.  A round that begins at step
`n` has gone back to before it: what earlier rounds did of the steps from `n` on was in vain, and was done again.

**Goodput** is the time spent in kept steps, divided by the time since the job began, by the coordinator's clock.  In a
round, the time from its first reported step to its last is spread evenly over the steps between.  What is not in there
is not good: starting, the first step (nobody reported its beginning), lost steps, the time between rounds.

Several nodes report the same steps: of each round, the word of its lowest rank counts, for no other reason than that it
is one word.  Rules: (1) reports may come late, twice and in any order; (2) steps of the round that runs count as kept
until a later round begins before them; (3) a round whose end nobody told counts as far as it was seen.
"""

from msgspec import Struct

from ripstop.model.events import EventRecord, FirstStep, JobClosed, StepsDone

MOST_ROUNDS = 1000  # looked at again when a later round begins before them; older ones are settled


class Spent(Struct, frozen=True):
    """Where a job's time went, in seconds, and how many steps were done in vain."""

    kept: float
    lost: float
    wall: float
    steps_lost: int

    @property
    def ratio(self) -> float:
        return min(1.0, self.kept / self.wall) if self.wall > 0 else 0.0


class _Span(Struct, frozen=True):
    """Steps `first` to `last`, so long apart, as this rank reported them."""

    rank: int
    first: int
    last: int
    seconds: float

    def kept(self, limit: int | None) -> int:
        """How many of the steps after the first are below the limit."""
        steps = max(0, self.last - self.first)
        return steps if limit is None else min(steps, max(0, limit - 1 - self.first))

    def before(self, limit: int | None) -> tuple[float, float, int]:
        """The seconds of what is kept and of what is not, and the number of steps that are not."""
        steps = self.last - self.first
        if steps <= 0:
            return 0.0, 0.0, 0
        kept = self.kept(limit)
        good = self.seconds * kept / steps
        return good, self.seconds - good, steps - kept


class _Round(Struct):
    """What is known of one round."""

    lowest: int  # the lowest step that anybody began with
    began: tuple[int, str, int, float] | None = None  # the lowest rank that began: rank, node, step, when
    seen: _Span | None = None  # how far it was seen
    done: _Span | None = None  # how far it came


class Goodput:
    """What `Spent` says of a job, from its entries."""

    def __init__(self) -> None:
        self._rounds: dict[int, _Round] = {}
        self._settled = (0.0, 0.0, 0)
        self._settled_round = 0
        self._began: float | None = None
        self._ended: float | None = None

    @property
    def known(self) -> bool:
        """Has any worker reported a step?"""
        return bool(self._rounds)

    @property
    def teller(self) -> tuple[str, int] | None:
        """The node and the rank whose word counts in the latest round, unless all is told of it."""
        round = self._rounds[max(self._rounds)] if self._rounds else None
        if round is None or round.began is None or round.done is not None:
            return None
        rank, node, _, _ = round.began
        return node, rank

    def on(self, entry: EventRecord) -> None:
        """Something happened in the job."""
        if not entry.node:  # a node's clock may say anything
            self._began = entry.at if self._began is None else min(self._began, entry.at)
        match entry.event:
            case FirstStep(number, rank, step):
                if round := self._round(number, step):
                    began = (rank, entry.node, step, entry.at)
                    round.began = began if round.began is None else min(round.began, began)
            case StepsDone(number, rank, first, last, seconds):
                if (round := self._round(number, first)) and (round.done is None or rank < round.done.rank):
                    round.done = _Span(rank, first, last, max(0.0, seconds))
            case JobClosed() if not entry.node:
                self._ended = entry.at

    def progress(self, number: int, node: str, rank: int, step: int, at: float) -> None:
        """A worker of a round that runs has come to this step, at that time of its node's clock."""
        round = self._rounds.get(number)
        if round is not None and round.began is not None and round.began[:2] == (rank, node):
            first, began = round.began[2:]
            round.seen = _Span(rank, first, step, max(0.0, at - began))

    def spent(self, now: float) -> Spent:
        """The sums, by now."""
        kept, lost, steps_lost = self._settled
        limit: int | None = None
        for number in sorted(self._rounds, reverse=True):
            round = self._rounds[number]
            if span := round.done or round.seen:
                good, bad, vain = span.before(limit)
                kept, lost, steps_lost = kept + good, lost + bad, steps_lost + vain
            limit = round.lowest if limit is None else min(limit, round.lowest)
        end = now if self._ended is None else self._ended
        wall = max(0.0, end - self._began) if self._began is not None else 0.0
        return Spent(kept, lost, wall, steps_lost)

    def _round(self, number: int, first: int) -> _Round | None:
        """The round, begun at this step or before; None for one that is settled."""
        if number <= self._settled_round:
            return None
        round = self._rounds.setdefault(number, _Round(first))
        round.lowest = min(round.lowest, first)
        if len(self._rounds) > MOST_ROUNDS:
            self._settle(min(self._rounds))
        return self._rounds.get(number)

    def _settle(self, number: int) -> None:
        round = self._rounds.pop(number)
        self._settled_round = number
        if span := round.done or round.seen:
            limit = min((later.lowest for later in self._rounds.values()), default=None)
            kept, lost, steps = self._settled
            good, bad, vain = span.before(limit)
            self._settled = (kept + good, lost + bad, steps + vain)
