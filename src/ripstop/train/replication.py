"""Whether the state is the same on all ranks, as with DistributedDataParallel: then one shard can stand in for others.

In each round, a thread computes a digest while training goes on: a portion of each of the first commits, so that no
commit waits for it.  The ranks compare theirs through the store.  Commits are marked as replicated if all are equal;
until this is known, if the restored one was.  A restore compares the shards that it has once more.
"""

import hashlib
import threading

from ripstop.commit_memory import CommitHeader
from ripstop.train import content
from ripstop.train.commit_buffer import CommitBuffer
from ripstop.train.rank_store import RankStore

PORTION_BYTES = 256 << 20
_DIFFERENT = -(1 << 32)  # is added to the number of ranks with the same digest


class ReplicationComparison:
    """In one round, after one restore.  `is_replicated` is what is known from the restored commit."""

    def __init__(self, store: RankStore, topic: str, world_size: int, is_replicated: bool) -> None:
        self._store = store
        self._topic = topic
        self._world_size = world_size
        self._is_replicated = is_replicated or world_size == 1
        self._is_known = world_size == 1
        self._buffer: CommitBuffer | None = None  # in use by the thread
        self._thread: threading.Thread | None = None
        self._hash = hashlib.sha256()
        self._start = 0  # of the next portion
        self._is_hashed = self._is_published = False

    def add(self, buffer: CommitBuffer, header: CommitHeader) -> None:
        """Let the thread read a portion of this complete commit, if there is more to read."""
        if self._thread is not None:
            self._thread.join()
        if not self._is_hashed and not self._is_known:
            self._buffer = buffer
            self._thread = threading.Thread(target=self._read, args=(buffer, header), name="ripstop-digest")
            self._thread.start()

    def _read(self, buffer: CommitBuffer, header: CommitHeader) -> None:
        stored = content.StoredContent(buffer, buffer.read_pickle(header))
        self._is_hashed = stored.hash_portion(self._hash, self._start, PORTION_BYTES)
        self._start += PORTION_BYTES

    def release(self, buffer: CommitBuffer) -> None:
        """This buffer is about to change."""
        if self._thread is not None and buffer is self._buffer:
            self._thread.join()
            self._buffer = None

    def is_replicated(self) -> bool:
        """Whether all ranks have had the same state.  Does not wait for them."""
        if not self._is_known and self._is_hashed:
            vote = 0
            if not self._is_published:
                own = self._hash.hexdigest()
                vote = 1 if self._store.propose(self._topic, own) == own else _DIFFERENT
                self._is_published = True
            equal = self._store.add(f"{self._topic}/equal", vote)
            if equal < 0 or equal == self._world_size:
                self._is_known, self._is_replicated = True, equal > 0
        return self._is_replicated
