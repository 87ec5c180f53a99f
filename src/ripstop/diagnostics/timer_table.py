"""The table of timers that workers set.  Pure.

A worker sets a timer before code that could hang, and clears it afterwards.  Rules: (1) a worker has one timer for each
scope; setting it again replaces it; (2) clearing a timer that is not set has no effect; (3) an expired timer stays in
the table until `forget`.  The caller chooses the clock.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")
W = TypeVar("W", bound=Hashable)


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
