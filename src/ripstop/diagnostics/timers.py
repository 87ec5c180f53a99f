"""Deadlines that workers set for themselves: the table of them, and the lines in which they are asked for.  Pure.

A worker that enters a stretch of code in which it could hang sets a timer, and clears it on its way out; whoever holds
the table asks it when the next deadline is and who has missed one.  Rules: (1) one timer for a worker and a scope:
setting it again replaces it; (2) clearing what is not set changes nothing; (3) a missed timer stays until its worker is
forgotten: whoever acts on it says when that is done.  What the times count from is the caller's affair.

A line on the pipe is torch's: JSON with `pid`, `scope_id`, `expiration_time` (negative: clear it) and `signal`.
"""

import json
from collections.abc import Hashable
from typing import Generic, TypeVar

from msgspec import Struct

T = TypeVar("T")
W = TypeVar("W", bound=Hashable)

_SIGNALS = 64
_SCOPE = 4096  # characters: as much as a line on the pipe may have
_PIDS = 1 << 31


class Timers(Generic[W, T]):
    """The timers that are set; each carries something of the caller's."""

    def __init__(self) -> None:
        self._timers: dict[tuple[W, str], tuple[float, T]] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def __contains__(self, timer: tuple[W, str]) -> bool:
        return timer in self._timers

    def set(self, worker: W, scope: str, expires: float, carries: T) -> None:
        self._timers[worker, scope] = (expires, carries)

    def clear(self, worker: W, scope: str) -> None:
        self._timers.pop((worker, scope), None)

    def forget(self, worker: W) -> None:
        """Clear all that this worker has set."""
        for key in [key for key in self._timers if key[0] == worker]:
            del self._timers[key]

    def workers(self) -> frozenset[W]:
        """Those that have timers."""
        return frozenset(worker for worker, _ in self._timers)

    def deadline(self) -> float | None:
        """When the next timer is missed; None when none is set."""
        return min((expires for expires, _ in self._timers.values()), default=None)

    def expired(self, now: float) -> dict[W, list[T]]:
        """What the missed timers carry, the first deadline first, by worker."""
        found: dict[W, list[T]] = {}
        missed = [(expires, key[0], carries) for key, (expires, carries) in self._timers.items() if expires <= now]
        for _, worker, carries in sorted(missed, key=lambda timer: timer[0]):
            found.setdefault(worker, []).append(carries)
        return found


class Request(Struct, frozen=True):
    """What a worker asks for; `expires` is wall-clock time, negative to clear, and `signal` 0 when it is to live."""

    pid: int
    scope: str
    expires: float
    signal: int = 0


def read_request(line: bytes) -> Request:
    """The request in a line of the pipe; ValueError says why there is none."""
    try:
        said = json.loads(line)
        pid, scope, expires, signum = (said[name] for name in ("pid", "scope_id", "expiration_time", "signal"))
        expires = float(expires) if type(expires) in (int, float) else None
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if type(pid) is not int or not 1 < pid < _PIDS:
        raise ValueError(f"pid={pid!r}: not a worker's")
    if not isinstance(scope, str) or len(scope) > _SCOPE:
        raise ValueError(f"scope_id: not a text of at most {_SCOPE} characters")
    if expires is None or expires != expires:
        raise ValueError("expiration_time: not a time")
    if type(signum) is not int or signum > _SIGNALS:
        raise ValueError(f"signal={signum!r}: not a signal")
    return Request(pid, scope, expires, max(0, signum))
