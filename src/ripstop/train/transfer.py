"""Copies of shards from worker to worker, at a restore.

The giver listens while the ranks restore.  A request names a part of a buffer that the giver's node holds; the reply is
its bytes, straight from the memfd, and their digest.  Rules
1.  A request has the token that rank 0 made for this restore and the ranks read from the round's store.  Others get no
    byte, and no answer.
2.  A receiver uses bytes only after their digest matched.  A buffer gets its stamp last, so it is whole or not there.
3.  Nobody writes to a buffer before all ranks have what they need: `State.restore` ends with a barrier.
4.  If a peer is lost, the receiver raises; its round fails, and the next one decides anew.
"""

import hmac
import ipaddress
import os
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Self

import torch

from ripstop.train.commit_buffer import CommitBuffer
from ripstop.train.digest import CHUNK_BYTES, Digest

TOKEN_BYTES = 16
SOCKET_TIMEOUT_S = 60.0  # without a byte
_REQUEST = struct.Struct(f"<{TOKEN_BYTES}sIqq")  # token, shard, offset, size
_DIGEST = struct.Struct("<Q")


class TransferError(Exception):
    """A shard cannot be received."""


class Giver:
    """Serves the buffers of one commit, by shard, until it is closed."""

    def __init__(self, token: bytes, buffers: dict[int, CommitBuffer]) -> None:
        self._token = token
        self._buffers = buffers
        host, self.host = _addresses()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=128)
        self.port: int = self._socket.getsockname()[1]
        self._connections: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, name="ripstop-giver", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for opened in (self._socket, *self._connections):
            with suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)  # wakes its thread
        self._thread.join()
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._socket.accept()
                self._connections.add(connection)
                threading.Thread(target=self._serve, args=(connection,), name="ripstop-giver", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the receiver says what is wrong
            _set_timeout(connection)
            while request := connection.recv(_REQUEST.size, socket.MSG_WAITALL):
                if len(request) < _REQUEST.size:
                    return
                token, shard, offset, size = _REQUEST.unpack(request)
                buffer = self._buffers.get(shard)
                if not hmac.compare_digest(token, self._token) or buffer is None:
                    return
                if not 0 <= offset <= offset + size <= buffer.size:
                    return
                _send(connection, buffer, offset, size)
        self._connections.discard(connection)


def _send(connection: socket.socket, buffer: CommitBuffer, offset: int, size: int) -> None:
    digest = Digest()
    for start in range(offset, offset + size, CHUNK_BYTES):
        end = min(start + CHUNK_BYTES, offset + size)
        digest.update(buffer.bytes[start:end])  # while the receiver empties the socket's buffer
        sent = start
        while sent < end:
            sent += os.sendfile(connection.fileno(), buffer.fd, sent, end - sent)
    connection.sendall(_DIGEST.pack(digest.value))


class Receiver:
    """One connection to a giver."""

    def __init__(self, host: str, port: int, token: bytes) -> None:
        self._peer = f"{host}:{port}"
        self._token = token
        try:
            self._socket = socket.create_connection((host, port), SOCKET_TIMEOUT_S)
            _set_timeout(self._socket)
        except OSError as error:
            raise TransferError(f"{self._peer}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def read(self, shard: int, offset: int, into: memoryview) -> None:
        """Fill `into` with a part of a shard's buffer."""
        digest = Digest()
        try:
            self._socket.sendall(_REQUEST.pack(self._token, shard, offset, len(into)))
            with ThreadPoolExecutor(1) as beside:  # the digest takes no time if there is a core for it
                for start in range(0, len(into), CHUNK_BYTES):
                    chunk = into[start : start + CHUNK_BYTES]
                    self._fill(chunk)
                    beside.submit(digest.update, torch.frombuffer(chunk, dtype=torch.uint8))
            expected = bytearray(_DIGEST.size)
            self._fill(memoryview(expected))
        except OSError as error:
            raise TransferError(f"{self._peer}: {error}") from error
        if _DIGEST.unpack(expected)[0] != digest.value:
            raise TransferError(f"{self._peer}: {len(into)} bytes of shard {shard} do not match their digest")

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise ConnectionError("the peer has closed the connection")
            view = view[count:]


class LocalSource:
    """A shard in this node's memory."""

    def __init__(self, buffer: CommitBuffer) -> None:
        self._buffer = buffer

    def read(self, offset: int, size: int) -> torch.Tensor:
        return self._buffer.bytes[offset : offset + size]


class PeerSource:
    """A shard on another node."""

    def __init__(self, receiver: Receiver, shard: int) -> None:
        self._receiver = receiver
        self._shard = shard

    def read(self, offset: int, size: int) -> torch.Tensor:
        data = bytearray(size)
        self._receiver.read(self._shard, offset, memoryview(data))
        return torch.frombuffer(data, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)


def _set_timeout(opened: socket.socket) -> None:
    """In the kernel: Python's own timeout would make the socket non-blocking, and sendfile needs it blocking."""
    opened.settimeout(None)
    timeout = struct.pack("@ll", int(SOCKET_TIMEOUT_S), 0)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)


def _addresses() -> tuple[str, str]:
    """Where to listen, and under which address peers connect: the one from which this node reaches the round's store.

    A node whose own name leads to its loopback is the store's node, which peers reach under the store's address.
    """
    store = os.environ["MASTER_ADDR"]
    found = socket.getaddrinfo(store, int(os.environ["MASTER_PORT"]), type=socket.SOCK_DGRAM)
    for number, (family, kind, protocol, _, address) in enumerate(found):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)  # sends nothing
            except OSError:
                if number == len(found) - 1:
                    raise
                continue
            own = probe.getsockname()[0]
            if _is_loopback(own) and store != "localhost" and not _is_loopback(store):
                return ("::" if family == socket.AF_INET6 else "0.0.0.0"), store
            return own, own
    raise OSError(f"{store} has no address")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False
