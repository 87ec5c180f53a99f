"""What the commands about a running job have in common: which job it is, and how it is asked.

A job is found by the files that this user's agents keep on this machine (`api/registry.py`), or named by its
coordinator's endpoint.  `http.client` over a Unix socket or TCP is all that it takes, so a command starts quickly.
"""

import http.client
import json
import os
import socket
import ssl
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from msgspec import Struct

from ripstop.api.registry import JobRecord, job_records, socket_address
from ripstop.api.routes import PREFIX
from ripstop.cli.options.flags import Flag, Given, read_mixed
from ripstop.model.config import COORDINATOR_PORT, Tls
from ripstop.model.errors import RipstopError, UsageError
from ripstop.model.parsers import TLS_CONF, address, identifier, job_secret, key_values, tls
from ripstop.model.round import Address
from ripstop.system.network import describe_network_error, enable_keepalive
from ripstop.system.run_directory import run_directories

ABOUT_JOBS = """
  -j, --job NAME              the job's id, or one of its nodes; not needed where there is one job on this machine
  --endpoint HOST[:PORT]      the job's coordinator, if this machine is not part of the job (port 29400); --job is its
                              id (none), and RIPSTOP_TOKEN or RIPSTOP_TOKEN_FILE its secret
  --rdzv-conf tls_…=FILE,…    certificates for that, as for ripstop run
  --json                      the answer as JSON
"""
NAMING = (
    Flag("--help", short="-h", from_environment=False),
    Flag("--job", "NAME", short="-j", from_environment=False),
    Flag("--json", from_environment=False),
)
COMMON = (
    *NAMING,
    Flag("--endpoint", "HOST[:PORT]", from_environment=False),
    Flag("--rdzv-conf", "KEY=VALUE,…", from_environment=False),
)
PATIENCE = 20.0  # seconds for an answer, or for its beginning


class JobUnreachable(RipstopError):
    """There is no such job, or it does not answer."""


class RequestRejected(RipstopError):
    """The job will not."""


# the command line -----------------------------------------------------------------------------------------------------


class ParsedCommand(Struct, frozen=True):
    """The command line of one command."""

    given: Given
    words: tuple[str, ...]

    @property
    def as_json(self) -> bool:
        return "--json" in self.given

    def tell(self, answer: dict[str, Any]) -> None:
        """What came of a change."""
        if self.as_json:
            show_json(answer)
        else:
            print(answer["done"])


def read_command(
    command: str, argv: Sequence[str], help: str, flags: Sequence[Flag] = COMMON, most: int = 0
) -> ParsedCommand | None:
    """The command line, flags and words in any order; None when help was asked for, and given."""
    given, found = read_mixed(flags, argv)
    if "--help" in given:
        print(help, end="")
        return None
    if len(found) > most:
        raise UsageError(f"{found[most]}: one word too many; ripstop {command} --help says what it takes")
    return ParsedCommand(given, found)


def show_json(content: object) -> None:
    print(json.dumps(content, indent=2, ensure_ascii=False))


# which job ------------------------------------------------------------------------------------------------------------


class Target(Struct, frozen=True):
    """A job and the way to it."""

    name: str
    socket: Path | None
    endpoint: Address | None
    token: str
    tls: ssl.SSLContext | None

    def __str__(self) -> str:
        return f"job {self.name} at {self.socket or self.endpoint}"


def find(given: Given, environ: Mapping[str, str] | None = None) -> Target:
    """The job that is meant."""
    environ = os.environ if environ is None else environ
    if "--endpoint" in given:
        return _at_endpoint(given, environ)
    if "--rdzv-conf" in given:
        raise UsageError("--rdzv-conf is for a job elsewhere; add --endpoint=HOST:PORT, or leave it out")
    known = {sign: directory for directory in run_directories(environ) for sign in job_records(directory)}
    chosen = _choose(list(known), given.text("--job", ""))
    return _from(chosen, known[chosen])


def _at_endpoint(given: Given, environ: Mapping[str, str]) -> Target:
    where = address("--endpoint", given.text("--endpoint", ""), default_port=COORDINATOR_PORT)
    run_id = identifier("--job", given.text("--job", "none"))
    conf = key_values("--rdzv-conf", given.text("--rdzv-conf", ""))
    if other := conf.keys() - TLS_CONF:
        raise UsageError(f"--rdzv-conf {min(other)}: is not asked for here; there are {', '.join(sorted(TLS_CONF))}")
    certificates, _ = tls("--rdzv-conf", conf)
    token, _ = job_secret(environ)
    return Target(run_id, None, where, _derived(token, run_id), _context(certificates))


