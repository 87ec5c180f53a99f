"""The composition root: wires the parts of one node, runs them, and maps the end to an exit code.

Exit codes: 0 the job succeeded; 1 it failed, or its coordinator was not to be found; 2 wrong input, or refused by the
coordinator; 128 + n this agent was stopped by signal n.  `--linger` puts an end off, and changes no code.
"""

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ripstop.agent.driver import Driver
from ripstop.agent.machine import ExitAgent
from ripstop.api import probes
from ripstop.api.job_socket import JobSocket
from ripstop.coordinator.service import Coordinator
from ripstop.coordinator.settings import JobSettings
from ripstop.diagnostics.failure_report import render, to_json
from ripstop.logs.console import Console
from ripstop.logs.directory import LogDirectory, LogsSource, write_whole
from ripstop.model.config import (
    Backend,
    CoordinatorConfig,
    Entrypoint,
    Executable,
    Function,
    Logs,
    Module,
    QuarantineLimits,
    RunConfig,
    Script,
)
from ripstop.model.errors import UsageError
from ripstop.model.events import EventRecord as Logged
from ripstop.model.events import Sink
from ripstop.model.failure import JobReport
from ripstop.model.round import Address, Node, Outcome, RankBy
from ripstop.model.text import clean, one_line
from ripstop.protocol import secret
from ripstop.telemetry.event_file import JOB_EVENTS, NODE_EVENTS, EventFile
from ripstop.telemetry.log import StderrHandler
from ripstop.transport.endpoint import Bound, bind
from ripstop.transport.in_process import InProcessLink
from ripstop.transport.link import Link
from ripstop.workers.environment import shared_environment
from ripstop.workers.spawner import Spawner, Starter

log = logging.getLogger("ripstop")

SECRETS = (
    "RIPSTOP_TOKEN",
    "RIPSTOP_TOKEN_FILE",
    "RIPSTOP_ETCD_USER",
    "RIPSTOP_ETCD_PASSWORD",
)  # the agents' own; workers are not told


def run(config: RunConfig, link: Link | None = None) -> int:
    """Run this node's part of the job, with a link of the caller's where no coordinator is to be sought."""
    with _log_lines(config.notes, rendezvous=config.backend is not Backend.LOCAL):
        end, directory = _run(config, link)
    _conclude(end, directory)
    if config.termination_log is not None:
        _leave_word(config.termination_log, end)
    over = end.report is not None or end.code == 0  # else it may go better with a new agent
    if config.linger and over and end.code < 128:
        _linger(config)
    return end.code


def _run(config: RunConfig, link: Link | None) -> tuple[ExitAgent, LogDirectory]:
    directory = LogDirectory(config.logs, config.run_id)
    bound = bind_endpoint(config)
    probed = None
    if config.probe_port is not None:
        probed = probes.listen("--probe-port", config.local_addr, config.probe_port)
    environ = {name: value for name, value in os.environ.items() if name not in SECRETS}
    # before all else, because what it imports takes longest; the rest is loaded meanwhile
    spawner = Spawner(config.entry, shared_environment(environ, config.slots), config.start, config.preload)
    try:
        with _torch_handler(config, environ) as sinks:
            part = take_part(config, directory, spawner, environ, bound, sinks=sinks, link=link, probed=probed)
            end = asyncio.run(part)
    finally:
        spawner.close()
    return end, directory


def coordinate(config: CoordinatorConfig) -> int:
    """Run a coordinator alone."""
    with _log_lines(config.notes, rendezvous=True):
        directory = LogDirectory(Logs(config.log_dir), config.run_id) if config.log_dir else None
        bound = bind(config.endpoint, demanded=True, shared=config.max_nodes > 1)
        assert bound is not None, "a demanded endpoint is bound, or an error"
        _may_serve(bound, config)
        _warn_of(bound)
        end = asyncio.run(_coordinate(config, bound, directory))
    if isinstance(end, int):
        return 128 + end
    print(render(end), end="", file=sys.stderr)
    return 0 if end.outcome is Outcome.SUCCEEDED else 1


