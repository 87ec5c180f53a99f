"""What an elected coordinator sends, in order: what follows a new round waits until that round is committed.  Pure.

Rules: (1) after a proposed round, nothing is sent until it or a later one is committed; (2) a round that was withdrawn,
or followed by another one before its commit, is never started: its nodes get a `StandBy` before its `Assign`, so that
they learn only that a port they offered is used.
"""

from collections import deque
from typing import Generic, TypeVar

from ripstop.protocol.messages import Assign, FromCoordinator, StandBy

Peer = TypeVar("Peer")


class CommitQueue(Generic[Peer]):
    """Messages to peers; None closes the connection.  Every method returns what to send now."""

    def __init__(self) -> None:
        self._waiting: deque[int | tuple[Peer, FromCoordinator | None]] = deque()  # proposed rounds, and what follows
        self._abandoned: set[int] = set()  # rounds that are not committed, and never will be

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def propose(self, round: int) -> None:
        self._waiting.append(round)

    def push(self, peer: Peer, message: FromCoordinator | None) -> list[tuple[Peer, FromCoordinator | None]]:
        self._waiting.append((peer, message))
        return self._take()

    def commit(self, round: int) -> list[tuple[Peer, FromCoordinator | None]]:
        """This round is committed; earlier ones that are not will not be."""
        return self._settle({each for each in self._rounds() if each <= round}, but=round)

    def withdraw(self, newest: int) -> list[tuple[Peer, FromCoordinator | None]]:
        """The rounds after this one will not be committed."""
        return self._settle({each for each in self._rounds() if each > newest})

    def clear(self) -> None:
        self._waiting.clear()

    def _rounds(self) -> list[int]:
        return [each for each in self._waiting if isinstance(each, int)]

    def _settle(self, rounds: set[int], but: int = 0) -> list[tuple[Peer, FromCoordinator | None]]:
        self._abandoned |= rounds - {but}
        self._waiting = deque(each for each in self._waiting if not isinstance(each, int) or each not in rounds)
        return self._take()

    def _take(self) -> list[tuple[Peer, FromCoordinator | None]]:
        out: list[tuple[Peer, FromCoordinator | None]] = []
        while self._waiting and not isinstance(entry := self._waiting[0], int):
            self._waiting.popleft()
            peer, message = entry
            if isinstance(message, Assign) and message.place.round in self._abandoned:
                out.append((peer, StandBy(message.place.round, f"round {message.place.round} was not committed")))
            out.append(entry)
        return out