def _choose(known: list[JobRecord], wanted: str) -> JobRecord:
    fitting = [sign for sign in known if wanted in ("", sign.run_id, sign.node)]
    if not fitting:
        there = f"there are {_names(known)}" if known else "there is none of this user's"
        what = f"no job {wanted!r} on this machine: {there}" if wanted else f"no job runs on this machine: {there}"
        raise JobUnreachable(f"{what}; name its coordinator with --endpoint=HOST:PORT if it is elsewhere")
    if len({sign.run_id for sign in fitting}) > 1:
        raise UsageError(f"several jobs run on this machine: {_names(fitting)}; choose one with --job=NAME")
    hosts = [sign for sign in fitting if sign.socket]
    if len(hosts) > 1:
        nodes = ", ".join(sign.node for sign in hosts)
        raise UsageError(
            f"several jobs have the id {hosts[0].run_id}, on the nodes {nodes}; choose one with --job=NODE"
        )
    return (hosts or fitting)[0]


def _names(known: list[JobRecord]) -> str:
    return ", ".join(dict.fromkeys(sign.run_id for sign in known))


def _from(sign: JobRecord, directory: Path) -> Target:
    if sign.socket:
        return Target(sign.run_id, directory / Path(sign.socket).name, None, "", None)
    certificates = None
    if sign.tls:
        cert, key, ca = (Path(path) if path else None for path in (sign.tls_cert, sign.tls_key, sign.tls_ca))
        certificates = Tls(cert, key, ca)
    where = address("endpoint", sign.endpoint, default_port=COORDINATOR_PORT)
    return Target(sign.run_id, None, where, sign.token, _context(certificates))


def _derived(token: str, run_id: str) -> str:
    from ripstop.protocol.secret import api_token

    return api_token(token, run_id) if token else ""


def _context(certificates: Tls | None) -> ssl.SSLContext | None:
    if certificates is None:
        return None
    from ripstop.transport.tls import check_certificates, client_context

    check_certificates("--rdzv-conf", certificates)
    return client_context(certificates)


# asking it ------------------------------------------------------------------------------------------------------------


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        with socket_address(self._path) as where:
            self.sock.connect(where)


def get(target: Target, path: str, **query: Any) -> dict[str, Any]:
    with _answer(target, "GET", PREFIX + path, query) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def post(target: Target, path: str, **body: Any) -> dict[str, Any]:
    with _answer(target, "POST", PREFIX + path, {}, body) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def page(target: Target, path: str) -> str:
    """What is no part of the API."""
    with _answer(target, "GET", path, {}, accept="text/plain") as answer:
        return answer.read().decode("utf-8", "replace")


def lines(target: Target, path: str, accept: str, silence: float | None, **query: Any) -> Iterator[str]:
    """The lines of a stream, until it ends; it may say nothing for so many seconds, or as long as it lives."""
    with _answer(target, "GET", PREFIX + path, query, accept=accept, silence=silence) as answer:
        while data := answer.readline():
            yield data.decode("utf-8", "replace").rstrip("\n")


@contextmanager
def _answer(
    target: Target,
    method: str,
    path: str,
    query: dict[str, Any],
    body: dict[str, Any] | None = None,
    *,
    accept: str = "application/json",
    silence: float | None = PATIENCE,
) -> Iterator[http.client.HTTPResponse]:
    connection = _connection(target)
    headers = {"Accept": accept}
    if target.token:
        headers["Authorization"] = f"Bearer {target.token}"
    if body is not None:
        headers["Content-Type"] = "application/json"
    said = {name: value for name, value in query.items() if value is not None}
    where = path + (f"?{urlencode(said)}" if said else "")
    try:
        connection.connect()
        line = connection.sock  # `getresponse` may let go of it
        if target.endpoint is not None:
            enable_keepalive(line)
        connection.request(method, where, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RequestRejected(_objection(target, answer))
        line.settimeout(silence)
        yield answer
    except (OSError, http.client.HTTPException) as error:
        raise JobUnreachable(_trouble(target, error)) from error
    finally:
        connection.close()


def _connection(target: Target) -> http.client.HTTPConnection:
    if target.socket is not None:
        return _UnixConnection(target.socket, PATIENCE)
    assert target.endpoint is not None, "a target has a socket or an endpoint"
    host, port = target.endpoint.host, target.endpoint.port
    if target.tls is not None:
        return http.client.HTTPSConnection(host, port, timeout=PATIENCE, context=target.tls)
    return http.client.HTTPConnection(host, port, timeout=PATIENCE)


def _objection(target: Target, answer: http.client.HTTPResponse) -> str:
    if answer.status == http.client.UPGRADE_REQUIRED:
        return f"{target} speaks TLS only; give --rdzv-conf=tls_ca=FILE"
    try:
        return str(json.loads(answer.read(64 * 1024))["error"])
    except (ValueError, LookupError, TypeError):
        return f"{target} answers HTTP {answer.status}, so it is no ripstop job; mend the endpoint"


def _trouble(target: Target, error: Exception) -> str:
    match error:
        case ssl.SSLError():
            from ripstop.transport.tls import describe_tls_error

            why = describe_tls_error(error)
        case _:
            why = describe_network_error(error)
    return f"{target} cannot be reached: {why}; see whether it still runs, and where"


def complain(command: str, error: RipstopError) -> None:
    """From a thread of a command's; what `main` does for the command itself."""
    print(f"ripstop {command}: error: {error}", file=sys.stderr)
