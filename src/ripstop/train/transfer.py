"""Copies of shards from worker to worker, at a restore.

The giver listens while the ranks restore.  A request names a part of a buffer that the giver's node holds; the reply is
its bytes, straight from the memfd, and a MAC of their digest.  Rules
1.  The giver starts with a nonce.  The receiver proves over it, and a nonce of its own, that it has the key of this
    restore, which only the round's workers can derive.  Others get no byte of a buffer.
2.  A receiver uses bytes only after their MAC matched; it covers the request and both nonces.  For what is unpickled,
    the digest is SHA-256, which nobody can forge; for tensors it is a fast one, which detects damage.  A buffer gets
    its stamp last, so it is whole or not there.
3.  The giver has a bounded number of connections, and a proof has a deadline.
4.  Nobody writes to a buffer before all ranks have what they need: `State.restore` ends with a barrier.
5.  If a peer is lost, the receiver raises; its round fails, and the next one decides anew.
"""

import encodings.idna  # noqa: F401 - for getaddrinfo, which would import it at its first call, in every worker
import hashlib
import hmac
import ipaddress
import itertools
import os
import secrets
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Self

import torch

from ripstop.train.commit_buffer import CommitBuffer
from ripstop.train.digest import CHUNK_BYTES, Digest

NONCE_BYTES = 16
MAC_BYTES = 32
HANDSHAKE_TIMEOUT_S = 5.0  # for the whole proof
SOCKET_TIMEOUT_S = 60.0  # without a byte
MORE_CONNECTIONS = 8  # than ranks: those that are about to close
_REQUEST = struct.Struct("<Iqq?")  # shard, offset, size, whether it is unpickled
_NUMBER = struct.Struct("<Q")


class TransferError(Exception):
    """A shard cannot be received."""


