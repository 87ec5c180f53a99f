"""How the ranks of a round agree on its final commit, when a node leaves with notice.

The agents tell their workers that the round is about to end.  All ranks then commit after the same step, and wait for
the end.  So the next round continues exactly there, and no step is repeated.  Rules
1.  Each rank announces in the round's store that it knows.  When all have, rank 0 announces its next call of `commit`
    as the last one.  A collective lies between two calls, so every rank reads the announcement before that call.
2.  Nothing waits before the final commit: a rank that trains on is never blocked by one that knows.
3.  If a worker has several States, the one that commits first after a step agrees for all.  The others commit after it,
    in the same step; then the worker waits.  It also waits if the first one commits again: then the script did not
    commit the others after this step, and they keep their older commits.
"""

import weakref

from ripstop.commit_memory import IS_REPLICATED, CommitHeader
from ripstop.train.agent_memory import AgentMemory
from ripstop.train.rank_store import RankStore

TOPIC = "final commit"


class FinalCommit:
    """The part of one State, since its restore."""

    def __init__(
        self, name: str, round: int, store: RankStore, memory: AgentMemory, rank: int, world_size: int, restores: int
    ) -> None:
        self._name = name
        self._round = round
        self._store = store
        self._memory = memory
        self._rank = rank
        self._known = [f"{TOPIC} {restores} is known to {each}" for each in range(world_size)]
        self._topic = f"{TOPIC} {restores}"
        self._calls = 0
        self._has_announced = False
        self._call: int | None = None  # the last one
        self._made: dict[str, tuple[CommitHeader, int]] = {}  # of the first State: all States' final commits, and slots

    def is_now(self) -> bool:
        """Whether this call of `commit` is the last one.  Asked once at each call."""
        self._calls += 1
        if _states.get(self._name) is not self:
            _states[self._name] = self
        first = self._all()[0]
        if first is not self:
            return first._is_last_step()
        return self._memory.is_final_commit_due(self._name) and self._agree(self._calls)

    def made(self, header: CommitHeader, slot: int) -> None:
        """This State has made its final commit.  If all have, it returns when the worker is being stopped.

        In a worker that goes on in place, it then raises when the next round begins.
        """
        states = self._all()
        first = states[0]
        first._made[self._name] = header, slot
        if len(first._made) < len(states) and not (self is first and self._calls > (self._call or 0)):
            return
        for state in states:
            if state._name in first._made:
                header, slot = first._made[state._name]
                is_replicated = bool(header.flags & IS_REPLICATED)
                state._memory.final_commit_made(state._name, header.id, slot, is_replicated=is_replicated)
        first._memory.wait_for_end()

    def _all(self) -> "list[FinalCommit]":
        """Those that have committed in this round, in the order of their first calls."""
        return [state for state in _states.values() if state._round == self._round]

    def _is_last_step(self) -> bool:
        return self._call is not None and self._calls >= self._call

    def _agree(self, call: int) -> bool:
        if not self._has_announced:
            self._has_announced = True
            self._store.publish(self._known[self._rank], call)
        if self._call is None and self._rank and self._store.has([self._topic]):
            self._call = int(self._store.get(self._topic))
        if self._call is not None:
            return call >= self._call
        if self._rank == 0 and self._store.has(self._known):
            self._call = call + 1
            self._store.publish(self._topic, self._call)
        return False


_states: "weakref.WeakValueDictionary[str, FinalCommit]" = weakref.WeakValueDictionary()  # of this process
