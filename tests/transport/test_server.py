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
from ripstop.protocol.codec import MAX_FRAME, decode, encode
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
from ripstop.protocol.secret import Exchange
from ripstop.transport import server
from ripstop.transport.outbox import PREAUTH_HEADER, RETURNING

DEADLINE = 20.0
ANSWER: tuple[type[Welcome | Rejected], ...] = (Welcome, Rejected)


def make_knock(token: str = "s3cret", run_id: str = "job", node: str = "a", nonce: str = "") -> str:
    """What an agent says of itself with its request."""
    nonce = nonce or secrets.token_hex(16)
    return encode(Hello(run_id, node, nonce, Exchange(run_id, node, "", nonce).by_agent(token)))


@contextlib.asynccontextmanager
async def connection(address: Address, knock: str | None = None) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    headers = {PREAUTH_HEADER: make_knock() if knock is None else knock}
    async with (
        aiohttp.ClientSession() as http,
        asyncio.timeout(DEADLINE),
        http.ws_connect(f"ws://{address}/agent", headers=headers) as ws,
    ):
        yield ws


async def shake(
    ws: aiohttp.ClientWebSocketResponse, token: str = "s3cret", run_id: str = "job", node: str = "a"
) -> tuple[Hello, Welcome | Rejected]:
    """An agent's side of the handshake, by hand."""
    challenge = decode(await ws.receive_str(), (Challenge,))
    exchange = Exchange(run_id, node, challenge.nonce, "00" * 16)
    hello = Hello(run_id, node, exchange.answer, exchange.by_agent(token))
    await ws.send_str(encode(hello))
    return hello, decode(await ws.receive_str(), ANSWER)


async def ends(ws: aiohttp.ClientWebSocketResponse) -> None:
    """The coordinator closes the connection."""
    while (await ws.receive()).type not in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED):
        pass


async def works(harness: Any, coordinator: Any, address: Address) -> None:
    """A whole job runs, whatever was done to the port before."""
    async with harness.linking(address, node="honest") as (link, agent):
        await agent.until(lambda a: a.count("linked") == 1)
        link.send(harness.join("honest"))
        assign = await agent.heard(Assign)
        link.send(Succeeded(assign.place.round))
        await agent.heard(Closed)
        link.send(Left("the job is over"))
    report = await asyncio.wait_for(coordinator.ended, DEADLINE)
    assert report.outcome is Outcome.SUCCEEDED


def test_an_agent_with_the_secret_is_welcome_and_so_is_the_coordinator(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving(lease=7.0) as (_, address), connection(address) as ws:
            challenge = decode(await ws.receive_str(), (Challenge,))
            exchange = Exchange("job", "a", challenge.nonce, "00" * 16)
            await ws.send_str(encode(Hello("job", "a", exchange.answer, exchange.by_agent("s3cret"))))
            welcome = decode(await ws.receive_str(), (Welcome,))
            assert (welcome.proof, welcome.lease) == (exchange.by_coordinator("s3cret"), 7.0)
            assert abs(welcome.time - time.time()) < DEADLINE

    asyncio.run(scenario())


def test_a_wrong_secret_is_rejected_with_the_remedy(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address), connection(address) as ws:
            _, answer = await shake(ws, token="guess")
            assert isinstance(answer, Rejected)
            assert "set the same RIPSTOP_TOKEN on every node" in answer.why
            await ends(ws)
            assert coordinator.attached == []

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["", "x" * 257, "\ud800"])
def test_a_node_without_a_proper_name_is_rejected(harness: Any, name: str) -> None:
    async def scenario() -> None:
        async with harness.serving() as (_, address), connection(address) as ws:
            _, answer = await shake(ws, node=name)
            assert isinstance(answer, Rejected)
            assert "text of 1 to 256 characters" in answer.why
            await ends(ws)

    asyncio.run(scenario())


def test_an_agent_of_another_job_is_told_both_names(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address), connection(address) as ws:
            _, answer = await shake(ws, run_id="job2")
            assert isinstance(answer, Rejected)
            assert answer.final
            assert "'job'" in answer.why
            assert "'job2'" in answer.why
            await ends(ws)
            assert coordinator.attached == []

    asyncio.run(scenario())


