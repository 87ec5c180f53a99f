"""A collector of traces: a real HTTP server that decodes requests with OpenTelemetry's own definitions."""

import gzip
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install -r requirements/test.txt")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True)
class Received:
    """A span and the attributes of its resource."""

    trace: str
    id: str
    parent: str
    name: str
    seconds: float
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    links: list[tuple[str, str]]
    error: str
    resource: dict[str, Any]
    start: int
    end: int


def decode(body: bytes) -> list[Received]:
    """The spans of a request; raises an error if OpenTelemetry's definitions do not allow it."""
    request = ExportTraceServiceRequest.FromString(body)
    return [
        Received(
            trace=span.trace_id.hex(),
            id=span.span_id.hex(),
            parent=span.parent_span_id.hex(),
            name=span.name,
            seconds=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
            attributes=_attributes(span.attributes),
            events=[(event.name, _attributes(event.attributes)) for event in span.events],
            links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
            error=span.status.message if span.status.code == span.status.STATUS_CODE_ERROR else "",
            resource=_attributes(of.resource.attributes),
            start=span.start_time_unix_nano,
            end=span.end_time_unix_nano,
        )
        for of in request.resource_spans
        for scope in of.scope_spans
        for span in scope.spans
    ]


def _attributes(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    which = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if which == "array_value" else getattr(value, which)


class Collector:
    """Listens while it is a context; `replies` are for the next requests: a status, headers and a body."""

    def __init__(self, *replies: tuple[int, dict[str, str], bytes]) -> None:
        self.replies = list(replies)
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.spans: list[Received] = []
        self.errors: list[str] = []
        self._changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.handle(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        if request.headers["Content-Encoding"] == "gzip":
            body = gzip.decompress(body)
        status, headers, reply = self.replies.pop(0) if self.replies else (200, {}, b"")
        with self._changed:
            self.requests.append((request.path, {k.lower(): v for k, v in request.headers.items()}))
            if status == 200:
                try:
                    self.spans += decode(body)
                except Exception as error:
                    self.errors.append(f"{type(error).__name__}: {error}")
            self._changed.notify_all()
        request.send_response(status)
        for name, value in {"Content-Length": str(len(reply)), **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(reply)

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name]

    def wait_for_span(self, name: str, timeout: float = 60.0) -> Received:
        with self._changed:
            assert self._changed.wait_for(lambda: self.named(name), timeout), f"no {name}: {self.errors}"
            return self.named(name)[0]

    def wait_for_requests(self, count: int, timeout: float = 60.0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.requests) >= count, timeout), f"only {self.requests}"
