"""Shared code of the commands about a running job: send requests to its API, find it, parse the command line.

A command finds a job through the files that this user's agents keep on this machine (`api/local_jobs.py`), or at the
coordinator's endpoint.
"""

import http.client
import json
import os
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from ripstop.api import http_client
from ripstop.api.local_jobs import JobRecord, read_local_jobs
from ripstop.api.routes import PREFIX
from ripstop.cli.options.flags import HELP_FLAG, Flag, ParsedArguments, parse_flags_and_positionals
from ripstop.model.config import COORDINATOR_PORT, Tls
from ripstop.model.errors import HelpRequested, RipstopError, UsageError
from ripstop.model.parsers import identifier, integer, key_values, parse_address, parse_secret_variables
from ripstop.model.rendezvous_conf import TLS_CONF, rendezvous_conf_tls
from ripstop.model.round import Address
from ripstop.system.network import describe_network_error, enable_keepalive
from ripstop.system.socket_directory import socket_address, socket_directories

JOB_HELP = """
which job
  -j, --job NAME              the job's id, or the name of one of its nodes (the only job on this machine)
  --endpoint HOST[:PORT],…    the coordinator's address, for a job on other machines (port 29400); several if the
                              job has several, as in --rdzv-endpoint.  Give the job's id with --job (none), and its
                              secret in RIPSTOP_TOKEN or RIPSTOP_TOKEN_FILE
  --rdzv-conf tls_…=FILE,…    certificates for --endpoint, as in ripstop run
  --json                      print JSON

Defaults are in parentheses.

Exit codes: 0 done; 1 the job was not found, could not be reached, or rejected the command; 2 the command
line is wrong.
"""
BASIC_FLAGS = (HELP_FLAG, Flag("--job", "NAME", short="-j"), Flag("--json"))
JOB_FLAGS = (*BASIC_FLAGS, Flag("--endpoint", "HOST[:PORT],…"), Flag("--rdzv-conf", "KEY=VALUE,…"))
CHECK_TIMEOUT_S = 3.0  # for a reply, if another address may answer
REPLY_TIMEOUT_S = 20.0  # for a whole reply, or for the header of a stream
MAX_REPLY_BYTES = 256 << 20  # the stacks of a very large job


class JobUnreachable(RipstopError):
    """There is no such job, or it does not reply."""


class RequestRejected(RipstopError):
    """The job rejected the request."""


# a job ----------------------------------------------------------------------------------------------------------------


class JobClient(Struct, frozen=True):
    """A client of one job, through a Unix socket or at an endpoint."""

    name: str
    socket_path: Path | None
    endpoint: Address | None
    token: str
    tls: ssl.SSLContext | None

    def __str__(self) -> str:
        return f"job {self.name} at {self.socket_path or self.endpoint}"

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        reply: dict[str, Any] = json.loads(self._send("GET", PREFIX + path, query=query))
        return reply

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        reply: dict[str, Any] = json.loads(self._send("POST", PREFIX + path, body=body))
        return reply

    def check(self) -> None:
        """Raise an error if the coordinator does not answer here within `CHECK_TIMEOUT_S`."""
        self._send("GET", f"{PREFIX}/events", timeout_s=CHECK_TIMEOUT_S, query={"since": 2**53})  # a short reply

    def metrics(self) -> str:
        return self._send("GET", "/metrics", accept="text/plain").decode("utf-8", "replace")

    def stream_lines(self, path: str, accept: str, idle_timeout_s: float | None, **query: Any) -> Iterator[str]:
        """Yield the lines of a stream until it ends; `idle_timeout_s` limits its silence."""
        request = self._request("GET", PREFIX + path, query=query, accept=accept)
        with self._translated_errors():
            yield from http_client.request_http_lines(
                self._connect, request, timeout_s=REPLY_TIMEOUT_S, idle_timeout_s=idle_timeout_s
            )

    def _send(self, method: str, path: str, timeout_s: float | None = None, **options: Any) -> bytes:
        request = self._request(method, path, **options)
        with self._translated_errors():
            limit = timeout_s or REPLY_TIMEOUT_S
            return http_client.send_http_request(self._connect, request, timeout_s=limit, max_bytes=MAX_REPLY_BYTES)

    def _request(self, method: str, path: str, **options: Any) -> http_client.Request:
        return http_client.Request(method, path, str(self.endpoint or "localhost"), self.token, **options)

    def _connect(self, timeout_s: float) -> socket.socket:
        if self.socket_path is not None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(timeout_s)
            try:
                with socket_address(self.socket_path) as path:
                    sock.connect(path)
            except OSError:
                sock.close()
                raise
            return sock
        assert self.endpoint is not None, "a job has a socket or an endpoint"
        sock = socket.create_connection((self.endpoint.host, self.endpoint.port), timeout_s)
        enable_keepalive(sock)
        return sock if self.tls is None else self.tls.wrap_socket(sock, server_hostname=self.endpoint.host)

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except http_client.ErrorReply as reply:
            why = reply.error or f"{self} replied HTTP {reply.status}, so it is not a ripstop job; correct the endpoint"
            if reply.status == http.client.UPGRADE_REQUIRED:
                why = f"{self} requires TLS; add --rdzv-conf=tls_ca=FILE"
            raise RequestRejected(why) from reply
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, ssl.SSLError):
                from ripstop.transport.tls import describe_tls_error

                why = describe_tls_error(error)
            else:
                why = describe_network_error(error)
            raise JobUnreachable(f"cannot reach {self}: {why}; check that it runs, and its address") from error


# finding it -----------------------------------------------------------------------------------------------------------


