"""A rendezvous handler's interface, its parameters, results and errors; with `registry.py`, torch's module `.api`.

Names, arguments and defaults are torch's.  It needs no torch: a store is any object with `set` and `get`.
"""

from __future__ import annotations

import socket
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from ripstop.compat.utils import get_free_port
from ripstop.model.errors import UsageError
from ripstop.model.parsers import boolean

TORCH_API = "torch.distributed.elastic.rendezvous.api"  # torch's module, if the program has loaded it


class RendezvousError(Exception):
    """Base of a rendezvous's errors."""


class RendezvousClosedError(RendezvousError):
    """The rendezvous was closed: the job is over, or ends now."""


class RendezvousTimeoutError(RendezvousError):
    """The rendezvous did not complete in time."""


class RendezvousConnectionError(RendezvousError):
    """The backend cannot be reached."""


class RendezvousStateError(RendezvousError):
    """The stored value is not the state of this rendezvous."""


class RendezvousGracefulExitError(RendezvousError):
    """This node was a spare, and the job is over: not a failure."""


def is_rendezvous_handler_error(error: BaseException, kind: type[RendezvousError]) -> bool:
    """Whether it is ripstop's error of this kind or torch's: a handler may raise either."""
    torchs = sys.modules.get(TORCH_API)
    return isinstance(error, (kind, getattr(torchs, kind.__name__, kind)))


@dataclass
class RendezvousStoreInfo:
    """Where the workers' store is."""

    MASTER_ADDR_KEY: ClassVar[str] = "MASTER_ADDR"
    MASTER_PORT_KEY: ClassVar[str] = "MASTER_PORT"
    master_addr: str
    master_port: int

    @staticmethod
    def build(rank: int, store: Any, local_addr: str | None, server_port: int | None = None) -> RendezvousStoreInfo:
        """Rank 0 publishes its address and `server_port`, or a free port, in `store`; the others read it."""
        if rank == 0:
            store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, (local_addr or socket.getfqdn()).encode())
            store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(server_port or get_free_port()).encode())
        host = store.get(RendezvousStoreInfo.MASTER_ADDR_KEY).decode()
        return RendezvousStoreInfo(host, int(store.get(RendezvousStoreInfo.MASTER_PORT_KEY).decode()))


@dataclass(frozen=True, eq=False)
class RendezvousInfo:
    """One round, from this node's view: the agents' own store, this node's rank, the number of nodes, and where the
    workers' store is."""

    store: Any
    rank: int
    world_size: int
    bootstrap_store_info: RendezvousStoreInfo


class RendezvousHandler(ABC):
    """How the agents of a job find each other; an agent calls it from one thread, once for every round."""

    @abstractmethod
    def get_backend(self) -> str:
        """The backend's name, as in `--rdzv-backend`."""

    @property
    def use_agent_store(self) -> bool:
        """Whether an agent serves the store of `bootstrap_store_info`; otherwise rank 0's worker does."""
        return False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Leave the current round, and wait for the next one.

        Raises `RendezvousClosedError`, `RendezvousTimeoutError`, `RendezvousConnectionError`, `RendezvousStateError`,
        and `RendezvousGracefulExitError` for a spare whose job is over.
        """

    @abstractmethod
    def is_closed(self) -> bool:
        """Whether the rendezvous is closed; all nodes see it eventually."""

    @abstractmethod
    def set_closed(self) -> None:
        """Close the rendezvous: there is no further round."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """How many nodes wait for the next round; if it is above 0, agents start a new rendezvous."""

    @abstractmethod
    def get_run_id(self) -> str:
        """The job's name."""

    @abstractmethod
    def shutdown(self) -> bool:
        """The job is over: free all resources; returns whether that succeeded."""


class RendezvousParameters:
    """Parameters of a handler; `kwargs` are the backend's own settings, as in `--rdzv-conf`."""

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not backend:
            raise ValueError("a rendezvous has a backend, and its name is empty; give one, such as 'c10d'")
        if min_nodes < 1:
            raise ValueError(f"min_nodes={min_nodes}: a job has nodes; give 1 or more")
        if max_nodes < min_nodes:
            raise ValueError(f"max_nodes={max_nodes} is below min_nodes={min_nodes}; give as many or more")
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.config = kwargs
        self.local_addr = local_addr

    def get(self, key: str, default: Any = None) -> Any:
        """The setting without conversion."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """The setting as a bool; ValueError if it is not one."""
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        try:
            return boolean(key, str(value) if isinstance(value, int | str) else repr(value))
        except UsageError as error:
            raise ValueError(str(error)) from None

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """The setting as an int; ValueError if it is not one."""
        value = self.get(key, default)
        try:
            return None if value is None else int(value)
        except ValueError:
            raise ValueError(f"{key}={value}: not a whole number; write it like {key}=600") from None
