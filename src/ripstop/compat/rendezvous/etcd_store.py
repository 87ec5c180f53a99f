"""`torch.distributed.elastic.rendezvous.etcd_store`: a `torch.distributed.Store` in etcd, through its v3 API.

A key of the store is an etcd key with the store's prefix, and holds the bytes as they are.  Keys below the prefix and a
NUL are internal: `add` and `append` write a marker there in the same transaction.  So a change whose reply was lost is
recognised, and never made twice.  A store with a lease attaches it to all its keys.

As with torch, a wait that times out raises `LookupError`.  While etcd does not answer, calls wait too, up to the
store's timeout.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import Store  # type: ignore[attr-defined, unused-ignore]  # missing in torch's stub

from ripstop.compat.rendezvous.sync_etcd_client import SyncEtcdClient
from ripstop.election.etcd_client import KeyValue

__all__ = ["EtcdStore"]


class EtcdStore(Store):  # type: ignore[misc, unused-ignore]
    """`EtcdStore(client, "/prefix")`, with the client that `EtcdServer.get_client()` returns."""

    if TYPE_CHECKING:
        timeout: timedelta  # missing in torch's stub

    def __init__(
        self,
        etcd_client: SyncEtcdClient,
        etcd_store_prefix: str,
        timeout: timedelta | None = None,
        *,
        lease: Callable[[float], int] = lambda _: 0,
    ) -> None:
        super().__init__()
        self.client = etcd_client
        self.prefix = etcd_store_prefix if etcd_store_prefix.endswith("/") else f"{etcd_store_prefix}/"
        if timeout is not None:
            self.set_timeout(timeout)
        self._lease = lease
        self._id = secrets.token_hex(8)
        self._lock = threading.Lock()  # one change at a time, because there is one marker key

    def clone(self) -> EtcdStore:
        """Another store with the same keys."""
        return EtcdStore(self.client, self.prefix, self.timeout, lease=self._lease)

    # keys -------------------------------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        self.multi_set([key], [value])

    def get(self, key: str) -> bytes:
        """The key's value; waits until the key exists."""
        return self.multi_get([key])[0]

    def add(self, key: str, num: int) -> int:
        """Add to the key's number, 0 if the key does not exist; returns the sum."""

        def sum_up(old: bytes | None) -> bytes:
            held = old or b"0"
            try:
                return str(int(held) + num).encode()
            except ValueError:
                raise ValueError(
                    f"add to {key!r}: it holds {held[:40]!r}, which is not a number; use another key"
                ) from None

        return int(self._change(key, sum_up))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the key's value."""
        self._change(key, lambda old: (old or b"") + _etcd_store_bytes(value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set the key if it has the expected value, or does not exist and nothing is expected; returns its value then.

        As with torch, a key that does not exist where a value is expected is not created; returns the expected value.
        """
        expected, desired = _etcd_store_bytes(expected_value), _etcd_store_bytes(desired_value)
        while True:
            _, (found,) = self.client.read([self._name(key)], self._timeout_s)
            if found is None and expected:
                return expected
            if found is not None and found.value != expected:
                return found.value
            written, _ = self._swap(self._name(key), found, {self._name(key): desired})
            if written:  # if the reply was lost, the next read finds the value
                return desired

    def delete_key(self, key: str) -> bool:
        """Whether the key existed."""
        return self.client.delete(self._name(key), self._timeout_s)

    def num_keys(self) -> int:
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        """All keys, sorted."""
        prefix = self.prefix.encode()
        names = self.client.names(prefix + b"\1", prefix[:-1] + b"0", self._timeout_s)  # "0" comes after "/"
        return [name.removeprefix(prefix).decode() for name in names]

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 (names that torch's C++ calls for a `PrefixStore`)

    # many of them -----------------------------------------------------------------------------------------------------

    def has_extended_api(self) -> bool:
        """`append`, `multi_get` and `multi_set` exist."""
        return True

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values; waits until all keys exist."""
        return self._await(keys, self._timeout_s)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        data = {self._name(key): _etcd_store_bytes(value) for key, value in zip(keys, values, strict=True)}
        self.client.write(data, self._timeout_s, lease=self._lease(self._timeout_s))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist; does not wait."""
        return None not in self.client.read([self._name(key) for key in keys], self._timeout_s)[1]

    def wait(self, keys: Sequence[str], override_timeout: timedelta | None = None) -> None:
        """Wait until all keys exist, up to the store's timeout or this one."""
        self._await(keys, self._timeout_s if override_timeout is None else override_timeout.total_seconds())

    def _await(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        names = [self._name(key) for key in keys]
        deadline = time.monotonic() + timeout
        while True:
            revision, found = self.client.read(names, max(0.0, deadline - time.monotonic()))
            values = [value.value for value in found if value is not None]
            if len(values) == len(names):
                return values
            missing = found.index(None)
            if (left := deadline - time.monotonic()) <= 0:
                raise LookupError(
                    f"etcd has no key {keys[missing]!r} below {self.prefix} after {timeout:g} s; "
                    "check that a process sets it, or give the store a longer timeout"
                )
            self.client.wait_for_change(names[missing], revision + 1, left)

    # changes ----------------------------------------------------------------------------------------------------------

    def _change(self, key: str, change: Callable[[bytes | None], bytes]) -> bytes:
        """Replace the value by a function of it, exactly once."""
        name = self._name(key)
        marker_key = f"{self.prefix}\0{self._id}-{os.getpid()}".encode()  # a fork has another pid
        marker = secrets.token_bytes(8)
        with self._lock:
            _, (found,) = self.client.read([name], self._timeout_s)
            while True:
                new = change(found.value if found is not None else None)
                written, held = self._swap(name, found, {name: new, marker_key: marker})
                if written:
                    return new
                found, marked = held
                if marked is not None and marked.value == marker:
                    return new  # only the reply was lost

    def _swap(
        self, name: bytes, found: KeyValue | None, values: dict[bytes, bytes]
    ) -> tuple[int, list[KeyValue | None]]:
        """Write the values if the key is still as it was found; returns what the client's `swap` does."""
        revision = found.revision if found is not None else 0
        return self.client.swap(name, revision, values, self._timeout_s, lease=self._lease(self._timeout_s))

    @property
    def _timeout_s(self) -> float:
        return float(self.timeout.total_seconds())

    def _name(self, key: str) -> bytes:
        return f"{self.prefix}{key}".encode()


def _etcd_store_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