class TransferGiver:
    """Serves the buffers of one commit, by shard, to the other ranks until it is closed."""

    def __init__(self, key: bytes, buffers: dict[int, CommitBuffer], world_size: int) -> None:
        self._key = key
        self._buffers = buffers
        self._max_connections = world_size + MORE_CONNECTIONS
        host, self.host = _giver_addresses()
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
                if len(self._connections) >= self._max_connections:
                    connection.close()
                    continue
                self._connections.add(connection)
                threading.Thread(target=self._serve, args=(connection,), name="ripstop-giver", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, suppress(OSError):  # the receiver says what is wrong
                if session := self._handshake(connection):
                    self._answer(connection, session)
        finally:
            self._connections.discard(connection)

    def _handshake(self, connection: socket.socket) -> bytes:
        """Both nonces; b"" if the peer does not have the key."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        _disable_shard_transfer_delay(connection)
        _set_shard_transfer_timeout(connection, HANDSHAKE_TIMEOUT_S)
        connection.sendall(nonce)
        proof = connection.recv(NONCE_BYTES + MAC_BYTES, socket.MSG_WAITALL)  # the kernel's timeout is for all of it
        session = nonce + proof[:NONCE_BYTES]
        expected = _transfer_mac(self._key, b"receiver", session)
        return session if hmac.compare_digest(proof[NONCE_BYTES:], expected) else b""

    def _answer(self, connection: socket.socket, session: bytes) -> None:
        _set_shard_transfer_timeout(connection, SOCKET_TIMEOUT_S)
        for number in itertools.count():
            request = connection.recv(_REQUEST.size, socket.MSG_WAITALL)
            if len(request) < _REQUEST.size:
                return
            shard, offset, size, is_unpickled = _REQUEST.unpack(request)
            buffer = self._buffers.get(shard)
            if buffer is None or not 0 <= offset <= offset + size <= buffer.size:
                return
            digest = _send_transferred_part(connection, buffer, offset, size, is_unpickled=is_unpickled)
            connection.sendall(_transfer_mac(self._key, b"giver", session, _NUMBER.pack(number), request, digest))


def _send_transferred_part(
    connection: socket.socket, buffer: CommitBuffer, offset: int, size: int, *, is_unpickled: bool
) -> bytes:
    """The digest of what was sent."""
    if is_unpickled:
        content = buffer.memory(offset, offset + size)
        connection.sendall(content)
        return hashlib.sha256(content).digest()
    digest = Digest()
    for start in range(offset, offset + size, CHUNK_BYTES):
        end = min(start + CHUNK_BYTES, offset + size)
        digest.update(buffer.bytes[start:end])  # while the receiver empties the socket's buffer
        sent = start
        while sent < end:
            sent += os.sendfile(connection.fileno(), buffer.fd, sent, end - sent)
    return _NUMBER.pack(digest.value)


def _transfer_mac(key: bytes, prover: bytes, *parts: bytes) -> bytes:
    """The sizes of the parts follow from those before them."""
    return hmac.digest(key, b"".join([prover, *parts]), "sha256")


class TransferReceiver:
    """One connection to a giver."""

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self._peer = f"{host}:{port}"
        self._key = key
        self._requests = itertools.count()
        try:
            self._socket = socket.create_connection((host, port), SOCKET_TIMEOUT_S)
        except OSError as error:
            raise TransferError(f"{self._peer}: {error}") from error
        try:
            _disable_shard_transfer_delay(self._socket)
            _set_shard_transfer_timeout(self._socket, SOCKET_TIMEOUT_S)
            nonce, own = self._receive(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
            self._session = nonce + own
            self._socket.sendall(own + _transfer_mac(key, b"receiver", self._session))
        except OSError as error:
            self._socket.close()
            raise TransferError(f"{self._peer}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def read(self, shard: int, offset: int, into: memoryview) -> None:
        """Fill `into` with a part of a shard's buffer, for tensors."""
        digest = Digest()
        request = _REQUEST.pack(shard, offset, len(into), False)
        try:
            self._socket.sendall(request)
            with ThreadPoolExecutor(1) as beside:  # the digest takes no time if there is a core for it
                for start in range(0, len(into), CHUNK_BYTES):
                    chunk = into[start : start + CHUNK_BYTES]
                    self._fill(chunk)
                    beside.submit(digest.update, torch.frombuffer(chunk, dtype=torch.uint8))
            self._check(request, _NUMBER.pack(digest.value))
        except OSError as error:
            raise TransferError(f"{self._peer}: {error}") from error

    def read_bytes(self, shard: int, offset: int, size: int) -> bytes:
        """A part of a shard's buffer that may be unpickled."""
        request = _REQUEST.pack(shard, offset, size, True)
        try:
            self._socket.sendall(request)
            data = self._receive(size)
            self._check(request, hashlib.sha256(data).digest())
        except OSError as error:
            raise TransferError(f"{self._peer}: {error}") from error
        return data

    def _check(self, request: bytes, digest: bytes) -> None:
        number = _NUMBER.pack(next(self._requests))
        expected = _transfer_mac(self._key, b"giver", self._session, number, request, digest)
        if not hmac.compare_digest(self._receive(MAC_BYTES), expected):
            shard, _, size, _ = _REQUEST.unpack(request)
            raise TransferError(f"{self._peer}: {size} bytes of shard {shard} do not match their MAC")

    def _receive(self, size: int) -> bytes:
        data = bytearray(size)
        self._fill(memoryview(data))
        return bytes(data)

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

    def __init__(self, receiver: TransferReceiver, shard: int) -> None:
        self._receiver = receiver
        self._shard = shard

    def read(self, offset: int, size: int) -> torch.Tensor:
        data = bytearray(size)
        self._receiver.read(self._shard, offset, memoryview(data))
        return torch.frombuffer(data, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)


def _disable_shard_transfer_delay(opened: socket.socket) -> None:
    """Otherwise the kernel holds a MAC back until the bytes before it are acknowledged: 40 ms for each request."""
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _set_shard_transfer_timeout(opened: socket.socket, seconds: float) -> None:
    """In the kernel: Python's own timeout would make the socket non-blocking, and sendfile needs it blocking."""
    opened.settimeout(None)
    timeout = struct.pack("@ll", int(seconds), 0)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)


def _giver_addresses() -> tuple[str, str]:
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
            if _is_loopback_for_transfer(own) and store != "localhost" and not _is_loopback_for_transfer(store):
                return ("::" if family == socket.AF_INET6 else "0.0.0.0"), store
            return own, own
    raise OSError(f"{store} has no address")


def _is_loopback_for_transfer(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False
