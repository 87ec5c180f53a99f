"""An agent's link to a torch-style rendezvous handler, in the place of a coordinator.

The handler decides which nodes form a round.  This link decides everything else that a coordinator decides, for this
node, with the same restart policy.  The nodes of a round exchange messages through the round's store: each node writes
its `Join`, and node 0 writes an `Assign` for each.  Rules:

1.  One thread calls the handler, one call at a time.  The event loop never waits for a call, and the link handles the
    agent's messages while a call runs.
2.  The handler's store is new for every round.  So is the workers' store, which ripstop serves on node 0.
3.  A failure of this node's workers costs a restart, whatever its cause; the nodes of a round use the largest count.
    Nodes that join or leave cost nothing.
4.  Healthy workers continue when the handler cannot be reached; a new round needs it.
5.  Leaving is not closing: the link shuts the handler down when the job ended here, not when a signal ended this agent.
6.  A closed link holds no handler and no store, and none of their exceptions is in a reference cycle: they must not
    live until the garbage collector runs, perhaps in a forked child.

`main` runs `ripstop run --rdzv-backend=NAME` with such a handler.  Only this layer may import torch and handlers of
other packages, so `ripstop run`, which is in a lower layer, replaces itself with `main`, which calls it again.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from ripstop import cli
from ripstop.compat.rendezvous import RendezvousParameters, get_rendezvous_handler
from ripstop.compat.rendezvous.endpoint import parse_rendezvous_endpoint
from ripstop.compat.rendezvous.handler import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    is_rendezvous_handler_error,
)
from ripstop.coordinator import ranks
from ripstop.coordinator.restart_budget import RestartBudget, is_early_for_restart_budget
from ripstop.diagnostics.failure_ranking import rank_failures, root_cause, trimmed_ranking
from ripstop.launch import launch_node
from ripstop.model.config import RunConfig
from ripstop.model.failure import Failure, JobEnd, failure_in_short
from ripstop.model.round import Address, Node, Outcome, Place
from ripstop.protocol import codec
from ripstop.protocol.messages import (
    Assign,
    Closed,
    Closing,
    Failed,
    FromAgent,
    FromCoordinator,
    Join,
    Leaving,
    Ready,
    StandBy,
    Stopped,
    Succeeded,
)
from ripstop.transport.link import Listener

log = logging.getLogger("ripstop.coordinator")

T = TypeVar("T")
HANDLER_TIMEOUT_S = 900  # torch's launcher passes it to every handler
POLL_INTERVAL_S = 0.1  # between two checks for waiting nodes
RETRY_INTERVAL_S = 2.0  # after a check that failed
EXIT_BARRIER_TIMEOUT_S = 300.0  # for the other nodes' workers to finish
STOP_MARGIN_S = 5.0  # for workers to stop, beyond the grace period
SHUTDOWN_TIMEOUT_S = 30.0  # for the handler to shut down
MAX_ATTEMPTS = 3  # to agree on places with nodes that may have left again

_NODE, _PLACE, _DONE, _ALL_DONE = "ripstop/node/", "ripstop/place/", "ripstop/done", "ripstop/all_done"


class Rendezvous(Struct, frozen=True):
    """A round: this node's place in it, and the store that its agents share."""

    place: Place
    store: Any


class NextRound(Struct, frozen=True):
    """Another round is needed, after a pause."""

    why: str
    pause: float = 0.0


class Checked(Struct, frozen=True):
    """Result of a check of a round, which was `done` here or not: how it ends, and why the check failed."""

    round: int
    done: bool
    end: NextRound | JobEnd | None
    error: str = ""


