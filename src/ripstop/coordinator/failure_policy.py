"""Decides how to handle a failed round: restart, fail the job, wait, or diagnose a hang.  Pure.

Rules: (1) failures are kept for one round, the live one or the last one, up to `MAX_FAILURES`; (2) every failure that
ends a round is charged to a budget (`restart_budget.py`); a failure that no budget covers fails the job; (3) a failure
is free if a node of the round is disconnected or leaving, because that explains it; (4) if a failure looks like the
result of a lost peer, the job waits for this loss for `PEER_LOSS_TIMEOUT_S` seconds before it fails; a charge that a
loss explains within a lease is refunded; (5) a hang is diagnosed on all nodes of the round, for `DIAGNOSIS_TIMEOUT_S`
seconds at most, before it is charged; a worker that dies meanwhile is a failure as usual.

`job.py` reports what happened and applies the ruling.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from ripstop.coordinator.restart_budget import Cause, RestartBudget, RestartDecision, budget_cause
from ripstop.diagnostics.failure_ranking import looks_like_victim, rank_failures, root_cause, trimmed_ranking
from ripstop.diagnostics.hang_analysis import describe_hangs, hangs_among, suspect_ranks
from ripstop.model.config import Budget
from ripstop.model.events import BudgetCharged, BudgetRefunded, Event, HangDiagnosed, RoundEndCause
from ripstop.model.failure import Failure, failure_in_short
from ripstop.model.round import Place
from ripstop.protocol.limits import reason_within_limits

PEER_LOSS_TIMEOUT_S = 0.5  # how long a failure that would fail the job waits for a lost node that explains it
DIAGNOSIS_TIMEOUT_S = 5.0  # how long all nodes have to report the stacks of a round that hangs
MAX_FAILURES = 256  # kept of a round
MAX_HANGS = 16_384  # kept of a round, in short: any rank may be the suspect


class RoundAtFailure(Struct, frozen=True):
    """The live round at the time of a failure."""

    places: Mapping[str, Place]
    succeeded: Collection[str]  # nodes whose workers all exited 0
    departing: tuple[str, ...]  # nodes that are disconnected or leaving
    is_running: bool
    is_early: bool  # a failure now may be part of a crash loop


class Diagnose(Struct, frozen=True):
    nodes: tuple[str, ...]  # to be asked where their workers are


class Restart(Struct, frozen=True):
    cause: RoundEndCause
    reason: str
    delay: float  # before the next round


class RestartWithout(Struct, frozen=True):
    nodes: tuple[str, ...]  # which depart, and so explain the failure


class FailJob(Struct, frozen=True):
    reason: str


class Ruling(Struct, frozen=True):
    """What to do about a failure."""

    action: Diagnose | Restart | RestartWithout | FailJob | None = None  # None: do nothing now
    fault: tuple[str, str] | None = None  # the one node that caused the failure, and how; None: unknown, or several
    events: tuple[Event, ...] = ()


class FailurePolicy:
    """The failures and the restart budget of one job."""

    def __init__(self, budget: Budget, lease: float) -> None:
        self.restarts = RestartBudget(budget)
        self._lease = lease
        self._unexplained_round = 0  # the last charged round, if the node that caused the failure may still report
        self._refundable_at: float | None = None  # time of a charge that a lost node may still explain
        self.start_round(0)

    def start_round(self, round: int) -> None:
        self._round = round
        self._failures: list[Failure] = []
        self._reporters: set[str] = set()  # nodes that reported a failure
        self._awaited: set[str] = set()  # nodes that have not reported where their workers are
        self.reset()

    def reset(self) -> None:
        """The round is over: no decision is pending."""
        self._deferred_failure: tuple[float, str] | None = None  # when the job fails unless a loss explains it, and why
        self._diagnosis_end: float | None = None  # of a hang

    # what happened ----------------------------------------------------------------------------------------------------

    def on_failure(
        self, node: str, round: int, failures: tuple[Failure, ...], state: RoundAtFailure, now: float
    ) -> Ruling:
        """A node reports failed workers."""
        self.add_failures(failures, round)
        fault = None
        if round == self._unexplained_round and not all(looks_like_victim(f) for f in failures):
            self.mark_explained()
            fault = (node, failure_in_short(failures[0]))  # other nodes reported its failure first
        if round != self._round or node not in state.places:
            return Ruling(fault=fault)
        self._reporters.add(node)
        self._awaited.discard(node)
        return self.decide(state, now) if state.is_running else Ruling(fault=fault)

    def on_diagnosis(self, node: str, round: int, failures: Iterable[Failure]) -> None:
        """A node reports where its workers are."""
        self.add_failures(failures, round)
        if round == self._round:
            self._awaited.discard(node)

    def on_node_lost(self, node: str, now: float, *, in_round: bool) -> list[Event]:
        """The loss may explain the last failure; its charge is then refunded."""
        self._awaited.discard(node)
        if not in_round or self._refundable_at is None or now - self._refundable_at > self._lease:
            return []
        self.restarts.refund()
        self._refundable_at = None
        self.mark_explained()
        return [BudgetRefunded(self._round, node)]

    def add_failures(self, failures: Iterable[Failure], round: int) -> None:
        if round != self._round:
            return
        known = {(f.rank, f.at) for f in self._failures}
        for failure in failures:
            if (failure.rank, failure.at) in known:
                continue
            if len(self._failures) < MAX_FAILURES:
                self._failures.append(failure)
            elif failure.hang and len(self._failures) < MAX_HANGS:
                self._failures.append(replace(failure, message=failure.message[:200], traceback="", log_tail=()))

    def mark_explained(self) -> None:
        """The cause of the last charged failure is known."""
        self._unexplained_round = 0

    @property
    def has_failure(self) -> bool:
        """A node reported a failure of this round."""
        return bool(self._reporters)

    @property
    def is_failure_pending(self) -> bool:
        """The job fails soon, unless a lost node explains the failure."""
        return self._deferred_failure is not None

    @property
    def is_undecided(self) -> bool:
        """`review` must be called before the round changes for another reason."""
        return self._deferred_failure is not None or self._diagnosis_end is not None

    def failures(self) -> tuple[Failure, ...]:
        """The failures for the job's report, the root cause first."""
        return trimmed_ranking(rank_failures(self._failures))

    # rulings ----------------------------------------------------------------------------------------------------------

    def decide(self, state: RoundAtFailure, now: float) -> Ruling:
        """Decide how to handle the failures of the live round."""
        if state.departing:
            return Ruling(RestartWithout(state.departing))
        if self.is_failure_pending:
            return Ruling()
        if budget_cause(self._failures) is Cause.INFRASTRUCTURE:
            return self._start_diagnosis(state, now)
        return self._rule_on_crash(state, now)

    def review(self, state: RoundAtFailure, now: float) -> Ruling:
        """Decide whether a deferred failure or a diagnosis ends now."""
        if self._deferred_failure and now >= self._deferred_failure[0]:
            return Ruling(FailJob(f"{self._description()}; {self._deferred_failure[1]}"))
        if self._diagnosis_end is not None and not (self._awaited and now < self._diagnosis_end):
            return self._rule_on_hang(state, now)
        return Ruling()

    def _start_diagnosis(self, state: RoundAtFailure, now: float) -> Ruling:
        if self._diagnosis_end is not None:
            return Ruling()
        asked = tuple(n for n in state.places if n not in state.succeeded and n not in self._reporters)
        self._diagnosis_end = now + DIAGNOSIS_TIMEOUT_S
        self._awaited = set(asked)
        return Ruling(Diagnose(asked))

    def _rule_on_crash(self, state: RoundAtFailure, now: float) -> Ruling:
        decision, reason, charged = self._charge(Cause.APPLICATION, state, now)
        are_victims = len(state.places) > 1 and all(looks_like_victim(f) for f in self._failures)
        if decision.allowed:
            self._refundable_at, self._unexplained_round = (now, self._round) if are_victims else (None, 0)
            first = None if are_victims else root_cause(self._failures)
            fault = (_node_of_failed_rank(first.rank, state.places), self._description()) if first else None
            return Ruling(Restart(RoundEndCause.APPLICATION, reason, decision.delay), fault, (charged,))
        if are_victims:
            self._deferred_failure = (now + PEER_LOSS_TIMEOUT_S, decision.why)
            return Ruling(events=(charged,))
        return Ruling(FailJob(reason), events=(charged,))

    def _rule_on_hang(self, state: RoundAtFailure, now: float) -> Ruling:
        self._diagnosis_end = None
        hangs = hangs_among(self._failures, self._round)
        suspects = tuple(sorted(suspect_ranks(hangs)))
        decision, reason, charged = self._charge(Cause.INFRASTRUCTURE, state, now)
        events = (HangDiagnosed(self._round, suspects, reason_within_limits(describe_hangs(hangs))), charged)
        if not decision.allowed:
            return Ruling(FailJob(reason), events=events)
        fault = None
        if len(suspects) == 1:
            self.mark_explained()
            fault = (_node_of_failed_rank(suspects[0], state.places), f"rank {suspects[0]} hung")
        return Ruling(Restart(RoundEndCause.INFRASTRUCTURE, reason, decision.delay), fault, events)

    def _charge(self, cause: Cause, state: RoundAtFailure, now: float) -> tuple[RestartDecision, str, BudgetCharged]:
        decision = self.restarts.charge(now, cause, early=state.is_early)
        reason = f"{self._description()}; {decision.why}"
        used, limit = self.restarts.spent(cause, now), self.restarts.limit(cause)
        return decision, reason, BudgetCharged(self._round, cause, used, limit, decision.allowed, reason)

    def _description(self) -> str:
        failure = root_cause(self._failures)
        if failure and failure.hang:
            return reason_within_limits(describe_hangs(hangs_among(self._failures, self._round)))
        return f"rank {failure.rank} on {failure.host} {failure_in_short(failure)}" if failure else "a worker failed"

    def deadlines(self) -> Iterator[float]:
        if self._deferred_failure:
            yield self._deferred_failure[0]
        if self._diagnosis_end is not None:
            yield self._diagnosis_end

    def extend(self, now: float) -> None:
        """The coordinator was away: a lost node that explains the failure has time to show again."""
        if self._deferred_failure:
            self._deferred_failure = (now + PEER_LOSS_TIMEOUT_S, self._deferred_failure[1])
        if self._diagnosis_end is not None:
            self._diagnosis_end = max(self._diagnosis_end, now + PEER_LOSS_TIMEOUT_S)


def _node_of_failed_rank(rank: int, places: Mapping[str, Place]) -> str:
    """The node that has this global rank; empty when no node has it."""
    return next((n for n, p in places.items() if p.first_rank <= rank < p.first_rank + p.slots), "")
