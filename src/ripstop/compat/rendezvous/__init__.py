"""`torch.distributed.elastic.rendezvous`: how agents find each other, with torch's names.

    handler         the handler's interface, its parameters and errors; the registry    torch's `.api`
    registry        the backends that are registered by default                         `.registry`
    dynamic         a handler over any backend with compare-and-set                     `.dynamic_rendezvous`
    compare_and_set its decisions, pure
    c10d            a backend in a torch store                                          `.c10d_rendezvous_backend`
    static          a handler for fixed ranks                                           `.static_tcp_rendezvous`
    endpoint        HOST:PORT                                                           `.utils`
    etcd_*          the handler, backend, store and server that use etcd                `.etcd_*`

`ripstop run` uses its own coordinator; `launcher/handler_link.py` connects it to a handler of another package.
Importing this package imports no torch.
"""

from ripstop.compat.rendezvous.handler import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousHandlerCreator,
    RendezvousHandlerRegistry,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from ripstop.compat.rendezvous.registry import get_rendezvous_handler, register_defaults

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
    "get_rendezvous_handler",
    "rendezvous_handler_registry",
]

register_defaults()