class HandlerLink:
    """A `Link`; `make` creates the handler, in the handler's thread."""

    def __init__(self, make: Callable[[], Any], config: RunConfig) -> None:
        self._make = make
        self._config = config
        self._calls = _HandlerLinkThread()
        self._handler: Any = None
        self._listener: Listener | None = None
        self._task: asyncio.Task[None] | None = None
        self._node: Node | None = None
        self._ready: Ready | None = None
        self._is_ready = asyncio.Event()
        self._inbox: asyncio.Queue[FromAgent | Checked] = asyncio.Queue()
        self._restarts = RestartBudget(config.budget)
        self._newest = 0
        self._failures: list[Failure] = []

    # the link ---------------------------------------------------------------------------------------------------------

    @property
    def local_host(self) -> str | None:
        handler = self._config.handler
        assert handler is not None, "a job with a handler has its name"
        return "127.0.0.1" if self._config.max_nodes == 1 else _handler_link_own_address(handler.endpoint)

    @property
    def skew(self) -> float | None:
        return None  # there is no coordinator

    @property
    def disconnect_reason(self) -> str:
        return ""

    def open(self, listener: Listener) -> None:
        self._listener = listener
        loop = asyncio.get_running_loop()
        loop.call_soon(listener.on_connected)
        self._task = loop.create_task(self._run())

    def send(self, message: FromAgent) -> None:
        match message:
            case Join(node=node, ready=ready):
                self._node = node
                self._set_ready(ready)
            case Ready():
                self._set_ready(message)
            case Failed() | Succeeded() | Stopped():
                self._inbox.put_nowait(message)
            case Leaving() if self._task is not None:
                self._task.cancel()
            case _:
                pass  # for a coordinator only

    def drop(self) -> None:
        """There is no coordinator."""

    async def close(self) -> None:
        self._listener = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._calls.close()
        self._handler = self._task = None  # rule 6

    def _set_ready(self, ready: Ready | None) -> None:
        if ready is not None:
            self._ready = ready
            self._is_ready.set()

    def _send_to_agent(self, message: FromCoordinator) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().call_soon(self._listener.on_message, message)

    # the job ----------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            report = await self._run_rounds()
        except Exception as error:
            report = self._report_error(error)
        if report.outcome is Outcome.FAILED:
            report = await self._with_evidence(report)
        if self._handler is not None:
            with suppress(Exception):  # the job has ended: an error of the handler changes nothing
                await asyncio.wait_for(self._calls.run(self._handler.shutdown), SHUTDOWN_TIMEOUT_S)
        self._send_to_agent(Closed(report))

    async def _run_rounds(self) -> JobEnd:
        self._handler = await self._calls.run(self._make)
        why = "first round"
        while True:
            current = await self._rendezvous(why)
            end = await self._supervise_round(current)
            if isinstance(end, JobEnd):
                return end
            why = end.why
            self._send_to_agent(StandBy(current.place.round, why))
            await asyncio.sleep(end.pause)

    async def _rendezvous(self, why: str) -> Rendezvous:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            await self._is_ready.wait()
            assert self._node is not None and self._ready is not None, "set with the event"
            mine = Join(
                self._node,
                self._config.min_nodes,
                self._config.max_nodes,
                newest=self._newest,
                restarts=self._restarts.used,
                ready=self._ready,
            )
            info = await self._calls.run(self._handler.next_rendezvous)
            try:
                place = await self._calls.run(partial(agree_on_place_for_handler_link, info, mine, why))
            except Exception as error:
                if attempt == MAX_ATTEMPTS:
                    raise
                log.warning("the nodes of the round did not agree on their places, retrying: %s", error)
                continue
            self._accept(place)
            self._send_to_agent(Assign(place, why))
            return Rendezvous(place, info.store)
        raise AssertionError("the last attempt returns or raises")

    def _accept(self, place: Place) -> None:
        if place.group_rank == 0:  # its store port is used
            self._ready = None
            self._is_ready.clear()
        self._newest = place.round
        self._failures = []
        if place.restarts > self._restarts.used:
            self._restarts = RestartBudget(self._config.budget, place.restarts, asyncio.get_running_loop().time())

    async def _supervise_round(self, current: Rendezvous) -> NextRound | JobEnd:
        """Return when another round is needed, or the job is over."""
        loop = asyncio.get_running_loop()
        began, done, failing = loop.time(), False, False
        check = loop.create_task(self._check(current, POLL_INTERVAL_S))
        try:
            while True:
                match await self._next_message(began + EXIT_BARRIER_TIMEOUT_S - loop.time() if done else None):
                    case Failed(round, failures) if round == current.place.round:
                        self._failures += failures
                        verdict = self._restarts.charge(
                            loop.time(), early=is_early_for_restart_budget(loop.time() - began, progressed=False)
                        )
                        if not verdict.allowed:
                            return self._report(Outcome.FAILED, f"{self._culprit()}; {verdict.why}")
                        return NextRound(f"{self._culprit()}; {verdict.why}", verdict.delay)
                    case Succeeded(round) if round == current.place.round and not done:
                        done, began = True, loop.time()
                        check.cancel()  # a call that runs continues, and its result is ignored
                        check = loop.create_task(self._check(current, 0, done=True, report_done=True))
                    case Checked(round, was_done, end, error) if (round, was_done) == (current.place.round, done):
                        if end is not None:
                            return end
                        if error and not failing:
                            log.warning("the rendezvous handler cannot be reached, workers continue: %s", error)
                        failing = bool(error)
                        pause = RETRY_INTERVAL_S if failing else POLL_INTERVAL_S
                        check = loop.create_task(self._check(current, pause, done=done))  # rule 4
                    case None:
                        why = "all workers of this node exited 0; those of other nodes did not in time"
                        return self._report(Outcome.SUCCEEDED, why)
        finally:
            check.cancel()

    async def _check(self, current: Rendezvous, pause: float, *, done: bool = False, report_done: bool = False) -> None:
        """Query the handler after a pause; the result goes to the inbox, as the agent's messages do."""
        await asyncio.sleep(pause)
        end: NextRound | JobEnd | None = None
        problem = ""
        try:
            if report_done:
                await self._calls.run(lambda: _report_done_through_handler_link(current))
            if await self._calls.run(self._handler.num_nodes_waiting) > 0:
                end = NextRound("another node waits")
            elif done and await self._calls.run(lambda: current.store.check([_ALL_DONE])):
                end = self._report(Outcome.SUCCEEDED, "all workers exited 0")
        except Exception as error:
            problem = str(error) or type(error).__name__  # rule 6
            if done:  # the node that held the rendezvous has exited
                end = self._report(Outcome.SUCCEEDED, "all workers of this node exited 0")
        self._inbox.put_nowait(Checked(current.place.round, done, end, problem))

    async def _next_message(self, timeout: float | None) -> FromAgent | Checked | None:
        try:
            return await asyncio.wait_for(self._inbox.get(), timeout)
        except TimeoutError:
            return None

    # the end ----------------------------------------------------------------------------------------------------------

    def _report_error(self, error: Exception) -> JobEnd:
        assert self._config.handler is not None, "the error is the handler's"
        name = f"--rdzv-backend={self._config.handler.name}"
        if is_rendezvous_handler_error(error, RendezvousGracefulExitError):
            return self._report(Outcome.SUCCEEDED, f"{name}: this node was a spare, and the job is over")
        if is_rendezvous_handler_error(error, RendezvousClosedError):
            return self._report(Outcome.FAILED, f"{name}: another node has closed the job ({error or 'no reason'})")
        log.debug("%s", name, exc_info=error)
        return self._report(Outcome.FAILED, f"{name}: {type(error).__name__}: {error}")

    async def _with_evidence(self, report: JobEnd) -> JobEnd:
        """The report with the failures that are found when the workers stop."""
        self._send_to_agent(Closing(report.why))
        until = asyncio.get_running_loop().time() + self._config.timing.shutdown + STOP_MARGIN_S
        while (left := until - asyncio.get_running_loop().time()) > 0:
            match await self._next_message(left):
                case Stopped(failures):
                    self._failures += failures
                    break
                case Failed(failures=failures):
                    self._failures += failures
        return self._report(report.outcome, report.why)

    def _report(self, outcome: Outcome, why: str) -> JobEnd:
        known = {(failure.rank, failure.at): failure for failure in self._failures}
        failures = () if outcome is Outcome.SUCCEEDED else trimmed_ranking(rank_failures(known.values()))
        return JobEnd(self._config.run_id, outcome, why, self._newest, self._restarts.used, failures)

    def _culprit(self) -> str:
        failure = root_cause(self._failures)
        return f"rank {failure.rank} on {failure.host} {failure_in_short(failure)}" if failure else "a worker failed"