async def take_part(
    config: RunConfig,
    directory: LogDirectory,
    spawner: Starter,
    environ: dict[str, str],
    bound: Bound | None,
    logs_source: LogsSource | None = None,
    sinks: Sequence[Sink] = (),
    link: Link | None = None,
    probed: socket.socket | None = None,
    console: Console | None = None,
) -> ExitAgent:
    """This node's part of the job, in any event loop, with workers that `spawner` starts.

    `sinks` hear what this node sees; a `link` that is given leads to a coordinator of somebody else's making; at
    `probed`, probes are answered; what workers write is shown at the `console`, else at this process's descriptors.
    """
    node = _this_node(config, bound)
    config = _with_secret(config, bound)
    async with AsyncExitStack() as parts:
        heard = [_event_file(parts, directory, NODE_EVENTS), *sinks]
        if link is not None:
            meeting = _Meeting(link)
        elif config.backend is Backend.ETCD:
            meeting = _meet_by_etcd(parts, config, node, directory)
        else:
            meeting = await _meet(parts, config, node, directory, bound)
        driver = Driver(config, node, spawner, meeting.link, directory, environ, logs_source, heard, console)
        if meeting.broken is not None:
            meeting.broken.add_done_callback(lambda broken: driver.fail(broken.exception()))
        if probed is not None:
            parts.callback(asyncio.create_task(probes.serve(probed, driver.unready), name="ripstop-probes").cancel)
        end = await driver.run()
        if meeting.coordinator is not None and end.report is not None:
            await meeting.coordinator.ended  # the others are told before their coordinator goes
        return end


class _Meeting(Struct, frozen=True):
    """The way to the coordinator; what has its defect, should it break within this process; itself, if it is here."""

    link: Link
    broken: asyncio.Future[Any] | None = None
    coordinator: Coordinator | None = None


async def _meet(
    parts: AsyncExitStack, config: RunConfig, node: Node, directory: LogDirectory, bound: Bound | None
) -> _Meeting:
    """The coordinator is in this process, or at the endpoint."""
    if config.backend is not Backend.LOCAL and bound is None:
        _way_in(parts, config, node.id).follow(str(config.endpoint))
        return _Meeting(_remote(config, node.id))
    sinks = [_event_file(parts, directory, JOB_EVENTS), *_spans(parts, config)]
    coordinator = Coordinator(_settings(config, own=node.id), sinks=sinks)
    if bound is not None:
        await _serve(parts, coordinator, bound, config)
    _way_in(parts, config, node.id).lead(coordinator, str(bound.address) if bound else "")
    parts.callback(coordinator.stop)  # before those end who wait for an answer: none comes any more
    return _Meeting(InProcessLink(coordinator, node.id), coordinator.ended, coordinator)


def _meet_by_etcd(parts: AsyncExitStack, config: RunConfig, node: Node, directory: LogDirectory) -> _Meeting:
    """The coordinator is wherever etcd says; it may be within the link."""
    from ripstop.election.etcd_link import EtcdLink  # aiohttp: only where there is a network

    assert config.etcd is not None
    way_in = _way_in(parts, config, node.id)

    def seated(address: Address | None, own: Coordinator | None) -> None:
        if own is not None:
            way_in.lead(own, str(address))
        elif address is not None:
            way_in.follow(str(address))
        else:
            way_in.job = None

    link = EtcdLink(
        config.etcd,
        _settings(config),
        node=node.id,
        token=config.token,
        local_addr=config.local_addr,
        tls=config.tls,
        sinks=[_event_file(parts, directory, JOB_EVENTS), *_spans(parts, config)],
        seated=seated,
    )
    return _Meeting(link, link.broken)


async def _coordinate(config: CoordinatorConfig, bound: Bound, directory: LogDirectory | None) -> JobReport | int:
    """How the job ended, or the signal that ended its coordinator."""
    stopped: asyncio.Queue[int] = asyncio.Queue()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stopped.put_nowait, signum)
    async with AsyncExitStack() as parts:
        sinks = [_event_file(parts, directory, JOB_EVENTS)] if directory else []
        coordinator = Coordinator(_settings(config), sinks=[*sinks, *_spans(parts, config)])
        await _serve(parts, coordinator, bound, config)
        _way_in(parts, config, f"{socket.gethostname()}-{os.getpid()}").lead(coordinator, str(config.endpoint))
        parts.callback(coordinator.stop)
        log.info("coordinator of job=%s at %s", config.run_id, bound.address)
        signalled = asyncio.create_task(stopped.get())
        ends: list[asyncio.Future[Any]] = [coordinator.ended, signalled]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if signalled.done():
        return signalled.result()
    signalled.cancel()
    return coordinator.ended.result()


