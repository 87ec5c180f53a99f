"""An agent's link to a rendezvous handler of torch's kind, in the place of a coordinator.

The handler says who meets; all else that a coordinator decides is decided here, for this node, with the same policy.
What nodes must agree on they say through the round's store: each its `Join`, and node 0 to each its `Assign`.  Rules:

1.  The handler is called from one thread of its own, one call at a time; the event loop never waits for it, and what
    the agent says is acted upon while a call takes however long.
2.  A handler's store is new for every round.  The workers' store is ours, also new, on node 0.
3.  A failure of this node's workers costs a restart, whatever they died of; the nodes of a round agree on the largest
    count.  Nodes that come or go cost nothing.
4.  Healthy workers go on when the handler cannot be reached; a new round needs it.
5.  Leaving is not closing: the handler is shut down when the job ended here, not when a signal ended this agent.
6.  A link that was closed holds no handler and no store, and no exception of theirs is in a reference cycle: they must
    not live until garbage is collected, perhaps in a forked child.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from ripstop.compat.rendezvous.endpoint import parse_rendezvous_endpoint
from ripstop.compat.rendezvous.handler import RendezvousClosedError, RendezvousGracefulExitError, is_a
from ripstop.coordinator import ranks
from ripstop.coordinator.budget import RestartBudget, is_early_failure
from ripstop.diagnostics.failure_report import how, order, root_cause, trim
from ripstop.model.config import RunConfig
from ripstop.model.failure import Failure, JobReport
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
TIMEOUT = 900  # seconds: what torch's launcher gives to every handler
PACE = 0.1  # seconds between two looks for newcomers
TROUBLED = 2.0  # and when the last one failed
EXIT_BARRIER = 300.0  # seconds for the other nodes' workers to finish
FAREWELL = 5.0  # seconds beyond the grace for workers to be stopped
GOODBYE = 30.0  # seconds for the handler to shut down
ATTEMPTS = 3  # to agree on places with nodes that may be gone again

_NODE, _PLACE, _DONE, _ALL_DONE = "ripstop/node/", "ripstop/place/", "ripstop/done", "ripstop/all_done"


class Met(Struct, frozen=True):
    """A round: this node's place in it, and the store that its agents share."""

    place: Place
    store: Any


class Again(Struct, frozen=True):
    """Another round is needed, after a pause."""

    why: str
    pause: float = 0.0


class Looked(Struct, frozen=True):
    """What the handler says, and the nodes of a round once this one is done; or why that is not known."""

    round: int
    done: bool
    waiting: int = 0
    all_done: bool = False
    trouble: str | None = None