# messages through the round's store -----------------------------------------------------------------------------------


def agree_on_place_for_handler_link(info: Any, mine: Join, why: str) -> Place:
    """This node's place in the round; the nodes' workers may differ in role and number."""
    store, rank = info.store, info.rank
    store.set(f"{_NODE}{rank}", codec.encode(mine))
    if rank == 0:
        joins = [codec.decode(store.get(f"{_NODE}{each}").decode(), (Join,)) for each in range(info.world_size)]
        for each, place in enumerate(_handler_link_places(joins)):
            store.set(f"{_PLACE}{each}", codec.encode(Assign(place, why)))
    return codec.decode(store.get(f"{_PLACE}{rank}").decode(), (Assign,)).place


def _handler_link_places(joins: list[Join]) -> list[Place]:
    host = joins[0]
    assert host.ready is not None, "set before the rendezvous"
    return ranks.places(
        [join.node for join in joins],
        round=max(join.newest for join in joins) + 1,
        store=Address(host.node.host, host.ready.store_port),
        restarts=max(join.restarts for join in joins),
    )


def _report_done_through_handler_link(current: Rendezvous) -> None:
    if current.store.add(_DONE, 1) == current.place.group_size:
        current.store.set(_ALL_DONE, "1")


def _handler_link_own_address(endpoint: str) -> str:
    """This node's address on the route to the endpoint; without a route, the address of its host name."""
    with suppress(OSError, ValueError):
        host, port = parse_rendezvous_endpoint(endpoint, 1)
        family, kind, _, _, where = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing
            return str(probe.getsockname()[0])
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


