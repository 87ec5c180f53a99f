"""torch.distributed.elastic.utils.store and .distributed: a c10d store, barriers and exchanges of agents through it.

The keys are torch's, so that agents of torch and of ripstop can use the same store.  Use every key prefix once:
nothing is deleted from the store.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from ripstop.compat.utils import get_free_port, get_logger, get_socket_with_port

__all__ = [
    "barrier",
    "create_c10d_store",
    "get_all",
    "get_free_port",
    "get_socket_with_port",
    "store_timeout",
    "synchronize",
]

_MEMBERS = "_tcp_store/num_members"
_SET = "<val_ignored>"
_MAX_MISSING_RANKS = 16  # in the error of a timeout


def create_c10d_store(
    is_server: bool,
    server_addr: str,
    server_port: int = -1,
    world_size: int = 1,
    timeout: float = 600,
    wait_for_workers: bool = True,
    retries: int = 3,
    use_libuv: bool | None = None,
) -> Any:
    """A `TCPStore`; with `wait_for_workers` it returns when all `world_size` members are connected.

    A server without a port binds a free one itself, so no other process can take it, and `retries` has no effect.
    `use_libuv` has none either: the variable USE_LIBUV decides.
    """
    from torch.distributed import DistStoreError, TCPStore  # type: ignore[attr-defined]

    log = get_logger(__name__)
    if use_libuv is not None:
        log.warning("use_libuv=%s has no effect; set the variable USE_LIBUV to 0 or 1", use_libuv)
    if server_port == -1 and world_size > 1:
        raise ValueError(
            f"server_port must be specified when world_size > 1, got server_port={server_port}, world_size={world_size}"
        )
    if server_port == -1 and not is_server:
        raise ValueError("server_port must be specified for a client (is_server=False), got server_port=-1")
    store = TCPStore(
        host_name=server_addr,
        port=max(server_port, 0),
        world_size=world_size,
        is_master=is_server,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=wait_for_workers,
        use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
    )
    log.info("store at %s:%s, server: %s, members: %s", server_addr, store.port, is_server, world_size)
    if wait_for_workers:
        try:
            barrier(store, world_size, _MEMBERS, barrier_timeout=timeout)
        except DistStoreError as error:
            raise TimeoutError(
                f"the store at {server_addr}:{store.port} waited {timeout} s for {world_size} members, some did not "
                "connect; check that every member was started, or raise timeout"
            ) from error
    return store


@contextmanager
def store_timeout(store: Any, timeout: float) -> Iterator[None]:
    """Set the store's timeout within the block."""
    before = store.timeout
    store.set_timeout(timedelta(seconds=timeout))
    try:
        yield
    finally:
        store.set_timeout(before)


def get_all(store: Any, rank: int, prefix: str, world_size: int) -> list[bytes]:
    """The values of `{prefix}0` … `{prefix}{world_size - 1}`; waits for those that are not set yet.

    Rank 0 returns after all others have read, because its process may host the store.
    """
    values = store.multi_get([f"{prefix}{index}" for index in range(world_size)])
    all_read = _arrive(store, world_size, f"{prefix}/finished")
    if rank == 0:
        store.wait([all_read])
    return list(values)


def synchronize(
    store: Any, data: bytes, rank: int, world_size: int, key_prefix: str, timeout: float = 300
) -> list[bytes]:
    """Exchange data: returns the data of all ranks, by rank."""
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
    """Return when `world_size` callers have arrived.

    With a `rank`, the error of a timeout lists the missing ranks, as `rank_tracing_decoder` names them.
    """
    from torch.distributed import DistStoreError

    if rank is None and rank_tracing_decoder is not None:
        raise AssertionError("rank_tracing_decoder needs a rank; pass rank= too")
    with store_timeout(store, barrier_timeout):
        all_arrived = _arrive(store, world_size, key_prefix)
        try:
            store.wait([all_arrived])
        except DistStoreError:
            if rank is None:
                raise
            missing = _ranks_missing_at_store_barrier(
                store, world_size, key_prefix, rank, rank_tracing_decoder or str, trace_timeout
            )
            if missing is None:
                raise
            raise DistStoreError(
                f"Timed out waiting on barrier on rank {rank}, for key prefix: {key_prefix} (world_size={world_size}, "
                f"missing_ranks=[{', '.join(missing)}], timeout={barrier_timeout})"
            ) from None


def _arrive(store: Any, world_size: int, prefix: str) -> str:
    """Count this caller; returns the key that is set when all have arrived."""
    last = f"{prefix}/last_member"
    if store.add(f"{prefix}/num_members", 1) == world_size:
        store.set(last, _SET)
    return last


def _ranks_missing_at_store_barrier(
    store: Any, world_size: int, prefix: str, rank: int, name: Callable[[int], str], timeout: float
) -> list[str] | None:
    """Rank 0 finds the ranks that did not time out, and then releases the others; None if rank 0 is missing."""
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
        if len(missing) == _MAX_MISSING_RANKS:
            break
        try:  # after the first missing rank, the others have had enough time
            store.wait([f"{prefix}{other}/TRACE"], timedelta(seconds=0.001 if missing else timeout))
        except DistStoreError:
            missing.append(name(other))
    store.set(gate, _SET)
    return missing