# the parts ------------------------------------------------------------------------------------------------------------


def bind_endpoint(config: RunConfig) -> Bound | None:
    """The socket of the endpoint, if this node is to host the coordinator, or of `--api` where it is alone."""
    if config.backend is Backend.LOCAL and config.api is not None:
        return bind(config.api, demanded=True, shared=False, flag="--api")
    if config.backend in (Backend.LOCAL, Backend.ETCD, Backend.HANDLER) or config.is_host is False:
        return None
    assert config.endpoint is not None, "a job of several nodes has an endpoint"
    bound = bind(config.endpoint, demanded=config.is_host is True, shared=config.max_nodes > 1, own=config.local_addr)
    if bound is not None:
        _may_serve(bound, config)
        _warn_of(bound)
    return bound


def _with_secret(config: RunConfig, bound: Bound | None) -> RunConfig:
    """A job of one node that is hosted here has a secret nobody else needs to know; so nobody else can join or end it.

    A certificate that everybody is asked for does the same, and lets operators in.
    """
    if bound is None or config.token or config.max_nodes > 1 or (config.tls is not None and config.tls.ca is not None):
        return config
    return replace(config, token=secrets.token_hex(16))


def _may_serve(bound: Bound, config: RunConfig | CoordinatorConfig) -> None:
    """Would the agents trust the certificate of the endpoint's host?  Asked before anything is started."""
    if config.tls is not None and config.endpoint is not None:
        from ripstop.transport.tls import examine_host

        try:
            examine_host(config.tls, config.endpoint.host)
        except UsageError:
            bound.listening.close()
            raise


def _warn_of(bound: Bound) -> None:
    if bound.note:
        log.warning("%s", bound.note)


def _this_node(config: RunConfig, bound: Bound | None) -> Node:
    """This agent.  Its address: what the user gave, else the endpoint's if hosted here, else what the link finds."""
    host = config.local_addr or ""
    if not host and config.backend is Backend.LOCAL:
        host = "127.0.0.1"
    if not host and bound is not None and config.endpoint is not None:
        # the others' addresses are numbers; by its name, this one could not be put among them
        host = bound.address.host if config.rank_by is RankBy.ADDRESS else config.endpoint.host
    name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
    return Node(name, host, config.slots, config.role, config.node_rank, config.node_number, config.node_label)


def _settings(config: RunConfig | CoordinatorConfig, own: str = "") -> JobSettings:
    alone = isinstance(config, RunConfig) and config.backend is Backend.LOCAL
    return JobSettings(
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        target=config.target,
        timing=config.timing,
        budget=config.budget,
        fixed_ranks=isinstance(config, RunConfig) and config.backend is Backend.STATIC,
        rank_by=config.rank_by,
        own=own,
        quarantine=QuarantineLimits(failures=0) if alone else config.quarantine,
    )


def _event_file(parts: AsyncExitStack, directory: LogDirectory, name: str) -> Sink:
    file = EventFile(directory.path / name)
    parts.callback(file.close)
    return file.add


def _spans(parts: AsyncExitStack, config: RunConfig | CoordinatorConfig) -> list[Sink]:
    """What sends the job's traces, where somebody wants them."""
    if config.tracing is None:
        return []
    from ripstop.telemetry.trace_exporter import TraceExporter

    exporter = TraceExporter(config.tracing, config.run_id)
    parts.push_async_callback(exporter.close)
    return [exporter.add]


def _way_in(parts: AsyncExitStack, config: RunConfig | CoordinatorConfig, node: str) -> JobSocket:
    """For operators on this machine."""
    token = secret.api_token(config.token, config.run_id) if config.token else ""
    found = JobSocket(os.environ, config.run_id, node, token, config.tls)
    parts.push_async_callback(found.close)
    return found


@contextmanager
def _torch_handler(config: RunConfig, environ: dict[str, str]) -> Iterator[list[Sink]]:
    """A handler of torch's kind, while the job runs."""
    if not config.event_handler:
        yield []
        return
    from ripstop.telemetry.torch_handler import EventHandler

    handler = EventHandler(config.event_handler, environ)
    try:
        yield [torch_sink(config, _program(config.entry), handler.put)]
    finally:
        handler.close()


