"""Pre-authentication: reject an unauthenticated peer before HTTP is parsed.

Parsing HTTP and upgrading to WebSocket takes more than a millisecond of a process that also supervises workers.  So an
agent sends its `Hello`, computed over an empty challenge, in a header of its request.  A request without a valid
`Hello` is answered here, for a fraction of that time.  Pre-authentication grants nothing: the handshake with a fresh
challenge follows, so a recorded request fails there at the latest.  Rules:

1.  Bytes that cannot be an agent's request go to HTTP at once, unchanged.
2.  A request for the agents' path, in any form, goes to HTTP if `check` returns None.  Otherwise the rejection is the
    only answer.
3.  This module has no timer.  `connection_limits.py` closes a peer that sends nothing.
"""

import asyncio
import hashlib
import posixpath
from base64 import b64encode
from collections.abc import Callable
from urllib.parse import unquote

from ripstop.protocol.codec import encode
from ripstop.protocol.messages import Rejected
from ripstop.transport.websocket import AGENT_PATH, PREAUTH_HEADER

MAX_REQUEST_HEAD_BYTES = 8192  # more than an agent's request needs
END_OF_HEAD = b"\r\n\r\n"
PRINTABLE = bytes(range(0x20, 0x7F))  # the bytes of a valid request line
BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
WEBSOCKET_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
CLOSE_FRAME = b"\x88\x02\x03\xe8"


class PreAuthProtocol(asyncio.Protocol):
    """One connection, until it goes to HTTP or is rejected.

    `check` gets the pre-auth header and the `Origin` header.  `accept` gets the bytes received so far, and whether the
    peer may become an agent.
    """

    def __init__(
        self,
        check: Callable[[asyncio.Transport, str, str | None], Rejected | None],
        accept: Callable[[asyncio.Transport, bytes, bool], None],
        on_lost: Callable[[asyncio.Transport], None],
    ) -> None:
        self._check = check
        self._accept = accept
        self._on_lost = on_lost
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        if self._transport.is_closing():
            return
        self._received += data
        line, newline, _ = self._received.partition(b"\r\n")
        if line.rstrip(b"\r").strip(PRINTABLE) or (newline and request_path(line) != AGENT_PATH):
            self._accept(self._transport, self._received, False)
        elif newline and (end := self._received.find(END_OF_HEAD, 0, MAX_REQUEST_HEAD_BYTES)) >= 0:
            head = self._received[: end + len(END_OF_HEAD)]
            if rejected := self._check(self._transport, header(head, PREAUTH_HEADER) or "", header(head, "Origin")):
                self._reject(rejection(head, rejected))
            else:
                self._accept(self._transport, self._received, True)
        elif len(self._received) >= MAX_REQUEST_HEAD_BYTES:
            self._reject(BAD_REQUEST)

    def _reject(self, response: bytes) -> None:
        assert self._transport is not None
        self._transport.write(response)
        self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        assert self._transport is not None
        self._on_lost(self._transport)


def request_path(line: bytes) -> str:
    """The path of a request line; every form that HTTP maps to a path gives that path here, too."""
    _, _, rest = line.decode("latin-1").partition(" ")
    target = rest.strip().partition(" ")[0].partition("?")[0].partition("#")[0]
    if "://" in target:
        target = f"/{target.partition('://')[2].partition('/')[2]}"
    return posixpath.normpath(f"/{unquote(target).lstrip('/')}")


def header(head: bytes, name: str) -> str | None:
    """A header of a request, or None."""
    at = head.lower().find(f"\r\n{name.lower()}:".encode())
    if at < 0:
        return None
    line = head[at + 2 :].partition(b"\r\n")[0]
    return line.partition(b":")[2].strip().decode("latin-1")


def rejection(head: bytes, rejected: Rejected) -> bytes:
    """The whole response to a request: a WebSocket with one message, and its end."""
    key = header(head, "Sec-WebSocket-Key")
    if not key:
        return BAD_REQUEST
    accept = b64encode(hashlib.sha1(key.encode("latin-1") + WEBSOCKET_GUID, usedforsecurity=False).digest())
    upgrade = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    text = encode(rejected).encode()
    return b"%sSec-WebSocket-Accept: %s%s%s%s" % (upgrade, accept, END_OF_HEAD, _text_frame(text), CLOSE_FRAME)


def _text_frame(text: bytes) -> bytes:
    """A frame of fewer than 64 KiB."""
    size = bytes((len(text),)) if len(text) < 126 else b"\x7e" + len(text).to_bytes(2, "big")
    return b"\x81" + size + text
