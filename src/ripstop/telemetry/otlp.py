"""Spans as OpenTelemetry's collectors take them: OTLP's `ExportTraceServiceRequest` in its JSON encoding.  Pure.

That encoding is Protobuf's, with ids in hexadecimal digits: names are lowerCamelCase, enums are numbers, 64-bit
integers are text.  What collectors answer is read here, too, and may be anything.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from ripstop import __version__
from ripstop.telemetry.spans import Context, Moment, Span, Value

INTERNAL = 1  # a span's kind: neither a client's nor a server's
ERROR = 2  # a status; without one, nobody has said that it was good or bad
LATEST = (1 << 63) - 1  # nanoseconds since 1970: a node's clock may say anything, and is not to spoil a whole request


def request(spans: Iterable[Span], resource: Mapping[str, str]) -> bytes:
    """The body that sends these spans, of something that has these attributes."""
    scope = {"scope": {"name": "ripstop", "version": __version__}, "spans": [_span(span) for span in spans]}
    body = {"resourceSpans": [{"resource": {"attributes": _attributes(dict(resource))}, "scopeSpans": [scope]}]}
    return json.dumps(body, separators=(",", ":")).encode()


def complaint(answer: bytes) -> str:
    """What a collector that took the request did not like in it, or why it did not; empty when it says nothing."""
    try:
        found = json.loads(answer)
        partial = found.get("partialSuccess") or {}
        rejected, said = partial.get("rejectedSpans", 0), partial.get("errorMessage", "") or found.get("message", "")
        return f"{rejected} spans rejected: {said}" if int(rejected) else str(said)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return ""


def _span(span: Span) -> dict[str, Any]:
    return {
        **_context(span.context),
        **({"parentSpanId": span.parent} if span.parent else {}),
        "name": span.name,
        "kind": INTERNAL,
        "startTimeUnixNano": _time(span.start),
        "endTimeUnixNano": _time(max(span.start, span.end)),
        "attributes": _attributes(span.attributes),
        "events": [_event(moment) for moment in span.moments],
        "links": [_context(link) for link in span.links],
        "status": {"code": ERROR, "message": span.error} if span.error else {},
    }


def _context(context: Context) -> dict[str, str]:
    return {"traceId": context.trace, "spanId": context.span}


def _event(moment: Moment) -> dict[str, Any]:
    return {
        "timeUnixNano": _time(moment.at),
        "name": moment.name,
        "attributes": _attributes(moment.attributes),
    }


def _attributes(attributes: Mapping[str, Value]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in attributes.items()]


def _value(value: Value) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case tuple() | list():
            return {"arrayValue": {"values": [_value(one) for one in value]}}
    return {"stringValue": value}


def _time(seconds: float) -> str:
    micros = seconds * 1e6  # all that a float of our days has; what is finer would be noise
    return str(min(LATEST, max(0, round(micros) * 1000))) if math.isfinite(micros) else "0"
