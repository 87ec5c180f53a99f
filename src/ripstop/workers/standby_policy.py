"""When a node makes, takes and discards its standby workers.  Pure: `on(event, now)` returns commands.

Rules
1.  Every local rank below `count` has at most one standby.
2.  Standbys are made when they disturb least: after the first step of a round, or `MAKE_DELAY_S` after its start; on a
    node without a round, `MAKE_DELAY_S` after its zygote was ready.  None is made while workers stop or start.
3.  A standby that fails (its warm-up raises or takes longer than `WARM_UP_TIMEOUT_S`, or the process dies) is not
    replaced in the same round.  After `MAX_FAILURES` in a row its local rank gets none any more.
4.  A standby that was declined (too little GPU memory is free) is considered again in the next round.
5.  A failure is news once, until a standby of this node is ready again; so is giving up.
"""

from enum import Enum

from msgspec import Struct

MAKE_DELAY_S = 5.0
WARM_UP_TIMEOUT_S = 120.0
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


class RoundStopping(Struct, frozen=True):
    """The workers of the round are being stopped."""


class WarmedUp(Struct, frozen=True):
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
    Idle | RoundStarted | FirstStep | RoundStopping | WarmedUp | StandbyFailed | Declined | Taken | Unavailable | Tick
)


# commands -------------------------------------------------------------------------------------------------------------


class Make(Struct, frozen=True):
    local_rank: int


class Discard(Struct, frozen=True):
    """End this process, if it is still there."""

    local_rank: int


class ReportFailure(Struct, frozen=True):
    """`why` "": the warm-up took too long.  `is_final`: this local rank gets none any more.  `is_news`: see rule 5."""

    local_rank: int
    why: str
    is_final: bool
    is_news: bool


StandbyCommand = Make | Discard | ReportFailure


class StandbyPolicy:
    """The standbys of one node; `states` are by local rank."""

    def __init__(self, count: int) -> None:
        self.states = dict.fromkeys(range(count), State.ABSENT)
        self._failures = dict.fromkeys(range(count), 0)  # in a row
        self._warming_since: dict[int, float] = {}
        self._make_at: float | None = None
        self._has_reported = self._has_reported_end = False

    def deadline(self) -> float | None:
        """When `Tick` is due."""
        times = [since + WARM_UP_TIMEOUT_S for since in self._warming_since.values()]
        if self._make_at is not None:
            times.append(self._make_at)
        return min(times, default=None)

    def on(self, event: StandbyEvent, now: float) -> list[StandbyCommand]:
        match event:
            case Idle():
                self._make_at = now + MAKE_DELAY_S
            case RoundStarted():
                self._make_at = now + MAKE_DELAY_S
                self._replace(State.FAILED, State.ABSENT)
            case FirstStep() if self._make_at is not None:
                self._make_at = now
            case RoundStopping():
                self._make_at = None
            case WarmedUp(rank) if self.states[rank] is State.WARMING:
                del self._warming_since[rank]
                self.states[rank] = State.READY
                self._failures[rank] = 0
                self._has_reported = False
            case StandbyFailed(rank, why) if self.states[rank] in (State.WARMING, State.READY):
                return self._on_failure(rank, why) + self._on_time(now)
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

    def _on_time(self, now: float) -> list[StandbyCommand]:
        commands: list[StandbyCommand] = []
        for rank, since in list(self._warming_since.items()):
            if now >= since + WARM_UP_TIMEOUT_S:
                commands += self._on_failure(rank, "")
        if self._make_at is not None and now >= self._make_at:
            self._make_at = None
            for rank in (rank for rank, state in self.states.items() if state is State.ABSENT):
                self.states[rank] = State.WARMING
                self._warming_since[rank] = now
                commands.append(Make(rank))
        return commands

    def _on_failure(self, rank: int, why: str) -> list[StandbyCommand]:
        self._warming_since.pop(rank, None)
        self._failures[rank] += 1
        is_final = self._failures[rank] >= MAX_FAILURES
        self.states[rank] = State.GIVEN_UP if is_final else State.FAILED
        is_news = not (self._has_reported_end if is_final else self._has_reported)
        self._has_reported = True
        self._has_reported_end |= is_final
        return [Discard(rank), ReportFailure(rank, why, is_final, is_news)]

    def _replace(self, old: State, new: State) -> None:
        self.states = {rank: new if state is old else state for rank, state in self.states.items()}
