"""The composition root: builds the parts of one node, runs them, and turns the result into an exit code.

Exit codes: 0 the job succeeded; 1 it failed, or no coordinator was reachable; 2 wrong input, or the coordinator
rejected this node; 128 + n signal n ended this agent.  `--linger` delays the exit and does not change the code.
"""

import asyncio
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, closing, contextmanager
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

import ripstop
from ripstop.agent.driver import AgentDriver
from ripstop.agent.machine_io import ExitAgent
from ripstop.api.job_socket import JobSocket
from ripstop.api.probe_server import listen_for_probes, serve_probes
from ripstop.coordinator.driver import Coordinator
from ripstop.coordinator.job_types import JobSettings
from ripstop.diagnostics.failure_log import FailureLog
from ripstop.election.elected_link import ElectedLink
from ripstop.final_output import (
    print_final_output,
    print_final_report,
    write_final_job_report,
    write_final_termination_message,
)
from ripstop.logs.console import Console
from ripstop.logs.directory import LogDirectory, LogDirectorySource
from ripstop.model.config import (
    Backend,
    CoordinatorConfig,
    Executable,
    LogFormat,
    Logs,
    Module,
    QuarantineLimits,
    RunConfig,
    Script,
)
from ripstop.model.errors import UsageError
from ripstop.model.events import Sink
from ripstop.model.failure import JobEnd
from ripstop.model.round import Address, Node, Outcome, RankBy
from ripstop.protocol import secret
from ripstop.starters.user_key import job_secret_from_user_key
from ripstop.system.live_line import LiveLine, can_show
from ripstop.system.stderr_terminal import has_colors
from ripstop.telemetry.event_file import JOB_EVENTS, NODE_EVENTS, EventFile
from ripstop.telemetry.stderr_log import StderrLogPrinter, log_to_stderr
from ripstop.transport.endpoint import Bound, bind_endpoint, bind_first_endpoint
from ripstop.transport.link import InProcessLink, Link
from ripstop.workers.environment import shared_environment
from ripstop.workers.processes import Children
from ripstop.workers.saver_process import prepare_saver_directory
from ripstop.workers.spawner import Spawner, WorkerSpawner

log = logging.getLogger("ripstop")

# workers do not get these
SECRET_VARIABLES = (
    *("RIPSTOP_TOKEN", "RIPSTOP_TOKEN_FILE", "RIPSTOP_ETCD_USER", "RIPSTOP_ETCD_PASSWORD"),
    "PET_NOTIFY_URL",
)


# one node -------------------------------------------------------------------------------------------------------------


def launch_node(config: RunConfig, link: Link | None = None) -> int:
    """Run this node's part of the job; a caller that has its own coordinator passes the `link` to it."""
    live = _launch_live_line(config)
    with log_to_stderr(config.own_log, config.notes, with_coordinator=config.backend is not Backend.LOCAL, live=live):
        if config.user_key is not None:
            config = replace(config, token=job_secret_from_user_key(config.user_key))
        directory = LogDirectory(config.logs, config.run_id)
        if config.checkpoints is not None:
            prepare_saver_directory(config.checkpoints.directory)
        end = _run_with_workers(config, directory, link, live)
        if (report := end.report) is not None and report.outcome is Outcome.SUCCEEDED:
            log.info("job=%s succeeded rounds=%d restarts=%d", report.run_id, report.rounds, report.restarts)
    printer = StderrLogPrinter("run", config.own_log)
    print_final_output(end, directory, printer)
    write_final_job_report(directory, printer)
    if config.termination_log is not None:
        write_final_termination_message(config.termination_log, end, printer)
    is_job_over = end.report is not None or end.code == 0  # otherwise a new agent may succeed
    if config.linger and is_job_over and end.code < 128:
        printer.line("the job is over; waiting for a signal to exit (--linger)", logging.INFO)
        _linger_after_launch(config.signals)
    return end.code


