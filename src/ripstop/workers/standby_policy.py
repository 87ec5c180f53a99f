"""When a node makes, takes and discards its standby workers.  Pure: `on(event, now)` returns commands.

Rules
1.  Every local rank below `count` has at most one standby.
2.  Standbys are made when they disturb least: after the first step of a round, or `MAKE_DELAY_S` after its start
    (`RUN_AHEAD_DELAY_S`, if they run the script); on a node without a round, `MAKE_DELAY_S` after its zygote was ready.
    None is made while workers stop or start.
3.  A standby that waits before the script and fails (its warm-up raises or takes longer than `WARM_UP_TIMEOUT_S`, or
    the process dies) is not replaced in the same round.  After `MAX_FAILURES` in a row its local rank gets none any
    more.
4.  A standby that was declined (too little GPU memory is free) is considered again in the next round.
5.  A failure is news once, until a standby of this node is ready again; so is giving up.
6.  With `until` elastic, standbys run ahead: they also run the script, up to its function with `train.elastic`.  If one
    fails, a standby that waits before the script replaces it in the same round.  After `MAX_FAILURES` in a row, its
    local rank gets only standbys that wait before the script.  A node without a round also gets only those, because it
    has no ranks yet.
7.  A standby runs the script only if the worker of its local rank has called the training function itself.  Where the
    script never calls it, the standby would train beside the worker, and overwrite its files.  If the worker has not
    called it when standbys are made, a standby that waits before the script is made, and replaced after the call.
"""

from enum import Enum

from msgspec import Struct

from ripstop.model.config import StandbyUntil

MAKE_DELAY_S = 5.0
RUN_AHEAD_DELAY_S = 60.0  # the workers themselves may need this time for the part of the script that standbys run
WARM_UP_TIMEOUT_S = 120.0
RUN_AHEAD_TIMEOUT_S = 1800.0  # with the warm-up
MAX_FAILURES = 3


class State(Enum):
    """State of a local rank's standby."""

    ABSENT = "absent"
    WARMING = "warming"
    READY = "ready"
    FAILED = "failed"  # none in this round
    GIVEN_UP = "given up"  # none in this job


# events ---------------------------------------------------------------------------------------------------------------


class Idle(Struct, frozen=True):
    """The zygote is ready, and no round runs on this node."""


class RoundStarted(Struct, frozen=True):
    """All workers of a round have started."""


class FirstStep(Struct, frozen=True):
    """A worker of the round has reported a step."""


class WorkerStarting(Struct, frozen=True):
    """A new worker takes this local rank."""

    local_rank: int


class FunctionCalled(Struct, frozen=True):
    """The worker of this local rank has called its training function."""

    local_rank: int


class RoundStopping(Struct, frozen=True):
    """The workers of the round are being stopped."""


class WarmedUp(Struct, frozen=True):
    """The standby waits for a round: it has warmed up and, if it is to do so, run the script."""

    local_rank: int


class StandbyFailed(Struct, frozen=True):
    local_rank: int
    why: str


class Declined(Struct, frozen=True):
    local_rank: int


class Taken(Struct, frozen=True):
    """The standby is a worker now, or was discarded because it did not fit."""

    local_rank: int


class Unavailable(Struct, frozen=True):
    """Workers are not forked from a zygote, so there can be no standbys."""


class Tick(Struct, frozen=True):
    """The deadline has passed."""


StandbyEvent = (
    Idle
    | RoundStarted
    | FirstStep
    | WorkerStarting
    | FunctionCalled
    | RoundStopping
    | WarmedUp
    | StandbyFailed
    | Declined
    | Taken
    | Unavailable
    | Tick
)


# commands -------------------------------------------------------------------------------------------------------------


class Make(Struct, frozen=True):
    local_rank: int
    until: StandbyUntil = StandbyUntil.SCRIPT


class Discard(Struct, frozen=True):
    """End this process, if it is still there."""

    local_rank: int


class ReportFailure(Struct, frozen=True):
    """`why` "": it took too long.  `is_final`: the local rank gets none with this `until` again.  `is_news`: rule 5."""

    local_rank: int
    why: str
    is_final: bool
    is_news: bool
    until: StandbyUntil = StandbyUntil.SCRIPT


StandbyCommand = Make | Discard | ReportFailure