class HandlerLink:
    """A `Link`; `make` makes the handler, in the handler's thread."""

    def __init__(self, make: Callable[[], Any], config: RunConfig) -> None:
        self._make = make
        self._config = config
        self._calls = _Thread()
        self._handler: Any = None
        self._listener: Listener | None = None
        self._task: asyncio.Task[None] | None = None
        self._node: Node | None = None
        self._ready: Ready | None = None
        self._offered = asyncio.Event()
        self._heard: asyncio.Queue[FromAgent | Looked] = asyncio.Queue()
        self._restarts = RestartBudget(config.budget)
        self._newest = 0
        self._failures: list[Failure] = []

    # the link ---------------------------------------------------------------------------------------------------------

    @property
    def local_host(self) -> str | None:
        handler = self._config.handler
        assert handler is not None, "a job with a handler has its name"
        return "127.0.0.1" if self._config.max_nodes == 1 else _own_address(handler.endpoint)

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
        self._task = loop.create_task(self._take_part())

    def send(self, message: FromAgent) -> None:
        match message:
            case Join(node=node, ready=ready):
                self._node = node
                self._offer(ready)
            case Ready():
                self._offer(message)
            case Failed() | Succeeded() | Stopped():
                self._heard.put_nowait(message)
            case Leaving() if self._task is not None:
                self._task.cancel()
            case _:
                pass  # nobody else could be told; what keeps a node from being ready does so here too

    async def close(self) -> None:
        self._listener = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._calls.close()
        self._handler = self._task = None  # rule 6

    def _offer(self, ready: Ready | None) -> None:
        if ready is not None:
            self._ready = ready
            self._offered.set()

    def _say(self, message: FromCoordinator) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().call_soon(self._listener.on_message, message)

    # the job ----------------------------------------------------------------------------------------------------------

    async def _take_part(self) -> None:
        try:
            report = await self._rounds()
        except Exception as error:
            report = self._end_of(error)
        if report.outcome is Outcome.FAILED:
            report = await self._with_evidence(report)
        if self._handler is not None:
            with suppress(Exception):  # the job has ended; what the handler makes of it is its own
                await asyncio.wait_for(self._calls.run(self._handler.shutdown), GOODBYE)
        self._say(Closed(report))

    async def _rounds(self) -> JobReport:
        self._handler = await self._calls.run(self._make)
        why = "first round"
        while True:
            met = await self._meet(why)
            end = await self._attend(met)
            if isinstance(end, JobReport):
                return end
            why = end.why
            self._say(StandBy(met.place.round, why))
            await asyncio.sleep(end.pause)

    async def _meet(self, why: str) -> Met:
        for attempt in range(1, ATTEMPTS + 1):
            await self._offered.wait()
            assert self._node is not None and self._ready is not None, "there was an offer"
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
                place = await self._calls.run(partial(agree, info, mine, why))
            except Exception as error:
                if attempt == ATTEMPTS:
                    raise
                log.warning("the nodes of a round did not agree on their places, trying again: %s", error)
                continue
            self._take(place)
            self._say(Assign(place, why))
            return Met(place, info.store)
        raise AssertionError("the last attempt returns or raises")

    def _take(self, place: Place) -> None:
        if place.group_rank == 0:  # the offer is used
            self._ready = None
            self._offered.clear()
        self._newest = place.round
        self._failures = []
        if place.restarts > self._restarts.used:
            self._restarts = RestartBudget(self._config.budget, place.restarts, asyncio.get_running_loop().time())

    async def _attend(self, met: Met) -> Again | JobReport:
        """Until another round is needed, or the job is over."""
        loop = asyncio.get_running_loop()
        began, done, troubled = loop.time(), False, False
        look = loop.create_task(self._look(met, PACE))
        try:
            while True:
                match await self._hear(began + EXIT_BARRIER - loop.time() if done else None):
                    case Failed(round, failures) if round == met.place.round:
                        self._failures += failures
                        verdict = self._restarts.charge(
                            loop.time(), early=is_early_failure(loop.time() - began, progressed=False)
                        )
                        if not verdict.allowed:
                            return self._report(Outcome.FAILED, f"{self._culprit()}; {verdict.why}")
                        return Again(f"{self._culprit()}; {verdict.why}", verdict.delay)
                    case Succeeded(round) if round == met.place.round and not done:
                        done, began = True, loop.time()
                        look.cancel()  # a call that is being made goes on, and its answer is old
                        look = loop.create_task(self._look(met, 0, done=True, arrive=True))
                    case Looked() as seen if (seen.round, seen.done) == (met.place.round, done):
                        if (end := self._end_seen(seen)) is not None:
                            return end
                        if seen.trouble is not None and not troubled:
                            log.warning("the rendezvous cannot be asked, workers go on: %s", seen.trouble)
                        troubled = seen.trouble is not None
                        look = loop.create_task(self._look(met, TROUBLED if troubled else PACE, done=done))  # rule 4
                    case None:
                        why = "all workers of this node exited 0, and others never did"
                        return self._report(Outcome.SUCCEEDED, why)
        finally:
            look.cancel()

    async def _look(self, met: Met, pause: float, *, done: bool = False, arrive: bool = False) -> None:
        """Ask the handler, after a pause; the answer is heard as what the agent says is."""
        await asyncio.sleep(pause)
        try:
            if arrive:
                await self._calls.run(lambda: _arrive(met))
            waiting = await self._calls.run(self._handler.num_nodes_waiting)
            all_done = done and await self._calls.run(lambda: met.store.check([_ALL_DONE]))
            seen = Looked(met.place.round, done, waiting, all_done)
        except Exception as error:
            seen = Looked(met.place.round, done, trouble=str(error) or type(error).__name__)  # rule 6
        self._heard.put_nowait(seen)

    def _end_seen(self, seen: Looked) -> Again | JobReport | None:
        if seen.waiting > 0:
            return Again("another node waits")
        if seen.all_done:
            return self._report(Outcome.SUCCEEDED, "all workers exited 0")
        if seen.done and seen.trouble is not None:  # this node's work is; whoever held the rendezvous has gone
            return self._report(Outcome.SUCCEEDED, "all workers of this node exited 0")
        return None

    async def _hear(self, patience: float | None) -> FromAgent | Looked | None:
        try:
            return await asyncio.wait_for(self._heard.get(), patience)
        except TimeoutError:
            return None

    # the end ----------------------------------------------------------------------------------------------------------

    def _end_of(self, error: Exception) -> JobReport:
        assert self._config.handler is not None, "it is the handler's error"
        name = f"--rdzv-backend={self._config.handler.name}"
        if is_a(error, RendezvousGracefulExitError):
            return self._report(Outcome.SUCCEEDED, f"{name}: this node was a spare, and the job is over")
        if is_a(error, RendezvousClosedError):
            return self._report(Outcome.FAILED, f"{name}: another node has closed the job ({error or 'no reason'})")
        log.debug("%s", name, exc_info=error)
        return self._report(Outcome.FAILED, f"{name}: {type(error).__name__}: {error}")

    async def _with_evidence(self, report: JobReport) -> JobReport:
        """The report, once the workers are stopped and it is known how they died."""
        self._say(Closing(report.why))
        until = asyncio.get_running_loop().time() + self._config.timing.shutdown + FAREWELL
        while (left := until - asyncio.get_running_loop().time()) > 0:
            match await self._hear(left):
                case Stopped(failures):
                    self._failures += failures
                    break
                case Failed(failures=failures):
                    self._failures += failures
        return self._report(report.outcome, report.why)

    def _report(self, outcome: Outcome, why: str) -> JobReport:
        known = {(failure.rank, failure.at): failure for failure in self._failures}
        failures = () if outcome is Outcome.SUCCEEDED else trim(order(known.values()))
        return JobReport(self._config.run_id, outcome, why, self._newest, self._restarts.used, failures)

    def _culprit(self) -> str:
        failure = root_cause(self._failures)
        return f"rank {failure.rank} on {failure.host} {how(failure)}" if failure else "a worker failed"


