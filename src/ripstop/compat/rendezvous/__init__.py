"""`torch.distributed.elastic.rendezvous` and its `.api`: how agents find each other, with torch's names.

    handler           the handler's interface, its parameters and errors
    registry          backends by name                                    torch's `.registry`
    dynamic           a handler over any backend with compare-and-set     `.dynamic_rendezvous`
    compare_and_set   its decisions, pure
    c10d              a backend in a torch store                          `.c10d_rendezvous_backend`
    static            a handler for fixed ranks                           `.static_tcp_rendezvous`
    endpoint          HOST:PORT                                           `.utils`
    etcd_rendezvous   a backend and a handler in etcd                     `.etcd_rendezvous`, `.etcd_rendezvous_backend`
    etcd_store        a torch store in etcd                               `.etcd_store`
    etcd_server       a local etcd                                        `.etcd_server`
    sync_etcd_client  the client of these three

`ripstop run` uses its own coordinator; `launcher/handler_link.py` connects it to a handler of another package.
Importing this package imports no torch.
"""

from ripstop.compat.rendezvous.handler import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from ripstop.compat.rendezvous.registry import (
    RendezvousHandlerCreator,
    RendezvousHandlerRegistry,
    get_rendezvous_handler,
    rendezvous_handler_registry,
)

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
