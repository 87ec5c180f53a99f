"""`torch.distributed.elastic.rendezvous.static_tcp_rendezvous`: fixed ranks, and one TCPStore on node 0.

Every round has the same members and values, and there are no round numbers, so all rounds share a prefix, as with
torch.
"""

from datetime import timedelta
from typing import Any

from ripstop.compat.rendezvous.endpoint import parse_rendezvous_endpoint
from ripstop.compat.rendezvous.handler import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

__all__ = ["StaticTCPRendezvous", "create_rdzv_handler"]

TIMEOUT_S = 600


class StaticTCPRendezvous(RendezvousHandler):
    """Nodes with fixed ranks; rank 0 serves the store, which the workers use too."""

    def __init__(
        self, master_addr: str, master_port: int, rank: int, world_size: int, run_id: str, timeout: int
    ) -> None:
        self.master_addr = master_addr
        self.master_port = master_port
        self.rank = rank
        self.world_size = world_size
        self.run_id = run_id
        self.timeout = timedelta(seconds=timeout)
        self._store: Any = None

    def get_backend(self) -> str:
        return "static"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return when all nodes are connected."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        if self._store is None:
            where, serves = (self.master_addr, self.master_port), self.rank == 0
            try:
                self._store = TCPStore(*where, self.world_size, serves, self.timeout, multi_tenant=True)
            except (RuntimeError, ValueError) as error:  # torch's own are RuntimeErrors
                raise RendezvousConnectionError(
                    f"node {self.rank} of {self.world_size} cannot use the store at {where[0]}:{where[1]}: "
                    f"{error}; check that node 0 is up, and that the port is free there"
                ) from error
        info = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(PrefixStore(self.run_id, self._store), self.rank, self.world_size, info)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """No effect: there is no shared state."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        return True


def create_rdzv_handler(params: RendezvousParameters) -> RendezvousHandler:
    """From `endpoint`, `max_nodes` and the settings `rank` and `timeout` (600)."""
    rank = params.get_as_int("rank")
    if rank is None:
        raise ValueError("static needs this node's rank, and it is missing; give rank=N (--node-rank=N)")
    if not params.endpoint.strip():
        raise ValueError("static needs the address of node 0, and the endpoint is empty; give HOST:PORT")
    host, port = parse_rendezvous_endpoint(params.endpoint, -1)
    if port == -1:
        raise ValueError(f"endpoint={params.endpoint}: static needs a port too; write {params.endpoint}:29500")
    timeout = params.get_as_int("timeout", TIMEOUT_S)
    assert timeout is not None, "it has a default"
    return StaticTCPRendezvous(host, port, rank, params.max_nodes, params.run_id, timeout)
