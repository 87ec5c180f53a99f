"""A synchronous etcd client for `EtcdStore` and `EtcdRendezvousBackend`; torch has no such module.

It runs `election/etcd_client.py` on an event loop in its own thread.  (Torch uses python-etcd, whose v2 API etcd has
removed.)  Keys and values are bytes.  If etcd does not reply, a request is retried until `timeout`.  So a write whose
reply was lost is made twice: it must be idempotent, or a `swap`.
"""

import asyncio
import os
import threading
import time
import weakref
from base64 import b64decode
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from ripstop.election.etcd_client import (
    EtcdClient,
    Json,
    KeyValue,
    Unavailable,
    b64,
    get,
    if_revision,
    parsing_etcd_reply,
    put,
)
from ripstop.model.config import Etcd

FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0  # between retries; doubled each time
MAX_OPERATIONS = 100  # in a transaction; etcd allows 128
MAX_WATCH_S = 10.0  # a watch may hang with its etcd member

T = TypeVar("T")


class SyncEtcdClient:
    """Connections to etcd, for any number of threads; a forked process opens its own."""

    def __init__(self, settings: Etcd) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._pid = 0  # of the process that runs the loop
        self._close: Callable[[], object] = lambda: None

    def close(self) -> None:
        """Close the connections; another request opens new ones."""
        self._close()
        self._pid = 0

    # keys -------------------------------------------------------------------------------------------------------------

    def read(self, keys: Sequence[bytes], timeout: float) -> tuple[int, list[KeyValue | None]]:
        """The etcd revision when the first key was read, and the values of these keys."""
        replies = [self._transact(timeout, [], [get(key) for key in some]) for some in _sync_etcd_client_batches(keys)]
        return replies[0][0] if replies else 0, [value for _, values in replies for value in values]

    def write(self, values: Mapping[bytes, bytes], timeout: float, *, lease: int = 0) -> None:
        """Write the values; more than a transaction holds are not written atomically."""
        for some in _sync_etcd_client_batches(list(values.items())):
            self._transact(timeout, [], [put(key, value, lease) for key, value in some])

    def swap(
        self, key: bytes, revision: int, values: Mapping[bytes, bytes], timeout: float, *, lease: int = 0
    ) -> tuple[int, list[KeyValue | None]]:
        """Write if the key was last written at this revision (0: does not exist).  Returns the new revision and [].

        Otherwise returns 0 and the present values of all these keys.
        """
        puts = [put(name, value, lease) for name, value in values.items()]
        return self._transact(timeout, [if_revision(key, "mod", revision)], puts, [get(name) for name in values])

    def delete(self, key: bytes, timeout: float) -> bool:
        """Whether the key existed."""
        reply = self._call("kv/deleterange", {"key": b64(key)}, timeout)
        with parsing_etcd_reply():
            return int(reply.get("deleted", 0)) > 0

    def names(self, first: bytes, end: bytes, timeout: float) -> list[bytes]:
        """The keys from `first` up to, but not including, `end`."""
        body = {"key": b64(first), "range_end": b64(end), "keys_only": True}
        reply = self._call("kv/range", body, timeout)
        with parsing_etcd_reply():
            return [b64decode(kv["key"]) for kv in reply.get("kvs", ())]

    def wait_for_change(self, key: bytes, revision: int, timeout: float) -> None:
        """Return when the key changes at this revision or later; may also return without a change."""

        async def watch(client: EtcdClient) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(timeout, MAX_WATCH_S)):
                    if not await client.wait_for_change({"key": b64(key)}, revision):
                        await asyncio.sleep(FIRST_PAUSE_S)

        self._do(watch)

    # leases -----------------------------------------------------------------------------------------------------------

    def lease(self, lease: int, ttl: int, timeout: float) -> int:
        """Renew this lease; returns a new one if it has expired."""

        async def renew(client: EtcdClient) -> int:
            if lease and await client.keep_alive(lease) > 0:
                return lease
            return (await client.grant(ttl))[0]

        return self._retry(renew, timeout)

    # requests ---------------------------------------------------------------------------------------------------------

    def _transact(self, timeout: float, *parts: Sequence[Json]) -> tuple[int, list[KeyValue | None]]:
        return self._retry(lambda client: client.transaction(*parts), timeout)

    def _call(self, path: str, body: Json, timeout: float) -> Json:
        return self._retry(lambda client: client.call(path, body), timeout)

    def _retry(self, work: Callable[[EtcdClient], Coroutine[Any, Any, T]], timeout: float) -> T:
        deadline, pause = time.monotonic() + timeout, FIRST_PAUSE_S
        while True:
            try:
                return self._do(work)
            except Unavailable:
                if time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_S)

    def _do(self, work: Callable[[EtcdClient], Coroutine[Any, Any, T]]) -> T:
        with self._lock:
            if self._pid != os.getpid():
                self._begin()
        done = asyncio.run_coroutine_threadsafe(work(self._client), self._loop)
        try:
            return done.result()
        except BaseException:  # Ctrl-C, too
            done.cancel()
            raise

    def _begin(self) -> None:
        async def make() -> EtcdClient:
            return EtcdClient(self._settings)

        self._loop = asyncio.new_event_loop()
        threading.Thread(target=_run_etcd_loop, args=(self._loop,), name="ripstop-etcd", daemon=True).start()
        self._client = asyncio.run_coroutine_threadsafe(make(), self._loop).result()
        self._pid = os.getpid()
        self._close = weakref.finalize(self, _end_sync_etcd_client, self._loop, self._client, self._pid)


def _run_etcd_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _end_sync_etcd_client(loop: asyncio.AbstractEventLoop, client: EtcdClient, pid: int) -> None:
    if pid == os.getpid():  # a fork has the loop but not its thread
        asyncio.run_coroutine_threadsafe(client.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)


def _sync_etcd_client_batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[start : start + MAX_OPERATIONS] for start in range(0, len(items), MAX_OPERATIONS))
