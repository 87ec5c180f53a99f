"""torch.distributed.elastic.utils.distributed: a c10d store, and free ports."""

import os
from contextlib import closing
from datetime import timedelta
from typing import Any

from ripstop.compat.utils import get_logger, get_socket_with_port
from ripstop.compat.utils.store import barrier

__all__ = ["create_c10d_store", "get_free_port", "get_socket_with_port"]

_MEMBERS = "_tcp_store/num_members"  # torch's key: members of torch and of ripstop may share a store
log = get_logger(__name__)


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


def get_free_port() -> int:
    """A port of localhost that was free; `get_socket_with_port` reserves it."""
    with closing(get_socket_with_port()) as taken:
        return int(taken.getsockname()[1])