class _HandlerLinkThread:
    """Runs calls one at a time in a daemon thread: a handler may block for a long time."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="ripstop-rendezvous-handler", daemon=True)

    async def run(self, call: Callable[[], T]) -> T:
        if not self._thread.is_alive():
            self._thread.start()
        reply: Future[T] = Future()
        self._calls.put((call, reply))
        try:
            return await asyncio.wrap_future(reply)
        finally:
            del reply  # its exception's traceback refers to this frame: rule 6

    def close(self) -> None:
        self._calls.put(None)

    def _main(self) -> None:
        while (item := self._calls.get()) is not None:
            call, reply = item
            if reply.set_running_or_notify_cancel():  # False if nobody waits any more
                try:
                    reply.set_result(call())
                except Exception as error:
                    reply.set_exception(error)
            del item, call, reply  # do not hold them while waiting for the next one


# a job with a handler -------------------------------------------------------------------------------------------------


def link_to_handler(config: RunConfig, conf: Mapping[str, Any]) -> HandlerLink:
    """A link to the handler that the configuration names; `conf` are the handler's settings."""
    named = config.handler
    assert named is not None, "the configuration names a handler"
    nodes = config.min_nodes, config.max_nodes
    parameters = RendezvousParameters(
        named.name, named.endpoint, config.run_id, *nodes, config.local_addr, **{"timeout": HANDLER_TIMEOUT_S, **conf}
    )
    return HandlerLink(partial(get_rendezvous_handler, parameters), config)


def main() -> int:
    """`ripstop run` with a handler."""
    return cli.main(["run", *sys.argv[1:]], with_handler=_run_with_handler_link)


def _run_with_handler_link(config: RunConfig) -> int:
    assert config.handler is not None, "the configuration names a handler"
    return launch_node(config, link_to_handler(config, dict(config.handler.conf)))
