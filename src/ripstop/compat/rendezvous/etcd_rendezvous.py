"""Rendezvous in etcd: torch's `etcd_rendezvous_backend`, and the names of `etcd_rendezvous`, torch's first handler.

The shared state is one key of etcd's v3 API.  (Torch's protocols use the v2 API, which etcd has removed.)  A write
succeeds if nobody has written since the state was read; the token is the etcd revision of the state.  A node has a
lease, which every write renews, so every heartbeat does.  When the lease expires, etcd removes the node's keys, here
and in the store of the handler: a job leaves nothing behind for ever.  The state is base64, as with torch, so other
values are detected.
"""

import os
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from ripstop.compat.rendezvous.dynamic import (
    DynamicRendezvousHandler,
    DynamicRendezvousStateHolder,
    RendezvousBackend,
    RendezvousSettings,
    RendezvousTimeout,
    decode_dynamic_rendezvous_state,
)
from ripstop.compat.rendezvous.etcd_store import EtcdStore
from ripstop.compat.rendezvous.handler import RendezvousConnectionError, RendezvousHandler
from ripstop.compat.rendezvous.sync_etcd_client import SyncEtcdClient
from ripstop.election.etcd_client import Denied, Unavailable
from ripstop.model import parsers, rendezvous_conf
from ripstop.model.errors import UsageError

__all__ = [
    "EtcdRendezvous",
    "EtcdRendezvousBackend",
    "EtcdRendezvousHandler",
    "EtcdRendezvousRetryImmediately",
    "EtcdRendezvousRetryableFailure",
    "create_backend",
    "create_rdzv_handler",
]

LEASE_TTL_S = 7200
READ_TIMEOUT_S = 60
STATE_PREFIX, STORE_PREFIX = "/torch/elastic/rendezvous", "/torch/elastic/store"
FIRST_PREFIX = "/torchelastic/p2p"  # of `create_rdzv_handler`
FIRST_TIMEOUT_S, FIRST_LAST_CALL_S = 600, 30


class EtcdRendezvousBackend(RendezvousBackend):
    """A backend for `DynamicRendezvousHandler`."""

    def __init__(
        self,
        client: SyncEtcdClient,
        run_id: str,
        key_prefix: str | None = None,
        ttl: int | None = None,
        *,
        read_timeout: float = READ_TIMEOUT_S,
    ) -> None:
        if not run_id:
            raise ValueError("run_id='': it names the job's state in etcd; give one that is not empty")
        self._client = client
        self._key = (f"{key_prefix}/{run_id}" if key_prefix else run_id).encode()
        self._ttl = ttl if ttl and ttl > 0 else LEASE_TTL_S
        self._lease = 0
        self._leasing = threading.Lock()  # heartbeats run in another thread
        self._read_timeout = read_timeout

    @property
    def name(self) -> str:
        return "etcd-v2"  # torch's name, which users write

    def check_connection(self) -> None:
        """Raise `RendezvousConnectionError` unless etcd answers and this node may read the state.

        There is no retry, so a wrong address is an error now and not after `read_timeout`.
        """
        with _etcd_connection_errors():
            self._client.read([self._key], timeout=0)

    def get_state(self) -> tuple[bytes, int] | None:
        with _etcd_connection_errors():
            _, (found,) = self._client.read([self._key], self._read_timeout)
        return (self._decoded(found.value), found.revision) if found is not None else None

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, int, bool] | None:
        """As the base class says; None if the state has been deleted."""
        if isinstance(revision := token or 0, bool) or not isinstance(revision, int):
            held = self.get_state()  # not our token
            return (*held, False) if held is not None else None
        with _etcd_connection_errors():
            lease = self.lease(self._read_timeout)
            values = {self._key: b64encode(state)}
            written, found = self._client.swap(self._key, revision, values, self._read_timeout, lease=lease)
        if written:
            return state, written, True
        (now,) = found
        if now is None:
            return None
        # our lease with our state: the write succeeded, and its reply was lost
        stored = self._decoded(now.value)
        return stored, now.revision, now.lease == lease and stored == state

    def _decoded(self, value: bytes) -> bytes:
        return decode_dynamic_rendezvous_state(value, f"the key {self._key.decode()} of etcd")

    def lease(self, timeout: float) -> int:
        """This node's lease, renewed."""
        with self._leasing:
            self._lease = self._client.lease(self._lease, self._ttl, timeout)
            return self._lease


