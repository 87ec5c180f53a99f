"""Who is in touch with the coordinator, and who is going: words and closed connections, each with its time.  Pure.

Rules: (1) silence for a lease is a loss; (2) a closed connection is a hint: it is a loss when the node is not back
after `RECONNECT`; (3) a coordinator that was itself away (stopped, suspended) blames nobody for it: all waiting starts
anew, but once only for a node that stays silent, lest a starved coordinator never lose anybody.

What a loss means is not decided here.  Both kinds of times are kept in their order, so that a beat costs the same in a
job of thousands.
"""

from collections.abc import Iterator
from itertools import takewhile

LATE = 0.1  # seconds: if a deadline is missed by so much, this process was stopped or starved
RECONNECT = 0.5  # seconds a node may take to come back over a new connection


class Liveness:
    """The contacts of one job.  `own` is the node in the coordinator's own process; it needs no lease."""

    def __init__(self, lease: float, own: str) -> None:
        self.absent: dict[str, float] = {}  # connections closed, and since when, the oldest first
        self.leaving: set[str] = set()  # they said that they go
        self._lease = lease
        self._own = own
        self._heard: dict[str, float] = {}  # last word of each node with a lease, the oldest first
        self._forgiven: set[str] = set()  # not heard since this coordinator was away

    # what is noted ----------------------------------------------------------------------------------------------------

    def came(self, node: str, now: float) -> None:
        """It has joined, over a new connection."""
        self.absent.pop(node, None)
        self.leaving.discard(node)
        self.spoke(node, now)

    def spoke(self, node: str, now: float) -> None:
        self._forgiven.discard(node)
        if node != self._own:
            self._heard.pop(node, None)
            self._heard[node] = now  # to the end: the dictionary stays in the order of time

    def broke_off(self, node: str, now: float) -> None:
        """Its connection closed."""
        self._heard.pop(node, None)
        self.absent.setdefault(node, now)

    def leaves(self, node: str) -> None:
        """It said that it goes."""
        self.leaving.add(node)

    def forget(self, node: str) -> None:
        """It is part of the job no more."""
        self._heard.pop(node, None)
        self.absent.pop(node, None)
        self.leaving.discard(node)

    def forgive(self, now: float) -> None:
        """This coordinator was away, and nobody could be heard meanwhile (3)."""
        again = {n: heard for n, heard in self._heard.items() if n in self._forgiven}
        self._forgiven = set(self._heard)
        self._heard = again | {n: now for n in self._heard if n not in again}
        self.absent = dict.fromkeys(self.absent, now)

    # what follows -----------------------------------------------------------------------------------------------------

    def silent(self, now: float) -> list[tuple[str, float]]:
        """Who is lost by (1), and when it was heard last."""
        return list(takewhile(lambda word: now >= word[1] + self._lease + LATE, self._heard.items()))

    def not_returned(self, now: float) -> list[tuple[str, float]]:
        """Who is lost by (2), and since when it is absent."""
        return list(takewhile(lambda close: now >= close[1] + RECONNECT, self.absent.items()))

    def is_going(self, node: str) -> bool:
        return node in self.absent or node in self.leaving

    def deadlines(self) -> Iterator[float]:
        """When somebody may be lost."""
        if self._heard:
            silent = next(iter(self._heard.values())) + self._lease
            yield silent  # wake up first: if that is late, words may lie unread
            yield silent + LATE
        if self.absent:
            yield next(iter(self.absent.values())) + RECONNECT
