"""HTTP client for a job's API, used by the `ripstop` commands and by the Kubernetes operator.

The caller opens the connection (TCP, TLS or a Unix socket).  Rules: (1) one deadline covers the connection, the request
and the reply, so a server that sends one byte at a time gets no extra time; a stream has it until its header is read;
(2) the size of a reply is bounded; (3) redirects are not followed.  Imports no other module of ripstop.
"""

import http.client
import io
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from msgspec import Struct

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_LINE_BYTES = 16 << 20  # of a stream
MAX_ERROR_BYTES = 64 << 10  # of a reply with another status than 200

Connect = Callable[[float], socket.socket]  # opens a connection within this many seconds


class ErrorReply(Exception):
    """The server replied with another status than 200.  `error` is the API's error text, "" if there is none."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.body = body
        self.error = _http_client_error_text(body)


class Request(Struct, frozen=True):
    """One request.  `host` is the Host header; parameters of the query that are None are left out."""

    method: str
    path: str
    host: str = "localhost"
    token: str = ""
    query: Mapping[str, Any] = {}
    body: Mapping[str, Any] | None = None
    accept: str = "application/json"


def send_http_request(connect: Connect, request: Request, *, timeout_s: float, max_bytes: int) -> bytes:
    """Return the body of the reply.  Raises `ErrorReply`, `OSError` or `http.client.HTTPException`."""
    with _http_client_reply(connect, request, timeout_s) as (response, _):
        content = response.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise http.client.HTTPException(f"the reply is larger than {max_bytes} bytes")
        return content


def request_http_lines(
    connect: Connect, request: Request, *, timeout_s: float, idle_timeout_s: float | None
) -> Iterator[str]:
    """Yield the lines of a stream until it ends.  `idle_timeout_s` is the longest silence; None: no limit."""
    with _http_client_reply(connect, request, timeout_s) as (response, reader):
        reader.wait_at_most(idle_timeout_s)
        while line := response.readline(MAX_LINE_BYTES):
            yield line.decode("utf-8", "replace").rstrip("\n")


@contextmanager
def _http_client_reply(
    connect: Connect, request: Request, timeout_s: float
) -> Iterator[tuple[http.client.HTTPResponse, "_HttpReplyReader"]]:
    deadline = time.monotonic() + timeout_s
    headers = {"Host": request.host, "Accept": request.accept, "Connection": "close"}
    if request.token:
        headers["Authorization"] = f"Bearer {request.token}"
    if request.body is not None:
        headers["Content-Type"] = "application/json"
    parameters = urlencode({name: value for name, value in request.query.items() if value is not None})
    url = f"{request.path}?{parameters}" if parameters else request.path
    connection = http.client.HTTPConnection("localhost")
    connection.sock = sock = connect(timeout_s)
    try:
        sock.settimeout(_http_client_time_left(deadline))
        connection.request(request.method, url, None if request.body is None else json.dumps(request.body), headers)
        reader = _HttpReplyReader(sock, deadline)
        response = http.client.HTTPResponse(sock, method=request.method)
        response.fp.close()
        response.fp = io.BufferedReader(reader)
        with response:
            response.begin()
            if response.status != http.client.OK:
                raise ErrorReply(response.status, response.read(MAX_ERROR_BYTES))
            yield response, reader
    finally:
        connection.close()


class _HttpReplyReader(io.RawIOBase):
    """Reads a socket until a deadline (rule 1)."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline: float | None = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "Buffer") -> int:
        if self._deadline is not None:
            self._sock.settimeout(_http_client_time_left(self._deadline))
        return self._sock.recv_into(memoryview(buffer))

    def wait_at_most(self, idle_timeout_s: float | None) -> None:
        """From now on, limit the silence between two reads and not the time of all reads."""
        self._deadline = None
        self._sock.settimeout(idle_timeout_s)


def _http_client_time_left(deadline: float) -> float:
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError("timed out")
    return left


def _http_client_error_text(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, RecursionError, TypeError, LookupError):
        return ""