def test_an_agent_of_the_next_job_may_try_again_when_this_one_is_over(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address):
            coordinator.apply_command(StopJob("enough"))
            await asyncio.wait_for(coordinator.ended, DEADLINE)
            async with connection(address) as ws:
                _, answer = await shake(ws, run_id="job2")
                assert isinstance(answer, Rejected)
                assert not answer.final

    asyncio.run(scenario())


def test_a_replayed_hello_opens_nothing(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address):
            async with connection(address) as ws:
                hello, answer = await shake(ws)
                assert isinstance(answer, Welcome)
            async with connection(address) as ws:
                decode(await ws.receive_str(), (Challenge,))
                await ws.send_str(encode(hello))
                assert isinstance(decode(await ws.receive_str(), ANSWER), Rejected)
            assert len(coordinator.attached) == 1

    asyncio.run(scenario())


WRONG_KNOCKS = {
    "no header": ("", "install the same version of ripstop"),
    "another version": ('{"v":2,"type":"Hello","who":"the future"}', "install the same version of ripstop"),
    "no JSON": ("let me in", "is JSON, this is not"),
    "another message": (encode(Heartbeat()), "expected Hello"),
    "another secret": (make_knock(token="guess"), "set the same RIPSTOP_TOKEN on every node"),
    "another job": (make_knock(run_id="job2"), "this is the coordinator of job 'job', not of 'job2'"),
    "a long name": (make_knock(node="x" * 257), "text of 1 to 256 characters"),
}


@pytest.mark.parametrize(("text", "why"), WRONG_KNOCKS.values(), ids=WRONG_KNOCKS.keys())
def test_who_knocks_wrong_is_told_why_and_nothing_more(harness: Any, text: str, why: str) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address):
            async with connection(address, text) as ws:
                assert why in decode(await ws.receive_str(), (Rejected,)).why
                await ends(ws)
            await works(harness, coordinator, address)

    asyncio.run(scenario())


def test_a_knock_that_was_overheard_is_good_for_nothing(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address):
            overheard = make_knock()
            async with connection(address, overheard) as ws:
                assert isinstance((await shake(ws))[1], Welcome)
            async with connection(address, overheard) as ws:
                assert "used once" in decode(await ws.receive_str(), (Rejected,)).why
                await ends(ws)
            assert len(coordinator.attached) == 1

    asyncio.run(scenario())


