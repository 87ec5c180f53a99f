"""`torch.distributed.elastic.rendezvous.etcd_rendezvous_backend`: a rendezvous's state as one key of etcd.

A write succeeds if nobody has written since the state was read; the token is the etcd revision of the state.  A node
has a lease, which every write renews, so every heartbeat does.  When the lease expires, etcd removes the node's keys,
here and in the store that `create_backend` returns: a job leaves nothing behind for ever.  The state is base64, as with
torch, so other values are detected.
"""

from __future__ import annotations

import os
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ripstop.compat.rendezvous import RendezvousConnectionError
from ripstop.compat.rendezvous.dynamic import RendezvousBackend, decode_base64
from ripstop.compat.rendezvous.etcd import Client, Denied, Unavailable
from ripstop.model import parsers
from ripstop.model.errors import UsageError

if TYPE_CHECKING:
    from ripstop.compat.rendezvous.etcd_store import EtcdStore

__all__ = ["EtcdRendezvousBackend", "create_backend"]

LEASE_TTL_S = 7200
READ_TIMEOUT_S = 60
STATE_PREFIX, STORE_PREFIX = "/torch/elastic/rendezvous", "/torch/elastic/store"


class EtcdRendezvousBackend(RendezvousBackend):
    """A backend for `DynamicRendezvousHandler`."""

    def __init__(
        self,
        client: Client,
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
        with _connection_errors():
            self._client.read([self._key], timeout=0)

    def get_state(self) -> tuple[bytes, int] | None:
        """The state and its token; None if there is none."""
        with _connection_errors():
            _, (found,) = self._client.read([self._key], self._read_timeout)
        return (self._decoded(found.data), found.revision) if found is not None else None

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, int, bool] | None:
        """Set the state if it still has this token (None: if there is no state yet).

        Returns the stored state, its token, and whether it is the given one; None if the state has been deleted.
        """
        if isinstance(revision := token or 0, bool) or not isinstance(revision, int):
            held = self.get_state()  # not our token
            return (*held, False) if held is not None else None
        with _connection_errors():
            lease = self.lease(self._read_timeout)
            values = {self._key: b64encode(state)}
            written, found = self._client.swap(self._key, revision, values, self._read_timeout, lease=lease)
        if written:
            return state, written, True
        (now,) = found
        if now is None:
            return None
        # our lease with our state: the write succeeded, and its reply was lost
        stored = self._decoded(now.data)
        return stored, now.revision, now.lease == lease and stored == state

    def _decoded(self, value: bytes) -> bytes:
        return decode_base64(value, f"the key {self._key.decode()} of etcd")

    def lease(self, timeout: float) -> int:
        """This node's lease, renewed."""
        with self._leasing:
            self._lease = self._client.lease(self._lease, self._ttl, timeout)
            return self._lease


def create_backend(params: Any) -> tuple[EtcdRendezvousBackend, EtcdStore]:
    """The backend, and a store in the same etcd; etcd must answer.

    Settings: `read_timeout` (60 s), `protocol`, `ssl_cert`, `ssl_cert_key`, `ca_cert`.
    """
    from ripstop.compat.rendezvous.etcd_store import EtcdStore

    with client_for(params) as (client, read_timeout):
        backend = EtcdRendezvousBackend(client, params.run_id, STATE_PREFIX, read_timeout=read_timeout)
        backend.check_connection()
        return backend, EtcdStore(client, STORE_PREFIX, lease=backend.lease)


@contextmanager
def client_for(params: Any) -> Iterator[tuple[Client, float]]:
    """A client for these parameters, and its read timeout.  The client is closed if the body raises."""
    conf = {key: str(value) for key, value in params.config.items()}
    try:
        read_timeout = parsers.duration("read_timeout", conf.get("read_timeout", str(READ_TIMEOUT_S)), positive=True)
        settings, _ = parsers.etcd("endpoint", params.endpoint, "RendezvousParameters", conf, os.environ)
    except UsageError as error:
        raise ValueError(str(error)) from None
    client = Client(settings)
    try:
        yield client, read_timeout
    except BaseException:
        client.close()
        raise


@contextmanager
def _connection_errors() -> Iterator[None]:
    """Raise the client's errors as `RendezvousConnectionError`."""
    try:
        yield
    except (Denied, Unavailable) as error:
        raise RendezvousConnectionError(str(error)) from error
