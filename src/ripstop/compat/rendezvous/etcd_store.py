"""`torch.distributed.elastic.rendezvous.etcd_store`: a `torch.distributed.Store` in etcd, through its v3 API.

A key of the store is one of etcd's, with the store's prefix before it, and holds the bytes as they are.  Below the
prefix and a NUL are the store's own keys: whoever adds or appends leaves a mark there in the same transaction.  So a
change whose answer was lost is told from one that was not made, and never made twice.  A store that is
given a lease writes all with it.

Kept from torch: who waits in vain gets a `LookupError`.  While etcd does not answer, calls wait as well, as long as the
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

from torch.distributed import Store  # type: ignore[attr-defined, unused-ignore]  # it is there

from ripstop.compat.rendezvous.etcd import Client

__all__ = ["EtcdStore"]


class EtcdStore(Store):  # type: ignore[misc, unused-ignore]
    """`EtcdStore(client, "/prefix")`, with the client that `EtcdServer.get_client()` gives."""

    if TYPE_CHECKING:
        timeout: timedelta  # which torch's stub forgets

    def __init__(
        self,
        etcd_client: Client,
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
        self._own = secrets.token_hex(8)
        self._changing = threading.Lock()  # there is one note: one change at a time

    def clone(self) -> EtcdStore:
        """Another of the same keys."""
        return EtcdStore(self.client, self.prefix, self.timeout, lease=self._lease)

    # keys -------------------------------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Give the key this value."""
        self.multi_set([key], [value])

    def get(self, key: str) -> bytes:
        """The key's value; waits until there is one."""
        return self.multi_get([key])[0]

    def add(self, key: str, num: int) -> int:
        """Add to the number that the key holds, 0 if it is not there; the sum."""

        def sum_up(old: bytes | None) -> bytes:
            held = old or b"0"
            try:
                return str(int(held) + num).encode()
            except ValueError:
                raise ValueError(
                    f"add to {key!r}: it holds {held[:40]!r}, which is no number; use another key"
                ) from None

        return int(self._change(key, sum_up))

    def append(self, key: str, value: str | bytes) -> None:
        """Put this behind what the key holds."""
        self._change(key, lambda old: (old or b"") + _data(value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set it if it holds what is expected, or, if nothing is, is not there; what it holds then.

        A key that is not there, when something was expected, stays away; the answer is what was expected.
        """
        expected, desired = _data(expected_value), _data(desired_value)
        while True:
            _, (found,) = self.client.read([self._name(key)], self._patience)
            if found is None and expected:
                return expected
            if found is not None and found.data != expected:
                return found.data
            revision = found.revision if found is not None else 0
            # when an answer was lost, the value is there: the next look says what is true then
            values = {self._name(key): desired}
            if self.client.swap(self._name(key), revision, values, self._patience, lease=self._lease(self._patience))[
                0
            ]:
                return desired

    def delete_key(self, key: str) -> bool:
        """Whether it was there."""
        return self.client.delete(self._name(key), self._patience)

    def num_keys(self) -> int:
        """How many there are."""
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        """All keys, in order."""
        prefix = self.prefix.encode()
        names = self.client.names(prefix + b"\1", prefix[:-1] + b"0", self._patience)  # "0" comes after "/"
        return [name.removeprefix(prefix).decode() for name in names]

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 (as torch's C++ calls them, for a `PrefixStore`)

    # many of them -----------------------------------------------------------------------------------------------------

    def has_extended_api(self) -> bool:
        """`append`, `multi_get` and `multi_set` are there."""
        return True

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Their values; waits until all have one."""
        return self._await(keys, self._patience)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Give each key its value."""
        pairs = zip(keys, values, strict=True)
        data = {self._name(key): _data(value) for key, value in pairs}
        self.client.write(data, self._patience, lease=self._lease(self._patience))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of them are there; does not wait."""
        return None not in self.client.read([self._name(key) for key in keys], self._patience)[1]

    def wait(self, keys: Sequence[str], override_timeout: timedelta | None = None) -> None:
        """Wait until all are there, as long as the store's timeout or this one."""
        self._await(keys, self._patience if override_timeout is None else override_timeout.total_seconds())

    def _await(self, keys: Sequence[str], patience: float) -> list[bytes]:
        names = [self._name(key) for key in keys]
        deadline = time.monotonic() + patience
        while True:
            revision, found = self.client.read(names, max(0.0, deadline - time.monotonic()))
            there = [value.data for value in found if value is not None]
            if len(there) == len(names):
                return there
            missing = found.index(None)
            if (left := deadline - time.monotonic()) <= 0:
                raise LookupError(
                    f"etcd has no key {keys[missing]!r} below {self.prefix} after {patience:g} s; "
                    "see that somebody sets it, or give the store a longer timeout"
                )
            self.client.wait_for_change(names[missing], revision + 1, left)

    # changes ----------------------------------------------------------------------------------------------------------

    def _change(self, key: str, change: Callable[[bytes | None], bytes]) -> bytes:
        """Make a value of the one that is there, once."""
        name = self._name(key)
        note = f"{self.prefix}\0{self._own}-{os.getpid()}".encode()  # a fork has its own
        mark = secrets.token_bytes(8)
        with self._changing:
            _, (found,) = self.client.read([name], self._patience)
            while True:
                new = change(found.data if found is not None else None)
                revision = found.revision if found is not None else 0
                values = {name: new, note: mark}
                done, held = self.client.swap(name, revision, values, self._patience, lease=self._lease(self._patience))
                if done:
                    return new
                found, noted = held
                if noted is not None and noted.data == mark:
                    return new  # it was the answer that was lost

    @property
    def _patience(self) -> float:
        return float(self.timeout.total_seconds())

    def _name(self, key: str) -> bytes:
        return f"{self.prefix}{key}".encode()


def _data(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
