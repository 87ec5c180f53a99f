"""Rendezvous backends by name: the registry class, and the backends that are registered by default.

A backend's module, and torch, are imported when the first handler is created.  Backends of other packages are entry
points of the group `torchrun.handlers`, each a function that returns the creator.
"""

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module

from ripstop.compat.rendezvous.handler import TORCH_API, RendezvousHandler, RendezvousParameters

log = logging.getLogger("ripstop.compat")

RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]


class RendezvousHandlerRegistry:
    """Backends by name."""

    def __init__(self) -> None:
        self._registry: dict[str, RendezvousHandlerCreator] = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Register the function that creates handlers of this backend; a name has one creator."""
        if not backend:
            raise ValueError("a backend has a name, and this one is empty; give one")
        if self._registry.setdefault(backend, creator) != creator:
            raise ValueError(
                f"the backend {backend!r} is registered with {self._registry[backend]} already, so it cannot be with "
                f"{creator}; choose another name"
            )

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """A new handler of the backend in `params`."""
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
                f"the handler for the backend {params.backend!r} returns {handler.get_backend()!r} as its backend; "
                "register it under that name"
            )
        return handler

    def _creator(self, backend: str) -> RendezvousHandlerCreator | None:
        return self._registry.get(backend)


def _load_torch_registry() -> None:
    """Import torch's registry before any handler: it loads all handlers, and would load the first one twice.

    Its warnings about handlers that cannot be loaded are suppressed; the one that is used raises its error.
    """
    torch_log = logging.getLogger("torch.distributed.elastic.rendezvous.registry")
    before, torch_log.disabled = torch_log.disabled, True
    with suppress(ImportError):
        import_module(TORCH_API)
    torch_log.disabled = before


class _RegistryWithEntryPoints(RendezvousHandlerRegistry):
    """Also finds handlers of other packages, and handlers that a program has registered with torch."""

    def _creator(self, backend: str) -> RendezvousHandlerCreator | None:
        if backend not in self._registry:
            from importlib.metadata import entry_points

            for point in entry_points(group="torchrun.handlers", name=backend):
                _load_torch_registry()
                self.register(backend, point.load()())
        torchs = getattr(sys.modules.get(TORCH_API), "rendezvous_handler_registry", None)
        return super()._creator(backend) or getattr(torchs, "_registry", {}).get(backend)


def _registered_c10d_handler(params: RendezvousParameters) -> RendezvousHandler:
    from ripstop.compat.rendezvous import c10d, dynamic

    backend, store = c10d.create_backend(params)
    return dynamic.create_handler(store, backend, params)


def _registered_static_handler(params: RendezvousParameters) -> RendezvousHandler:
    from ripstop.compat.rendezvous import static

    return static.create_rdzv_handler(params)


def _registered_etcd_handler(params: RendezvousParameters) -> RendezvousHandler:
    from ripstop.compat.rendezvous import dynamic, etcd_rendezvous

    if params.backend == "etcd-v2":
        log.warning("the backend etcd-v2 is the same as etcd: ripstop uses etcd's v3 API")
    backend, store = etcd_rendezvous.create_backend(params)
    handler = dynamic.create_handler(store, backend, params)
    handler.backend_name = params.backend
    return handler


rendezvous_handler_registry: RendezvousHandlerRegistry = _RegistryWithEntryPoints()
for _name, _create in {
    "c10d": _registered_c10d_handler,
    "static": _registered_static_handler,
    "etcd": _registered_etcd_handler,
    "etcd-v2": _registered_etcd_handler,
}.items():
    rendezvous_handler_registry.register(_name, _create)


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """A new handler of the backend in `params`."""
    return rendezvous_handler_registry.create_handler(params)
