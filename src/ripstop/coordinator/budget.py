"""How many failures a job is allowed, and how long to wait before the next try.  Pure.

Rules: (1) only failures are charged; a node that comes, goes or is lost costs nothing; (2) at most `max_restarts`
charges stand in any window (or in the whole run when there is none); (3) a restart is immediate, unless rounds die
young again and again: from the third young death in a row there is a pause, one second, and it doubles with each
further one, up to `backoff`; (4) a round that hangs is charged to the infrastructure's budget, which has a limit and a
window of its own; (5) a round dies young if it fails within `YOUNG` seconds and no worker has reported a step or a
checkpoint.  A crash loop that takes longer than that needs no pause: its own start-up is one.
"""

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

from ripstop.model.config import Budget
from ripstop.model.failure import Failure

YOUNG = 3.0  # seconds
PATIENCE = 2  # young deaths in a row that are still healed at once


class Cause(StrEnum):
    """Whose budget pays for a restart."""

    APPLICATION = "application"
    INFRASTRUCTURE = "infrastructure"


def cause_of(failures: Iterable[Failure]) -> Cause:
    """A round's failures are the infrastructure's if all that is known is that it hangs: nobody has died by itself."""
    hangs = [failure.hang is not None for failure in failures]
    return Cause.INFRASTRUCTURE if hangs and all(hangs) else Cause.APPLICATION


class RestartDecision(Struct, frozen=True):
    """May the job restart, when, and why."""

    allowed: bool
    delay: float
    why: str


def dies_young(lived: float, *, progressed: bool) -> bool:
    """Whether a round that fails after so many seconds may be part of a crash loop (rule 5)."""
    return not progressed and lived < YOUNG


class RestartBudget:
    """The restarts of one job: what was spent, and what the next one costs."""

    def __init__(self, budget: Budget, used: int = 0, now: float = 0.0) -> None:
        self._budget = budget
        # of those that another coordinator granted neither time nor cause is known: as if it were now, for failures
        self._charges = {Cause.APPLICATION: [now] * min(used, budget.max_restarts), Cause.INFRASTRUCTURE: []}
        self._young = 0
        self.used = used

    def charge(self, now: float, cause: Cause = Cause.APPLICATION, *, young: bool) -> RestartDecision:
        """A round failed: spend one restart if there is one left."""
        limit, window = self.limit(cause), self._window(cause)
        if window:
            self._charges[cause] = [at for at in self._charges[cause] if at > now - window]
        spent = self.spent(cause, now)
        scope = f"in {window:g} s" if window else "in all"
        kind = "" if cause is Cause.APPLICATION else f"{cause} "
        if spent >= limit:
            return RestartDecision(False, 0.0, f"{spent} of {limit} {kind}restarts {scope} are spent")
        self._charges[cause].append(now)
        self.used += 1
        self._young = self._young + 1 if young else 0
        delay = self._delay()
        pause = f", after a pause of {delay:g} s for {self._young} quick failures in a row" if delay else ""
        return RestartDecision(True, delay, f"{kind}restart {spent + 1} of {limit} {scope}{pause}")

    def refund(self) -> None:
        """The last charge was a mistake: what failed was the victim of a node's loss.  `used` never goes back."""
        if charges := self._charges[Cause.APPLICATION]:
            charges.pop()
            self._young = max(0, self._young - 1)

    def spent(self, cause: Cause, now: float) -> int:
        """What stands charged."""
        window = self._window(cause)
        return sum(not window or at > now - window for at in self._charges[cause])

    def limit(self, cause: Cause) -> int:
        return self._budget.max_restarts if cause is Cause.APPLICATION else self._budget.max_infra_restarts

    def _window(self, cause: Cause) -> float:
        return self._budget.window if cause is Cause.APPLICATION else self._budget.infra_window

    def _delay(self) -> float:
        if self._young <= PATIENCE or not self._budget.backoff:
            return 0.0
        return min(2.0 ** min(self._young - PATIENCE - 1, 16), self._budget.backoff)
