"""The messages of an elected coordinator, in order.  Pure.

Messages after a new round wait until that round is committed or withdrawn.  Rules: (1) after a proposed round, nothing
is sent until it or a later one is committed, or it is withdrawn; (2) a round that was withdrawn, or followed by another
one before its commit, is never started: its nodes get a `StandBy` before its `Assign`, so that they learn only that a
port they offered is used; a node that offered no port for it, and has a place in a later round, gets neither, and its
workers can go on in place.
"""

from collections import deque
from typing import Generic, TypeVar

from ripstop.protocol.messages import Assign, FromCoordinator, StandBy

Peer = TypeVar("Peer")


class CommitQueue(Generic[Peer]):
    """Messages to peers; None closes the connection.  `push`, `commit` and `withdraw` return what to send now."""

    def __init__(self) -> None:
        self._waiting: deque[int | tuple[Peer, FromCoordinator | None]] = deque()  # proposed rounds, and what follows

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
        self._abandon({each for each in self._rounds() if each < round})
        if round in self._waiting:
            self._waiting.remove(round)
        return self._take()

    def withdraw(self, newest: int) -> list[tuple[Peer, FromCoordinator | None]]:
        """The rounds after this one will not be committed."""
        self._abandon({each for each in self._rounds() if each > newest})
        return self._take()

    def clear(self) -> None:
        self._waiting.clear()

    def _rounds(self) -> list[int]:
        return [each for each in self._waiting if isinstance(each, int)]

    def _abandon(self, rounds: set[int]) -> None:
        """These rounds will not be committed (rule 2)."""
        entries, self._waiting = self._waiting, deque()
        has_later = set[Peer]()  # peers with a place in a later round
        for entry in reversed(entries):
            if isinstance(entry, int):
                if entry not in rounds:
                    self._waiting.appendleft(entry)
                continue
            peer, message = entry
            if not isinstance(message, Assign) or message.place.round not in rounds:
                self._waiting.appendleft(entry)
            elif peer not in has_later or message.place.group_rank == 0:
                why = f"round {message.place.round} was not committed"
                self._waiting.extendleft((entry, (peer, StandBy(message.place.round, why))))
            if isinstance(message, Assign):
                has_later.add(peer)

    def _take(self) -> list[tuple[Peer, FromCoordinator | None]]:
        out: list[tuple[Peer, FromCoordinator | None]] = []
        while self._waiting and not isinstance(entry := self._waiting[0], int):
            self._waiting.popleft()
            out.append(entry)
        return out
