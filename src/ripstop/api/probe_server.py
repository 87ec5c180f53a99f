"""Liveness and readiness probes of an agent, over HTTP on a port of their own.

`/livez` returns 200 while the agent's event loop runs.  `/readyz` returns 200 while the agent's workers run or can be
started, else 503 and the reason.  No authentication; a request reveals nothing else.  Rules: (1) the size and the time
of a request are limited; (2) at most `MAX_CONNECTIONS` are open, and a new one closes the oldest that has sent no
request; (3) connections are accepted one at a time and read before many others can follow, so silent connections cannot
block a probe.
"""

import asyncio
import socket
from collections.abc import Callable
from functools import partial

from ripstop.model.errors import UsageError

MAX_REQUEST_BYTES = 8192
TIMEOUT_S = 1.0  # for the request, and for sending the reply
MAX_CONNECTIONS = 32
ACCEPT_RETRY_DELAY_S = 0.1  # when there are no file descriptors
HEADER_END = b"\r\n\r\n"
LIVE_PATHS = ("/livez", "/healthz", "/live", "/")  # ours, and usual names
READY_PATHS = ("/readyz", "/ready")
STATUS_TEXTS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


def listen_for_probes(name: str, host: str | None, port: int) -> socket.socket:
    """Listen on a port of this host, or of all addresses; `name` is the flag of the port."""
    try:
        if host is None:
            dual = socket.has_dualstack_ipv6()
            return socket.create_server(
                ("", port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual
            )
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)  # an IPv6 address with its scope
    except OSError as error:
        raise UsageError(f"{name}={port}: cannot listen on this port ({error.strerror}); choose a free one") from error


async def serve_probes(listening: socket.socket, unready: Callable[[], str]) -> None:
    """Serve probes until cancelled; `unready` returns why the agent is not ready, "" if it is."""
    loop = asyncio.get_running_loop()
    connections: dict[asyncio.Transport, None] = {}  # oldest first
    listening.setblocking(False)
    try:
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except ConnectionError:
                continue  # closed by the client before it was accepted
            except OSError:
                await asyncio.sleep(ACCEPT_RETRY_DELAY_S)
                continue
            while len(connections) >= MAX_CONNECTIONS:
                oldest = next(iter(connections))
                del connections[oldest]
                oldest.abort()
            try:
                await loop.connect_accepted_socket(partial(_ProbeConnection, connections, unready), connection)
            except OSError:
                connection.close()
    finally:
        listening.close()
        for transport in list(connections):
            transport.abort()


class _ProbeConnection(asyncio.Protocol):
    """One request and its reply."""

    def __init__(self, connections: dict[asyncio.Transport, None], unready: Callable[[], str]) -> None:
        self._connections = connections
        self._unready = unready
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections[transport] = None
        self._timer = asyncio.get_running_loop().call_later(TIMEOUT_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._received += data
        if (end := self._received.find(HEADER_END, 0, MAX_REQUEST_BYTES)) >= 0:
            self._transport.write(probe_reply(self._received[: end + len(HEADER_END)], self._unready))
            self._transport.close()
        elif len(self._received) >= MAX_REQUEST_BYTES:
            self._transport.abort()

    def connection_lost(self, _: Exception | None) -> None:
        self._timer.cancel()
        self._connections.pop(self._transport, None)


def probe_reply(request: bytes, unready: Callable[[], str]) -> bytes:
    method, _, rest = request.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0].decode("ascii", "replace")
    if path not in (*LIVE_PATHS, *READY_PATHS):
        status, text = 404, f"no such path; use {LIVE_PATHS[0]} or {READY_PATHS[0]}"
    elif method not in (b"GET", b"HEAD"):
        status, text = 405, "use GET"
    elif path in READY_PATHS and (why := unready()):
        status, text = 503, why
    else:
        status, text = 200, "ok"
    body = f"{text}\n".encode()
    header = (
        f"HTTP/1.1 {status} {STATUS_TEXTS[status]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode()
    return header if method == b"HEAD" else header + body