class StandbyPolicy:
    """The standbys of one node; `states` and `untils` are by local rank."""

    def __init__(self, count: int, until: StandbyUntil = StandbyUntil.SCRIPT) -> None:
        self.states = dict.fromkeys(range(count), State.ABSENT)
        self.untils = dict.fromkeys(range(count), StandbyUntil.SCRIPT)
        self._wanted_until = until  # where the job wants its standbys to wait
        self._failures = {(rank, each): 0 for rank in range(count) for each in StandbyUntil}  # in a row
        self._warming_since: dict[int, float] = {}
        self._make_at: float | None = None
        self._has_no_round = False
        self._has_made_standbys = False  # for the round that runs now
        self._called: set[int] = set()  # local ranks whose worker has called the training function
        self._failed_run_ahead: set[int] = set()  # local ranks whose run-ahead standby failed in this round
        self._reported_failures: set[tuple[StandbyUntil, bool]] = set()  # (until, is_final): no news (rule 5)

    def deadline(self) -> float | None:
        """When `Tick` is due."""
        times = [since + self._timeout(rank) for rank, since in self._warming_since.items()]
        if self._make_at is not None:
            times.append(self._make_at)
        return min(times, default=None)

    def on(self, event: StandbyEvent, now: float) -> list[StandbyCommand]:
        match event:
            case Idle():
                self._make_at, self._has_no_round = now + MAKE_DELAY_S, True
            case RoundStarted():
                self._on_round_started(now)
            case FirstStep() if self._make_at is not None and (
                self._wanted_until is StandbyUntil.SCRIPT or self._called
            ):
                self._make_at = now
            case WorkerStarting(rank):
                self._called.discard(rank)
            case FunctionCalled(rank) if rank in self.states:
                self._called.add(rank)
                if self._has_made_standbys and self._make_at is None and self._is_to_run_ahead(rank):
                    self._make_at = now + RUN_AHEAD_DELAY_S
            case RoundStopping():
                self._make_at, self._has_made_standbys = None, False
            case WarmedUp(rank) if self.states[rank] is State.WARMING:
                del self._warming_since[rank]
                self.states[rank] = State.READY
                self._failures[rank, self.untils[rank]] = 0
                self._reported_failures.discard((self.untils[rank], False))
                if self._has_made_standbys and self._make_at is None and self._is_to_run_ahead(rank):
                    self._make_at = now
            case StandbyFailed(rank, why) if self.states[rank] in (State.WARMING, State.READY):
                return self._on_failure(rank, why, now) + self._on_time(now)
            case Declined(rank) if self.states[rank] is State.WARMING:
                del self._warming_since[rank]
                self.states[rank] = State.FAILED
            case Taken(rank) if self.states[rank] is State.READY:
                self.states[rank] = State.ABSENT
            case Unavailable():
                discarded = [rank for rank, state in self.states.items() if state in (State.WARMING, State.READY)]
                self.states = dict.fromkeys(self.states, State.GIVEN_UP)
                self._make_at = None
                self._warming_since.clear()
                return [Discard(rank) for rank in discarded]
        return self._on_time(now)

    def _on_round_started(self, now: float) -> None:
        runs_ahead = self._wanted_until is StandbyUntil.ELASTIC
        self._make_at = now + (RUN_AHEAD_DELAY_S if runs_ahead else MAKE_DELAY_S)
        self._has_no_round = self._has_made_standbys = False
        self._failed_run_ahead.clear()
        self.states = {rank: State.ABSENT if it is State.FAILED else it for rank, it in self.states.items()}

    def _on_time(self, now: float) -> list[StandbyCommand]:
        commands: list[StandbyCommand] = []
        for rank, since in list(self._warming_since.items()):
            if now >= since + self._timeout(rank):
                commands += self._on_failure(rank, "", now)
        if self._make_at is not None and now >= self._make_at:
            self._make_at, self._has_made_standbys = None, True
            for rank, state in self.states.items():
                if state is State.READY and self._is_to_run_ahead(rank):
                    commands.append(Discard(rank))
                    self.states[rank] = State.ABSENT
            for rank in (rank for rank, state in self.states.items() if state is State.ABSENT):
                self.states[rank] = State.WARMING
                self.untils[rank] = self._next_until(rank)
                self._warming_since[rank] = now
                commands.append(Make(rank, self.untils[rank]))
        return commands

    def _next_until(self, rank: int) -> StandbyUntil:
        failed = rank in self._failed_run_ahead or self._failures[rank, StandbyUntil.ELASTIC] >= MAX_FAILURES
        may_run_ahead = rank in self._called and not self._has_no_round and not failed
        return self._wanted_until if may_run_ahead else StandbyUntil.SCRIPT

    def _is_to_run_ahead(self, rank: int) -> bool:
        """Whether its standby was made to wait before the script, and could run the script now (rule 7)."""
        return self.untils[rank] is StandbyUntil.SCRIPT and self._next_until(rank) is StandbyUntil.ELASTIC

    def _timeout(self, rank: int) -> float:
        return RUN_AHEAD_TIMEOUT_S if self.untils[rank] is StandbyUntil.ELASTIC else WARM_UP_TIMEOUT_S

    def _on_failure(self, rank: int, why: str, now: float) -> list[StandbyCommand]:
        until = self.untils[rank]
        self._warming_since.pop(rank, None)
        self._failures[rank, until] += 1
        is_final = self._failures[rank, until] >= MAX_FAILURES
        if until is StandbyUntil.ELASTIC:
            self.states[rank] = State.ABSENT
            self._failed_run_ahead.add(rank)
            if self._has_made_standbys:
                self._make_at = now
        else:
            self.states[rank] = State.GIVEN_UP if is_final else State.FAILED
        is_news = (until, is_final) not in self._reported_failures
        self._reported_failures |= {(until, False), (until, is_final)}
        return [Discard(rank), ReportFailure(rank, why, is_final, is_news, until)]
