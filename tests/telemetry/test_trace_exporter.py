"""Spans sent to real collectors: working ones, failing ones, and none."""

import asyncio
import logging
import math
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import closing

import pytest

from ripstop.model.config import Tracing
from ripstop.model.events import EventRecord, JobClosed, NodeJoined, RoundFormed
from ripstop.telemetry import trace_exporter
from ripstop.telemetry.spans import Context, Span, SpanEvent
from ripstop.telemetry.trace_exporter import TraceExporter, sdk_span
from tests.collector import Collector, Received, decode
from tests.e2e.harness import free_port

EVENTS = (
    NodeJoined("a", "h", 1),
    RoundFormed(1, ("a",), 1, "h:1", 0, "first round"),
    JobClosed("succeeded", "all workers exited 0", 1, 0),
)
OK = (200, {}, b"")
CONTEXT = Context("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
OTHER = Context("ffffffffffffffffffffffffffffffff", "0000000000000001")


@pytest.fixture(autouse=True)
def short_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_exporter, "BATCH_DELAY_S", 0.01)
    monkeypatch.setattr(trace_exporter, "LOAD_TIMEOUT_S", 30.0)  # the SDK is large


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector replies, but perhaps not within a second."""
    monkeypatch.setattr(trace_exporter, "FLUSH_TIMEOUT_S", 20.0)


@pytest.fixture
def run_job(monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """Run a job from its first event to its last; return how long its end waited for the collector."""

    def run(url: str, condition: Callable[[], Awaitable[object]] | None = None, **variables: str) -> float:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", url)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

        async def job() -> float:
            exporter = TraceExporter(Tracing(url.partition("?")[0]), "job7")
            for event in EVENTS:
                exporter.add(EventRecord(1, time.time(), "", event))
            if condition is not None:
                async with asyncio.timeout(120):
                    await condition()
            start = time.monotonic()
            await exporter.close()
            return time.monotonic() - start

        return asyncio.run(job())

    return run


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Our own: threads of another exporter's library may still log for a test before."""
    own = [record for record in caplog.records if record.name.startswith("ripstop")]
    return [record.getMessage() for record in own if record.levelno == logging.WARNING]


def requests(collector: Collector, count: int) -> Callable[[], Awaitable[None]]:
    return lambda: asyncio.to_thread(collector.wait_for_requests, count)


Run = Callable[..., float]


