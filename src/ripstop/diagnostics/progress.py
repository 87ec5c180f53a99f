"""Which workers of one node make progress, and since when one does not.  Pure; times come in from outside.

Rules: (1) a worker that has said once that it makes progress must go on saying so: it hangs when it is silent for the
timeout; (2) of one that has never said anything, what can be seen from outside counts: it hangs when for the whole
timeout it writes nothing, uses next to no CPU time, and shows the same stack each time it is looked at; (3) nobody is
looked at who reports, and nobody at all without a timeout; (4) a time in which nobody could be seen or heard, since the
machine stood still or they had no way to report, counts against nobody.
"""

from collections.abc import Mapping

from msgspec import Struct

LOOKS = 4  # in a timeout
IDLE = 0.01  # of a core: who uses less does nothing
SILENT = "no heartbeat"  # how a hang shows, by rule 1
SMOOTH = 0.3  # the weight of the latest rate of steps


class WorkerProgress(Struct, frozen=True):
    """What a worker reports: its step, steps a second, seconds since it was heard, and how often it has spoken."""

    step: int | None
    rate: float
    age: float
    beats: int


class ActivitySample(Struct, frozen=True):
    """What can be seen of a worker from outside: bytes written, seconds of CPU time, and its stack, if asked for.

    `ready`: it would go on if it had a processor, of which a crowded machine gives it none.
    """

    written: int
    cpu: float
    stack: str = ""
    ready: bool = False


class Stuck(Struct, frozen=True):
    """A worker hangs: since so many seconds, and how that shows."""

    seconds: float
    sign: str


class StepRange(Struct, frozen=True):
    """The steps of one worker in its round, and the time from the first to the last of them."""

    first: int
    last: int
    seconds: float


class _Worker(Struct):
    lively: float  # the last sign of life, by rule 2
    looked: float
    signs: ActivitySample = ActivitySample(0, 0.0)
    same_stack: int = 0  # looks in a row that showed it
    beats: int = 0
    beat: float = 0.0
    step: int | None = None
    stepped: float = 0.0
    first: tuple[int, float] | None = None
    rate: float = 0.0


class Progress:
    """The workers of one node in one round; a worker is known by its local rank."""

    def __init__(self, workers: int, timeout: float, now: float) -> None:
        self._timeout = timeout
        self._excused = now  # by rule 4, until then
        self._workers = {rank: _Worker(lively=now, looked=now) for rank in range(workers)}
        self._strides: dict[int, StepRange] = {}

    def beat(self, rank: int, step: int | None, beats: int, now: float) -> None:
        """It says that it makes progress; `beats` is how often it has said so by now."""
        worker = self._workers.get(rank)
        if worker is None:
            return
        worker.beats, worker.beat = max(worker.beats + 1, beats), now
        if step is None:
            return
        if worker.first is None or step < worker.first[0]:
            worker.first = (step, now)
        if worker.step is not None and step > worker.step and now > worker.stepped:
            rate = (step - worker.step) / (now - worker.stepped)
            worker.rate = rate if not worker.rate else worker.rate + SMOOTH * (rate - worker.rate)
        if step != worker.step:
            worker.step, worker.stepped = step, now
        self._strides[rank] = StepRange(worker.first[0], step, now - worker.first[1])

    def look(self, rank: int, signs: ActivitySample, now: float) -> None:
        """It was seen like this."""
        worker = self._workers.get(rank)
        if worker is None:
            return
        before, worker.signs = worker.signs, signs
        since, worker.looked = worker.looked, now
        moved = (
            signs.ready
            or signs.written != before.written
            or signs.cpu - before.cpu > IDLE * (now - since)
            or (before.stack != "" and signs.stack not in ("", before.stack))
        )
        if moved:
            worker.lively = now
        worker.same_stack = 0 if moved or not signs.stack else worker.same_stack + 1

    def unseen(self, rank: int, now: float) -> None:
        """It could not be seen, which says nothing against it."""
        if worker := self._workers.get(rank):
            worker.looked = worker.lively = now

    def excuse(self, now: float) -> None:
        """Nobody could be seen or heard until now (rule 4)."""
        self._excused = now
        for worker in self._workers.values():
            worker.looked = worker.lively = now
            worker.same_stack = 0

    def gone(self, rank: int) -> None:
        """It has ended."""
        self._workers.pop(rank, None)

    # what is to be done -----------------------------------------------------------------------------------------------

    def deadline(self) -> float | None:
        """When somebody is to be looked at, or given up; None: never."""
        if not self._timeout:
            return None
        return min(
            (
                self._heard(worker) + self._timeout if worker.beats else worker.looked + self._timeout / LOOKS
                for worker in self._workers.values()
            ),
            default=None,
        )

    def due(self, now: float) -> dict[int, bool]:
        """Who is to be looked at now, and whether a stack is wanted: not of somebody who was at work lately."""
        return {
            rank: now - worker.lively >= self._timeout / 2
            for rank, worker in self._workers.items()
            if self._timeout and not worker.beats and now - worker.looked >= self._timeout / LOOKS
        }

    def stuck(self, now: float) -> dict[int, Stuck]:
        """Who hangs."""
        found: dict[int, Stuck] = {}
        for rank, worker in self._workers.items() if self._timeout else ():
            if worker.beats:
                if now - self._heard(worker) >= self._timeout:
                    found[rank] = Stuck(now - worker.beat, SILENT)
            elif now - worker.lively >= self._timeout and worker.same_stack > 1:
                found[rank] = Stuck(now - worker.lively, "no output, no CPU time, the same stack")
        return found

    def _heard(self, worker: _Worker) -> float:
        return max(worker.beat, self._excused)

    def idle(self, rank: int, now: float) -> float:
        """Seconds since this worker was seen or heard to do something."""
        worker = self._workers.get(rank)
        if worker is None:
            return 0.0
        return now - (worker.beat if worker.beats else worker.lively)

    # what others want to know -----------------------------------------------------------------------------------------

    def paces(self, now: float) -> Mapping[int, WorkerProgress]:
        """Of the workers that report."""
        return {
            rank: WorkerProgress(worker.step, worker.rate, now - worker.beat, worker.beats)
            for rank, worker in self._workers.items()
            if worker.beats
        }

    def stepped(self) -> Mapping[int, StepRange]:
        """The steps of all workers that reported any, also of those that have ended."""
        return self._strides
