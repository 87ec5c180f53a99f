import asyncio
import contextlib
import logging
import os
import random
import secrets
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from ripstop.model.operator_commands import StopJob
from ripstop.model.round import Address, Outcome
from ripstop.protocol.codec import MAX_FRAME_BYTES, decode, encode
from ripstop.protocol.messages import (
    Assign,
    Challenge,
    Closed,
    Heartbeat,
    Hello,
    Left,
    Rejected,
    StandBy,
    Succeeded,
    Welcome,
)
from ripstop.protocol.secret import SecretProofExchange
from ripstop.transport import agent_authentication, api_authorization, connection_limits
from ripstop.transport.rejection_log import RejectionLog
from ripstop.transport.websocket import CLOSE_CODE_RETURNING, PREAUTH_HEADER

DEADLINE = 120.0
WELCOME_OR_REJECTED: tuple[type[Welcome | Rejected], ...] = (Welcome, Rejected)


def preauth_hello(token: str = "s3cret", run_id: str = "job", node: str = "a", nonce: str = "") -> str:
    """The pre-auth header of an agent's request."""
    nonce = nonce or secrets.token_hex(16)
    return encode(Hello(run_id, node, nonce, SecretProofExchange(run_id, node, "", nonce).agent_proof(token)))


@contextlib.asynccontextmanager
async def connection(address: Address, header: str | None = None) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    headers = {PREAUTH_HEADER: preauth_hello() if header is None else header}
    async with (
        aiohttp.ClientSession() as http,
        asyncio.timeout(DEADLINE),
        http.ws_connect(f"ws://{address}/agent", headers=headers, autoping=False) as ws,
    ):
        yield ws


async def do_handshake(
    ws: aiohttp.ClientWebSocketResponse, token: str = "s3cret", run_id: str = "job", node: str = "a"
) -> tuple[Hello, Welcome | Rejected]:
    """The agent's side of the handshake."""
    challenge = decode(await ws.receive_str(), (Challenge,))
    exchange = SecretProofExchange(run_id, node, challenge.nonce, "00" * 16)
    hello = Hello(run_id, node, exchange.agent_nonce, exchange.agent_proof(token))
    await ws.send_str(encode(hello))
    return hello, decode(await ws.receive_str(), WELCOME_OR_REJECTED)


async def wait_closed(ws: aiohttp.ClientWebSocketResponse) -> None:
    """The coordinator closes the connection."""
    while (await ws.receive()).type not in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED):
        pass


async def job_runs(harness: Any, coordinator: Any, address: Address) -> None:
    """A whole job still runs."""
    async with harness.linking(address, node="honest") as (link, agent):
        await agent.until(lambda a: a.count("linked") == 1)
        link.send(harness.join("honest"))
        assign = await agent.heard(Assign)
        link.send(Succeeded(assign.place.round))
        await agent.heard(Closed)
        link.send(Left("the job is over"))
    report = await asyncio.wait_for(coordinator.ended, DEADLINE)
    assert report.outcome is Outcome.SUCCEEDED


