"""How long a node was without workers, and what took the time.  Pure."""

from msgspec import Struct

from ripstop.model.events import Recovered


class RecoveryClock(Struct):
    """From what went wrong to workers that run again; times of one clock, each known when it is reached."""

    happened: float
    known: float
    told: float | None = None  # what to do about it
    stopped: float | None = None

    def over(self, round: int, called: float, now: float) -> Recovered:
        """The workers of this round were called for then, and run now."""
        told = self.known if self.told is None else self.told
        stopped = told if self.stopped is None else self.stopped
        return Recovered(
            round,
            detect=self.known - self.happened,
            decide=told - self.known + max(0.0, called - stopped),
            stop=stopped - told,
            start=now - max(called, stopped),
        )