def find_job_client(args: ParsedArguments, environ: Mapping[str, str]) -> JobClient:
    if "--endpoint" in args:
        return _job_client_at_endpoint(args, environ)
    if "--rdzv-conf" in args:
        raise UsageError("--rdzv-conf needs --endpoint; add --endpoint=HOST:PORT, or remove --rdzv-conf")
    records = {record: directory for directory in socket_directories(environ) for record in read_local_jobs(directory)}
    record = _choose_record_for_job_client(list(records), args.text("--job"))
    return _job_client_of_record(record, records[record])


def _job_client_at_endpoint(args: ParsedArguments, environ: Mapping[str, str]) -> JobClient:
    texts = args.text("--endpoint").split(",")
    endpoints = [parse_address("--endpoint", text, default_port=COORDINATOR_PORT) for text in texts]
    run_id = identifier("--job", args.text("--job", "none"))
    conf = key_values("--rdzv-conf", args.text("--rdzv-conf"))
    if other := conf.keys() - TLS_CONF:
        raise UsageError(f"--rdzv-conf {min(other)}: not a key for this command; use {', '.join(sorted(TLS_CONF))}")
    certificates, _ = rendezvous_conf_tls("--rdzv-conf", conf)
    token, _ = parse_secret_variables(environ)
    if token:
        from ripstop.protocol.secret import api_token_from_secret

        token = api_token_from_secret(token, run_id)
    context = _job_client_tls_context(certificates)
    return _job_client_with_coordinator([JobClient(run_id, None, endpoint, token, context) for endpoint in endpoints])


def _job_client_with_coordinator(addresses: list[JobClient]) -> JobClient:
    """The address of several at which the coordinator answers.  A single address is not asked."""
    problems: list[JobUnreachable | RequestRejected] = []
    for job in addresses if len(addresses) > 1 else ():
        try:
            job.check()
            return job
        except (JobUnreachable, RequestRejected) as problem:
            problems.append(problem)
    if problems:
        raise next((problem for problem in problems if isinstance(problem, RequestRejected)), problems[0])
    return addresses[0]


def _choose_record_for_job_client(records: list[JobRecord], name: str) -> JobRecord:
    matching = [record for record in records if name in ("", record.run_id, record.node)]
    if not matching:
        jobs = f"its jobs are {_run_ids_for_job_client(records)}" if records else "this user has no jobs here"
        problem = f"no job {name!r} on this machine: {jobs}" if name else f"no job runs on this machine: {jobs}"
        raise JobUnreachable(f"{problem}; for a job on other machines, give --endpoint=HOST:PORT")
    if len({record.run_id for record in matching}) > 1:
        raise UsageError(
            f"several jobs run on this machine: {_run_ids_for_job_client(matching)}; choose one with --job=NAME"
        )
    with_coordinator = [record for record in matching if record.socket]
    if len(with_coordinator) > 1:
        nodes = ", ".join(record.node for record in with_coordinator)
        raise UsageError(
            f"several jobs have the id {matching[0].run_id}, on the nodes {nodes}; choose one with --job=NODE"
        )
    return (with_coordinator or matching)[0]


def _run_ids_for_job_client(records: list[JobRecord]) -> str:
    return ", ".join(dict.fromkeys(record.run_id for record in records))


def _job_client_of_record(record: JobRecord, directory: Path) -> JobClient:
    if record.socket:
        return JobClient(record.run_id, directory / Path(record.socket).name, None, "", None)
    certificates = None
    if record.tls:
        cert, key, ca = (Path(path) if path else None for path in (record.tls_cert, record.tls_key, record.tls_ca))
        certificates = Tls(cert, key, ca)
    endpoint = parse_address("endpoint", record.endpoint, default_port=COORDINATOR_PORT)
    return JobClient(record.run_id, None, endpoint, record.token, _job_client_tls_context(certificates))


def _job_client_tls_context(certificates: Tls | None) -> ssl.SSLContext | None:
    if certificates is None:
        return None
    from ripstop.transport.tls import check_tls_certificates, client_context

    check_tls_certificates("--rdzv-conf", certificates)
    return client_context(certificates)


# the command line -----------------------------------------------------------------------------------------------------


class JobClientCommandLine(Struct, frozen=True):
    """The command line of a command about a job."""

    args: ParsedArguments
    positional: tuple[str, ...]

    @property
    def as_json(self) -> bool:
        return "--json" in self.args

    def find_job(self) -> JobClient:
        return find_job_client(self.args, os.environ)

    def is_job_running(self) -> bool:
        """Whether the job can be found, and its workers run."""
        try:
            return bool(self.find_job().get("/status")["phase"] == "running")
        except RipstopError:
            return False

    def rank(self) -> int | None:
        """The argument RANK, None if it is absent."""
        return integer("RANK", self.positional[0], minimum=0, maximum=2**31) if self.positional else None

    def print(self, text: str, reply: object) -> None:
        """Print the text, or with --json the reply."""
        print(json.dumps(reply, indent=2, ensure_ascii=False) if self.as_json else text)


class JobCommand(Struct, frozen=True):
    """A command about a job: the function that runs it and returns its exit code (None: 0), its help and its flags."""

    run: Callable[[JobClientCommandLine], int | None]
    help: str
    flags: tuple[Flag, ...] = JOB_FLAGS
    max_positional: int = 0


def run_job_client_command(name: str, command: JobCommand, argv: Sequence[str]) -> int:
    args, positional = parse_flags_and_positionals(command.flags, argv)
    if "--help" in args:
        raise HelpRequested(command.help)
    if len(positional) > command.max_positional:
        raise UsageError(f"{positional[command.max_positional]}: unexpected argument; see ripstop {name} --help")
    return command.run(JobClientCommandLine(args, positional)) or 0
