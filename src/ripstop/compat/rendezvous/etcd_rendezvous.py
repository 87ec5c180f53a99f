"""`torch.distributed.elastic.rendezvous.etcd_rendezvous`: the names of torch's first rendezvous in etcd.

Torch's protocol uses etcd's v2 API, which etcd has removed.  Here the handler is that of `dynamic.py`, and the shared
state is one key of etcd's v3 API.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from ripstop.compat.rendezvous import RendezvousHandler
from ripstop.compat.rendezvous.dynamic import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
    _Host,
    _StateHolder,
)
from ripstop.compat.rendezvous.etcd import Client
from ripstop.compat.rendezvous.etcd_rendezvous_backend import EtcdRendezvousBackend, client_for
from ripstop.compat.rendezvous.etcd_store import EtcdStore

__all__ = [
    "EtcdRendezvous",
    "EtcdRendezvousHandler",
    "EtcdRendezvousRetryImmediately",
    "EtcdRendezvousRetryableFailure",
    "create_rdzv_handler",
]

PREFIX = "/torchelastic/p2p"
TIMEOUT, LAST_CALL_TIMEOUT = 600, 30  # seconds


class EtcdRendezvousRetryableFailure(Exception):
    """Never raised; for programs that import the name."""


class EtcdRendezvousRetryImmediately(Exception):
    """Never raised; for programs that import the name."""


class EtcdRendezvous:
    """The keys and limits of a rendezvous; `client` is what `EtcdServer.get_client()` returns."""

    def __init__(
        self,
        client: Client,
        prefix: str,
        run_id: str,
        num_min_workers: int,
        num_max_workers: int,
        timeout: float,
        last_call_timeout: float,
    ) -> None:
        self.client = client
        self.settings = RendezvousSettings(
            run_id,
            num_min_workers,
            num_max_workers,
            RendezvousTimeout(timedelta(seconds=timeout), timedelta(seconds=last_call_timeout)),
            timedelta(seconds=5),
            3,
        )
        prefix = prefix.rstrip("/")
        self.backend = EtcdRendezvousBackend(client, run_id, f"{prefix}/rdzv")
        self.store = EtcdStore(client, f"{prefix}/store", lease=self.backend.lease)


class EtcdRendezvousHandler(DynamicRendezvousHandler):
    """`EtcdRendezvousHandler(EtcdRendezvous(…), local_addr)`: a rendezvous handler of the backend `etcd`."""

    def __init__(self, rdzv_impl: EtcdRendezvous, local_addr: str | None) -> None:
        host = _Host(local_addr or socket.getfqdn(), given=bool(local_addr))
        holder = _StateHolder(rdzv_impl.backend, rdzv_impl.settings.run_id)
        super().__init__(host, rdzv_impl.settings, "etcd", rdzv_impl.store, holder)


def create_rdzv_handler(params: Any) -> RendezvousHandler:
    """From `RendezvousParameters`.

    Settings: `timeout` (600 s), `last_call_timeout` (30 s), `etcd_prefix` (/torchelastic/p2p), `protocol`,
    `cacert`, `cert`, `key`.
    """

    def seconds(name: str, default: int) -> int:
        found = params.get_as_int(name, default)
        assert found is not None, "it has a default"
        return int(found)

    with client_for(params) as (client, _):
        rendezvous = EtcdRendezvous(
            client,
            params.get("etcd_prefix", PREFIX),
            params.run_id,
            params.min_nodes,
            params.max_nodes,
            seconds("timeout", TIMEOUT),
            seconds("last_call_timeout", LAST_CALL_TIMEOUT),
        )
        rendezvous.backend.check_connection()
        return EtcdRendezvousHandler(rendezvous, params.local_addr)