def create_backend(params: Any) -> tuple[EtcdRendezvousBackend, EtcdStore]:
    """The backend, and a store in the same etcd; etcd must answer.

    Settings: `read_timeout` (60 s), `protocol`, `ssl_cert`, `ssl_cert_key`, `ca_cert`.
    """
    with _etcd_rendezvous_client(params) as (client, read_timeout):
        backend = EtcdRendezvousBackend(client, params.run_id, STATE_PREFIX, read_timeout=read_timeout)
        backend.check_connection()
        return backend, EtcdStore(client, STORE_PREFIX, lease=backend.lease)


# torch's first handler ------------------------------------------------------------------------------------------------


class EtcdRendezvousRetryableFailure(Exception):
    """Never raised; for programs that import the name."""


class EtcdRendezvousRetryImmediately(Exception):
    """Never raised; for programs that import the name."""


class EtcdRendezvous:
    """The keys and limits of a rendezvous; `client` is what `EtcdServer.get_client()` returns."""

    def __init__(
        self,
        client: SyncEtcdClient,
        prefix: str,
        run_id: str,
        num_min_workers: int,
        num_max_workers: int,
        timeout: float,
        last_call_timeout: float,
    ) -> None:
        timeouts = RendezvousTimeout(timedelta(seconds=timeout), timedelta(seconds=last_call_timeout))
        self.client = client
        self.settings = RendezvousSettings(run_id, num_min_workers, num_max_workers, timeouts, timedelta(seconds=5), 3)
        prefix = prefix.rstrip("/")
        self.backend = EtcdRendezvousBackend(client, run_id, f"{prefix}/rdzv")
        self.store = EtcdStore(client, f"{prefix}/store", lease=self.backend.lease)


class EtcdRendezvousHandler(DynamicRendezvousHandler):
    """`EtcdRendezvousHandler(EtcdRendezvous(…), local_addr)`: a rendezvous handler of the backend `etcd`."""

    def __init__(self, rdzv_impl: EtcdRendezvous, local_addr: str | None) -> None:
        holder = DynamicRendezvousStateHolder(rdzv_impl.backend, rdzv_impl.settings.run_id)
        super().__init__(local_addr, rdzv_impl.settings, "etcd", rdzv_impl.store, holder)


def create_rdzv_handler(params: Any) -> RendezvousHandler:
    """From `RendezvousParameters`.

    Settings: `timeout` (600 s), `last_call_timeout` (30 s), `etcd_prefix` (/torchelastic/p2p), `protocol`,
    `cacert`, `cert`, `key`.
    """
    with _etcd_rendezvous_client(params) as (client, _):
        rendezvous = EtcdRendezvous(
            client,
            params.get("etcd_prefix", FIRST_PREFIX),
            params.run_id,
            params.min_nodes,
            params.max_nodes,
            params.get_as_int("timeout", FIRST_TIMEOUT_S),
            params.get_as_int("last_call_timeout", FIRST_LAST_CALL_S),
        )
        rendezvous.backend.check_connection()
        return EtcdRendezvousHandler(rendezvous, params.local_addr)


@contextmanager
def _etcd_rendezvous_client(params: Any) -> Iterator[tuple[SyncEtcdClient, float]]:
    """A client for these parameters, and its read timeout.  The client is closed if the body raises."""
    conf = {key: str(value) for key, value in params.config.items()}
    try:
        read_timeout = parsers.duration("read_timeout", conf.get("read_timeout", str(READ_TIMEOUT_S)), positive=True)
        settings, _ = rendezvous_conf.etcd("endpoint", params.endpoint, "RendezvousParameters", conf, os.environ)
    except UsageError as error:
        raise ValueError(str(error)) from None
    client = SyncEtcdClient(settings)
    try:
        yield client, read_timeout
    except BaseException:
        client.close()
        raise


@contextmanager
def _etcd_connection_errors() -> Iterator[None]:
    """Raise the client's errors as `RendezvousConnectionError`."""
    try:
        yield
    except (Denied, Unavailable) as error:
        raise RendezvousConnectionError(str(error)) from error
