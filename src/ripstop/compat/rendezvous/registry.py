"""`torch.distributed.elastic.rendezvous.registry`: the backends that are registered by default.

A backend's module, and torch, are imported when the first handler is created.  Backends of other packages are entry
points of the group `torchrun.handlers`, each a function that returns the creator.
"""

import logging

from ripstop.compat.rendezvous.handler import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry

__all__ = ["get_rendezvous_handler"]

log = logging.getLogger("ripstop.compat")


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """A new handler of the backend in `params`."""
    return rendezvous_handler_registry.create_handler(params)


def _c10d(params: RendezvousParameters) -> RendezvousHandler:
    from ripstop.compat.rendezvous import c10d, dynamic

    backend, store = c10d.create_backend(params)
    return dynamic.create_handler(store, backend, params)


def _static(params: RendezvousParameters) -> RendezvousHandler:
    from ripstop.compat.rendezvous import static

    return static.create_rdzv_handler(params)


def _etcd(params: RendezvousParameters) -> RendezvousHandler:
    from ripstop.compat.rendezvous import dynamic, etcd_rendezvous_backend

    backend, store = etcd_rendezvous_backend.create_backend(params)
    handler = dynamic.create_handler(store, backend, params)
    handler.backend_name = params.backend  # `etcd` or `etcd-v2`
    return handler


def _etcd_v2(params: RendezvousParameters) -> RendezvousHandler:
    log.warning("the backend etcd-v2 is the same as etcd: ripstop uses etcd's v3 API")
    return _etcd(params)


def register_defaults() -> None:
    rendezvous_handler_registry.register("c10d", _c10d)
    rendezvous_handler_registry.register("static", _static)
    rendezvous_handler_registry.register("etcd", _etcd)
    rendezvous_handler_registry.register("etcd-v2", _etcd_v2)
