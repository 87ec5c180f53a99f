"""What OpenTelemetry's variables come to mean."""

from pathlib import Path

import pytest

from ripstop.cli.commands.coordinator import configure as configure_coordinator
from ripstop.cli.commands.run import configure
from ripstop.cli.dry_run import describe
from ripstop.model.config import Tracing

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
HERE = {ENDPOINT: "http://here:4318"}
SERVICE = (("service.name", "ripstop"),)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def read(environ: dict[str, str]) -> tuple[Tracing | None, tuple[str, ...]]:
    """What becomes of them, and what is said about it."""
    config = configure([__file__], {"PATH": "/bin", **environ})
    assert config is not None
    return config.tracing, tuple(note for note in config.notes if "OTEL" in note or "TRACEPARENT" in note)


def test_without_an_endpoint_there_are_no_traces() -> None:
    assert read({}) == (None, ())
    assert read({ENDPOINT: "", "OTEL_SERVICE_NAME": "mine", "TRACEPARENT": PARENT}) == (None, ())


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({ENDPOINT: "http://here:4318"}, "http://here:4318/v1/traces"),
        ({ENDPOINT: "https://here/otlp/"}, "https://here/otlp/v1/traces"),
        ({ENDPOINT: " http://[::1]:4318 "}, "http://[::1]:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://here:1/own?key=k"}, "http://here:1/own?key=k"),
        ({**HERE, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://there/t"}, "http://there/t"),
        ({**HERE, "OTEL_TRACES_EXPORTER": "console, otlp"}, "http://here:4318/v1/traces"),
        ({**HERE, "OTEL_SDK_DISABLED": "false"}, "http://here:4318/v1/traces"),
        ({**HERE, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http://here:4318/v1/traces"),
    ],
)
def test_an_endpoint_is_where_traces_go(environ: dict[str, str], url: str) -> None:
    assert read(environ) == (Tracing(url, resource=SERVICE), ())


@pytest.mark.parametrize("off", [{"OTEL_SDK_DISABLED": "True"}, {"OTEL_TRACES_EXPORTER": "none"}])
def test_traces_can_be_switched_off(off: dict[str, str]) -> None:
    assert read(HERE | off) == (None, ())


def test_spans_say_what_they_are_of() -> None:
    tracing, notes = read(HERE | {"OTEL_RESOURCE_ATTRIBUTES": "service.name=a, team = b%2Cc,"})
    assert tracing is not None
    assert (tracing.resource, notes) == ((("service.name", "a"), ("team", "b,c")), ())
    tracing, _ = read(HERE | {"OTEL_RESOURCE_ATTRIBUTES": "service.name=a", "OTEL_SERVICE_NAME": "mine"})
    assert tracing is not None
    assert tracing.resource == (("service.name", "mine"),)


def test_headers_are_sent_and_never_shown() -> None:
    headers = {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Basic%20s3cret,x-tenant=7"}
    config = configure([__file__], {**HERE, **headers})
    assert config is not None and config.tracing is not None
    assert config.tracing.headers == (("authorization", "Basic s3cret"), ("x-tenant", "7"))
    assert "http://here:4318/v1/traces" in describe(config, {})
    assert "s3cret" not in describe(config, {}) + repr(config)
    tracing, _ = read(HERE | headers | {"OTEL_EXPORTER_OTLP_TRACES_HEADERS": "a=b"})
    assert tracing is not None
    assert tracing.headers == (("a", "b"),)


def test_traces_can_be_under_a_parent() -> None:
    tracing, notes = read(HERE | {"TRACEPARENT": PARENT})
    assert tracing is not None
    assert (tracing.parent, notes) == (("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"), ())
    later, _ = read(HERE | {"TRACEPARENT": f"cc{PARENT[2:]}-what-comes-later"})
    assert later == tracing


def test_a_certificate_of_ones_own_is_trusted(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.touch()
    tracing, _ = read(HERE | {"OTEL_EXPORTER_OTLP_CERTIFICATE": str(file)})
    assert tracing is not None
    assert tracing.ca == file


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({ENDPOINT: "here:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT='here:4318': not an address of HTTP"),
        ({ENDPOINT: "http://"}, "not an address"),
        ({ENDPOINT: "http://here:99999"}, "not an address"),
        ({ENDPOINT: "http://[::1"}, "not an address"),
        ({ENDPOINT: "http://me:s3cret@here"}, "has a user or a password in it"),
        ({**HERE, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "write OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=http://HOST:4318"),
        ({**HERE, "OTEL_EXPORTER_OTLP_CERTIFICATE": "/nowhere"}, "cannot be read: No such file"),
        ({**HERE, "TRACEPARENT": PARENT[:-1] + "0"}, "its trace is not recorded"),
    ],
)
def test_what_cannot_be_used_is_said_and_the_job_runs_without_traces(environ: dict[str, str], said: str) -> None:
    tracing, (note,) = read(environ)
    assert tracing is None
    assert said in note
    assert note.endswith("the job runs without traces")
    assert "s3cret" not in note


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"OTEL_EXPORTER_OTLP_HEADERS": "a=b,s3cret,c d=e,f=x%0Ay"}, "OTEL_EXPORTER_OTLP_HEADERS: its entry 2"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "team"}, "OTEL_RESOURCE_ATTRIBUTES: 'team' is not key=value"),
        ({"TRACEPARENT": "nonsense"}, "not a W3C trace context"),
        ({"TRACEPARENT": PARENT.replace("b7ad6b7169203331", "0" * 16)}, "not a W3C trace context"),
        ({"TRACEPARENT": f"{PARENT}-more"}, "not a W3C trace context"),
        ({"TRACEPARENT": f"ff{PARENT[2:]}"}, "not a W3C trace context"),
        ({"TRACEPARENT": PARENT.upper()}, "not a W3C trace context"),
    ],
)
def test_a_part_that_cannot_be_used_is_said_and_left_out(environ: dict[str, str], said: str) -> None:
    tracing, notes = read(HERE | environ)
    assert tracing is not None
    assert said in notes[0]
    assert "s3cret" not in "".join(notes)
    assert (tracing.parent, tracing.headers[1:]) == (None, ())


def test_nodes_that_meet_without_a_coordinator_have_no_traces() -> None:
    config = configure(["--rdzv-backend=theirs", __file__], HERE, registered=["theirs"])
    assert config is not None
    assert config.tracing is None
    assert any("another package's handler" in note for note in config.notes)


def test_a_coordinator_by_itself_reads_the_same_variables() -> None:
    config = configure_coordinator(["--rdzv-endpoint=head"], HERE)
    assert config is not None
    assert config.tracing == Tracing("http://here:4318/v1/traces", resource=SERVICE)
