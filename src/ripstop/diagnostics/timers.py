"""The table of timers that workers set, and the format of their requests.  Pure.

A worker sets a timer before code that could hang, and clears it afterwards.  Rules: (1) a worker has one timer for each
scope; setting it again replaces it; (2) clearing a timer that is not set has no effect; (3) an expired timer stays in
the table until `forget`.  The caller chooses the clock.

A request is a line in torch's format: JSON with `pid`, `scope_id`, `expiration_time` (negative: clear) and `signal`.
"""

import json
from collections.abc import Hashable
from typing import Generic, TypeVar

from msgspec import Struct

T = TypeVar("T")
W = TypeVar("W", bound=Hashable)

_MAX_SIGNAL = 64
_MAX_SCOPE_CHARS = 4096  # the longest line that a pipe writes atomically
_MAX_PID = 1 << 31


class Timers(Generic[W, T]):
    """The timers that are set, each with data of the caller."""

    def __init__(self) -> None:
        self._timers: dict[tuple[W, str], tuple[float, T]] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def __contains__(self, timer: tuple[W, str]) -> bool:
        return timer in self._timers

    def set(self, worker: W, scope: str, expires: float, data: T) -> None:
        self._timers[worker, scope] = (expires, data)

    def clear(self, worker: W, scope: str) -> None:
        self._timers.pop((worker, scope), None)

    def forget(self, worker: W) -> None:
        """Clear all timers of this worker."""
        for key in [key for key in self._timers if key[0] == worker]:
            del self._timers[key]

    def workers(self) -> frozenset[W]:
        """The workers that have timers."""
        return frozenset(worker for worker, _ in self._timers)

    def deadline(self) -> float | None:
        """When the next timer expires; None if none is set."""
        return min((expires for expires, _ in self._timers.values()), default=None)

    def expired(self, now: float) -> dict[W, list[T]]:
        """The data of expired timers, by worker; the earliest deadline first."""
        found: dict[W, list[T]] = {}
        missed = [(expires, key[0], data) for key, (expires, data) in self._timers.items() if expires <= now]
        for _, worker, data in sorted(missed, key=lambda timer: timer[0]):
            found.setdefault(worker, []).append(data)
        return found


class Request(Struct, frozen=True):
    """`expires` is wall-clock time, or negative to clear the timer; `signal` 0: do not kill the worker."""

    pid: int
    scope: str
    expires: float
    signal: int = 0


def read_request(line: bytes) -> Request:
    """Parse a line of the pipe.  Raises ValueError with the reason."""
    try:
        fields = json.loads(line)
        pid, scope, expires, signum = (fields[name] for name in ("pid", "scope_id", "expiration_time", "signal"))
        expires = float(expires) if type(expires) in (int, float) else None
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if type(pid) is not int or not 1 < pid < _MAX_PID:
        raise ValueError(f"pid={pid!r}: not a process id")
    if not isinstance(scope, str) or len(scope) > _MAX_SCOPE_CHARS:
        raise ValueError(f"scope_id: not a string of at most {_MAX_SCOPE_CHARS} characters")
    if expires is None or expires != expires:
        raise ValueError("expiration_time: not a time")
    if type(signum) is not int or signum > _MAX_SIGNAL:
        raise ValueError(f"signal={signum!r}: not a signal")
    return Request(pid, scope, expires, max(0, signum))
