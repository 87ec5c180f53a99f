"""The coordinator's doorstep: what a connection says first is read here, and strangers get no further.

To speak HTTP and WebSocket with somebody takes this process more than a millisecond, and it is an agent's, with workers
to look after.  So an agent's request has its `Hello` in a header, a knock, made over an empty challenge, and a request
without a good one is answered here, for a fraction of that.  A knock opens nothing: the handshake with its challenge
follows, and who repeats a knock that was overheard fails there at the latest.  Rules:

1.  What cannot be an agent's request goes on at once, as it came: to HTTP, which has words for it.
2.  A request for the agents' path, however method and path are spelled, goes on when `answer` has no objection; else
    the objection is all that is said.
3.  Nobody is waited for here: who says nothing is the server's to turn away.
"""

import asyncio
import hashlib
import posixpath
from base64 import b64encode
from collections.abc import Callable
from urllib.parse import unquote

from ripstop.protocol.codec import encode
from ripstop.protocol.messages import Rejected
from ripstop.transport.outbox import PATH, PREAUTH_HEADER

MAX_HEAD = 8192  # bytes of an agent's request, more than any needs
END = b"\r\n\r\n"
PRINTABLE = bytes(range(0x20, 0x7F))  # what a request line is made of
NO_WEBSOCKET = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # of RFC 6455


class PreAuthProtocol(asyncio.Protocol):
    """One connection, until it is let in or turned away."""

    def __init__(
        self,
        answer: Callable[[asyncio.Transport, str, str | None], Rejected | None],
        let_in: Callable[[asyncio.Transport, bytes, bool], None],
        gone: Callable[[asyncio.Transport], None],
    ) -> None:
        self._answer = answer  # to a knock, and to the page it comes from, if it comes from one
        self._let_in = let_in  # with what it said, and whether it may be an agent
        self._gone = gone
        self._heard = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        if self._transport.is_closing():
            return
        self._heard += data
        line, newline, _ = self._heard.partition(b"\r\n")
        if line.rstrip(b"\r").strip(PRINTABLE) or (newline and path(line) != PATH):
            self._let_in(self._transport, self._heard, False)
        elif newline and (end := self._heard.find(END, 0, MAX_HEAD)) >= 0:
            head = self._heard[: end + len(END)]
            if rejected := self._answer(self._transport, header(head, PREAUTH_HEADER) or "", header(head, "Origin")):
                self._turn_away(refusal(head, rejected))
            else:
                self._let_in(self._transport, self._heard, True)
        elif len(self._heard) >= MAX_HEAD:
            self._turn_away(NO_WEBSOCKET)

    def _turn_away(self, word: bytes) -> None:
        assert self._transport is not None
        self._transport.write(word)
        self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        assert self._transport is not None
        self._gone(self._transport)


def path(line: bytes) -> str:
    """The path that a request line asks for, as HTTP will understand it or a little more generously."""
    _, _, rest = line.decode("latin-1").partition(" ")
    target = rest.strip().partition(" ")[0].partition("?")[0].partition("#")[0]
    if "://" in target:
        target = f"/{target.partition('://')[2].partition('/')[2]}"
    return posixpath.normpath(f"/{unquote(target).lstrip('/')}")


def header(head: bytes, name: str) -> str | None:
    """A header of a request; None where it has none of that name."""
    at = head.lower().find(f"\r\n{name.lower()}:".encode())
    if at < 0:
        return None
    line = head[at + 2 :].partition(b"\r\n")[0]
    return line.partition(b":")[2].strip().decode("latin-1")


def refusal(head: bytes, rejected: Rejected) -> bytes:
    """All that is said to who asked so: a WebSocket with one message, and its end."""
    key = header(head, "Sec-WebSocket-Key")
    if not key:
        return NO_WEBSOCKET
    accept = b64encode(hashlib.sha1(key.encode("latin-1") + MAGIC, usedforsecurity=False).digest())
    upgrade = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    text = encode(rejected).encode()
    return b"%sSec-WebSocket-Accept: %s%s%s%s" % (upgrade, accept, END, _frame(text), b"\x88\x02\x03\xe8")


def _frame(text: bytes) -> bytes:
    """A text frame, of fewer than 64 KiB."""
    size = bytes((len(text),)) if len(text) < 126 else b"\x7e" + len(text).to_bytes(2, "big")
    return b"\x81" + size + text