@pytest.mark.usefixtures("patient")
def test_the_last_spans_are_sent_when_the_job_ends(run_job: Run, caplog: pytest.LogCaptureFixture) -> None:
    with Collector() as collector:
        run_job(f"{collector.endpoint}/v1/traces")
    assert {span.name for span in collector.spans} == {"job", "round"}
    assert {span.resource["service.name"] for span in collector.spans} == {"ripstop"}
    path, headers = collector.requests[0]
    assert (path, headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
    assert not collector.errors and not warnings(caplog)


@pytest.mark.usefixtures("patient")
def test_the_sdk_reads_its_own_variables(run_job: Run) -> None:
    with Collector() as collector:
        run_job(
            collector.endpoint,
            OTEL_EXPORTER_OTLP_HEADERS="authorization=Basic%20s3cret,x-tenant=7",
            OTEL_EXPORTER_OTLP_COMPRESSION="gzip",
            OTEL_RESOURCE_ATTRIBUTES="service.name=a,team=b%2Cc",
            OTEL_SERVICE_NAME="mine",
        )
    _, headers = collector.requests[0]
    assert (headers["authorization"], headers["x-tenant"]) == ("Basic s3cret", "7")
    assert headers["content-encoding"] == "gzip"
    assert collector.spans[0].resource == {"service.name": "mine", "team": "b,c"}


@pytest.mark.usefixtures("patient")
def test_a_header_that_cannot_be_parsed_is_reported_without_its_value(
    run_job: Run, caplog: pytest.LogCaptureFixture
) -> None:
    with Collector() as collector:
        run_job(collector.endpoint, OTEL_EXPORTER_OTLP_HEADERS="a=b,s3cret")
    assert collector.spans
    assert "OTEL_EXPORTER_OTLP_HEADERS is not KEY=VALUE" in warnings(caplog)[0]
    assert "s3cret" not in caplog.text


@pytest.mark.usefixtures("patient")
def test_a_busy_collector_gets_the_request_again(run_job: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with Collector((503, {"Retry-After": "0"}, b"?"), (429, {"Retry-After": "0"}, b""), OK) as collector:
        run_job(collector.endpoint, requests(collector, 3))
    assert {span.name for span in collector.spans} == {"job", "round"}
    (warning,) = warnings(caplog)
    assert warning.startswith(f"spans cannot be sent to {collector.endpoint}: ")
    assert f"spans are sent to {collector.endpoint} again" in caplog.text


@pytest.mark.usefixtures("patient")
def test_a_rejected_request_is_not_sent_again(run_job: Run, caplog: pytest.LogCaptureFixture) -> None:
    with Collector((400, {}, b"no such tenant")) as collector:
        run_job(f"{collector.endpoint}/?key=s3cret", requests(collector, 1))
    assert [span.name for span in collector.spans] == ["job"]  # the request with the round was rejected
    assert "400" in warnings(caplog)[0]
    assert "1 spans of the job's traces were not sent" in warnings(caplog)[-1]
    assert "s3cret" not in caplog.text


@pytest.mark.usefixtures("patient")
def test_rejected_spans_of_an_accepted_request_are_reported(run_job: Run, caplog: pytest.LogCaptureFixture) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    reply = ExportTraceServiceResponse()
    reply.partial_success.rejected_spans = 1
    reply.partial_success.error_message = "too old"
    with Collector((200, {}, reply.SerializeToString())) as collector:
        run_job(collector.endpoint, requests(collector, 1))
    assert "1 spans rejected: too old" in warnings(caplog)[0]


@pytest.mark.usefixtures("patient")
def test_a_redirect_is_not_followed(run_job: Run, caplog: pytest.LogCaptureFixture) -> None:
    with Collector() as other, Collector((307, {"Location": other.endpoint}, b"")) as collector:
        run_job(collector.endpoint, requests(collector, 1))
    assert not other.requests
    assert "HTTP status 307" in warnings(caplog)[0]


def test_an_unreachable_collector_is_reported_once_and_does_not_delay_the_job(
    run_job: Run, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    waited = run_job(f"http://me:s3cret@127.0.0.1:{port}/?key=s3cret", lambda: asyncio.sleep(0.5))
    first, last = warnings(caplog)
    assert "spans cannot be sent" in first
    assert last.startswith("2 spans of the job's traces were not sent to http://")
    assert "key" not in first
    assert waited < trace_exporter.LOAD_TIMEOUT_S + trace_exporter.FLUSH_TIMEOUT_S + 1


def test_the_end_of_a_job_waits_one_second_for_a_collector_that_does_not_reply(
    run_job: Run, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        waited = run_job(f"http://127.0.0.1:{silent.getsockname()[1]}")
    # later, its thread may report that the collector is gone
    assert any("2 spans of the job's traces were not sent" in text for text in warnings(caplog))
    assert 0.9 < waited < trace_exporter.LOAD_TIMEOUT_S + trace_exporter.FLUSH_TIMEOUT_S + 1


@pytest.mark.parametrize("endpoint", ["here:4318", "http://", "http://127.0.0.1:99999", "http://[::1"])
def test_an_endpoint_that_is_no_url_is_reported_and_the_job_continues(
    endpoint: str, run_job: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run_job(endpoint)
    assert "spans cannot be sent" in warnings(caplog)[0]
    assert "2 spans of the job's traces were not sent" in warnings(caplog)[-1]


@pytest.mark.usefixtures("patient")
def test_the_queue_is_bounded(run_job: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(trace_exporter, "MAX_QUEUED_SPANS", 1)
    monkeypatch.setattr(trace_exporter, "BATCH_DELAY_S", 5.0)
    with Collector() as collector:
        run_job(collector.endpoint)
    assert [span.name for span in collector.spans] == ["round"]
    assert "1 spans of the job's traces were not sent" in warnings(caplog)[-1]


def test_a_defect_in_the_computation_of_spans_ends_the_traces_and_not_the_job(
    run_job: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(trace_exporter.Spans, "on", broken)
    run_job("http://127.0.0.1:1")
    assert caplog.text.count("the job continues without traces") == 1


# the SDK's spans ------------------------------------------------------------------------------------------------------


def encoded(span: Span) -> Received:
    """The span as a collector receives it."""
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.resources import Resource

    request = encode_spans([sdk_span(span, Resource({"service.name": "mine"}))])
    (received,) = decode(request.SerializeToString())
    return received


def test_a_span_is_received_unchanged() -> None:
    attributes = {"text": "größer\n", "whole": -(1 << 63), "number": 0.5, "truth": True, "list": (1, 2), "none": ()}
    span = Span(
        CONTEXT, "00f067aa0ba902b7", "recovery", 1794774876.25, 1794774877.5, attributes,
        (SpanEvent(1794774876.5, "worker_failed", {"ripstop.rank": 1}),), (OTHER,), "it failed",
    )  # fmt: skip
    found = encoded(span)
    assert (found.trace, found.id, found.parent) == (CONTEXT.trace, CONTEXT.span, "00f067aa0ba902b7")
    assert (found.start, found.end, found.seconds) == (1794774876250000000, 1794774877500000000, 1.25)
    assert found.attributes == attributes | {"list": [1, 2], "none": []}
    assert found.events == [("worker_failed", {"ripstop.rank": 1})]
    assert found.links == [(OTHER.trace, OTHER.span)]
    assert found.error == "it failed"
    assert found.resource == {"service.name": "mine"}


def test_a_root_span_without_failure_has_neither_parent_nor_error() -> None:
    found = encoded(Span(CONTEXT, "", "job", 1.0, 2.0, {}))
    assert (found.parent, found.error) == ("", "")


def test_text_that_is_not_valid_utf8_is_replaced() -> None:
    found = encoded(Span(CONTEXT, "", "job", 1.0, 2.0, {"text": "a\ud800"}))
    assert found.attributes == {"text": "a?"}


@pytest.mark.parametrize("at", [-1.0, 0.0, 1e300, -1e300, math.nextafter(math.inf, 0)])
def test_a_wrong_clock_does_not_make_the_request_invalid(at: float) -> None:
    found = encoded(Span(CONTEXT, "", "job", at, at - 5, {}))
    assert 0 <= found.start <= found.end < 1 << 63
