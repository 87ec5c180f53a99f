"""How the ranks of a round agree on its last commit, when a node leaves with notice.

The agents tell their workers that the round is about to end.  All ranks then commit after the same step, and wait for
the end.  So the next round continues exactly there, and no step is repeated.  Rules
1.  Each rank announces in the round's store that it knows.  When all have, rank 0 announces its next call of `commit`
    as the last one.  A collective lies between two calls, so every rank reads the announcement before that call.
2.  Nothing waits before the last commit: a rank that trains on is never blocked by one that knows.
"""

from ripstop.train.rank_store import RankStore

TOPIC = "last commit"


class LastCommit:
    """The agreement of one State since its restore."""

    def __init__(self, store: RankStore, rank: int, world_size: int, restores: int) -> None:
        self._store = store
        self._rank = rank
        self._known = [f"{TOPIC} {restores} is known to {each}" for each in range(world_size)]
        self._topic = f"{TOPIC} {restores}"
        self._has_announced = False
        self._call: int | None = None  # the last one

    def is_now(self, call: int) -> bool:
        """Whether this call of `commit` is the last one.  Asked at each call after the agent's message."""
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
