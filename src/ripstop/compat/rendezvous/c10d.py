"""`torch.distributed.elastic.rendezvous.c10d_rendezvous_backend`: the shared state of a rendezvous in a torch store.

A store has `compare_set`, and a `get` that blocks while the key does not exist.  So the key always exists: it holds a
placeholder until the first state is written.  Values are base64, because torch's stores take text; the value itself is
the fencing token.
"""

import logging
import os
import tempfile
from base64 import b64encode
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from ripstop.compat.rendezvous.dynamic import RendezvousBackend, Token, decode_dynamic_rendezvous_state
from ripstop.compat.rendezvous.endpoint import parse_rendezvous_endpoint
from ripstop.compat.rendezvous.handler import RendezvousConnectionError, RendezvousParameters
from ripstop.model.config import COORDINATOR_PORT
from ripstop.system.network import is_this_machine

__all__ = ["C10dRendezvousBackend", "create_backend"]

log = logging.getLogger("ripstop.compat")

_EMPTY = b"Y2FuaW1hZGFt"  # torch's placeholder, so that its handlers and ours detect each other
READ_TIMEOUT_S = 60


class C10dRendezvousBackend(RendezvousBackend):
    """One key of a `TCPStore`, `FileStore` or `HashStore`."""

    def __init__(self, store: Any, run_id: str) -> None:
        if not run_id:
            raise ValueError("a rendezvous has a run id, and this one is empty; give the job a name")
        self._store = store
        self._key = f"torch.rendezvous.{run_id}"
        self._call(lambda: store.compare_set(self._key, "", _EMPTY.decode()))

    @property
    def name(self) -> str:
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        return self._decoded(self._call(lambda: self._store.get(self._key)))

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        if token is not None and not isinstance(token, bytes):  # not our token: it cannot match
            found = self.get_state()
            return None if found is None else (*found, False)
        desired = b64encode(state)
        value = self._call(lambda: self._store.compare_set(self._key, (token or _EMPTY).decode(), desired.decode()))
        found = self._decoded(value)
        return None if found is None else (*found, value == desired)

    def _call(self, request: Callable[[], bytes]) -> bytes:
        try:
            return bytes(request())
        except (RuntimeError, ValueError) as error:  # torch's own are RuntimeErrors
            raise RendezvousConnectionError(
                f"the store of the rendezvous does not answer: {error}; check that the process that serves it is up"
            ) from error

    def _decoded(self, value: bytes) -> tuple[bytes, Token] | None:
        if value == _EMPTY:
            return None
        return decode_dynamic_rendezvous_state(value, f"the key {self._key} of the store"), value


def create_backend(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, Any]:
    """A backend, and the store it is in.

    Settings: `store_type` is `tcp` (at the endpoint) or `file` (the endpoint is a path; a new file without one);
    `is_host` decides whether this process serves a TCP store; by default it does if the endpoint is this machine and no
    other process serves it; `read_timeout` (60) is the store's own, in seconds.
    """
    match kind := str(params.get("store_type", "tcp")).strip().lower():
        case "tcp":
            store = _c10d_rendezvous_tcp_store(params)
        case "file":
            store = _c10d_rendezvous_file_store(params)
        case _:
            raise ValueError(f"store_type={kind}: there are tcp and file; choose one of them")
    return C10dRendezvousBackend(store, params.run_id), store


def _c10d_rendezvous_tcp_store(params: RendezvousParameters) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = parse_rendezvous_endpoint(params.endpoint, COORDINATOR_PORT)
    timeout = params.get_as_int("read_timeout", READ_TIMEOUT_S)
    if timeout is None or timeout <= 0:
        raise ValueError(f"read_timeout={timeout}: a time is above 0; give seconds")
    is_host = params.get_as_bool("is_host")
    tries = [is_host] if is_host is not None else [True, False] if is_this_machine(host) else [False]
    for serves in tries:
        try:
            store = TCPStore(host, port, is_master=serves, multi_tenant=True, timeout=timedelta(seconds=timeout))
        except (RuntimeError, ValueError) as error:
            if serves is not tries[-1]:
                continue  # another process of this machine serves it
            raise RendezvousConnectionError(
                f"no store for the rendezvous at {host}:{port}: {error}; check that the node with that address is up"
            ) from error
        if serves:
            log.info("pid=%d serves the store of the rendezvous at %s:%d", os.getpid(), host, store.port)
        return store
    raise AssertionError("one of the tries returns or raises")


def _c10d_rendezvous_file_store(params: RendezvousParameters) -> Any:
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    path = params.endpoint
    try:
        if not path:
            number, path = tempfile.mkstemp()
            os.close(number)
        Path(path).touch()  # torch would try for minutes
        return FileStore(path)
    except (OSError, RuntimeError, ValueError) as error:
        raise RendezvousConnectionError(
            f"no store for the rendezvous in the file {path!r}: {error}; name one that can be written"
        ) from error
