"""`torch.distributed.elastic.rendezvous.etcd_rendezvous_backend`: a rendezvous's state as one key of etcd.

The state is written where nobody has written since it was read; the token is the revision of etcd at which it was.  A
node has a lease, which every write renews, so every beat does.  When it has not written for a long time, its keys go by
themselves, here and in the store that is made with the backend: a job leaves nothing behind for ever.  The state is
base64, as torch has it, so that what is none is known.
"""

from __future__ import annotations

import binascii
import os
import threading
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ripstop.compat.rendezvous import RendezvousConnectionError, RendezvousStateError
from ripstop.compat.rendezvous.dynamic import RendezvousBackend
from ripstop.compat.rendezvous.etcd import Client, Denied, Unavailable
from ripstop.model import parsers
from ripstop.model.errors import UsageError

if TYPE_CHECKING:
    from ripstop.compat.rendezvous.etcd_store import EtcdStore

__all__ = ["EtcdRendezvousBackend", "create_backend"]

TTL = 7200  # seconds
READ_TIMEOUT = 60  # seconds
STATE_PREFIX, STORE_PREFIX = "/torch/elastic/rendezvous", "/torch/elastic/store"


class EtcdRendezvousBackend(RendezvousBackend):
    """What `DynamicRendezvousHandler` wants of a backend."""

    def __init__(
        self,
        client: Client,
        run_id: str,
        key_prefix: str | None = None,
        ttl: int | None = None,
        *,
        read_timeout: float = READ_TIMEOUT,
    ) -> None:
        if not run_id:
            raise ValueError("run_id='': it names the job's state in etcd; give one that is not empty")
        self._client = client
        self._key = (f"{key_prefix}/{run_id}" if key_prefix else run_id).encode()
        self._ttl = ttl if ttl and ttl > 0 else TTL
        self._lease = 0
        self._leasing = threading.Lock()  # beats come from a thread of their own
        self._read_timeout = read_timeout

    @property
    def name(self) -> str:
        return "etcd-v2"  # torch's, and what users ask for

    def get_state(self) -> tuple[bytes, int] | None:
        """The state and its token; None when there is none."""
        with _connection_errors():
            _, (found,) = self._client.read([self._key], self._read_timeout)
        return (self._decoded(found.data), found.revision) if found is not None else None

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, int, bool] | None:
        """Set it if it still has this token (None: if there is none yet).

        Returns the state then, its token, and whether it is the one given.  None: there is none, and there was one.
        """
        if isinstance(revision := token or 0, bool) or not isinstance(revision, int):
            held = self.get_state()  # no token of ours
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
        # our lease with our state: it was written, and the answer lost
        there = self._decoded(now.data)
        return there, now.revision, now.lease == lease and there == state

    def _decoded(self, value: bytes) -> bytes:
        try:
            return b64decode(value, validate=True)
        except binascii.Error:
            raise RendezvousStateError(
                f"the key {self._key.decode()} of etcd holds no state of a rendezvous: found {value[:80]!r}; "
                "it is left as it is: use another run id"
            ) from None

    def lease(self, patience: float) -> int:
        """This node's, counting anew."""
        with self._leasing:
            self._lease = self._client.lease(self._lease, self._ttl, patience)
            return self._lease


def create_backend(params: Any) -> tuple[EtcdRendezvousBackend, EtcdStore]:
    """The backend, and a store in the same etcd, of `RendezvousParameters`; etcd must answer.

    Of its configuration: `read_timeout` (60 s), `protocol`, `ssl_cert`, `ssl_cert_key`, `ca_cert`.
    """
    from ripstop.compat.rendezvous.etcd_store import EtcdStore

    with connected(params) as (client, read_timeout):
        backend = EtcdRendezvousBackend(client, params.run_id, STATE_PREFIX, read_timeout=read_timeout)
        return backend, EtcdStore(client, STORE_PREFIX, lease=backend.lease)


@contextmanager
def connected(params: Any) -> Iterator[tuple[Client, float]]:
    """A client for what these parameters say, and how long it may wait; at the end, etcd is asked whether it is there.

    It is asked once: whoever makes a backend learns of a wrong address now, and not after `read_timeout`.
    """
    conf = {key: str(value) for key, value in params.config.items()}
    try:
        read_timeout = parsers.duration("read_timeout", conf.get("read_timeout", str(READ_TIMEOUT)), positive=True)
        settings, _ = parsers.etcd("endpoint", params.endpoint, "RendezvousParameters", conf, os.environ)
    except UsageError as error:
        raise ValueError(str(error)) from None
    client = Client(settings)
    try:
        yield client, read_timeout
        with _connection_errors():
            client.read([STATE_PREFIX.encode()], patience=0)
    except BaseException:
        client.close()
        raise


@contextmanager
def _connection_errors() -> Iterator[None]:
    """By the name under which handlers know them."""
    try:
        yield
    except (Denied, Unavailable) as error:
        raise RendezvousConnectionError(str(error)) from error
