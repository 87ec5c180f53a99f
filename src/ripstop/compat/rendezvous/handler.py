"""`torch.distributed.elastic.rendezvous.api`: what a rendezvous handler is, is made of, gives, and raises.

Names, arguments and defaults are torch's.  Nothing here needs torch: a store is anything with `set` and `get`.
"""

from __future__ import annotations

import logging
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from ripstop.model.errors import UsageError
from ripstop.model.parsers import boolean

__all__ = [
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "RendezvousInfo",
    "RendezvousParameters",
    "RendezvousStateError",
    "RendezvousStoreInfo",
    "RendezvousTimeoutError",
    "is_a",
    "rendezvous_handler_registry",
]


_TORCHS = "torch.distributed.elastic.rendezvous.api"  # torch's own, where a program has loaded it


class RendezvousError(Exception):
    """Base of what a rendezvous raises."""


class RendezvousClosedError(RendezvousError):
    """The rendezvous was closed: the job is over, or about to be."""


class RendezvousTimeoutError(RendezvousError):
    """Not in the time that was given."""


class RendezvousConnectionError(RendezvousError):
    """What holds the rendezvous cannot be reached."""


class RendezvousStateError(RendezvousError):
    """What is there is no state of this rendezvous."""


class RendezvousGracefulExitError(RendezvousError):
    """This node was a spare, and the job is over: an end, not a failure."""


def is_a(error: BaseException, kind: type[RendezvousError]) -> bool:
    """Whether it is one of ours, or of torch's under the same name: a handler may raise either."""
    torchs = sys.modules.get(_TORCHS)
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
        """What rank 0 says through `store`: its address, and `server_port` or a port that is free there now."""
        if rank == 0:
            store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, (local_addr or socket.getfqdn()).encode())
            store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(server_port or _free_port()).encode())
        host = store.get(RendezvousStoreInfo.MASTER_ADDR_KEY).decode()
        return RendezvousStoreInfo(host, int(store.get(RendezvousStoreInfo.MASTER_PORT_KEY).decode()))


def _free_port() -> int:
    from ripstop.compat.utils.distributed import get_free_port

    return get_free_port()


class RendezvousInfo:
    """One round, as this node is told of it."""

    def __init__(self, store: Any, rank: int, world_size: int, bootstrap_store_info: RendezvousStoreInfo) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._bootstrap_store_info = bootstrap_store_info

    @property
    def store(self) -> Any:
        """The agents' own store for this round."""
        return self._store

    @property
    def rank(self) -> int:
        """This node's."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of nodes."""
        return self._world_size

    @property
    def bootstrap_store_info(self) -> RendezvousStoreInfo | None:
        """Where the workers' store is."""
        return self._bootstrap_store_info


class RendezvousHandler(ABC):
    """How the agents of a job meet; they call it from one thread, again for every round."""

    @abstractmethod
    def get_backend(self) -> str:
        """The backend's name, as in `--rdzv-backend`."""

    @property
    def use_agent_store(self) -> bool:
        """Whether `bootstrap_store_info` is a store that an agent serves, and not rank 0's worker."""
        return False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Leave the round that this node is in, and wait for the next one.

        Raises `RendezvousClosedError`, `RendezvousTimeoutError`, `RendezvousConnectionError`, `RendezvousStateError`,
        and for a spare whose job is over `RendezvousGracefulExitError`.
        """

    @abstractmethod
    def is_closed(self) -> bool:
        """Whether there will be no other round; known to all nodes sooner or later."""

    @abstractmethod
    def set_closed(self) -> None:
        """There will be no other round."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """How many nodes came too late for this round; when it is above 0, agents come to the next one."""

    @abstractmethod
    def get_run_id(self) -> str:
        """The job's name."""

    @abstractmethod
    def shutdown(self) -> bool:
        """The job is over: free what is held; whether that went well."""


class RendezvousParameters:
    """What a handler is made from; `kwargs` are the backend's own settings, those of `--rdzv-conf`."""

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
        """The setting as it was given."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """The setting as true or false; ValueError when it is neither."""
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        try:
            return boolean(key, str(value) if isinstance(value, int | str) else repr(value))
        except UsageError as error:
            raise ValueError(str(error)) from None

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """The setting as a whole number; ValueError when it is none."""
        value = self.get(key, default)
        try:
            return None if value is None else int(value)
        except ValueError:
            raise ValueError(f"{key}={value}: not a whole number; write it like {key}=600") from None


RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]


class RendezvousHandlerRegistry:
    """Backends by name."""

    def __init__(self) -> None:
        self._registry: dict[str, RendezvousHandlerCreator] = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """`creator` makes the handlers of this backend; a name has one creator."""
        if not backend:
            raise ValueError("a backend has a name, and this one is empty; give one")
        if self._registry.setdefault(backend, creator) != creator:
            raise ValueError(
                f"the backend {backend!r} is registered with {self._registry[backend]} already, so it cannot be with "
                f"{creator}; choose another name"
            )

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """A new handler of the backend that `params` names."""
        creator = self._creator(params.backend)
        if creator is None:
            known = ", ".join(sorted(self._registry))
            raise ValueError(
                f"the backend {params.backend!r} is not registered, there are {known or 'none'}; register() it, or "
                "install the package that has it as an entry point torchrun.handlers"
            )
        handler = creator(params)
        if handler.get_backend() != params.backend:
            raise RuntimeError(
                f"the handler for the backend {params.backend!r} says that it is for {handler.get_backend()!r}; "
                "register it under that name"
            )
        return handler

    def _creator(self, backend: str) -> RendezvousHandlerCreator | None:
        return self._registry.get(backend)


def _load_torchs() -> None:
    """Before any handler: torch loads all of them when the first one imports it, and so would load that one twice.

    What it has to say of those that cannot be loaded is said here, of the one that is asked for.
    """
    about = logging.getLogger("torch.distributed.elastic.rendezvous.registry")
    before, about.disabled = about.disabled, True
    with suppress(ImportError):
        import_module(_TORCHS)
    about.disabled = before


class _WithEntryPoints(RendezvousHandlerRegistry):
    """Finds handlers of other packages too, when they are asked for, and those that a program gave to torch's."""

    def _creator(self, backend: str) -> RendezvousHandlerCreator | None:
        if backend not in self._registry:
            from importlib.metadata import entry_points

            for point in entry_points(group="torchrun.handlers", name=backend):
                _load_torchs()
                self.register(backend, point.load()())
        torchs = getattr(sys.modules.get(_TORCHS), "rendezvous_handler_registry", None)
        return super()._creator(backend) or getattr(torchs, "_registry", {}).get(backend)


rendezvous_handler_registry: RendezvousHandlerRegistry = _WithEntryPoints()
