"""The HTTP client of the API: headers, limits of time and size."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from ripstop.api import http_client

REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@contextmanager
def server(reply: bytes) -> Iterator[tuple[http_client.Connect, list[bytes]]]:
    """Accepts one connection, sends this reply and waits for the client to close."""
    requests: list[bytes] = []

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.settimeout(120)
            requests.append(connection.recv(65536))
            connection.sendall(reply)
            connection.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield partial(socket.create_connection, listening.getsockname()), requests
        thread.join(120)


def test_a_request_has_host_token_query_and_body() -> None:
    with server(REPLY) as (connect, requests):
        request = http_client.Request("POST", "/scale", "head:29400", "t", {"a": 1, "b": None}, {"nodes": 2})
        body = http_client.send_http_request(connect, request, timeout_s=20.0, max_bytes=2)
    assert body == b"{}"
    header, _, content = requests[0].partition(b"\r\n\r\n")
    lines = header.decode().split("\r\n")
    assert lines[0] == "POST /scale?a=1 HTTP/1.1"
    assert {"Host: head:29400", "Authorization: Bearer t", "Content-Type: application/json"} <= set(lines)
    assert content in (b"", b'{"nodes": 2}')  # it may come in a second packet


def test_an_error_reply_has_its_status_and_text() -> None:
    reply = b'HTTP/1.1 409 Conflict\r\nContent-Length: 17\r\n\r\n{"error": "busy"}'
    with server(reply) as (connect, _), pytest.raises(http_client.ErrorReply) as raised:
        http_client.send_http_request(connect, http_client.Request("GET", "/status"), timeout_s=20.0, max_bytes=100)
    assert (raised.value.status, raised.value.error) == (409, "busy")


def test_a_reply_that_stays_incomplete_times_out() -> None:
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"
    with server(reply) as (connect, _), pytest.raises(TimeoutError):
        http_client.send_http_request(connect, http_client.Request("GET", "/status"), timeout_s=0.2, max_bytes=100)
