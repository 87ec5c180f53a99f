"""Whether the job sends traces, from OpenTelemetry's variables.

OpenTelemetry's SDK reads most of them itself (`telemetry/trace_exporter.py`).  The variables may be set for the
training script or for a whole cluster.  So no value is an error: ripstop logs a value that it cannot use, and the job
runs without traces.
"""

import re
from collections.abc import Mapping

from ripstop.model.config import Tracing

OTLP = "OTEL_EXPORTER_OTLP_"
SDK_MODULES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
TRACEPARENT = (
    "(?P<version>(?!ff)[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)


def tracing(environ: Mapping[str, str], notes: list[str], *, coordinated: bool = True) -> Tracing | None:
    """None: no traces.  `coordinated`: the job has a coordinator, which is the process that sends traces."""
    name, endpoint = _tracing_setting(environ, "ENDPOINT")
    if not endpoint:
        return None
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if "otlp" not in [name.strip() for name in (environ.get("OTEL_TRACES_EXPORTER") or "otlp").split(",")]:
        return None
    traceparent = re.fullmatch(TRACEPARENT, environ.get("TRACEPARENT", "").strip())
    problem = ""
    if not coordinated:
        problem = f"{name} has no effect with another package's rendezvous handler"
    elif _tracing_setting(environ, "PROTOCOL")[1].strip() == "grpc":
        remedy = f"{OTLP}TRACES_ENDPOINT=http://HOST:4318/v1/traces and {OTLP}TRACES_PROTOCOL=http/protobuf"
        problem = f"{_tracing_setting(environ, 'PROTOCOL')[0]}=grpc: ripstop sends spans over HTTP; write {remedy}"
    elif not _is_tracing_installed():
        problem = f"{name} is set, but OpenTelemetry's SDK is not installed; run `pip install ripstop[tracing]`"
    elif traceparent and not int(traceparent["flags"], 16) & 1:
        problem = f"TRACEPARENT={traceparent[0]}: its trace is not sampled (the last bit is 0)"
    if problem:
        notes.append(f"{problem}; the job runs without traces")
        return None
    return Tracing(_tracing_endpoint_without_secrets(endpoint), _tracing_parent(environ, traceparent, notes))


def _tracing_setting(environ: Mapping[str, str], setting: str) -> tuple[str, str]:
    """The name and the value of the variable for traces, else of the one for all signals."""
    own, common = f"{OTLP}TRACES_{setting}", f"{OTLP}{setting}"
    return (own, environ[own]) if environ.get(own) else (common, environ.get(common, ""))


def _is_tracing_installed() -> bool:
    from importlib.util import find_spec

    try:
        return all(find_spec(module) for module in SDK_MODULES)
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _tracing_endpoint_without_secrets(endpoint: str) -> str:
    """The address for log lines: users, passwords and query strings are left out."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(endpoint.strip())
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
    except ValueError:
        return "the collector"


def _tracing_parent(
    environ: Mapping[str, str], traceparent: re.Match[str] | None, notes: list[str]
) -> tuple[str, str] | None:
    """The ids of the trace and the span of a W3C `traceparent`.  Versions after the first may have more fields."""
    text = environ.get("TRACEPARENT", "")
    if not text:
        return None
    if (
        traceparent is None
        or (traceparent["version"] == "00" and traceparent["more"])
        or not int(traceparent["trace"], 16) * int(traceparent["span"], 16)
    ):
        notes.append(f"TRACEPARENT={text!r}: not a W3C trace context; the job starts a new trace")
        return None
    return traceparent["trace"], traceparent["span"]
