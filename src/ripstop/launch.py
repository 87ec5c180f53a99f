"""The composition root: wires the parts of one node, runs them, and maps the end to an exit code.

Exit codes: 0 the job succeeded; 1 it failed, or its coordinator was not to be found; 2 wrong input; 128 + n this agent
was stopped by signal n.
"""

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from contextlib import AsyncExitStack

from ripstop.agent.driver import Driver
from ripstop.agent.machine import Quit
from ripstop.config import Backend, CoordinatorConfig, RunConfig
from ripstop.observe.report import render, to_json
from ripstop.rendezvous.coordinator import Coordinator
from ripstop.rendezvous.endpoint import Bound, bind
from ripstop.rendezvous.link import Link
from ripstop.rendezvous.local import LocalLink
from ripstop.rendezvous.machine import Settings
from ripstop.round import Node, Outcome
from ripstop.workers.environment import shared_environment
from ripstop.workers.logs import LogDirectory, write_whole
from ripstop.workers.spawner import Spawner

log = logging.getLogger("ripstop")

LOG_FORMAT = "[ripstop] %(asctime)s.%(msecs)03d %(levelname).1s %(message)s"


def run(config: RunConfig) -> int:
    """Run this node's part of the job."""
    _log_to_stderr(config.notes, rendezvous=config.backend is not Backend.LOCAL)
    directory = LogDirectory(config.logs, config.run_id)
    bound = _bind(config)
    environ = dict(os.environ)
    # before all else, because what it imports takes longest; the rest is loaded meanwhile
    spawner = Spawner(config.entry, shared_environment(environ, config.slots), config.start, config.preload)
    try:
        end = asyncio.run(_run(config, directory, spawner, environ, bound))
    finally:
        spawner.close()
    _conclude(end, directory)
    return end.code


def coordinate(config: CoordinatorConfig) -> int:
    """Run a coordinator alone."""
    _log_to_stderr(config.notes, rendezvous=True)
    bound = bind(config.endpoint, demanded=True, shared=config.max_nodes > 1)
    assert bound is not None, "a demanded endpoint is bound, or an error"
    _warn_of(bound)
    return asyncio.run(_coordinate(config, bound))


async def _run(
    config: RunConfig, directory: LogDirectory, spawner: Spawner, environ: dict[str, str], bound: Bound | None
) -> Quit:
    node = _this_node(config, hosting=bound is not None)
    async with AsyncExitStack() as parts:
        link: Link
        coordinator: Coordinator | None = None
        if config.backend is Backend.LOCAL or bound is not None:
            coordinator = Coordinator(_settings(config, own=node.id))
            parts.callback(coordinator.stop)
            link = LocalLink(coordinator, node.id)
            if bound is not None:
                await _serve(parts, coordinator, bound, config)
        else:
            link = _remote(config, node.id)
        end = await Driver(config, node, spawner, link, directory, environ).run()
        if coordinator is not None and end.report is not None:
            await coordinator.ended  # the others are told before their coordinator goes
        return end


async def _coordinate(config: CoordinatorConfig, bound: Bound) -> int:
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, lambda n=signum: stopped.done() or stopped.set_result(n))
    async with AsyncExitStack() as parts:
        coordinator = Coordinator(_settings(config))
        parts.callback(coordinator.stop)
        await _serve(parts, coordinator, bound, config)
        log.info("coordinator of job=%s at %s", config.run_id, bound.address)
        await asyncio.wait([coordinator.ended, stopped], return_when=asyncio.FIRST_COMPLETED)
    if not coordinator.ended.done():
        return 128 + stopped.result()
    report = coordinator.ended.result()
    print(render(report), end="", file=sys.stderr)
    return 0 if report.outcome is Outcome.SUCCEEDED else 1


# the parts ------------------------------------------------------------------------------------------------------------


def _bind(config: RunConfig) -> Bound | None:
    """The endpoint's socket, if this node is to host the coordinator."""
    if config.backend is Backend.LOCAL or config.is_host is False:
        return None
    assert config.endpoint is not None, "a job of several nodes has an endpoint"
    bound = bind(config.endpoint, demanded=config.is_host is True, shared=config.max_nodes > 1)
    if bound is not None:
        _warn_of(bound)
    return bound


def _warn_of(bound: Bound) -> None:
    if bound.note:
        log.warning("%s", bound.note)


def _this_node(config: RunConfig, *, hosting: bool) -> Node:
    """This agent.  Its address is the user's word, or the endpoint's own where it hosts that, or what the link finds."""
    host = config.local_addr or ""
    if not host and config.backend is Backend.LOCAL:
        host = "127.0.0.1"
    if not host and hosting and config.endpoint is not None:
        host = config.endpoint.host
    name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
    return Node(name, host, config.slots, config.role, config.node_rank)


def _settings(config: RunConfig | CoordinatorConfig, own: str = "") -> Settings:
    return Settings(
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        timing=config.timing,
        budget=config.budget,
        fixed_ranks=isinstance(config, RunConfig) and config.backend is Backend.STATIC,
        own=own,
    )


async def _serve(
    parts: AsyncExitStack, coordinator: Coordinator, bound: Bound, config: RunConfig | CoordinatorConfig
) -> None:
    from ripstop.rendezvous.server import Server  # aiohttp: only where there is a network

    server = Server(
        bound.listening, coordinator, run_id=config.run_id, token=config.token, lease=config.timing.lease
    )
    parts.push_async_callback(server.close)
    await server.start()


def _remote(config: RunConfig, node: str) -> Link:
    from ripstop.rendezvous.client import WebSocketLink

    assert config.endpoint is not None
    return WebSocketLink(
        config.endpoint, run_id=config.run_id, node=node, token=config.token, lease=config.timing.lease
    )


# what the user sees ---------------------------------------------------------------------------------------------------


def _log_to_stderr(notes: tuple[str, ...], *, rendezvous: bool) -> None:
    """One line an event.  A coordinator for this node alone is silent: the agent tells the same."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(LOG_FORMAT, "%H:%M:%S"))
    log.handlers = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False
    logging.getLogger("ripstop.rendezvous").setLevel(logging.INFO if rendezvous else logging.WARNING)
    for note in notes:
        log.warning("%s", note)


def _conclude(end: Quit, directory: LogDirectory) -> None:
    if end.report is not None:
        if end.report.outcome is Outcome.SUCCEEDED:
            directory.tidy()
            return
        print(f"\n{render(end.report)}", end="", file=sys.stderr)
        path = directory.path / "report.json"
        try:
            write_whole(path, to_json(end.report))
            print(f"report: {path}", file=sys.stderr)
        except OSError as error:
            print(f"report: could not be written to {path}: {error.strerror}", file=sys.stderr)
    elif end.code < 128:
        print(f"ripstop run: error: {end.why}", file=sys.stderr)
