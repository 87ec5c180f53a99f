"""Whether the state is the same on all ranks, as with DistributedDataParallel: then one shard can stand in for others.

Each round, a thread computes the digest of the first commit while training goes on, and the ranks compare theirs
through the store.  Later commits of the round are marked as replicated if all are equal.  A restore compares the shards
that it has once more.
"""

import hashlib
import threading

from ripstop.commit_memory import Header
from ripstop.train import content
from ripstop.train.commit_buffer import CommitBuffer
from ripstop.train.rank_store import RankStore

_DIFFERENT = -(1 << 32)  # is added to the number of ranks with the same digest


class Comparison:
    def __init__(self, store: RankStore, topic: str, world_size: int) -> None:
        self._store = store
        self._topic = topic
        self._world_size = world_size
        self._buffer: CommitBuffer | None = None  # in use
        self._thread: threading.Thread | None = None
        self._digest: str | None = None
        self._is_equal: bool | None = True if world_size == 1 else None  # None: not known yet

    def begin(self, buffer: CommitBuffer, header: Header) -> None:
        """Compare this complete commit, if none has been compared."""
        if self._thread is None and self._is_equal is None:
            self._buffer = buffer
            self._thread = threading.Thread(target=self._compute, args=(buffer, header), name="ripstop-digest")
            self._thread.start()

    def _compute(self, buffer: CommitBuffer, header: Header) -> None:
        digests = content.Stored(buffer, buffer.read_pickle(header)).digests()
        self._digest = hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()

    def release(self, buffer: CommitBuffer) -> None:
        """This buffer is about to change."""
        if self._thread is not None and buffer is self._buffer:
            self._thread.join()
            self._buffer = None

    def is_equal(self) -> bool:
        """Whether all ranks are known to have the same state.  Does not wait for them."""
        if self._is_equal is None and self._thread is not None and not self._thread.is_alive():
            own, self._digest = self._digest, None
            vote = 0
            if own is not None:
                vote = 1 if self._store.propose(self._topic, own) == own else _DIFFERENT
            equal = self._store.add(f"{self._topic}/equal", vote)
            if equal < 0 or equal == self._world_size:
                self._is_equal = equal > 0
        return bool(self._is_equal)