def _run_with_workers(
    config: RunConfig, directory: LogDirectory, link: Link | None, live: LiveLine | None
) -> ExitAgent:
    bound = bind_launch_endpoint(config)
    probe_socket = None
    if config.probe_port is not None:
        probe_socket = listen_for_probes("--probe-port", config.local_addr, config.probe_port)
    environ = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    # first, because its imports take the longest; the agent loads the rest meanwhile
    children = Children()
    shared = shared_environment(environ, config.slots)
    with (
        closing(Spawner(children, config.entry, shared, config.start, config.preload)) as spawner,
        _launch_torch_event_handler(config, environ, children) as sinks,
    ):
        _log_launch(config, directory)
        return asyncio.run(
            run_launched_agent(
                config,
                directory,
                spawner,
                environ,
                bound,
                sinks=sinks,
                link=link,
                probe_socket=probe_socket,
                console=Console(live=live),
            )
        )


async def run_launched_agent(
    config: RunConfig,
    directory: LogDirectory,
    spawner: WorkerSpawner,
    environ: dict[str, str],
    bound: Bound | None,
    logs_source: LogDirectorySource | None = None,
    sinks: Sequence[Sink] = (),
    link: Link | None = None,
    probe_socket: socket.socket | None = None,
    console: Console | None = None,
) -> ExitAgent:
    """Run this node's agent in any event loop, with the workers that `spawner` starts.

    `sinks` take this node's events.  Without a `link`, the agent finds or hosts the coordinator.  Without a `console`,
    the workers' output goes to this process's stdout and stderr.
    """
    node = _node_to_launch(config, bound)
    config = _with_launch_secret(config, bound)
    async with AsyncExitStack() as parts:
        node_sinks = [_open_event_file_at_launch(parts, directory, NODE_EVENTS), *sinks]
        if link is not None:
            access = _CoordinatorAccess(link)
        elif config.backend is Backend.ETCD or config.successors:
            access = _elected_link_at_launch(parts, config, node, directory, bound)
        elif config.backend is Backend.LOCAL or bound is not None:
            access = await _launch_hosted_coordinator(parts, config, node, directory, bound)
        else:
            access = _link_to_coordinator_at_launch(parts, config, node)
        describe_wait: Callable[[], str] = access.coordinator.wait_text if access.coordinator is not None else str
        driver = AgentDriver(
            config, node, spawner, access.link, directory, environ, logs_source, node_sinks, console, describe_wait
        )
        if access.failure is not None:
            access.failure.add_done_callback(lambda failure: driver.fail(failure.exception()))
        if probe_socket is not None:
            _launch_probe_server(parts, probe_socket, driver.reason_not_ready)
        end = await driver.run()
        if access.coordinator is not None and end.report is not None:
            await access.coordinator.ended  # the other nodes receive the report before their coordinator exits
        return end


class _CoordinatorAccess(Struct, frozen=True):
    """The link to the coordinator.

    `failure` is done with an exception if the coordinator fails in this process; `coordinator` is set if it is hosted
    here for the whole job.
    """

    link: Link
    failure: asyncio.Future[Any] | None = None
    coordinator: Coordinator | None = None


async def _launch_hosted_coordinator(
    parts: AsyncExitStack, config: RunConfig, node: Node, directory: LogDirectory, bound: Bound | None
) -> _CoordinatorAccess:
    """The coordinator runs in this process; `bound` is None if it serves this node alone."""
    sinks = [_open_job_event_file_at_launch(parts, directory), *_other_launch_sinks(parts, config)]
    coordinator = Coordinator(_job_settings_at_launch(config, own=node.id), sinks=sinks)
    if bound is not None:
        await _launch_server(parts, coordinator, bound, config)
    _launch_job_socket(parts, config, node.id).lead(coordinator, str(bound.address) if bound else "")
    parts.callback(coordinator.stop)  # before the server closes: clients that wait for a reply end then
    return _CoordinatorAccess(InProcessLink(coordinator, node.id), coordinator.ended, coordinator)