def test_agent_and_coordinator_prove_the_secret_to_each_other(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving(lease=7.0) as (_, address), connection(address) as ws:
            challenge = decode(await ws.receive_str(), (Challenge,))
            exchange = SecretProofExchange("job", "a", challenge.nonce, "00" * 16)
            await ws.send_str(encode(Hello("job", "a", exchange.agent_nonce, exchange.agent_proof("s3cret"))))
            welcome = decode(await ws.receive_str(), (Welcome,))
            assert (welcome.proof, welcome.lease) == (exchange.coordinator_proof("s3cret"), 7.0)
            assert abs(welcome.time - time.time()) < DEADLINE

    asyncio.run(scenario())


def test_a_wrong_secret_is_rejected_with_the_remedy(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address), connection(address) as ws:
            _, reply = await do_handshake(ws, token="guess")
            assert isinstance(reply, Rejected)
            assert "set the same RIPSTOP_TOKEN on every node" in reply.why
            await wait_closed(ws)
            assert coordinator.attached == []

    asyncio.run(scenario())


def test_a_name_with_a_lone_surrogate_is_rejected(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (_, address), connection(address) as ws:
            await ws.receive_str()
            await ws.send_str('{"v":1,"type":"Hello","run_id":"job","node":"\\ud800","nonce":"n","proof":"p"}')
            answer = decode(await ws.receive_str(), (Rejected,))
            assert "surrogate pair" in answer.why
            await wait_closed(ws)

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_a_node_without_a_proper_name_is_rejected(harness: Any, name: str) -> None:
    async def scenario() -> None:
        async with harness.serving() as (_, address), connection(address) as ws:
            _, reply = await do_handshake(ws, node=name)
            assert isinstance(reply, Rejected)
            assert "text of 1 to 256 characters" in reply.why
            await wait_closed(ws)

    asyncio.run(scenario())


def test_the_rejection_of_an_agent_of_another_job_names_both_jobs(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address), connection(address) as ws:
            _, reply = await do_handshake(ws, run_id="job2")
            assert isinstance(reply, Rejected)
            assert reply.final
            assert "'job'" in reply.why
            assert "'job2'" in reply.why
            await wait_closed(ws)
            assert coordinator.attached == []

    asyncio.run(scenario())


def test_an_agent_of_the_next_job_may_retry_when_this_job_has_ended(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address):
            coordinator.apply_command(StopJob("enough"))
            await asyncio.wait_for(coordinator.ended, DEADLINE)
            async with connection(address) as ws:
                _, reply = await do_handshake(ws, run_id="job2")
                assert isinstance(reply, Rejected)
                assert not reply.final

    asyncio.run(scenario())


def test_a_replayed_hello_is_rejected(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address):
            async with connection(address) as ws:
                hello, reply = await do_handshake(ws)
                assert isinstance(reply, Welcome)
            async with connection(address) as ws:
                decode(await ws.receive_str(), (Challenge,))
                await ws.send_str(encode(hello))
                assert isinstance(decode(await ws.receive_str(), WELCOME_OR_REJECTED), Rejected)
            assert len(coordinator.attached) == 1

    asyncio.run(scenario())


INVALID_PREAUTH = {
    "no header": ("", "install the same version of ripstop"),
    "another version": ('{"v":2,"type":"Hello","field":"of the future"}', "install the same version of ripstop"),
    "no JSON": ("not JSON", "is JSON, this is not"),
    "another message": (encode(Heartbeat()), "expected Hello"),
    "another secret": (preauth_hello(token="guess"), "set the same RIPSTOP_TOKEN on every node"),
    "another job": (preauth_hello(run_id="job2"), "this is the coordinator of job 'job', not of 'job2'"),
    "a long name": (preauth_hello(node="x" * 257), "text of 1 to 256 characters"),
}


@pytest.mark.parametrize(("text", "why"), INVALID_PREAUTH.values(), ids=INVALID_PREAUTH.keys())
def test_invalid_pre_authentication_is_rejected_with_the_reason_only(harness: Any, text: str, why: str) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address):
            async with connection(address, text) as ws:
                assert why in decode(await ws.receive_str(), (Rejected,)).why
                await wait_closed(ws)
            await job_runs(harness, coordinator, address)

    asyncio.run(scenario())


def test_a_replayed_pre_auth_header_is_rejected(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address):
            recorded = preauth_hello()
            async with connection(address, recorded) as ws:
                assert isinstance((await do_handshake(ws))[1], Welcome)
            async with connection(address, recorded) as ws:
                assert "valid once" in decode(await ws.receive_str(), (Rejected,)).why
                await wait_closed(ws)
            assert len(coordinator.attached) == 1

    asyncio.run(scenario())


def test_the_number_of_remembered_nonces_is_limited(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_authentication, "MAX_REMEMBERED_NONCES", 2)

    async def scenario() -> None:
        async with harness.serving() as (coordinator, address):
            first, *others = (preauth_hello() for _ in range(3))
            for text in (first, *others, first):  # forgotten, but the challenge is a new one
                async with connection(address, text) as ws:
                    decode(await ws.receive_str(), (Challenge,))
            async with connection(address, others[1]) as ws:
                decode(await ws.receive_str(), (Rejected,))
            assert coordinator.attached == []

    asyncio.run(scenario())


def test_an_agents_request_may_arrive_byte_by_byte(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (_, address):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            request = (
                UPGRADE[: UPGRADE.index(b"Ripstop-Preauth")] + f"ripstop-preauth:{preauth_hello()}\r\n\r\n".encode()
            )
            async with asyncio.timeout(DEADLINE):
                for at in range(len(request)):
                    writer.write(request[at : at + 1])
                    await writer.drain()
                assert b"101" in await reader.readline()
                await reader.readuntil(b"Challenge")
            writer.close()

    asyncio.run(scenario())


LONG = b"GET /agent HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: %s\r\n" % (n, b"x" * 1000) for n in range(10))


@pytest.mark.parametrize("end", [b"\r\n", b"Ripstop-Preauth: %s\r\n\r\n" % preauth_hello().encode()])
def test_an_agents_request_that_is_too_long_is_rejected(harness: Any, end: bytes) -> None:
    async def scenario() -> None:
        async with harness.serving() as (_, address):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(LONG + end)
            async with asyncio.timeout(DEADLINE):
                assert b"400" in await reader.readline()
            writer.close()

    asyncio.run(scenario())


REQUEST_LINES = [
    b"GET /agent",
    b"GET /agent?x",
    b"GET /agent#x",
    b"HEAD /agent",
    b"get /agent",
    b"POST /agent",
    b"GET  /agent",
    b"GET //agent",
    b"GET /./agent",
    b"GET /x/../agent",
    b"GET /agent/",
    b"GET /%61gent",
    b"GET /%61%67%65%6e%74",
    b"GET /%2561gent",
    b"GET http://127.0.0.1/agent",
    b"GET http://evil.example/agent",
    b"GET HTTP://evil.example//agent?x=y",
    b"\r\nGET /agent",
    b"\nGET /agent",
    b" GET /agent",
    b"GET\t/agent",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\nGET /agent",
    b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /agent",
]


@pytest.mark.parametrize("token", ["", "s3cret"])
@pytest.mark.parametrize("request_line", REQUEST_LINES)
def test_without_pre_authentication_no_form_of_the_path_reaches_the_handshake(
    harness: Any, request_line: bytes, token: str
) -> None:
    async def scenario() -> None:
        async with harness.serving(token=token) as (coordinator, address):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(request_line + UPGRADE[len(b"GET /agent") : UPGRADE.index(b"Ripstop-Preauth")] + b"\r\n")
            async with asyncio.timeout(DEADLINE):
                with contextlib.suppress(ConnectionError):
                    assert b"Challenge" not in await reader.read()
            writer.close()
            assert coordinator.attached == []

    asyncio.run(scenario())


@pytest.mark.parametrize("origin", [b"http://evil.example", b"null", b""])
def test_a_web_page_cannot_join_even_with_the_secret(
    harness: Any, origin: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with harness.serving() as (_, address):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            header = b"Ripstop-Preauth: %s\r\n\r\n" % preauth_hello().encode()
            writer.write(UPGRADE[: UPGRADE.index(b"Ripstop-Preauth")] + b"Origin: " + origin + b"\r\n" + header)
            async with asyncio.timeout(DEADLINE):
                assert b"a web page cannot join a job" in await reader.read()
            writer.close()

    with caplog.at_level(logging.DEBUG, "ripstop"):
        asyncio.run(scenario())
    assert "tried to join the job" in caplog.text


def test_unauthenticated_peers_do_not_learn_the_run_id(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving(run_id="my-run") as (_, address), aiohttp.ClientSession() as http:
            async with connection(address, preauth_hello(token="guess", run_id="other")) as ws:
                why = decode(await ws.receive_str(), (Rejected,)).why
                assert "coordinator of another job, not of 'other'" in why
            for path in ("/metrics", "/api/v1/status", "/healthz", "/"):
                for headers in ({}, {"Authorization": "Bearer guess"}):
                    async with http.get(f"http://{address}{path}", headers=headers) as response:
                        assert "my-run" not in await response.text()

    asyncio.run(scenario())


def test_without_a_secret_an_agent_of_another_job_does_not_learn_the_run_id(harness: Any) -> None:
    async def scenario() -> None:
        async with (
            harness.serving(run_id="my-run", token="") as (_, address),
            connection(address, preauth_hello(token="", run_id="other")) as ws,
        ):
            assert "my-run" not in decode(await ws.receive_str(), (Rejected,)).why

    asyncio.run(scenario())


def agent_request() -> bytes:
    return UPGRADE[: UPGRADE.index(b"Ripstop-Preauth")] + b"Ripstop-Preauth: %s\r\n\r\n" % preauth_hello().encode()


def expecting_post() -> bytes:
    return b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"


@pytest.mark.parametrize("request_of", [agent_request, expecting_post])
def test_a_peer_that_disconnects_early_is_not_an_error(
    harness: Any, request_of: Callable[[], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address):
            for _ in range(50):
                with socket.create_connection((address.host, address.port)) as peer:
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    peer.sendall(request_of())
                    for _ in range(random.randrange(8)):
                        await asyncio.sleep(0)
            await job_runs(harness, coordinator, address)

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("key", [b"x", b"\xff\xfe", b"", b"AAAA AAAA"])
def test_an_invalid_websocket_key_is_rejected_and_logged_once(
    harness: Any, key: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address):
            for _ in range(3):
                good = UPGRADE[: UPGRADE.index(b"Ripstop-Preauth")].replace(b"AAAAAAAAAAAAAAAAAAAAAA==", key)
                await send_raw(address, good + b"Ripstop-Preauth: %s\r\n\r\n" % preauth_hello().encode())
            await job_runs(harness, coordinator, address)

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    (line,) = (record.getMessage() for record in caplog.records)
    assert "logged once" in line
    assert not caplog.records[0].exc_info


def test_an_invalid_body_is_logged_once(harness: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with harness.serving() as (_, address):
            for _ in range(3):
                await send_raw(
                    address,
                    b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 20\r\n\r\n" + b"x" * 20,
                )

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert len(caplog.records) <= 1
    assert not any(record.exc_info for record in caplog.records)


def test_a_defect_is_logged_once_per_place(
    harness: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(api_authorization.ApiAuthorization, "operator", broken)

    async def scenario() -> None:
        async with harness.serving() as (_, address), aiohttp.ClientSession() as http:
            for _ in range(5):
                async with http.get(f"http://{address}/api/v1/status") as response:
                    assert response.status == 500

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert len([record for record in caplog.records if record.exc_info]) == 1


def test_data_after_invalid_pre_authentication_is_ignored(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (_, address):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(UPGRADE[: UPGRADE.index(b"Ripstop-Preauth")] + b"\r\n" + b"x" * 10_000)
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(DEADLINE):
                    assert b"Rejected" in await reader.read()
            writer.close()

    asyncio.run(scenario())


def test_another_version_is_rejected_with_the_remedy(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (_, address), connection(address) as ws:
            await ws.receive_str()
            await ws.send_str('{"v":2,"type":"Hello","field":"of the future"}')
            reply = decode(await ws.receive_str(), (Rejected,))
            assert "install the same version of ripstop" in reply.why
            await wait_closed(ws)

    asyncio.run(scenario())


def test_a_heartbeat_is_answered_if_the_agent_asks_for_it(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (_, address), connection(address) as ws:
            await do_handshake(ws)
            for number in range(3):
                await ws.pong()
                await ws.ping(str(number).encode())
                answer = await ws.receive()
                assert (answer.type, answer.data) == (aiohttp.WSMsgType.PONG, str(number).encode())
            await ws.ping()
            assert (await ws.receive()).data == b""

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["fin", "reset", "close frame"])
def test_the_coordinator_learns_whether_an_agent_ended_without_a_close_frame(harness: Any, how: str) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address), connection(address) as ws:
            await do_handshake(ws)
            opened = ws.get_extra_info("socket")
            match how:
                case "fin":
                    opened.shutdown(socket.SHUT_WR)
                case "reset":
                    opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    ws._response.connection.transport.abort()
                case _:
                    await ws.close()
            await coordinator.until(lambda c: c.forgotten)
            assert bool(coordinator.closed_by_node) is (how != "close frame")

    asyncio.run(scenario())


def test_a_node_cannot_join_under_another_name(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address):
            async with connection(address) as ws:
                await do_handshake(ws, node="a")
                await ws.send_str(encode(harness.join("b")))
                await wait_closed(ws)
            await job_runs(harness, coordinator, address)

    asyncio.run(scenario())


def test_healthz_answers_ok_and_unknown_paths_answer_404(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (_, address), aiohttp.ClientSession() as http:
            async with http.get(f"http://{address}/healthz") as response:
                assert (response.status, await response.text()) == (200, "ok")
            for method, path in (("POST", "/"), ("GET", "/agent/../etc/passwd"), ("PUT", "/x"), ("GET", "/agents")):
                async with http.request(method, f"http://{address}{path}") as response:
                    assert response.status == 404
            for method in ("GET", "POST"):
                async with http.request(method, f"http://{address}/agent") as response:
                    assert response.status == 400

    asyncio.run(scenario())


async def send_raw(address: Address, data: bytes) -> None:
    """Send bytes unchanged, and wait until the coordinator closes the connection."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(data)
        await writer.drain()
        async with asyncio.timeout(DEADLINE):
            while await reader.read(65536):
                pass
    except ConnectionError:
        pass  # closed by a reset
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


UPGRADE = (
    b"GET /agent HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    b"Ripstop-Preauth: %s\r\n\r\n" % preauth_hello().encode()
)

GARBAGE = {
    "nothing": b"",
    "raw bytes": os.urandom(4096),
    "a TLS hello": bytes.fromhex("16030100c2010000be0303") + os.urandom(180),
    "half a request": b"GET /agent HTTP/1.1\r\nHost: x\r\n",
    "an endless header": b"GET /agent HTTP/1.1\r\nX: " + b"x" * 200_000,
    "a request without an upgrade": b"GET /agent HTTP/1.1\r\nHost: x\r\n\r\n",
    "an upgrade and silence": UPGRADE,
    "an upgrade and raw bytes": UPGRADE + b"\xff" * 4096,
    "an upgrade and an unmasked frame": UPGRADE + b"\x81\x02{}",
    "an upgrade and a frame of exabytes": UPGRADE + b"\x81\xff\x7f\xff\xff\xff\xff\xff\xff\xff" + b"mask" + b"x" * 1000,
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_disconnected_and_the_job_continues(
    harness: Any, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "HANDSHAKE_TIMEOUT_S", 0.3)

    async def scenario() -> None:
        async with harness.serving() as (coordinator, address):
            await send_raw(address, data)
            assert coordinator.attached == []
            await job_runs(harness, coordinator, address)

    asyncio.run(scenario())


FRAMES = {
    "no JSON": "hello",
    "wrong JSON": '{"v":1,"type":"Hello"}',
    "a huge frame": "x" * (MAX_FRAME_BYTES + 1000),
    "a deep one": "[" * 100_000,
    "a binary frame": b"\x80\x04\x95",
}


@pytest.mark.parametrize("frame", [*FRAMES.values(), encode(Heartbeat())], ids=[*FRAMES.keys(), "the wrong message"])
def test_an_invalid_frame_of_an_unauthenticated_peer_changes_nothing(harness: Any, frame: str | bytes) -> None:
    asyncio.run(send_invalid_frame(harness, frame, authenticated=False))


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES.keys())
def test_an_invalid_frame_of_an_agent_ends_only_its_connection(harness: Any, frame: str | bytes) -> None:
    asyncio.run(send_invalid_frame(harness, frame, authenticated=True))


async def send_invalid_frame(harness: Any, frame: str | bytes, authenticated: bool) -> None:
    async with harness.serving() as (coordinator, address):
        async with connection(address) as ws:
            if authenticated:
                await do_handshake(ws)
            await (ws.send_str(frame) if isinstance(frame, str) else ws.send_bytes(frame))
            await wait_closed(ws)
        await job_runs(harness, coordinator, address)


def test_repeated_rejections_of_a_peer_are_logged_once(harness: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with harness.serving() as (_, address):
            for _ in range(5):
                await send_raw(address, b"\x00\x01\x02 not http\r\n\r\n")
                async with connection(address) as ws:
                    await do_handshake(ws, token="guess")

    with caplog.at_level(logging.DEBUG, "ripstop"):
        asyncio.run(scenario())
    rejected = [record.getMessage() for record in caplog.records if "rejected" in record.getMessage()]
    assert len(rejected) == 2
    assert all("peer=127.0.0.1" in line for line in rejected)
    assert not any(record.name.startswith("aiohttp") for record in caplog.records)


def test_at_the_limit_the_oldest_unauthenticated_connection_is_closed(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "MAX_UNAUTHENTICATED", 3)

    async def scenario() -> None:
        async with harness.serving() as (coordinator, address):
            idle = [await asyncio.open_connection(address.host, address.port) for _ in range(4)]
            oldest = idle[0][0]
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(oldest.read(), DEADLINE) == b""
            await job_runs(harness, coordinator, address)
            for _, writer in idle:
                writer.close()

    asyncio.run(scenario())


def test_a_coordinator_of_more_nodes_than_open_files_logs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection_limits.resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(connection_limits.resource, "setrlimit", lambda *_: None)
    for nodes in (3000, 5000):
        connection_limits.UnauthenticatedConnections(nodes, RejectionLog())
    (line,) = caplog.messages
    assert line.startswith("a coordinator of 5000 nodes needs 5512 open files, its limit is 4096")


def test_a_second_connection_of_a_node_ends_the_first_and_nothing_else(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address), connection(address) as first:
            await do_handshake(first)
            await first.send_str(encode(harness.join("a")))
            place = decode(await first.receive_str(), (Assign,)).place
            async with connection(address) as second:
                await do_handshake(second)
                await wait_closed(first)
                await coordinator.until(lambda c: len(c.forgotten) == 1)
                await second.send_str(encode(harness.join("a", held=place, newest=place.round)))
                await second.send_str(encode(Succeeded(place.round)))
                report = decode(await second.receive_str(), (Closed,)).report
                assert (report.outcome, report.rounds) == (Outcome.SUCCEEDED, 1)

    asyncio.run(scenario())


@pytest.mark.parametrize(("code", "returning"), [(CLOSE_CODE_RETURNING, True), (1000, False)])
def test_the_close_code_shows_whether_an_agent_returns(harness: Any, code: int, returning: bool) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address), connection(address) as ws:
            await do_handshake(ws)
            await ws.close(code=code)
            await coordinator.until(lambda c: len(c.forgotten) == 1)
            assert (coordinator.returning == coordinator.forgotten) is returning

    asyncio.run(scenario())


def test_a_peer_that_does_not_read_is_disconnected(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address), connection(address) as ws:
            await do_handshake(ws)
            await coordinator.until(lambda c: len(c.attached) == 1)
            (session,) = coordinator.attached
            large = StandBy(1, "x" * (MAX_FRAME_BYTES - 1000))
            for _ in range(1000):
                if coordinator.forgotten:
                    break
                session.send(large)
                await asyncio.sleep(0)
            await coordinator.until(lambda c: c.forgotten == [session])

    asyncio.run(scenario())


def test_queued_messages_arrive_before_the_server_closes(harness: Any) -> None:
    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            async with harness.serving() as (coordinator, address):
                ws = await stack.enter_async_context(connection(address))
                await do_handshake(ws)
                await coordinator.until(lambda c: len(c.attached) == 1)
                for number in range(20):
                    coordinator.attached[0].send(StandBy(number, "x" * 10_000))
            assert [decode(await ws.receive_str(), (StandBy,)).round for _ in range(20)] == list(range(20))
            await wait_closed(ws)

    asyncio.run(scenario())


def test_two_hundred_connections_leave_nothing_behind(harness: Any) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the shortest way to count them

    async def scenario() -> None:
        async with harness.serving() as (coordinator, address):
            before, tasks = descriptors(), len(asyncio.all_tasks())
            for number in range(200):
                match number % 4:
                    case 0:
                        async with harness.linking(address, node=f"n{number}") as (_, agent):
                            await agent.until(lambda a: a.count("linked") == 1)
                    case 1:
                        async with harness.linking(address, token="guess") as (_, agent):
                            await agent.until(lambda a: a.count("refused") == 1)
                    case 2:
                        await send_raw(address, b"\x00 no http\r\n\r\n")
                    case _:
                        _, writer = await asyncio.open_connection(address.host, address.port)
                        writer.close()
                        await writer.wait_closed()
            await coordinator.until(lambda c: len(c.forgotten) == 50)
            async with asyncio.timeout(DEADLINE):
                while descriptors() > before or len(asyncio.all_tasks()) > tasks:  # noqa: ASYNC110 - the kernel has no event for it
                    await asyncio.sleep(0.01)

    asyncio.run(scenario())
