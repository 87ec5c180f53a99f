"""torch.distributed.elastic.utils.store: agents meet at a c10d store.

The keys are torch's, so that one of its agents and one of ours meet at the same barrier.  Every key prefix is good for
one meeting: nothing is deleted from the store.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

__all__ = ["barrier", "get_all", "store_timeout", "synchronize"]

_SET = "<val_ignored>"
_MOST_MISSING = 16  # ranks that a timeout names


@contextmanager
def store_timeout(store: Any, timeout: float) -> Iterator[None]:
    """The store's timeout is this one meanwhile."""
    before = store.timeout
    store.set_timeout(timedelta(seconds=timeout))
    try:
        yield
    finally:
        store.set_timeout(before)


def get_all(store: Any, rank: int, prefix: str, world_size: int) -> list[bytes]:
    """The values of `{prefix}0` … `{prefix}{world_size - 1}`; waits for those that are not there yet.

    Rank 0 returns after all others have read, since its process may host the store.
    """
    values = store.multi_get([f"{prefix}{index}" for index in range(world_size)])
    everyone_read = _arrive(store, world_size, f"{prefix}/finished")
    if rank == 0:
        store.wait([everyone_read])
    return list(values)


def synchronize(
    store: Any, data: bytes, rank: int, world_size: int, key_prefix: str, timeout: float = 300
) -> list[bytes]:
    """Everyone's data, by rank, on every rank."""
    with store_timeout(store, timeout):
        store.set(f"{key_prefix}{rank}", data)
        return get_all(store, rank, key_prefix, world_size)


def barrier(
    store: Any,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: float = 10,
) -> None:
    """Returns when `world_size` callers are here.

    With a `rank`, a timeout's error names the ranks that are missing, in the words of `rank_tracing_decoder`.
    """
    from torch.distributed import DistStoreError

    if rank is None and rank_tracing_decoder is not None:
        raise AssertionError("a rank_tracing_decoder names missing ranks for a rank; pass rank= too")
    with store_timeout(store, barrier_timeout):
        everyone_came = _arrive(store, world_size, key_prefix)
        try:
            store.wait([everyone_came])
        except DistStoreError:
            if rank is None:
                raise
            missing = _missing(store, world_size, key_prefix, rank, rank_tracing_decoder or str, trace_timeout)
            if missing is None:
                raise
            raise DistStoreError(
                f"Timed out waiting on barrier on rank {rank}, for key prefix: {key_prefix} (world_size={world_size}, "
                f"missing_ranks=[{', '.join(missing)}], timeout={barrier_timeout})"
            ) from None


def _arrive(store: Any, world_size: int, prefix: str) -> str:
    """One more is here; the key that is set when all are."""
    last = f"{prefix}/last_member"
    if store.add(f"{prefix}/num_members", 1) == world_size:
        store.set(last, _SET)
    return last


def _missing(
    store: Any, world_size: int, prefix: str, rank: int, name: Callable[[int], str], patience: float
) -> list[str] | None:
    """Rank 0 asks who has timed out like itself, and then lets the others go; None when rank 0 is the missing one."""
    from torch.distributed import DistStoreError

    store.set(f"{prefix}{rank}/TRACE", _SET)
    gate = f"{prefix}/TRACING_GATE"
    if rank != 0:
        try:
            store.wait([gate])
        except DistStoreError:
            return None
        return [f"[<check rank 0 ({name(0)}) for missing rank info>]"]
    missing: list[str] = []
    for other in range(1, world_size):
        if len(missing) == _MOST_MISSING:
            break
        try:  # whoever comes has had its time once one was found missing
            store.wait([f"{prefix}{other}/TRACE"], timedelta(seconds=0.001 if missing else patience))
        except DistStoreError:
            missing.append(name(other))
    store.set(gate, _SET)
    return missing