def _link_to_coordinator_at_launch(parts: AsyncExitStack, config: RunConfig, node: Node) -> _CoordinatorAccess:
    """The coordinator runs at the endpoint."""
    from ripstop.transport.websocket_link import WebSocketLink  # aiohttp: only with a network

    assert config.endpoint is not None
    _launch_job_socket(parts, config, node.id).follow(str(config.endpoint))
    tls = None
    if config.tls is not None:
        from ripstop.transport.tls import client_context

        tls = client_context(config.tls)
    link = WebSocketLink(
        config.endpoint,
        run_id=config.run_id,
        node=node.id,
        token=config.token,
        lease=config.timing.lease,
        max_nodes=config.max_nodes,
        tls=tls,
    )
    return _CoordinatorAccess(link)


def _elected_link_at_launch(
    parts: AsyncExitStack, config: RunConfig, node: Node, directory: LogDirectory, bound: Bound | None
) -> _CoordinatorAccess:
    """etcd or the nodes elect the agent that runs the coordinator; if it is this one, it runs within the link."""
    job_socket = _launch_job_socket(parts, config, node.id)

    def on_elected(address: Address | None, own: Coordinator | None) -> None:
        if own is not None:
            job_socket.lead(own, str(address))
        elif address is not None:
            job_socket.follow(str(address))
        else:
            job_socket.job = None

    settings = replace(_job_settings_at_launch(config, own=node.id), is_elected=True)
    sinks = [_open_job_event_file_at_launch(parts, directory), *_other_launch_sinks(parts, config)]
    identity = {"node": node.id, "token": config.token, "tls": config.tls}
    common: dict[str, Any] = {**identity, "sinks": sinks, "on_leader": on_elected}
    link: ElectedLink
    if config.etcd is not None:
        from ripstop.election.etcd_link import EtcdLink  # aiohttp: only with a network

        link = EtcdLink(config.etcd, settings, local_addr=config.local_addr, **common)
    else:
        from ripstop.election.succession_link import SuccessionLink

        link = SuccessionLink(config.successors, settings, bound=bound, **common)
    return _CoordinatorAccess(link, link.failed)


# a coordinator without workers ----------------------------------------------------------------------------------------


def launch_coordinator(config: CoordinatorConfig) -> int:
    """Run a coordinator without workers."""
    with log_to_stderr(config.own_log, config.notes, with_coordinator=True):
        directory = LogDirectory(Logs(config.log_dir), config.run_id) if config.log_dir else None
        bound = bind_endpoint(config.endpoint, required=True, multi_node=config.max_nodes > 1)
        assert bound is not None, "bind raises if it cannot bind a required endpoint"
        _check_endpoint_at_launch(bound, config)
        end = asyncio.run(_run_launched_coordinator(config, bound, directory))
    printer = StderrLogPrinter("coordinator", config.own_log)
    if isinstance(end, JobEnd):
        level = logging.INFO if end.outcome is Outcome.SUCCEEDED else logging.ERROR
        print_final_report(end, printer, level)
    if directory is not None:
        write_final_job_report(directory, printer)
    if isinstance(end, int):
        return 128 + end
    return 0 if end.outcome is Outcome.SUCCEEDED else 1


async def _run_launched_coordinator(
    config: CoordinatorConfig, bound: Bound, directory: LogDirectory | None
) -> JobEnd | int:
    """The job's report, or the signal that ended the coordinator."""
    loop = asyncio.get_running_loop()
    signalled: asyncio.Future[int] = loop.create_future()

    def on_signal(signum: int) -> None:
        if not signalled.done():
            signalled.set_result(signum)

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal, signum)
    async with AsyncExitStack() as parts:
        sinks = [_open_job_event_file_at_launch(parts, directory)] if directory else []
        coordinator = Coordinator(_job_settings_at_launch(config), sinks=[*sinks, *_other_launch_sinks(parts, config)])
        await _launch_server(parts, coordinator, bound, config)
        name = f"{socket.gethostname()}-{os.getpid()}"
        _launch_job_socket(parts, config, name).lead(coordinator, str(config.endpoint))
        parts.callback(coordinator.stop)
        log.info("coordinator of job=%s at %s", config.run_id, bound.address)
        ends: list[asyncio.Future[Any]] = [coordinator.ended, signalled]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    return signalled.result() if signalled.done() else coordinator.ended.result()