def _program(entry: Entrypoint) -> str:
    match entry:
        case Script(path):
            return path
        case Module(name):
            return name
        case Executable(argv):
            return argv[0]
        case Function():
            return "function"


def torch_sink(config: RunConfig, program: str, put: Callable[[str], None]) -> Sink:
    """Gives `put` what happens here as torch's agent would have told it."""
    from ripstop.telemetry.torch_events import TorchEvents

    events = TorchEvents(
        run_id=config.run_id,
        role=config.role,
        backend=config.backend.value,
        host=socket.gethostname(),
        program=program,
    )

    def sink(entry: Logged) -> None:
        for text in events.convert(entry):
            put(text)

    return sink


async def _serve(
    parts: AsyncExitStack, coordinator: Coordinator, bound: Bound, config: RunConfig | CoordinatorConfig
) -> None:
    from ripstop.transport.server import Server  # aiohttp: only where there is a network

    tls = None
    if config.tls is not None:
        from ripstop.transport.tls import for_coordinator

        tls = for_coordinator(config.tls)
    server = Server(
        bound.listening,
        coordinator,
        run_id=config.run_id,
        token=config.token,
        lease=config.timing.lease,
        nodes=config.max_nodes,
        tls=tls,
        agents=isinstance(config, CoordinatorConfig) or config.backend is not Backend.LOCAL,
        name=config.endpoint.host if config.endpoint else "",
    )
    parts.push_async_callback(server.close)
    await server.start()


def _remote(config: RunConfig, node: str) -> Link:
    from ripstop.transport.client import WebSocketLink

    assert config.endpoint is not None
    tls = None
    if config.tls is not None:
        from ripstop.transport.tls import for_agent

        tls = for_agent(config.tls)
    return WebSocketLink(
        config.endpoint, run_id=config.run_id, node=node, token=config.token, lease=config.timing.lease, tls=tls
    )


# what the user sees ---------------------------------------------------------------------------------------------------


@contextmanager
def _log_lines(notes: tuple[str, ...], *, rendezvous: bool) -> Iterator[None]:
    """One line an event.  A coordinator for this node alone is silent: the agent tells the same."""
    handler = StderrHandler()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    logging.getLogger("ripstop.coordinator").setLevel(logging.INFO if rendezvous else logging.WARNING)
    for note in notes:
        log.warning("%s", note)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


def _conclude(end: ExitAgent, directory: LogDirectory) -> None:
    succeeded = end.report is not None and end.report.outcome is Outcome.SUCCEEDED
    directory.tidy(succeeded=succeeded)
    if succeeded:
        return
    if end.report is not None:
        print(f"\n{render(_with_what_is_kept(end.report, directory))}", end="", file=sys.stderr)
        if not directory.kept:
            return
        path = directory.path / "report.json"
        try:
            write_whole(path, to_json(end.report))
            print(f"report: {path}", file=sys.stderr)
        except OSError as error:
            word = f"{path} cannot be written ({error.strerror}); name another directory with --log-dir"
            print(f"report: {word}", file=sys.stderr)
    elif end.code < 128:
        print(f"ripstop run: error: {one_line(end.why)}", file=sys.stderr)


def _leave_word(file: Path, end: ExitAgent) -> None:
    """For whoever started this agent.  Not being able to is worth a line, and no more."""
    from ripstop.api.termination_message import termination_message

    try:
        file.write_text(termination_message(end.why, end.report))
    except OSError as error:
        word = f"cannot be written ({error.strerror}); name another file"
        print(f"ripstop run: RIPSTOP_TERMINATION_LOG={file}: {word}", file=sys.stderr)


def _linger(config: RunConfig) -> None:
    """Wait for a signal.  Blocked, it also comes to the first process of a container, which hears no other kind."""
    print("ripstop run: the job is over; staying until a signal comes (--linger)", file=sys.stderr, flush=True)
    wanted = [signal.Signals[name] for name in config.signals]
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    signal.sigwait(wanted)


def _with_what_is_kept(report: JobReport, directory: LogDirectory) -> JobReport:
    """The report, without the names of files that are gone."""
    if directory.kept:
        return report
    ours = clean(str(directory.path))
    failures = (
        replace(failure, logs="", error_file="", hang=failure.hang and replace(failure.hang, file=""))
        if failure.logs.startswith(ours)
        else failure
        for failure in report.failures
    )
    return replace(report, failures=tuple(failures))
