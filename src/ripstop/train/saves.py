"""Which commits are saved to disk, and which buffers the saver reads meanwhile.

All ranks save the same commit.  Rank 0 announces it while it makes an earlier one, since the other ranks cannot ask
without waiting (`intervals.next_save_interval`).
"""

import logging
import time

from ripstop.commit_memory import CommitHeader
from ripstop.train import intervals
from ripstop.train.agent_memory import AgentError, AgentMemory
from ripstop.train.rank_store import RankStore

log = logging.getLogger("ripstop.train")


class Saves:
    """The saves of one State since its restore, every `interval` seconds; 0: none."""

    def __init__(
        self, name: str, topic: str, rank: int, memory: AgentMemory, store: RankStore, interval: float
    ) -> None:
        self._name = name
        self._topic = topic
        self._rank = rank
        self._memory = memory
        self._store = store
        self.interval = interval
        self._commits = 0
        self._next: tuple[int, bool] | None = (1, False)  # a commit, and whether it is saved; None: ask rank 0
        self._last_look = (0, time.monotonic())  # commit and time
        self._due_at = time.monotonic() + interval
        self._unsent: tuple[int, CommitHeader, int | None] | None = None
        self._may_be_in_use = bool(interval)

    def is_due(self) -> bool:
        """Whether this commit is to be saved.  Every rank asks once for each commit."""
        if not self.interval:
            return False
        self._commits += 1
        if self._next is None:
            commit, is_saved = self._store.get(f"{self._topic} after {self._last_look[0]}")
            self._next = commit, is_saved
        if self._commits < self._next[0]:
            return False
        is_due = self._next[1]
        (commit, then), now = self._last_look, time.monotonic()
        self._last_look = self._commits, now
        if is_due:
            self._due_at = now + self.interval
        if self._rank:
            self._next = None
            return is_due
        steps, is_saved = intervals.next_save_interval(self._due_at - now, self._commits - commit, now - then)
        self._next = self._commits + steps, is_saved
        self._store.publish(f"{self._topic} after {self._commits}", self._next)
        return is_due

    def add(self, slot: int, header: CommitHeader, fd: int | None = None) -> None:
        """Save this commit after `send`: from the agent's buffer, or from the file of this descriptor."""
        self._unsent = slot, header, fd

    def send(self) -> bool:
        """The last commit is complete: have it saved, if it is due.  Whether the agent does."""
        if self._unsent is None:
            return False
        (slot, header, fd), self._unsent = self._unsent, None
        try:
            is_accepted = self._memory.save(self._name, slot, header.id.round, header.id.number, fd)
        except AgentError as error:
            log.warning("state %r: commit %d is not saved to disk: %s", self._name, header.id.number, error)
            return False
        self._may_be_in_use |= is_accepted
        return is_accepted

    def slots_in_use(self) -> list[int]:
        """The buffers that must not change, because the saver reads them."""
        if not self._may_be_in_use:
            return []
        try:
            slots = self._memory.slots_in_use(self._name)
        except AgentError:
            slots = []
        self._may_be_in_use = bool(slots)
        return slots
