"""A connection between the replicators of two nodes: handshake, messages and their limits.

1.  The receiver sends a nonce; the sender proves the job's secret over it, its own nonce, its node and the round; the
    receiver proves the secret in turn.  A peer without the secret gets no reply, and does not learn the run id.
2.  Messages are JSON objects of at most `MAX_MESSAGE_BYTES`, each after its length.  Nothing is unpickled.
3.  TCP connect, TLS handshake and proofs take at most `HANDSHAKE_TIMEOUT_S` each.  Later, a peer must send or take
    something every `IDLE_TIMEOUT_S`.
4.  With TLS, both ends verify certificates as agents and coordinators do.  A job's own authority signs nodes only, so
    names are not compared with it; with the system's authorities they are.
"""

import json
import secrets
import socket
import time
from contextlib import suppress
from typing import Any

from ripstop.model.config import Tls
from ripstop.protocol.secret import ReplicaSecretProofExchange, proofs_match
from ripstop.system.network import enable_keepalive
from ripstop.transport.tls import client_context, server_context

MAX_MESSAGE_BYTES = 4096
NONCE_BYTES = 16
HANDSHAKE_TIMEOUT_S = 5.0
IDLE_TIMEOUT_S = 60.0


class PeerError(Exception):
    """The peer is not one of this job and round, or does not keep to the protocol."""


class PeerConnection:
    """One end of an open connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._deadline: float | None = time.monotonic() + HANDSHAKE_TIMEOUT_S

    def end_handshake(self) -> None:
        self._deadline = None
        self.socket.settimeout(IDLE_TIMEOUT_S)

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        assert len(data) <= MAX_MESSAGE_BYTES
        self._set_timeout()
        self.socket.sendall(len(data).to_bytes(4, "big") + data)

    def receive(self) -> dict[str, Any]:
        size = int.from_bytes(self._receive_bytes(4), "big")
        if size > MAX_MESSAGE_BYTES:
            raise PeerError("a message is too long")
        try:
            message = json.loads(self._receive_bytes(size))
        except (ValueError, RecursionError):
            raise PeerError("a message is not JSON") from None
        if not isinstance(message, dict):
            raise PeerError("a message is not an object")
        return message

    def _receive_bytes(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            self._set_timeout()
            view = view[self.receive_into(view) :]
        return bytes(data)

    def receive_into(self, view: memoryview) -> int:
        if not (size := self.socket.recv_into(view)):
            raise PeerError("the peer closed the connection")
        return size

    def _set_timeout(self) -> None:
        if self._deadline is not None:
            if (left := self._deadline - time.monotonic()) <= 0:
                raise PeerError("the handshake takes too long")
            self.socket.settimeout(left)

    def interrupt(self) -> None:
        """Let a thread that uses the connection get an error."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()


def connect_to_peer(
    host: str, port: int, *, tls: Tls | None, token: str, run_id: str, node: str, round: int
) -> PeerConnection:
    """Connect to the partner; OSError or PeerError if that fails."""
    opened = socket.create_connection((host, port), timeout=HANDSHAKE_TIMEOUT_S)
    try:
        enable_keepalive(opened)
        if tls is not None:
            context = client_context(tls)
            context.check_hostname = tls.ca is None
            opened = context.wrap_socket(opened, server_hostname=host)
        peer = PeerConnection(opened)
        nonce, own = peer.receive().get("nonce"), secrets.token_hex(NONCE_BYTES)
        if not isinstance(nonce, str):
            raise PeerError("the peer does not start with a nonce")
        exchange = ReplicaSecretProofExchange(run_id, node, round, nonce, own)
        peer.send({"node": node, "round": round, "nonce": own, "proof": exchange.sender_proof(token)})
        match peer.receive():
            case {"proof": str(proof), "error": str(error)} if proofs_match(proof, exchange.receiver_proof(token)):
                if error:
                    raise PeerError(error)
            case _:
                raise PeerError("the peer does not have the job's secret")
        peer.end_handshake()
        return peer
    except BaseException:
        opened.close()
        raise


def accept_peer(opened: socket.socket, *, tls: Tls | None, token: str, run_id: str, round: int) -> PeerConnection:
    """The receiver's side of the handshake; OSError or PeerError if the peer does not pass it."""
    enable_keepalive(opened)
    if tls is not None:
        opened.settimeout(HANDSHAKE_TIMEOUT_S)
        opened = server_context(tls).wrap_socket(opened, server_side=True)
    try:
        peer = PeerConnection(opened)
        nonce = secrets.token_hex(NONCE_BYTES)
        peer.send({"nonce": nonce})
        match peer.receive():
            case {"node": str(node), "round": int(its_round), "nonce": str(its_nonce), "proof": str(proof)}:
                exchange = ReplicaSecretProofExchange(run_id, node, its_round, nonce, its_nonce)
            case _:
                raise PeerError("the peer sends no proof")
        if not proofs_match(proof, exchange.sender_proof(token)):
            raise PeerError("the peer does not have the job's secret")
        error = "" if its_round == round else f"this node is in round {round}"
        peer.send({"proof": exchange.receiver_proof(token), "error": error})
        if error:
            raise PeerError(f"the peer is in round {its_round}")
        peer.end_handshake()
        return peer
    except BaseException:
        opened.close()
        raise