# what nodes say through the round's store -----------------------------------------------------------------------------


def agree(info: Any, mine: Join, why: str) -> Place:
    """This node's place among all of the round, whose workers may differ in role and number."""
    store, rank = info.store, info.rank
    store.set(f"{_NODE}{rank}", codec.encode(mine))
    if rank == 0:
        joins = [codec.decode(store.get(f"{_NODE}{each}").decode(), (Join,)) for each in range(info.world_size)]
        for each, place in enumerate(_places(joins)):
            store.set(f"{_PLACE}{each}", codec.encode(Assign(place, why)))
    return codec.decode(store.get(f"{_PLACE}{rank}").decode(), (Assign,)).place


def _places(joins: list[Join]) -> list[Place]:
    host = joins[0]
    assert host.ready is not None, "nobody meets without an offer"
    return ranks.places(
        [join.node for join in joins],
        round=max(join.newest for join in joins) + 1,
        store=Address(host.node.host, host.ready.store_port),
        restarts=max(join.restarts for join in joins),
    )


def _arrive(met: Met) -> None:
    if met.store.add(_DONE, 1) == met.place.group_size:
        met.store.set(_ALL_DONE, "1")


def _own_address(endpoint: str) -> str:
    """This node's address on the way to the endpoint; where that is none, the one its name leads to."""
    with suppress(OSError, ValueError):
        host, port = parse_rendezvous_endpoint(endpoint, 1)
        family, kind, _, _, where = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(where)  # sends nothing
            return str(way.getsockname()[0])
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


class _Thread:
    """Calls, one at a time, in a thread that nobody waits for at the end: a handler may block for long."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="ripstop-rendezvous-handler", daemon=True)

    async def run(self, call: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        waiting = [answer]  # until it has come, or nobody waits for it any more

        def settle(value: T | None, error: BaseException | None) -> None:
            if not waiting or waiting[0].done():
                return
            if error is not None:
                waiting[0].set_exception(error)
            else:
                waiting[0].set_result(value)  # type: ignore[arg-type]  # it is what the call gave

        def make() -> None:
            value, error = None, None
            try:
                value = call()
            except Exception as raised:
                error = raised
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(settle, value, error)
            del error  # its traceback leads to this frame: rule 6

        if not self._thread.is_alive():
            self._thread.start()
        self._calls.put(make)
        try:
            return await answer
        finally:
            waiting.clear()
            del answer  # and the exception in it, whose traceback leads to this frame: rule 6

    def close(self) -> None:
        self._calls.put(None)

    def _main(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # not held while the next one is waited for
