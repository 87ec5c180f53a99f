"""How many failures a job may have, and how long it waits before a restart.  Pure.

Rules: (1) only failures are charged; a node that joins, leaves or is lost costs nothing; (2) at most `max_restarts`
charges count in any window, or in the whole run when there is no window; (3) a restart is immediate, except after
repeated early failures: from the third early failure in a row the job waits one second, and twice as long after each
further one, up to `backoff`; (4) a round that hangs is charged to the infrastructure budget, which has its own limit
and window; (5) a failure is early if the round fails within `EARLY_FAILURE_S` seconds and no worker has reported a step
or a checkpoint.  A slower crash loop needs no delay, because its start-up time is one.
"""

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

from ripstop.model.config import Budget
from ripstop.model.failure import Failure

EARLY_FAILURE_S = 3.0
IMMEDIATE_RESTARTS = 2  # early failures in a row that are followed by an immediate restart


class Cause(StrEnum):
    """Which budget a restart is charged to."""

    APPLICATION = "application"
    INFRASTRUCTURE = "infrastructure"


def budget_cause(failures: Iterable[Failure]) -> Cause:
    """A round in which every failure is a hang is charged to the infrastructure budget."""
    hangs = [failure.hang is not None for failure in failures]
    return Cause.INFRASTRUCTURE if hangs and all(hangs) else Cause.APPLICATION


FLAGS = {Cause.APPLICATION: "--max-restarts", Cause.INFRASTRUCTURE: "--max-infra-restarts"}


class RestartDecision(Struct, frozen=True):
    """Whether the job may restart, after which delay, and why."""

    allowed: bool
    delay: float
    why: str


def is_early_for_restart_budget(run_time: float, *, progressed: bool) -> bool:
    """Whether a round that fails after `run_time` seconds may be part of a crash loop (rule 5)."""
    return not progressed and run_time < EARLY_FAILURE_S


class RestartBudget:
    def __init__(self, budget: Budget, used: int = 0, now: float = 0.0) -> None:
        self._backoff = budget.backoff
        self._limits = {  # charges, and the window in which they count
            Cause.APPLICATION: (budget.max_restarts, budget.window),
            Cause.INFRASTRUCTURE: (budget.max_infra_restarts, budget.infra_window),
        }
        # Restarts that another coordinator granted: their time and cause are unknown, so they are charged as
        # application failures at this time.
        self._charges = {Cause.APPLICATION: [now] * min(used, budget.max_restarts), Cause.INFRASTRUCTURE: []}
        self._estimated = {now} if used else set()
        self._inherited: dict[Cause, list[float]] = {Cause.APPLICATION: [], Cause.INFRASTRUCTURE: []}
        self.early_failures = 0  # in a row
        self.used = used
        self.changes = 0  # of any of these

    def inherit(self, charges: dict[Cause, list[float]], used: int, early_failures: int) -> None:
        """Take over the charges of another coordinator.  Its number of restarts replaces the estimate from places."""
        self._inherited = charges
        self._charges[Cause.APPLICATION] = [at for at in self._charges[Cause.APPLICATION] if at not in self._estimated]
        self.early_failures = max(self.early_failures, early_failures)
        self.used = max(self.used, used)
        self.changes += 1

    def charges(self, cause: Cause) -> list[float]:
        """The times of all charges, the oldest first."""
        return sorted(self._inherited[cause] + self._charges[cause])

    def charge(self, now: float, cause: Cause = Cause.APPLICATION, *, early: bool) -> RestartDecision:
        """Charge a failed round, if the budget allows a restart."""
        limit, window = self._limits[cause]
        if window:
            self._charges[cause] = [at for at in self._charges[cause] if at > now - window]
        spent = self.spent(cause, now)
        scope = f" in {window:g} s" if window else ""
        kind = "" if cause is Cause.APPLICATION else f"{cause} "
        if spent >= limit:
            if limit:
                return RestartDecision(False, 0.0, f"{spent} of {limit} {kind}restarts{scope} are used")
            return RestartDecision(False, 0.0, f"no {kind}restart is allowed ({FLAGS[cause]}=0)")
        self._charges[cause].append(now)
        self.used += 1
        self.changes += 1
        self.early_failures = self.early_failures + 1 if early else 0
        delay = self._delay()
        pause = f", after a delay of {delay:g} s for {self.early_failures} early failures in a row" if delay else ""
        return RestartDecision(True, delay, f"{kind}restart {spent + 1} of {limit}{scope}{pause}")

    def refund(self) -> None:
        """Take back the last charge, because a lost node explains the failure.  `used` does not decrease."""
        if charges := self._charges[Cause.APPLICATION]:
            charges.pop()
            self.changes += 1
            self.early_failures = max(0, self.early_failures - 1)

    def spent(self, cause: Cause, now: float) -> int:
        """How many charges count now."""
        _, window = self._limits[cause]
        return sum(not window or at > now - window for at in self._inherited[cause] + self._charges[cause])

    def limit(self, cause: Cause) -> int:
        return self._limits[cause][0]

    def _delay(self) -> float:
        if self.early_failures <= IMMEDIATE_RESTARTS:
            return 0.0
        return min(2.0 ** min(self.early_failures - IMMEDIATE_RESTARTS - 1, 16), self._backoff)
