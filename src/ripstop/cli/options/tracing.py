"""Where traces go: OpenTelemetry's variables, which are not ours alone.

The training script may be meant by them, or a whole cluster.  So nothing in them is refused: what cannot be used is
said, and the job runs without.
"""

import re
from collections.abc import Iterator, Mapping
from urllib.parse import unquote, urlsplit

from ripstop.model.config import Tracing
from ripstop.model.errors import UsageError
from ripstop.model.parsers import pem_file

OTLP = "OTEL_EXPORTER_OTLP_"
SERVICE = "ripstop"  # the name that spans are found by, unless there is another
CONTEXT = re.compile(
    "(?P<version>(?!ff)[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)


def tracing(environ: Mapping[str, str], notes: list[str], *, coordinated: bool) -> Tracing | None:
    """What they ask for; None where that is nothing.  Without a coordinator there is nobody to tell of a job."""
    name, endpoint = _ours(environ, "ENDPOINT")
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if "otlp" not in [word.strip() for word in (environ.get("OTEL_TRACES_EXPORTER") or "otlp").split(",")]:
        return None
    try:
        return _read(environ, name, endpoint.strip(), notes, coordinated=coordinated)
    except UsageError as error:
        notes.append(f"{error}; the job runs without traces")
        return None


def _read(
    environ: Mapping[str, str], name: str, endpoint: str, notes: list[str], *, coordinated: bool
) -> Tracing | None:
    """`UsageError` says why there are no traces."""
    if not coordinated:
        raise UsageError(f"{name} has no effect on nodes that meet through another package's handler")
    wanted, protocol = _ours(environ, "PROTOCOL")
    if protocol.strip() == "grpc":
        own = f"{OTLP}TRACES_ENDPOINT=http://HOST:4318/v1/traces"
        raise UsageError(
            f"{wanted}=grpc: ripstop sends spans over HTTP; write {own} and {OTLP}TRACES_PROTOCOL=http/json"
        )
    where, certificate = _ours(environ, "CERTIFICATE")
    headers_name, headers = _ours(environ, "HEADERS")
    sent = tuple(_pairs(headers_name, headers, notes, secret=True))
    resource = {"service.name": SERVICE} | dict(
        _pairs("OTEL_RESOURCE_ATTRIBUTES", environ.get("OTEL_RESOURCE_ATTRIBUTES", ""), notes)
    )
    if service := environ.get("OTEL_SERVICE_NAME"):
        resource["service.name"] = service
    return Tracing(
        url=_url(name, endpoint, whole="TRACES_" in name),
        headers=sent,
        resource=tuple(resource.items()),
        ca=pem_file(where, certificate) if certificate else None,
        parent=_parent(environ.get("TRACEPARENT", ""), notes),
    )


def _ours(environ: Mapping[str, str], setting: str) -> tuple[str, str]:
    """A setting of traces, else of all signals: the variable's name, and its value, empty where there is none."""
    own, common = f"{OTLP}TRACES_{setting}", f"{OTLP}{setting}"
    return (own, environ[own]) if environ.get(own) else (common, environ.get(common, ""))


def _url(name: str, text: str, *, whole: bool) -> str:
    """Traces have a path below the endpoint of all signals; an endpoint of their own is taken as it is."""
    try:
        parts = urlsplit(text)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # its port, or its brackets
        fits = False
    if not fits or not text.isprintable() or " " in text:
        raise UsageError(f"{name}={text!r}: not an address of HTTP; write http://HOST:4318")
    if "@" in parts.netloc:
        raise UsageError(f"{name}: has a user or a password in it; write them as {OTLP}HEADERS=authorization=…")
    return text if whole else parts._replace(path=f"{parts.path.rstrip('/')}/v1/traces", fragment="").geturl()


def _pairs(name: str, text: str, notes: list[str], *, secret: bool = False) -> Iterator[tuple[str, str]]:
    """`key=value,…` with what is no plain character as %XX, in the value."""
    for number, part in enumerate(text.split(","), 1):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        value = unquote(value)
        if not part.strip():
            continue
        if not (key and equals and key.isprintable() and value.isprintable()) or (secret and not _is_header(key)):
            said = f"its entry {number}" if secret else repr(part)
            notes.append(f"{name}: {said} is not key=value and has no effect; write commas and the like as %2C")
            continue
        yield key, value


def _is_header(key: str) -> bool:
    return key.isascii() and all(c.isalnum() or c in "!#$%&'*+-.^_`|~" for c in key)


def _parent(text: str, notes: list[str]) -> tuple[str, str] | None:
    """Of a W3C `traceparent`: version, trace, span, flags.  Versions after the first may go on behind these."""
    if not text:
        return None
    found = CONTEXT.fullmatch(text.strip())
    if (
        found is None
        or (found["version"] == "00" and found["more"])
        or not int(found["trace"], 16) * int(found["span"], 16)
    ):
        notes.append(f"TRACEPARENT={text!r}: not a W3C trace context; the job's traces begin anew")
        return None
    if not int(found["flags"], 16) & 1:
        raise UsageError(f"TRACEPARENT={text}: its trace is not recorded (the last bit is 0)")
    return found["trace"], found["span"]
