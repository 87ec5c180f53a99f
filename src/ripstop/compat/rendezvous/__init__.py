"""`torch.distributed.elastic.rendezvous`: torch's names for how agents meet, on our own machine.

    handler     what a handler is, is made of, gives and raises; the registry       torch's `.api`
    registry    the backends that are there from the start                          `.registry`
    dynamic     a handler over anything that can compare-and-set a blob             `.dynamic_rendezvous`
    c10d        such a blob in a torch store                                        `.c10d_rendezvous_backend`
    static      a handler for fixed ranks                                           `.static_tcp_rendezvous`
    endpoint    HOST:PORT                                                           `.utils`

`ripstop run` meets at its own coordinator instead; `handler_link.py` beside this package is how it works with a handler
of another's.  Importing this imports no torch.
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
