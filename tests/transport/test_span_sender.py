"""Spans on their way to real collectors: good, bad, and none at all."""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import closing

import pytest

from ripstop.model.config import Tracing
from ripstop.model.events import EventRecord, JobClosed, NodeJoined, RoundFormed
from ripstop.transport import span_sender
from ripstop.transport.span_sender import SpanSender
from tests.collector import Collector

STORY = (
    NodeJoined("a", "h", 1),
    RoundFormed(1, ("a",), 1, "h:1", 0, "first round"),
    JobClosed("succeeded", "all workers exited 0", 1, 0),
)
OK = (200, {}, b"{}")


def run(
    url: str,
    until: Callable[[], Awaitable[object]] | None = None,
    headers: tuple[tuple[str, str], ...] = (),
) -> float:
    """A job from its beginning to its end; how long it waited there for its spans to be sent."""

    async def job() -> float:
        sender = SpanSender(Tracing(url, headers, (("service.name", "mine"),)), "job7")
        for event in STORY:
            sender.add(EventRecord(1, time.time(), "", event))
        if until is not None:
            async with asyncio.timeout(30):
                await until()
        began = time.monotonic()
        await sender.close()
        return time.monotonic() - began

    return asyncio.run(job())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def requested(collector: Collector, times: int) -> Callable[[], Awaitable[None]]:
    return lambda: asyncio.to_thread(collector.requested, times)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_sender, "TOGETHER", 0.01)
    monkeypatch.setattr(span_sender, "PAUSES", (0.01, 0.02))


def test_what_is_left_at_the_end_is_sent() -> None:
    with Collector() as collector:
        run(f"{collector.endpoint}/v1/traces", headers=(("x-tenant", "7"),))
    assert {span.name for span in collector.spans} == {"job", "round"}
    assert {span.resource["service.name"] for span in collector.spans} == {"mine"}
    path, headers = collector.requests[0]
    assert (path, headers["content-type"], headers["x-tenant"]) == ("/v1/traces", "application/json", "7")
    assert not collector.mistakes


def test_a_collector_that_is_busy_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    with Collector((503, {"Retry-After": "nonsense"}, b"?"), (429, {"Retry-After": "0"}, b""), OK) as collector:
        caplog.set_level(logging.INFO)
        run(collector.endpoint, requested(collector, 3))
    assert {span.name for span in collector.spans} == {"job", "round"}
    (warning,) = warnings(caplog)
    assert warning.startswith(f"spans cannot be sent to {collector.endpoint}: HTTP status 503")
    assert f"spans are sent to {collector.endpoint} again" in caplog.text


def test_what_a_collector_refuses_is_not_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    refusal = b'{"code": 3, "message": "no such\\ntenant"}'
    with Collector((400, {}, refusal)) as collector:
        run(f"{collector.endpoint}/?key=s3cret", requested(collector, 1))
    assert [span.name for span in collector.spans] == ["job"]  # the round's was refused
    assert "HTTP status 400 Bad Request: no such" in warnings(caplog)[0]
    assert "s3cret" not in caplog.text


def test_what_a_collector_takes_only_in_part_is_said(caplog: pytest.LogCaptureFixture) -> None:
    partial = b'{"partialSuccess": {"rejectedSpans": "1", "errorMessage": "too old"}}'
    with Collector((200, {}, partial)) as collector:
        run(collector.endpoint, requested(collector, 1))
    assert "1 spans rejected: too old" in warnings(caplog)[0]


def test_a_collector_elsewhere_is_not_gone_to(caplog: pytest.LogCaptureFixture) -> None:
    with Collector() as other, Collector((307, {"Location": other.endpoint}, b"")) as collector:
        run(collector.endpoint, requested(collector, 1))
    assert not other.requests
    assert "HTTP status 307" in warnings(caplog)[0]


def test_a_collector_that_is_down_is_said_once_and_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    waited = run(f"http://127.0.0.1:{port}", lambda: asyncio.sleep(0.2))
    first, last = warnings(caplog)
    assert "spans cannot be sent" in first
    assert last == f"2 spans of the job's traces were not sent to http://127.0.0.1:{port}"
    assert waited < 5


def test_a_collector_that_does_not_answer_has_a_second(caplog: pytest.LogCaptureFixture) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        waited = run(f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert "2 spans of the job's traces were not sent" in warnings(caplog)[-1]
    assert 0.9 < waited < 8


@pytest.mark.parametrize(
    "words", [b"\x00\x00\x12\x04\x00\x00\x00\x00", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", b""]
)
def test_a_collector_that_answers_nonsense_is_said_once(words: bytes, caplog: pytest.LogCaptureFixture) -> None:

    async def job() -> None:
        asked = asyncio.Event()

        async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"}")
            writer.write(words)
            writer.close()
            asked.set()

        server = await asyncio.start_server(babble, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            sender = SpanSender(Tracing(url), "job7")
            for event in STORY:
                sender.add(EventRecord(1, time.time(), "", event))
            async with asyncio.timeout(30):
                await asked.wait()
            await sender.close()

    asyncio.run(job())
    assert sum("spans cannot be sent" in warning for warning in warnings(caplog)) == 1


def test_only_so_many_spans_wait(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(span_sender, "WAITING", 1)
    with Collector() as collector:
        run(collector.endpoint)
    assert [span.name for span in collector.spans] == ["round"]
    assert "1 spans of the job's traces were not sent" in warnings(caplog)[-1]


def test_a_defect_of_ours_ends_the_trace_and_not_the_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(span_sender.Spans, "on", broken)
    run("http://127.0.0.1:1")
    assert caplog.text.count("the job goes on without traces") == 1
