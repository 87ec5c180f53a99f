"""Our spans, read with OpenTelemetry's own definitions."""

import math

import pytest

from ripstop.telemetry.otlp import complaint, request
from ripstop.telemetry.spans import Context, Moment, Span
from tests.collector import decode

CONTEXT = Context("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
OTHER = Context("ffffffffffffffffffffffffffffffff", "0000000000000001")


def test_a_span_arrives_as_it_was() -> None:
    attributes = {"text": "größer\n", "whole": -(1 << 63), "number": 0.5, "truth": True, "list": (1, 2), "none": ()}
    span = Span(
        CONTEXT, "00f067aa0ba902b7", "recovery", 1794774876.25, 1794774877.5, attributes,
        (Moment(1794774876.5, "worker_failed", {"ripstop.rank": 1}),), (OTHER,), "it was bad",
    )  # fmt: skip
    (found,) = decode(request([span], {"service.name": "mine"}))
    assert (found.trace, found.id, found.parent) == (CONTEXT.trace, CONTEXT.span, "00f067aa0ba902b7")
    assert (found.start, found.end, found.seconds) == (1794774876250000000, 1794774877500000000, 1.25)
    assert found.attributes == attributes | {"list": [1, 2], "none": []}
    assert found.events == [("worker_failed", {"ripstop.rank": 1})]
    assert found.links == [(OTHER.trace, OTHER.span)]
    assert found.error == "it was bad"
    assert found.resource == {"service.name": "mine"}


def test_a_root_that_went_well_has_neither_parent_nor_error() -> None:
    (found,) = decode(request([Span(CONTEXT, "", "job", 1.0, 2.0, {})], {}))
    assert (found.parent, found.error) == ("", "")


@pytest.mark.parametrize("at", [-1.0, 0.0, 1e300, -1e300, math.nextafter(math.inf, 0)])
def test_a_clock_that_says_anything_spoils_no_request(at: float) -> None:
    (found,) = decode(request([Span(CONTEXT, "", "job", at, at - 5, {})], {}))
    assert 0 <= found.start <= found.end < 1 << 63


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", ""),
        (b"{}", ""),
        (b"nonsense", ""),
        (b"[" * 100_000, ""),
        (b"[1]", ""),
        (b'{"partialSuccess": 7}', ""),
        (b'{"partialSuccess": {}}', ""),
        (b'{"partialSuccess": {"rejectedSpans": "3", "errorMessage": "too old"}}', "3 spans rejected: too old"),
        (b'{"partialSuccess": {"errorMessage": "use another path"}}', "use another path"),
        (b'{"code": 3, "message": "no such tenant"}', "no such tenant"),
    ],
)
def test_what_a_collector_does_not_like_is_read(answer: bytes, said: str) -> None:
    assert complaint(answer) == said
