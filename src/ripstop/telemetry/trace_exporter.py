"""Sends a job's spans to a collector with OpenTelemetry's SDK and its OTLP/HTTP exporter (`ripstop[tracing]`).

`spans.py` computes the spans.  The SDK reads its own variables: endpoint, headers, timeout, compression, certificates,
service name, resource attributes.  Rules:

1. A daemon thread loads the SDK and sends the spans.  The event loop never waits for it.  The end of a job waits at
   most `LOAD_TIMEOUT_S` for the SDK and `FLUSH_TIMEOUT_S` for the collector.
2. The queue is bounded.  The SDK retries a request within its own timeout; after that, the batch is lost.  The number
   of lost spans is logged at the end.
3. A problem is logged once, and once more when a request succeeds again.  No header, user name or query string is
   logged.
4. A redirect is an error: headers may contain secrets, so they are sent to the configured host only.
5. The thread waits `BATCH_DELAY_S` after the first span, so that it does not compete with a recovery for the CPU.
"""

import logging
import math
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ripstop import __version__
from ripstop.model.config import Tracing
from ripstop.model.events import EventRecord
from ripstop.model.text_formatting import one_line, without_surrogates
from ripstop.system.blocking_calls import run_in_daemon_thread
from ripstop.telemetry.spans import Attributes, Context, Span, Spans

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from requests import Response

log = logging.getLogger("ripstop.tracing")

SERVICE_NAME = "ripstop"  # unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES name another
BATCH_DELAY_S = 1.0
LOAD_TIMEOUT_S = 5.0
FLUSH_TIMEOUT_S = 1.0
MAX_QUEUED_SPANS = 16_384
MAX_BATCH_SPANS = 512
MAX_PROBLEM_CHARS = 300
LATEST_NS = (1 << 63) - 1  # since 1970; a node's clock may be wrong, and must not make a whole request invalid


class TraceExporter:
    """Must be made inside a running event loop.  `add` is a sink for the records of the job's journal."""

    def __init__(self, tracing: Tracing, run_id: str) -> None:
        parent = Context(*tracing.parent) if tracing.parent else None
        self._endpoint = tracing.endpoint
        self._spans: Spans | None = Spans(run_id, os.urandom(16), parent)
        self._queue: deque[Span] = deque()
        self._finished_spans = 0
        self._sent_spans = 0
        self._problem_logged = False
        self._thread: threading.Thread | None = None
        self._pending = threading.Event()
        self._closing = threading.Event()
        self._loaded = threading.Event()

    def add(self, record: EventRecord) -> None:
        self._enqueue(lambda spans: spans.on(record))

    async def close(self) -> None:
        """Send the last spans; wait for that at most as long as rule 1 allows."""
        self._enqueue(lambda spans: spans.end())
        self._closing.set()
        self._pending.set()
        if self._thread is not None:
            with suppress(TimeoutError, RuntimeError):
                await run_in_daemon_thread(self._join, LOAD_TIMEOUT_S + FLUSH_TIMEOUT_S + 1)
            self._queue.clear()  # the thread ends after its current request
        if lost := self._finished_spans - self._sent_spans:
            log.warning("%d spans of the job's traces were not sent to %s", lost, self._endpoint)

    def _join(self) -> None:
        assert self._thread is not None
        self._loaded.wait(LOAD_TIMEOUT_S)
        self._thread.join(FLUSH_TIMEOUT_S)

    def _enqueue(self, finished: Callable[[Spans], list[Span]]) -> None:
        """Queue the spans that end now.  A defect in their computation ends the traces, not the job."""
        if self._spans is None:
            return
        try:
            spans = finished(self._spans)
            if spans and self._thread is None:
                thread = threading.Thread(target=self._run, name="ripstop-traces", daemon=True)
                thread.start()
                self._thread = thread
        except Exception:
            self._spans = None
            log.exception("the job continues without traces")
            return
        self._finished_spans += len(spans)
        self._queue.extend(spans[: MAX_QUEUED_SPANS - len(self._queue)])
        if spans:
            self._pending.set()

    # the thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._closing.wait(BATCH_DELAY_S)
        with _sdk_logs_to(self._report_problem):
            try:
                send = _load_sdk(self._report_problem)
            except Exception as error:
                self._report_problem(f"OpenTelemetry cannot be loaded: {error!r}")
                return
            finally:
                self._loaded.set()
            while True:
                while batch := self._next_batch():
                    self._send(send, batch)
                if self._closing.is_set() and not self._queue:
                    return
                self._pending.wait()
                self._closing.wait(BATCH_DELAY_S)
                self._pending.clear()

    def _next_batch(self) -> list[Span]:
        batch: list[Span] = []
        with suppress(IndexError):  # the queue is empty, or `close` cleared it
            while len(batch) < MAX_BATCH_SPANS:
                batch.append(self._queue.popleft())
        return batch

    def _send(self, send: Callable[[list[Span]], bool], batch: list[Span]) -> None:
        try:
            succeeded = send(batch)
        except Exception as error:
            self._report_problem(repr(error))
            return
        if succeeded:
            self._sent_spans += len(batch)
            if self._problem_logged:
                self._problem_logged = False
                log.info("spans are sent to %s again", self._endpoint)

    def _report_problem(self, problem: str) -> None:
        if not self._problem_logged:
            self._problem_logged = True
            text = re.sub(r"//[^/@\s]*@", "//…@", one_line(problem))  # rule 3
            text = re.sub(r"\?[^\s'\")>]*", "?…", text)[:MAX_PROBLEM_CHARS].rstrip(". ")
            log.warning("spans cannot be sent to %s: %s; the job continues", self._endpoint, text)


