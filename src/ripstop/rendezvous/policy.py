"""How many failures a job is allowed, and how long to wait before the next try.  Pure.

Rules: (1) only failures are charged; a node that comes, goes or is lost costs nothing; (2) at most `max_restarts`
charges stand in any window (or in the whole run when there is none); (3) a restart is immediate, unless rounds die
young again and again: from the third young death in a row the pause doubles, from one second up to `backoff`.
"""

from dataclasses import dataclass

from ripstop.config import Budget

YOUNG = 10.0  # seconds: a round that fails sooner may be a crash loop
PATIENCE = 2  # young deaths in a row that are still healed at once


@dataclass(frozen=True, slots=True)
class Verdict:
    """May the job restart, when, and why."""

    allowed: bool
    delay: float
    why: str


class Restarts:
    """The restarts of one job: what was spent, and what the next one costs."""

    def __init__(self, budget: Budget, used: int = 0, now: float = 0.0) -> None:
        self._budget = budget
        self._charges = [now] * min(used, budget.max_restarts)  # their times are not known: as if it were now
        self._young = 0
        self.used = used

    def charge(self, now: float, lived: float) -> Verdict:
        """A round failed after it had `lived` so long: spend one restart if there is one left."""
        limit, window = self._budget.max_restarts, self._budget.window
        if window:
            self._charges = [at for at in self._charges if at > now - window]
        spent = len(self._charges)
        scope = f"in {window:g} s" if window else "in all"
        if spent >= limit:
            return Verdict(False, 0.0, f"{spent} of {limit} restarts {scope} are spent")
        self._charges.append(now)
        self.used += 1
        self._young = self._young + 1 if lived < YOUNG else 0
        delay = self._delay()
        pause = f", after a pause of {delay:g} s for {self._young} quick failures in a row" if delay else ""
        return Verdict(True, delay, f"restart {spent + 1} of {limit} {scope}{pause}")

    def refund(self) -> None:
        """The last charge was a mistake: what failed was the victim of a node's loss.  `used` never goes back."""
        if self._charges:
            self._charges.pop()
            self._young = max(0, self._young - 1)

    def _delay(self) -> float:
        if self._young <= PATIENCE or not self._budget.backoff:
            return 0.0
        return min(2.0 ** min(self._young - PATIENCE - 1, 16), self._budget.backoff)
