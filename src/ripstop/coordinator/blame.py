"""How the round failed: what is known of it, who is to blame, and what follows.  Pure.

Rules: (1) evidence is kept of one round, the live or the last one, and so much of it; (2) every failure that ends a
round is charged to a budget (`policy.py`), and where none covers it the job has failed; (3) a failure that looks like
the victim of a lost peer is not the end of a job before the loss had `BLAME` seconds to show itself, and a charge that
a loss explains within a lease is refunded; (4) a round that hangs is looked at on all its nodes before it is judged,
for `INSPECTION` seconds at most; a death meanwhile is a failure as ever.

Which nodes the job has, and what a ruling does to it, is the machine's.
"""

from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from ripstop.coordinator.budget import Cause, RestartBudget, RestartDecision, cause_of
from ripstop.diagnostics.failure_report import how, looks_like_victim, order, root_cause, trim
from ripstop.diagnostics.stacks import hangs_among, in_words, odd_ones
from ripstop.model.events import BudgetCharged, Event, HangDiagnosed, RoundEndCause
from ripstop.model.failure import Failure
from ripstop.protocol.limits import truncate_reason

BLAME = 0.5  # seconds a victim's failure waits for its cause, when it would end the job
INSPECTION = 5.0  # seconds for all nodes to tell where the workers of a hanging round are
EVIDENCE = 256  # failures kept of a round
PLACES = 16_384  # and of one that hangs, in short: the odd one out may be any


class RootCause(Struct, frozen=True):
    """The rank that is to blame, and no other, and for what."""

    rank: int
    deed: str


class FormNextRound(Struct, frozen=True):
    """The next round is to form, after the delay."""

    notes: tuple[Event, ...]  # for operators
    ending: RoundEndCause
    why: str
    delay: float
    culprit: RootCause | None  # None: nobody's own fault, as far as is known


class FailJob(Struct, frozen=True):
    """The job is to end."""

    notes: tuple[Event, ...]
    why: str


class AwaitLoss(Struct, frozen=True):
    """A lost node may explain it yet."""

    notes: tuple[Event, ...]


Ruling = FormNextRound | FailJob | AwaitLoss


