"""Probes over real sockets."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ripstop.agent.machine_io import ExitAgent
from ripstop.api.probe_server import MAX_CONNECTIONS, MAX_REQUEST_BYTES, listen_for_probes, probe_reply, serve_probes
from ripstop.launch import run_launched_agent
from ripstop.logs.directory import LogDirectory
from ripstop.model.config import Logs, RunConfig, Script
from ripstop.model.errors import UsageError


@pytest.mark.parametrize(
    ("request_line", "unready", "status", "text"),
    [
        ("GET /livez", "", 200, "ok"),
        ("GET /livez", "it is warming up", 200, "ok"),
        ("GET /healthz?verbose", "", 200, "ok"),
        ("GET /readyz", "", 200, "ok"),
        ("GET /readyz", "it is warming up", 503, "it is warming up"),
        ("GET /metrics", "", 404, "no such path; use /livez or /readyz"),
        ("POST /readyz", "", 405, "use GET"),
        ("\xff", "", 404, "no such path; use /livez or /readyz"),
    ],
)
def test_a_request_gets_this_reply(request_line: str, unready: str, status: int, text: str) -> None:
    head, _, body = probe_reply(f"{request_line} HTTP/1.1\r\n\r\n".encode("latin-1"), lambda: unready).partition(
        b"\r\n\r\n"
    )
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert body.decode() == f"{text}\n"


def test_a_head_request_gets_no_body() -> None:
    assert probe_reply(b"HEAD /livez HTTP/1.1\r\n\r\n", str).endswith(b"\r\n\r\n")


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[int]:
    """The port of the probes."""
    listening = listen_for_probes("--probe-port", "127.0.0.1", 0)
    serving = asyncio.create_task(serve_probes(listening, str))
    try:
        yield listening.getsockname()[1]
    finally:
        serving.cancel()
        await asyncio.wait([serving])


def test_probes_are_served_with_many_silent_connections() -> None:
    async def talk() -> list[bytes]:
        async with serving() as port:
            silent = []
            replies = []
            for _ in range(4):
                silent += [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS)]
                replies.append(await ask(port, b"GET /livez HTTP/1.1\r\n\r\n"))
            for reader, _ in silent[:MAX_CONNECTIONS]:  # closed for newer ones
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
            for _, writer in silent:
                writer.close()
            return [reply[:12] for reply in replies]

    assert asyncio.run(asyncio.wait_for(talk(), 120)) == 4 * [b"HTTP/1.1 200"]


def test_a_silent_connection_is_closed() -> None:
    async def talk() -> None:
        async with serving() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()

    asyncio.run(asyncio.wait_for(talk(), 120))


def test_a_request_that_is_too_long_is_closed_and_the_next_one_served() -> None:
    async def talk() -> list[bytes]:
        async with serving() as port:
            too_long = await ask(port, b"GET /livez HTTP/1.1\r\nX: " + b"x" * 2 * MAX_REQUEST_BYTES + b"\r\n\r\n")
            return [too_long, (await ask(port, b"GET /livez HTTP/1.1\r\n\r\n"))[:12]]

    assert asyncio.run(asyncio.wait_for(talk(), 120)) == [b"", b"HTTP/1.1 200"]


def test_a_request_may_come_in_pieces() -> None:
    async def talk() -> bytes:
        async with serving() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for piece in (b"GET /li", b"vez HTTP/1.1\r\n\r", b"\n"):
                writer.write(piece)
                await writer.drain()
            found = await reader.read()
            writer.close()
            return found[:12]

    assert asyncio.run(asyncio.wait_for(talk(), 120)) == b"HTTP/1.1 200"


def test_only_the_given_address_listens() -> None:
    with listen_for_probes("--probe-port", "127.0.0.2", 0) as listening:
        assert listening.getsockname()[0] == "127.0.0.2"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", listening.getsockname()[1]))


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"^--probe-port={port}: cannot listen on this port .*choose a free"):
            listen_for_probes("--probe-port", "127.0.0.1", port)


def test_without_a_host_all_addresses_listen() -> None:
    with listen_for_probes("--probe-port", None, 0) as listening:
        port = listening.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()


@pytest.mark.parametrize("steps", [0, 2])
def test_the_port_is_closed_when_the_agent_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Also if it ends before the probe server's task has run."""

    class BriefDriver:
        def __init__(self, *_: object) -> None: ...

        def reason_not_ready(self) -> str:
            return ""

        async def run(self) -> ExitAgent:
            for _ in range(steps):
                await asyncio.sleep(0)
            return ExitAgent(0)

    async def main() -> bool:
        config = RunConfig(entry=Script("train.py"), run_id="job")
        directory = LogDirectory(Logs(directory=tmp_path), "job")
        unused: Any = None
        unused_link: Any = object()
        await run_launched_agent(config, directory, unused, {}, None, link=unused_link, probe_socket=listening)
        return listening.fileno() == -1

    monkeypatch.setattr("ripstop.launch.AgentDriver", BriefDriver)
    with listen_for_probes("--probe-port", "127.0.0.1", 0) as listening:
        assert asyncio.run(main()), "the port is open"