@contextmanager
def _sdk_logs_to(report: Callable[[str], None]) -> Iterator[None]:
    """Pass warnings of the SDK to `report` instead of stderr."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name.endswith("util.re"):  # its message quotes the header
                report("an entry of OTEL_EXPORTER_OTLP_HEADERS is not KEY=VALUE; write special characters as %XX")
            else:
                report(record.getMessage())

    sdk_log, handler = logging.getLogger("opentelemetry"), Handler(logging.WARNING)
    propagate, sdk_log.propagate = sdk_log.propagate, False
    sdk_log.addHandler(handler)
    try:
        yield
    finally:
        sdk_log.removeHandler(handler)
        sdk_log.propagate = propagate


# OpenTelemetry's SDK --------------------------------------------------------------------------------------------------


def _load_sdk(report: Callable[[str], None]) -> Callable[[list[Span]], bool]:
    """Return a function that sends spans, and returns whether the collector accepted them."""
    import requests
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace.export import SpanExportResult

    def check_response(response: "Response", *_: Any, **__: Any) -> None:
        if response.is_redirect:  # rule 4
            raise requests.RequestException(f"HTTP status {response.status_code}: the collector sent a redirect")
        if response.ok:
            with suppress(Exception):  # not every collector sends this message
                rejected = ExportTraceServiceResponse.FromString(response.content).partial_success
                if rejected.rejected_spans:
                    report(f"{rejected.rejected_spans} spans rejected: {rejected.error_message}")

    session = requests.Session()
    session.hooks["response"].append(check_response)
    exporter = OTLPSpanExporter(session=session)
    resource = Resource({"service.name": SERVICE_NAME}).merge(OTELResourceDetector().detect())

    def send(spans: list[Span]) -> bool:
        return exporter.export([sdk_span(span, resource) for span in spans]) is SpanExportResult.SUCCESS

    return send


def sdk_span(span: Span, resource: Any) -> "ReadableSpan":
    """The same span as an object of the SDK, with our ids and times."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

    def context(trace: str, id: str) -> SpanContext:
        return SpanContext(int(trace, 16), int(id, 16), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    return ReadableSpan(
        span.name,
        context=context(span.context.trace, span.context.span),
        parent=context(span.context.trace, span.parent) if span.parent else None,
        resource=resource,
        attributes=_exportable_trace_attributes(span.attributes),
        events=[
            Event(event.name, _exportable_trace_attributes(event.attributes), _nanoseconds(event.at))
            for event in span.events
        ],
        links=[Link(context(link.trace, link.span)) for link in span.links],
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
        start_time=_nanoseconds(span.start),
        end_time=_nanoseconds(max(span.start, span.end)),
        instrumentation_scope=InstrumentationScope("ripstop", __version__),
    )


def _exportable_trace_attributes(attributes: Attributes) -> Attributes:
    """Protobuf rejects lone surrogates, which JSON from a node can contain."""
    return {name: without_surrogates(value) if isinstance(value, str) else value for name, value in attributes.items()}


def _nanoseconds(seconds: float) -> int:
    """Rounded to microseconds, the precision of our clocks."""
    micros = seconds * 1e6
    return min(LATEST_NS, max(0, round(micros) * 1000)) if math.isfinite(micros) else 0
