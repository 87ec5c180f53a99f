"""Answers to probes, over HTTP on a port of its own: is this agent alive, is it ready?

`/livez` is 200 for as long as the agent's event loop turns: that it answers is the proof.  `/readyz` is 200 while the
agent is of use to its job, else 503 and the reason.  Whoever can reach the port may ask and learns no more than that; a
request has a bounded size and time, and there are never more than `MOST` of them.  One more closes the oldest that has
not sent its request yet.  Connections are accepted one at a time, so each is read before many others can come: silent
connections cannot keep a probe from its answer.
"""

import asyncio
import socket
from collections.abc import Callable
from functools import partial

from ripstop.model.errors import UsageError

LONGEST = 8192  # bytes of a request
PATIENCE = 1.0  # seconds for it to come, and for its answer to be taken
MOST = 32  # at a time
NO_DESCRIPTORS = 0.1  # seconds until accepting is tried again
END = b"\r\n\r\n"
ALIVE = ("/livez", "/healthz", "/live", "/")  # the first is ours, the others are what people are used to
READY = ("/readyz", "/ready")
WORDS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


def listen(name: str, host: str | None, port: int) -> socket.socket:
    """At this port, of this address or of all; `name` is what the user calls the port."""
    try:
        if host is None:
            dual = socket.has_dualstack_ipv6()
            return socket.create_server(
                ("", port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual
            )
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)  # an IPv6 one with its scope
    except OSError as error:
        raise UsageError(
            f"{name}={port}: cannot be listened on here ({error.strerror}); choose a port that is free"
        ) from error


async def serve(listening: socket.socket, unready: Callable[[], str]) -> None:
    """Answer until cancelled; `unready` says why this agent is of no use, "" if it is."""
    loop = asyncio.get_running_loop()
    asking: dict[asyncio.Transport, None] = {}  # the oldest first
    listening.setblocking(False)
    try:
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except ConnectionError:
                continue  # it went away before we looked
            except OSError:
                await asyncio.sleep(NO_DESCRIPTORS)
                continue
            while len(asking) >= MOST:
                oldest = next(iter(asking))
                del asking[oldest]
                oldest.abort()
            try:
                await loop.connect_accepted_socket(partial(_Conversation, asking, unready), connection)
            except OSError:
                connection.close()
    finally:
        listening.close()
        for transport in list(asking):
            transport.abort()


class _Conversation(asyncio.Protocol):
    """One request and its answer."""

    def __init__(self, asking: dict[asyncio.Transport, None], unready: Callable[[], str]) -> None:
        self._asking = asking
        self._unready = unready
        self._heard = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._asking[transport] = None
        self._timer = asyncio.get_running_loop().call_later(PATIENCE, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._heard += data
        if (end := self._heard.find(END, 0, LONGEST)) >= 0:
            self._transport.write(answer(self._heard[: end + len(END)], self._unready))
            self._transport.close()
        elif len(self._heard) >= LONGEST:
            self._transport.abort()

    def connection_lost(self, _: Exception | None) -> None:
        self._timer.cancel()
        self._asking.pop(self._transport, None)


def answer(head: bytes, unready: Callable[[], str]) -> bytes:
    """The response to a request."""
    method, _, rest = head.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0].decode("ascii", "replace")
    if path not in (*ALIVE, *READY):
        status, text = 404, f"there are {ALIVE[0]} and {READY[0]}"
    elif method not in (b"GET", b"HEAD"):
        status, text = 405, "only GET makes sense here"
    elif path in READY and (why := unready()):
        status, text = 503, why
    else:
        status, text = 200, "ok"
    body = f"{text}\n".encode()
    head = (
        f"HTTP/1.1 {status} {WORDS[status]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode()
    return head if method == b"HEAD" else head + body
