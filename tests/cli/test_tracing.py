"""The configuration of traces from OpenTelemetry's variables."""

import pytest

from ripstop.cli.commands.coordinator import configure_coordinator
from ripstop.cli.commands.run import configure_run
from ripstop.cli.dry_run import describe_dry_run
from ripstop.model.config import Tracing

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
HERE = {ENDPOINT: "http://here:4318"}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def read(environ: dict[str, str]) -> tuple[Tracing | None, tuple[str, ...]]:
    """The configuration, and the notes about it."""
    config = configure_run([__file__], {"PATH": "/bin", **environ})
    return config.tracing, tuple(note for note in config.notes if "OTEL" in note or "TRACEPARENT" in note)


def test_without_an_endpoint_there_are_no_traces() -> None:
    assert read({}) == (None, ())
    assert read({ENDPOINT: "", "OTEL_SERVICE_NAME": "mine", "TRACEPARENT": PARENT}) == (None, ())


@pytest.mark.parametrize(
    ("environ", "endpoint"),
    [
        ({ENDPOINT: "http://here:4318"}, "http://here:4318"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://here:1/own?key=s3cret"}, "http://here:1/own"),
        ({ENDPOINT: "http://me:s3cret@here:1"}, "http://here:1"),
        ({ENDPOINT: "http://[::1"}, "the collector"),
        ({**HERE, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://there/t"}, "http://there/t"),
        ({**HERE, "OTEL_TRACES_EXPORTER": "console, otlp"}, "http://here:4318"),
        ({**HERE, "OTEL_SDK_DISABLED": "false"}, "http://here:4318"),
        ({**HERE, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http://here:4318"),
    ],
)
def test_an_endpoint_enables_traces_and_is_shown_without_secrets(environ: dict[str, str], endpoint: str) -> None:
    assert read(environ) == (Tracing(endpoint), ())


def test_secrets_are_not_part_of_the_configuration() -> None:
    config = configure_run([__file__], {**HERE, "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Basic%20s3cret"})
    assert "http://here:4318" in describe_dry_run(config, {})
    assert "s3cret" not in describe_dry_run(config, {}) + repr(config)


def test_without_the_sdk_the_job_runs_and_a_note_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ripstop.cli.options.tracing.SDK_MODULES", ("opentelemetry_not_here.sdk",))
    tracing, (note,) = read(HERE)
    assert tracing is None
    assert "pip install ripstop[tracing]" in note


@pytest.mark.parametrize("off", [{"OTEL_SDK_DISABLED": "True"}, {"OTEL_TRACES_EXPORTER": "none"}])
def test_traces_can_be_disabled(off: dict[str, str]) -> None:
    assert read(HERE | off) == (None, ())


def test_traceparent_names_the_parent_span() -> None:
    tracing, notes = read(HERE | {"TRACEPARENT": PARENT})
    assert tracing is not None
    assert (tracing.parent, notes) == (("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"), ())
    later, _ = read(HERE | {"TRACEPARENT": f"cc{PARENT[2:]}-what-comes-later"})
    assert later == tracing


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "write OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=http://HOST:4318"),
        ({"TRACEPARENT": PARENT[:-1] + "0"}, "its trace is not sampled"),
    ],
)
def test_a_value_that_cannot_be_used_is_noted_and_the_job_runs_without_traces(
    environ: dict[str, str], expected: str
) -> None:
    tracing, (note,) = read(HERE | environ)
    assert tracing is None
    assert expected in note
    assert note.endswith("the job runs without traces")


@pytest.mark.parametrize(
    "text",
    ["nonsense", PARENT.replace("b7ad6b7169203331", "0" * 16), f"{PARENT}-more", f"ff{PARENT[2:]}", PARENT.upper()],
)
def test_an_invalid_traceparent_is_noted_and_the_job_starts_a_new_trace(text: str) -> None:
    tracing, (note,) = read(HERE | {"TRACEPARENT": text})
    assert tracing is not None and tracing.parent is None
    assert "not a W3C trace context" in note


def test_a_job_without_a_coordinator_sends_no_traces() -> None:
    config = configure_run(["--rdzv-backend=theirs", __file__], HERE, registered=["theirs"])
    assert config.tracing is None
    assert any("ENDPOINT has no effect with another package's rendezvous handler" in note for note in config.notes)


def test_ripstop_coordinator_reads_the_same_variables() -> None:
    config = configure_coordinator(["--rdzv-endpoint=head"], HERE)
    assert config.tracing == Tracing("http://here:4318")