# the parts ------------------------------------------------------------------------------------------------------------


def bind_launch_endpoint(config: RunConfig) -> Bound | None:
    """The listening socket if this node hosts the coordinator for others, or serves `--api`; otherwise None."""
    if config.backend is Backend.LOCAL and config.api is not None:
        return bind_endpoint(config.api, required=True, multi_node=False, flag="--api")
    if config.backend in (Backend.LOCAL, Backend.ETCD, Backend.HANDLER) or config.is_host is False:
        return None
    assert config.endpoint is not None, "a job of several nodes has an endpoint"
    is_host = config.is_host is True
    if config.successors:
        bound = bind_first_endpoint(config.successors, required=is_host, own_address=config.local_addr)
    else:
        bound = bind_endpoint(
            config.endpoint, required=is_host, multi_node=config.max_nodes > 1, own_address=config.local_addr
        )
    if bound is not None:
        _check_endpoint_at_launch(bound, config)
    return bound


def _check_endpoint_at_launch(bound: Bound, config: RunConfig | CoordinatorConfig) -> None:
    """Before anything starts: UsageError if agents would not trust the certificate of the endpoint's host."""
    endpoint = bound.listed_address or config.endpoint
    if config.tls is not None and endpoint is not None:
        from ripstop.transport.tls import check_coordinator_certificate

        try:
            check_coordinator_certificate(config.tls, endpoint.host)
        except UsageError:
            bound.listening.close()
            raise
    if bound.note:
        log.warning("%s", bound.note)


def _with_launch_secret(config: RunConfig, bound: Bound | None) -> RunConfig:
    """A job of one node with an open port gets a random secret, so that no other user can join or stop it.

    It needs none if TLS requires client certificates: those also let operators in.
    """
    has_client_certificates = config.tls is not None and config.tls.ca is not None
    if bound is None or config.token or config.max_nodes > 1 or has_client_certificates:
        return config
    return replace(config, token=secrets.token_hex(16))


def _node_to_launch(config: RunConfig, bound: Bound | None) -> Node:
    """This node.  Its address is the user's, or the endpoint's if hosted here; empty: the link finds it."""
    host = config.local_addr or ""
    if not host and config.backend is Backend.LOCAL:
        host = "127.0.0.1"
    if not host and bound is not None and config.endpoint is not None:
        # ranks by address compare numeric addresses, so a host name would not sort
        listed = bound.listed_address or config.endpoint
        host = (bound.address if config.rank_by is RankBy.ADDRESS else listed).host
    # Promises belong to a node: an agent that is restarted must not have the same name by chance.
    name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8 if config.successors else 2)}"
    return Node(name, host, config.slots, config.role, config.node_rank, config.node_number, config.node_label)


def _job_settings_at_launch(config: RunConfig | CoordinatorConfig, own: str = "") -> JobSettings:
    is_local = isinstance(config, RunConfig) and config.backend is Backend.LOCAL
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
        allow_chaos=config.allow_chaos,
        stragglers=config.stragglers,
        quarantine=QuarantineLimits(failures=0) if is_local else config.quarantine,
    )


async def _launch_server(
    parts: AsyncExitStack, coordinator: Coordinator, bound: Bound, config: RunConfig | CoordinatorConfig
) -> None:
    from ripstop.transport.server import Server  # aiohttp: only with a network

    tls = None
    if config.tls is not None:
        from ripstop.transport.tls import server_context

        tls = server_context(config.tls)
    server = Server(
        bound.listening,
        coordinator,
        token=config.token,
        tls=tls,
        serves_agents=isinstance(config, CoordinatorConfig) or config.backend is not Backend.LOCAL,
        endpoint_host=config.endpoint.host if config.endpoint else "",
    )
    parts.push_async_callback(server.close)
    await server.start()


