"""A collector of traces: a real HTTP server, which reads what it gets with OpenTelemetry's own definitions."""

import base64
import json
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import pytest

pytest.importorskip("opentelemetry.proto", reason="no opentelemetry-proto here: pip install -r requirements/test.txt")

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

IDS = ("traceId", "spanId", "parentSpanId")


@dataclass(frozen=True, slots=True)
class Received:
    """A span, and what it is of."""

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
    """The spans of a request; an error for whatever is not as OpenTelemetry defines it."""
    request = ExportTraceServiceRequest()
    json_format.ParseDict(_with_bytes(json.loads(body)), request)
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


def _with_bytes(value: Any) -> Any:
    """The JSON that Protobuf itself would write: there, ids are base64 as other bytes are."""
    match value:
        case dict():
            return {
                key: base64.b64encode(bytes.fromhex(inner)).decode() if key in IDS else _with_bytes(inner)
                for key, inner in value.items()
            }
        case list():
            return [_with_bytes(inner) for inner in value]
    return value


def _attributes(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    which = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if which == "array_value" else getattr(value, which)


class Collector:
    """Listens while it is a context; `answers` are what the next requests get: a status, headers and a body."""

    def __init__(self, *answers: tuple[int, dict[str, str], bytes]) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.spans: list[Received] = []
        self.mistakes: list[str] = []
        self._changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.take(self)

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

    def take(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        status, headers, said = self.answers.pop(0) if self.answers else (200, {}, b"{}")
        with self._changed:
            self.requests.append((request.path, {k.lower(): v for k, v in request.headers.items()}))
            if status == 200:
                try:
                    self.spans += decode(body)
                except Exception as error:
                    self.mistakes.append(f"{type(error).__name__}: {error}")
            self._changed.notify_all()
        request.send_response(status)
        for name, value in {"Content-Length": str(len(said)), **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(said)

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name]

    def until(self, name: str, patience: float = 60.0) -> Received:
        """Waits for a span of this name."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.named(name), patience), f"no {name}: {self.mistakes}"
            return self.named(name)[0]

    def requested(self, times: int, patience: float = 60.0) -> None:
        """Waits for so many requests."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.requests) >= times, patience), f"only {self.requests}"
