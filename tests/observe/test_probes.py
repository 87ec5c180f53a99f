"""Probes over real sockets."""

import asyncio
import socket

import pytest

from ripstop.errors import UsageError
from ripstop.observe.probes import LONGEST, MOST, answer, listen, serve


@pytest.mark.parametrize(
    ("request_line", "unready", "status", "text"),
    [
        ("GET /livez", "", 200, "ok"),
        ("GET /livez", "it is warming up", 200, "ok"),
        ("GET /healthz?verbose", "", 200, "ok"),
        ("GET /readyz", "", 200, "ok"),
        ("GET /readyz", "it is warming up", 503, "it is warming up"),
        ("GET /metrics", "", 404, "there are /livez and /readyz"),
        ("POST /readyz", "", 405, "only GET makes sense here"),
        ("\xff", "", 404, "there are /livez and /readyz"),
    ],
)
def test_what_is_answered(request_line: str, unready: str, status: int, text: str) -> None:
    head, _, body = answer(f"{request_line} HTTP/1.1\r\n\r\n".encode("latin-1"), lambda: unready).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert body.decode() == f"{text}\n"


def test_a_head_request_gets_no_body() -> None:
    assert answer(b"HEAD /livez HTTP/1.1\r\n\r\n", str).endswith(b"\r\n\r\n")


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def test_it_answers_on_and_ends_conversations_that_are_too_long_or_too_many() -> None:
    async def talk() -> list[bytes]:
        listening = listen("--probe-port", "127.0.0.1", 0)
        port = listening.getsockname()[1]
        server = await serve(listening, str)
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MOST)]
        too_many = await ask(port, b"GET /livez HTTP/1.1\r\n\r\n")
        for _, writer in silent:
            writer.close()
        while not (again := await ask(port, b"GET /livez HTTP/1.1\r\n\r\n")):
            pass  # until it has seen them go
        too_long = await ask(port, b"GET /livez HTTP/1.1\r\nX: " + b"x" * 2 * LONGEST + b"\r\n\r\n")
        server.close()
        return [too_many, again[:12], too_long]

    assert asyncio.run(asyncio.wait_for(talk(), 20)) == [b"", b"HTTP/1.1 200", b""]


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"^--probe-port={port}: cannot be listened on here .*choose a port"):
            listen("--probe-port", "127.0.0.1", port)


def test_without_an_address_all_are_listened_at() -> None:
    with listen("--probe-port", None, 0) as listening:
        port = listening.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