def _launch_probe_server(parts: AsyncExitStack, listening: socket.socket, unready: Callable[[], str]) -> None:
    serving = asyncio.create_task(serve_probes(listening, unready), name="ripstop-probes")

    async def stop() -> None:
        serving.cancel()
        await asyncio.wait([serving])
        listening.close()  # the task does not, if it is cancelled before its first step

    parts.push_async_callback(stop)


def _launch_job_socket(parts: AsyncExitStack, config: RunConfig | CoordinatorConfig, node: str) -> JobSocket:
    """The job's API for operators on this machine."""
    token = secret.api_token_from_secret(config.token, config.run_id) if config.token else ""
    job_socket = JobSocket(os.environ, config.run_id, node, token, config.tls)
    parts.push_async_callback(job_socket.close)
    return job_socket


def _open_event_file_at_launch(parts: AsyncExitStack, directory: LogDirectory, name: str) -> Sink:
    file = EventFile(directory.path / name)
    parts.callback(file.close)
    return file.add


def _open_job_event_file_at_launch(parts: AsyncExitStack, directory: LogDirectory) -> Sink:
    """The file of the whole job's events; `directory` records whether this process was the one that wrote it."""
    file = EventFile(directory.path / JOB_EVENTS)

    def close() -> None:
        file.close()
        directory.has_job_events |= file.is_used

    parts.callback(close)
    return file.add


def _other_launch_sinks(parts: AsyncExitStack, config: RunConfig | CoordinatorConfig) -> list[Sink]:
    """The log of failures, and the senders of the job's traces and of notifications, if they are on."""
    sinks: list[Sink] = [FailureLog(log.warning).add]
    if config.tracing is not None:
        from ripstop.telemetry.trace_exporter import TraceExporter

        exporter = TraceExporter(config.tracing, config.run_id)
        parts.push_async_callback(exporter.close)
        sinks.append(exporter.add)
    if config.notify_url:
        from ripstop.notifications.webhook import Webhook

        webhook = Webhook(config.notify_url, config.run_id)
        parts.push_async_callback(webhook.close)
        sinks.append(webhook.add)
    return sinks


@contextmanager
def _launch_torch_event_handler(config: RunConfig, environ: dict[str, str], children: Children) -> Iterator[list[Sink]]:
    """The sink for the torch event handler that the user named, if any."""
    if not config.event_handler:
        yield []
        return
    from ripstop.telemetry.torch_handler import EventHandler, torch_handler_sink

    match config.entry:
        case Script(name) | Module(name) | Executable((name, *_)):
            program = name
        case _:
            program = "function"
    with closing(EventHandler(config.event_handler, environ, children)) as handler:
        yield [torch_handler_sink(config, program, handler.put)]


# the log, and the wait before the exit --------------------------------------------------------------------------------


def _log_launch(config: RunConfig, directory: LogDirectory) -> None:
    least, most = config.min_nodes, config.max_nodes
    text = "ripstop=%s job=%s nnodes=%s workers=%d logs=%s"
    nodes = f"{least}:{most}" if least < most else most
    logs = directory.path if directory.kept else os.devnull
    log.info(text, ripstop.__version__, config.run_id, nodes, config.slots, logs)


def _launch_live_line(config: RunConfig) -> LiveLine | None:
    """The live line of this terminal; None if there is none, or other processes of the job write to it."""
    is_shared = config.event_handler or config.standby.count or config.logs.specs
    is_shown = config.own_log.live and config.own_log.format is LogFormat.TEXT and not is_shared
    return LiveLine(colors=has_colors(os.environ)) if is_shown and can_show(os.environ) else None


def _linger_after_launch(names: Sequence[str]) -> None:
    """Wait for one of these signals.

    They are blocked first: the kernel drops an unblocked signal without a handler to the first process of a container.
    """
    signals = [signal.Signals[name] for name in names]
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    signal.sigwait(signals)
