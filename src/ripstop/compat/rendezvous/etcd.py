"""etcd for the synchronous names of torch: `election/etcd_client.py` on an event loop in a thread of its own.

What torch calls a client is python-etcd's, for an API that etcd has removed.  Ours is for `EtcdStore` and
`EtcdRendezvousBackend`.  Keys and values are bytes.  When nobody answers, a request is made again until `patience` is
over; a write whose answer was lost is then made twice, so it must be one that does no harm, or a `swap`.
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

from msgspec import Struct

from ripstop.election.etcd_client import Denied, EtcdClient, Unavailable, b64, parsing_reply
from ripstop.model.config import Etcd

__all__ = ["Client", "Denied", "Unavailable", "Value"]

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds before etcd is asked again; doubled
MOST = 100  # of a transaction's parts; etcd takes 128
LONGEST_WATCH = 10.0  # seconds: one may hang with its member

T = TypeVar("T")


class Value(Struct, frozen=True):
    """What a key holds, the revision of etcd at which it was written, and the lease that it goes with."""

    data: bytes
    revision: int
    lease: int


class Client:
    """Connections to etcd, for any number of threads; a forked process makes its own."""

    def __init__(self, settings: Etcd) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._pid = 0  # the process whose loop it is
        self._close: Callable[[], object] = lambda: None

    def close(self) -> None:
        """End the connections; the next request would make new ones."""
        self._close()
        self._pid = 0

    # keys -------------------------------------------------------------------------------------------------------------

    def read(self, keys: Sequence[bytes], patience: float) -> tuple[int, list[Value | None]]:
        """What these keys hold, and the revision of etcd when the first was read."""
        revision, found = 0, list[Value | None]()
        for some in _batched(keys):
            looks = [_look(key) for key in some]
            answer = self._call("kv/txn", {"success": looks}, patience)
            with parsing_reply():
                revision = revision or int(answer["header"]["revision"])
                found.extend(_value(one) for one in answer["responses"])
        return revision, found

    def write(self, values: Mapping[bytes, bytes], patience: float, *, lease: int = 0) -> None:
        """Many are not written at once."""
        for some in _batched(list(values.items())):
            self._call("kv/txn", {"success": [_put(key, value, lease) for key, value in some]}, patience)

    def swap(
        self, key: bytes, revision: int, values: Mapping[bytes, bytes], patience: float, *, lease: int = 0
    ) -> tuple[int, list[Value | None]]:
        """Write, if the key is still what was written at this revision (0: is not there): the new revision, and [].

        Else 0, and what all these keys hold.
        """
        same = {"key": b64(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
        puts = [_put(name, value, lease) for name, value in values.items()]
        looks = [_look(name) for name in values]
        answer = self._call("kv/txn", {"compare": [same], "success": puts, "failure": looks}, patience)
        with parsing_reply():
            if answer.get("succeeded"):
                return int(answer["header"]["revision"]), []
            return 0, [_value(one) for one in answer["responses"]]

    def delete(self, key: bytes, patience: float) -> bool:
        """Whether it was there."""
        answer = self._call("kv/deleterange", {"key": b64(key)}, patience)
        with parsing_reply():
            return int(answer.get("deleted", 0)) > 0

    def names(self, first: bytes, end: bytes, patience: float) -> list[bytes]:
        """The keys from the first up to the end, which is not one of them."""
        body = {"key": b64(first), "range_end": b64(end), "keys_only": True}
        answer = self._call("kv/range", body, patience)
        with parsing_reply():
            return [b64decode(kv["key"]) for kv in answer.get("kvs", ())]

    def wait_for_change(self, key: bytes, revision: int, patience: float) -> None:
        """Return when the key changes at this revision or later; now and then also without a reason."""

        async def watch(client: EtcdClient) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(patience, LONGEST_WATCH)):
                    if not await client.wait_for_change({"key": b64(key)}, revision):
                        await asyncio.sleep(FIRST_PAUSE)

        self._do(watch)

    # leases -----------------------------------------------------------------------------------------------------------

    def lease(self, lease: int, ttl: int, patience: float) -> int:
        """This lease, counting anew; another when there is no such lease any more."""

        async def renew(client: EtcdClient) -> int:
            if lease and await client.keep_alive(lease) > 0:
                return lease
            return (await client.grant(ttl))[0]

        return self._insist(renew, patience)

    # requests ---------------------------------------------------------------------------------------------------------

    def _call(self, path: str, body: dict[str, Any], patience: float) -> dict[str, Any]:
        return self._insist(lambda client: client.call(path, body), patience)

    def _insist(self, work: Callable[[EtcdClient], Coroutine[Any, Any, T]], patience: float) -> T:
        deadline, pause = time.monotonic() + patience, FIRST_PAUSE
        while True:
            try:
                return self._do(work)
            except Unavailable:
                if time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

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
        threading.Thread(target=_run, args=(self._loop,), name="ripstop-etcd", daemon=True).start()
        self._client = asyncio.run_coroutine_threadsafe(make(), self._loop).result()
        self._pid = os.getpid()
        self._close = weakref.finalize(self, _end, self._loop, self._client, self._pid)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _end(loop: asyncio.AbstractEventLoop, client: EtcdClient, pid: int) -> None:
    if pid == os.getpid():  # a fork has the loop, but not its thread
        asyncio.run_coroutine_threadsafe(client.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)


def _batched(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[start : start + MOST] for start in range(0, len(items), MOST))


def _look(key: bytes) -> dict[str, Any]:
    return {"request_range": {"key": b64(key)}}


def _put(key: bytes, value: bytes, lease: int = 0) -> dict[str, Any]:
    return {"request_put": {"key": b64(key), "value": b64(value), "lease": str(lease)}}


def _value(response: dict[str, Any]) -> Value | None:
    match response["response_range"].get("kvs", ()):
        case [kv]:
            return Value(b64decode(kv.get("value", "")), int(kv["mod_revision"]), int(kv.get("lease", 0)))
    return None
