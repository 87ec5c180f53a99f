"""Measures how long a node was without running workers, and which phase took the time.  Pure."""

from msgspec import Struct

from ripstop.model.events import Recovered

MIN_WAIT_S = 0.001  # the agent's own time between the end of `stop` and `start` is no wait


class RecoveryClock(Struct):
    """The times of one recovery, from the failure to the start of new workers; all of one clock."""

    failed_at: float
    detected_at: float
    decided_at: float | None = None  # the coordinator or this agent decided to stop the workers
    stopped_at: float | None = None

    def finish(self, round: int, requested_at: float, now: float, kept: int = 0) -> Recovered:
        """The start of this round's workers was requested at `requested_at`; they run now.  `kept` went on in place."""
        decided_at = self.detected_at if self.decided_at is None else self.decided_at
        stopped_at = decided_at if self.stopped_at is None else self.stopped_at
        began = requested_at if requested_at - stopped_at >= MIN_WAIT_S else stopped_at
        return Recovered(
            round,
            detect=self.detected_at - self.failed_at,
            decide=decided_at - self.detected_at,
            stop=stopped_at - decided_at,
            start=now - began,
            kept=kept,
            wait=began - stopped_at,
        )