def test_only_so_many_knocks_are_remembered(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_KNOCKS", 2)

    async def scenario() -> None:
        async with harness.serving() as (coordinator, address):
            first, *others = (make_knock() for _ in range(3))
            for text in (first, *others, first):  # forgotten, and no harm done: the challenge is another
                async with connection(address, text) as ws:
                    decode(await ws.receive_str(), (Challenge,))
            async with connection(address, others[1]) as ws:
                decode(await ws.receive_str(), (Rejected,))
            assert coordinator.attached == []

    asyncio.run(scenario())


def test_an_agents_request_may_come_in_pieces(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (_, address):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            request = UPGRADE[: UPGRADE.index(b"Ripstop-Knock")] + f"ripstop-knock:{make_knock()}\r\n\r\n".encode()
            async with asyncio.timeout(DEADLINE):
                for at in range(len(request)):
                    writer.write(request[at : at + 1])
                    await writer.drain()
                assert b"101" in await reader.readline()
                await reader.readuntil(b"Challenge")
            writer.close()

    asyncio.run(scenario())


LONG = b"GET /agent HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: %s\r\n" % (n, b"x" * 1000) for n in range(10))


@pytest.mark.parametrize("end", [b"\r\n", b"Ripstop-Knock: %s\r\n\r\n" % make_knock().encode()])
def test_an_agents_request_that_is_too_long_is_not_read_on(harness: Any, end: bytes) -> None:
    async def scenario() -> None:
        async with harness.serving() as (_, address):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(LONG + end)
            async with asyncio.timeout(DEADLINE):
                assert b"400" in await reader.readline()
            writer.close()

    asyncio.run(scenario())


SPELLINGS = [
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
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_without_a_knock_no_spelling_of_the_path_leads_to_the_handshake(
    harness: Any, spelling: bytes, token: str
) -> None:
    async def scenario() -> None:
        async with harness.serving(token=token) as (coordinator, address):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(spelling + UPGRADE[len(b"GET /agent") : UPGRADE.index(b"Ripstop-Knock")] + b"\r\n")
            async with asyncio.timeout(DEADLINE):
                with contextlib.suppress(ConnectionError):
                    assert b"Challenge" not in await reader.read()
            writer.close()
            assert coordinator.attached == []

    asyncio.run(scenario())


@pytest.mark.parametrize("origin", [b"http://evil.example", b"null", b""])
def test_a_web_page_cannot_join_whatever_it_knows(
    harness: Any, origin: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with harness.serving() as (_, address):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            knock = b"Ripstop-Knock: %s\r\n\r\n" % make_knock().encode()
            writer.write(UPGRADE[: UPGRADE.index(b"Ripstop-Knock")] + b"Origin: " + origin + b"\r\n" + knock)
            async with asyncio.timeout(DEADLINE):
                assert b"a web page cannot join a job" in await reader.read()
            writer.close()

    with caplog.at_level(logging.DEBUG, "ripstop"):
        asyncio.run(scenario())
    assert "asked to join the job" in caplog.text


def test_strangers_are_not_told_the_run_id(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving(run_id="my-run") as (_, address), aiohttp.ClientSession() as http:
            async with connection(address, make_knock(token="guess", run_id="other")) as ws:
                why = decode(await ws.receive_str(), (Rejected,)).why
                assert "coordinator of another job, not of 'other'" in why
            for path in ("/metrics", "/api/v1/status", "/healthz", "/"):
                for headers in ({}, {"Authorization": "Bearer guess"}):
                    async with http.get(f"http://{address}{path}", headers=headers) as response:
                        assert "my-run" not in await response.text()

    asyncio.run(scenario())


def test_without_a_secret_an_agent_of_another_job_is_not_told_the_run_id(harness: Any) -> None:
    async def scenario() -> None:
        async with (
            harness.serving(run_id="my-run", token="") as (_, address),
            connection(address, make_knock(token="", run_id="other")) as ws,
        ):
            assert "my-run" not in decode(await ws.receive_str(), (Rejected,)).why

    asyncio.run(scenario())


def an_agents_request() -> bytes:
    return UPGRADE[: UPGRADE.index(b"Ripstop-Knock")] + b"Ripstop-Knock: %s\r\n\r\n" % make_knock().encode()


def a_careful_post() -> bytes:
    return b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"


@pytest.mark.parametrize("request_of", [an_agents_request, a_careful_post])
def test_a_peer_that_is_gone_before_it_is_answered_is_no_error(
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
            await works(harness, coordinator, address)

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("key", [b"x", b"\xff\xfe", b"", b"AAAA AAAA"])
def test_a_key_that_is_none_is_refused_and_said_once(
    harness: Any, key: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address):
            for _ in range(3):
                good = UPGRADE[: UPGRADE.index(b"Ripstop-Knock")].replace(b"AAAAAAAAAAAAAAAAAAAAAA==", key)
                await raw(address, good + b"Ripstop-Knock: %s\r\n\r\n" % make_knock().encode())
            await works(harness, coordinator, address)

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    (line,) = (record.getMessage() for record in caplog.records)
    assert "said once" in line
    assert not caplog.records[0].exc_info


def test_a_body_that_is_not_what_it_says_is_said_once(harness: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with harness.serving() as (_, address):
            for _ in range(3):
                await raw(
                    address,
                    b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 20\r\n\r\n" + b"x" * 20,
                )

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert len(caplog.records) <= 1
    assert not any(record.exc_info for record in caplog.records)


def test_an_error_of_ours_is_logged_once_per_place(
    harness: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(server.Server, "_admit", broken)

    async def scenario() -> None:
        async with harness.serving() as (_, address), aiohttp.ClientSession() as http:
            for _ in range(5):
                async with http.get(f"http://{address}/api/v1/status") as response:
                    assert response.status == 500

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert len([record for record in caplog.records if record.exc_info]) == 1


def test_what_follows_a_bad_knock_in_one_go_does_not_help_it(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (_, address):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(UPGRADE[: UPGRADE.index(b"Ripstop-Knock")] + b"\r\n" + b"x" * 10_000)
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(DEADLINE):
                    assert b"Rejected" in await reader.read()
            writer.close()

    asyncio.run(scenario())


def test_another_version_is_rejected_with_the_remedy(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (_, address), connection(address) as ws:
            await ws.receive_str()
            await ws.send_str('{"v":2,"type":"Hello","who":"the future"}')
            answer = decode(await ws.receive_str(), (Rejected,))
            assert "install the same version of ripstop" in answer.why
            await ends(ws)

    asyncio.run(scenario())


def test_every_beat_is_answered(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (_, address), connection(address) as ws:
            await shake(ws)
            for _ in range(3):
                await ws.send_str(encode(Heartbeat()))
                assert decode(await ws.receive_str(), (Heartbeat,)) == Heartbeat()

    asyncio.run(scenario())


def test_a_node_cannot_join_under_another_name(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address):
            async with connection(address) as ws:
                await shake(ws, node="a")
                await ws.send_str(encode(harness.join("b")))
                await ends(ws)
            await works(harness, coordinator, address)

    asyncio.run(scenario())


def test_health_is_one_word_and_other_paths_are_not_there(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (_, address), aiohttp.ClientSession() as http:
            async with http.get(f"http://{address}/healthz") as response:
                assert (response.status, await response.text()) == (200, "ok")
            for method, path in (("GET", "/"), ("GET", "/agent/../etc/passwd"), ("PUT", "/x"), ("GET", "/agents")):
                async with http.request(method, f"http://{address}{path}") as response:
                    assert response.status == 404
            for method in ("GET", "POST"):
                async with http.request(method, f"http://{address}/agent") as response:
                    assert response.status == 400

    asyncio.run(scenario())


async def raw(address: Address, data: bytes) -> None:
    """Send bytes as they are, and wait until the coordinator has enough of it."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(data)
        await writer.drain()
        async with asyncio.timeout(DEADLINE):
            while await reader.read(65536):
                pass
    except ConnectionError:
        pass  # a way of ending it, too
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


UPGRADE = (
    b"GET /agent HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    b"Ripstop-Knock: %s\r\n\r\n" % make_knock().encode()
)

GARBAGE = {
    "nothing": b"",
    "raw bytes": os.urandom(4096),
    "a TLS hello": bytes.fromhex("16030100c2010000be0303") + os.urandom(180),
    "half a request": b"GET /agent HTTP/1.1\r\nHost: x\r\n",
    "an endless header": b"GET /agent HTTP/1.1\r\nX: " + b"x" * 200_000,
    "a request that is no WebSocket's": b"GET /agent HTTP/1.1\r\nHost: x\r\n\r\n",
    "an upgrade and silence": UPGRADE,
    "an upgrade and raw bytes": UPGRADE + b"\xff" * 4096,
    "an upgrade and an unmasked frame": UPGRADE + b"\x81\x02{}",
    "an upgrade and a frame of exabytes": UPGRADE + b"\x81\xff\x7f\xff\xff\xff\xff\xff\xff\xff" + b"mask" + b"x" * 1000,
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_cut_off_and_the_job_goes_on(harness: Any, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HANDSHAKE", 0.3)

    async def scenario() -> None:
        async with harness.serving() as (coordinator, address):
            await raw(address, data)
            assert coordinator.attached == []
            await works(harness, coordinator, address)

    asyncio.run(scenario())


FRAMES = {
    "no JSON": "hello",
    "wrong JSON": '{"v":1,"type":"Hello"}',
    "a huge frame": "x" * (MAX_FRAME + 1000),
    "a deep one": "[" * 100_000,
    "a binary frame": b"\x80\x04\x95",
}


@pytest.mark.parametrize("frame", [*FRAMES.values(), encode(Heartbeat())], ids=[*FRAMES.keys(), "the wrong message"])
def test_a_strangers_frame_that_breaks_the_protocol_changes_nothing(harness: Any, frame: str | bytes) -> None:
    asyncio.run(breaking_the_protocol(harness, frame, known=False))


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES.keys())
def test_an_agents_frame_that_breaks_the_protocol_ends_its_connection_only(harness: Any, frame: str | bytes) -> None:
    asyncio.run(breaking_the_protocol(harness, frame, known=True))


async def breaking_the_protocol(harness: Any, frame: str | bytes, known: bool) -> None:
    async with harness.serving() as (coordinator, address):
        async with connection(address) as ws:
            if known:
                await shake(ws)
            await (ws.send_str(frame) if isinstance(frame, str) else ws.send_bytes(frame))
            await ends(ws)
        await works(harness, coordinator, address)


def test_a_peer_that_repeats_itself_is_logged_once(harness: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with harness.serving() as (_, address):
            for _ in range(5):
                await raw(address, b"\x00\x01\x02 not http\r\n\r\n")
                async with connection(address) as ws:
                    await shake(ws, token="guess")

    with caplog.at_level(logging.DEBUG, "ripstop"):
        asyncio.run(scenario())
    refused = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(refused) == 2
    assert all("peer=127.0.0.1" in line for line in refused)
    assert not any(record.name.startswith("aiohttp") for record in caplog.records)


def test_when_there_are_too_many_strangers_the_oldest_makes_room(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_STRANGERS", 3)

    async def scenario() -> None:
        async with harness.serving() as (coordinator, address):
            strangers = [await asyncio.open_connection(address.host, address.port) for _ in range(4)]
            oldest = strangers[0][0]
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(oldest.read(), DEADLINE) == b""
            await works(harness, coordinator, address)
            for _, writer in strangers:
                writer.close()

    asyncio.run(scenario())


def test_a_second_connection_of_a_node_ends_the_first_and_nothing_else(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address), connection(address) as first:
            await shake(first)
            await first.send_str(encode(harness.join("a")))
            place = decode(await first.receive_str(), (Assign,)).place
            async with connection(address) as second:
                await shake(second)
                await ends(first)
                await coordinator.until(lambda c: len(c.forgotten) == 1)
                await second.send_str(encode(harness.join("a", held=place, newest=place.round)))
                await second.send_str(encode(Succeeded(place.round)))
                report = decode(await second.receive_str(), (Closed,)).report
                assert (report.outcome, report.rounds) == (Outcome.SUCCEEDED, 1)

    asyncio.run(scenario())


@pytest.mark.parametrize(("code", "returning"), [(RETURNING, True), (1000, False)])
def test_an_agent_can_say_that_it_will_be_back(harness: Any, code: int, returning: bool) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address), connection(address) as ws:
            await shake(ws)
            await ws.close(code=code)
            await coordinator.until(lambda c: len(c.forgotten) == 1)
            assert (coordinator.returning == coordinator.forgotten) is returning

    asyncio.run(scenario())


def test_a_peer_that_does_not_read_is_cut_off(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address), connection(address) as ws:
            await shake(ws)
            await coordinator.until(lambda c: len(c.attached) == 1)
            (session,) = coordinator.attached
            large = StandBy(1, "x" * (MAX_FRAME - 1000))
            for _ in range(1000):
                if coordinator.forgotten:
                    break
                session.send(large)
                await asyncio.sleep(0)
            await coordinator.until(lambda c: c.forgotten == [session])

    asyncio.run(scenario())


def test_what_was_sent_arrives_before_the_server_closes(harness: Any) -> None:
    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            async with harness.serving() as (coordinator, address):
                ws = await stack.enter_async_context(connection(address))
                await shake(ws)
                await coordinator.until(lambda c: len(c.attached) == 1)
                for number in range(20):
                    coordinator.attached[0].send(StandBy(number, "x" * 10_000))
            assert [decode(await ws.receive_str(), (StandBy,)).round for _ in range(20)] == list(range(20))
            await ends(ws)

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
                        await raw(address, b"\x00 no http\r\n\r\n")
                    case _:
                        _, writer = await asyncio.open_connection(address.host, address.port)
                        writer.close()
                        await writer.wait_closed()
            await coordinator.until(lambda c: len(c.forgotten) == 50)
            async with asyncio.timeout(DEADLINE):
                while descriptors() > before or len(asyncio.all_tasks()) > tasks:  # noqa: ASYNC110 - the kernel's news
                    await asyncio.sleep(0.01)

    asyncio.run(scenario())