class FailurePolicy:
    """The failures of one job, a round at a time."""

    def __init__(self) -> None:
        self._unexplained_round = 0  # the last round that was charged, if its culprit may yet be heard of
        self.inspection: float | None = None  # until when a hanging round is looked at
        self._suspect: float | None = None  # time of a charge that a loss may still explain
        self.begin(0)

    def begin(self, round: int) -> None:
        """Another round is the one that counts."""
        self._round = round
        self._failures: list[Failure] = []
        self._witnesses: set[str] = set()  # nodes that told of a failure
        self._awaited: set[str] = set()  # nodes that have not told where their workers are
        self.adjourn()

    def adjourn(self) -> None:
        """The round is over: nothing more is to be found out before something is done."""
        self._doom: tuple[float, str] | None = None  # the end, unless a lost node explains the failure by then
        self.inspection = None

    # evidence ---------------------------------------------------------------------------------------------------------

    def keep(self, failures: Iterable[Failure], round: int) -> None:
        if round != self._round:
            return
        known = {(f.rank, f.at) for f in self._failures}
        for failure in failures:
            if (failure.rank, failure.at) in known:
                continue
            if len(self._failures) < EVIDENCE:
                self._failures.append(failure)
            elif failure.hang and len(self._failures) < PLACES:
                self._failures.append(replace(failure, message=failure.message[:200], traceback="", log_tail=()))

    def testify(self, node: str) -> None:
        """A node of the round has told of a failure."""
        self._witnesses.add(node)
        self._awaited.discard(node)

    def dismiss(self, node: str) -> None:
        """A node has told where its workers are, or never will."""
        self._awaited.discard(node)

    def evidence(self) -> tuple[Failure, ...]:
        """The failures for the report, the culprit first."""
        return trim(order(self._failures))

    def is_culprit(self, round: int, failures: tuple[Failure, ...]) -> bool:
        """Whether these explain a round whose victims were heard first, and charged."""
        return round == self._unexplained_round and not all(looks_like_victim(f) for f in failures)

    def explained(self) -> None:
        """It is known who is to blame for the last round that was charged."""
        self._unexplained_round = 0

    @property
    def broken(self) -> bool:
        """A worker of the round failed."""
        return bool(self._witnesses)

    @property
    def only_hangs(self) -> bool:
        return cause_of(self._failures) is Cause.INFRASTRUCTURE

    @property
    def doomed(self) -> bool:
        """The job has failed, unless a lost node explains it in a moment."""
        return self._doom is not None

    # rulings ----------------------------------------------------------------------------------------------------------

    def rule(self, restarts: RestartBudget, nodes: int, now: float, *, young: bool) -> Ruling:
        """Workers have died in the round, of so many nodes."""
        verdict, why, charged = self._charge(restarts, Cause.APPLICATION, now, young=young)
        victims = nodes > 1 and all(looks_like_victim(f) for f in self._failures)
        if verdict.allowed:
            self._suspect, self._unexplained_round = (now, self._round) if victims else (None, 0)
            first = None if victims else root_cause(self._failures)
            culprit = RootCause(first.rank, self._words()) if first else None
            return FormNextRound((charged,), RoundEndCause.APPLICATION, why, verdict.delay, culprit)
        if victims:
            self._doom = (now + BLAME, verdict.why)
            return AwaitLoss((charged,))
        return FailJob((charged,), why)

    def rule_on_hang(self, restarts: RestartBudget, now: float, *, young: bool) -> Ruling:
        """All that can be known of the hang is known."""
        self.inspection = None
        hangs = hangs_among(self._failures, self._round)
        odd = tuple(sorted(odd_ones(hangs)))
        verdict, why, charged = self._charge(restarts, Cause.INFRASTRUCTURE, now, young=young)
        notes = (HangDiagnosed(self._round, odd, truncate_reason(in_words(hangs))), charged)
        if not verdict.allowed:
            return FailJob(notes, why)
        culprit = RootCause(odd[0], f"rank {odd[0]} hung") if len(odd) == 1 else None
        return FormNextRound(notes, RoundEndCause.INFRASTRUCTURE, why, verdict.delay, culprit)

    def sentence(self, now: float) -> str:
        """Why the job has failed, when nobody's loss has explained it in time; empty before."""
        return f"{self._words()}; {self._doom[1]}" if self._doom and now >= self._doom[0] else ""

    def excuse(self, restarts: RestartBudget, within: float, now: float) -> bool:
        """A node of the round is lost: whether that explains the last charge, and it is refunded."""
        if self._suspect is None or now - self._suspect > within:
            return False
        restarts.refund()  # its victims were heard first
        self._suspect = None
        self.explained()
        return True

    def _charge(
        self, restarts: RestartBudget, cause: Cause, now: float, *, young: bool
    ) -> tuple[RestartDecision, str, BudgetCharged]:
        verdict = restarts.charge(now, cause, young=young)
        why = f"{self._words()}; {verdict.why}"
        used, limit = restarts.spent(cause, now), restarts.limit(cause)
        return verdict, why, BudgetCharged(self._round, cause, used, limit, verdict.allowed, why)

    def _words(self) -> str:
        failure = root_cause(self._failures)
        if failure and failure.hang:
            return truncate_reason(in_words(hangs_among(self._failures, self._round)))
        return f"rank {failure.rank} on {failure.host} {how(failure)}" if failure else "a worker failed"

    # time -------------------------------------------------------------------------------------------------------------

    def inspect(self, nodes: Iterable[str], now: float) -> list[str]:
        """Begin to look at a round that hangs: who of these is to be asked where its workers are."""
        if self.inspection is not None:
            return []
        asked = [n for n in nodes if n not in self._witnesses]
        self.inspection = now + INSPECTION
        self._awaited = set(asked)
        return asked

    def is_waiting(self, now: float) -> bool:
        """Whether more may be known of a hang before its time is over."""
        return self.inspection is not None and bool(self._awaited) and now < self.inspection

    def deadlines(self) -> Iterator[float]:
        if self._doom:
            yield self._doom[0]
        if self.inspection is not None:
            yield self.inspection

    def forgive(self, now: float) -> None:
        """The coordinator was away: what would explain a failure has as long again as a loss takes to show itself."""
        if self._doom:
            self._doom = (now + BLAME, self._doom[1])
        if self.inspection is not None:
            self.inspection = max(self.inspection, now + BLAME)
