"""The driver of the rendezvous machine: clock, timer and connections for a pure `Job`.

Decides nothing and knows no transport: a connection is two callables, given to `attach`.  A node has one connection; a
second one supersedes the first, whose late messages and late end mean nothing then.

Nobody is blamed for silence while words of theirs may be waiting to be read: the job's clock stands still before each
deadline until what has arrived was heard.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ripstop.coordinator.job import Job
from ripstop.coordinator.job_io import (
    Disconnect,
    JobEnded,
    JobInput,
    NodeDisconnected,
    NodeMessage,
    Progressed,
    RecordEvent,
    Send,
    Tick,
)
from ripstop.coordinator.settings import JobSettings
from ripstop.model import events as observe
from ripstop.model.errors import ProtocolError, QueryFailed
from ripstop.model.events import Sink
from ripstop.model.failure import JobReport
from ripstop.model.operator_commands import OperatorCommand
from ripstop.model.status import JobStatus, NodeState, NodeStatus
from ripstop.protocol.limits import bounded_entry
from ripstop.protocol.messages import Events, FromAgent, FromCoordinator, Heartbeat, Query, Reply
from ripstop.telemetry.journal import Journal
from ripstop.telemetry.metrics import Totals

if TYPE_CHECKING:
    from ripstop.coordinator.metrics_collector import MetricsCollector

TURN = 0.01  # seconds in which the event loop reads what has arrived
PATIENCE = 10.0  # seconds for an agent's answer

log = logging.getLogger("ripstop.coordinator")


class Session:
    """One connection of one node."""

    __slots__ = ("_coordinator", "close", "node", "send")

    def __init__(
        self,
        coordinator: "Coordinator",
        node: str,
        send: Callable[[FromCoordinator], None],
        close: Callable[[], None],
    ) -> None:
        self.node = node
        self.send = send
        self.close = close
        self._coordinator = coordinator

    def receive(self, message: FromAgent) -> None:
        """The node said something."""
        self._coordinator.hear(self, message)

    def detach(self, *, returning: bool = False) -> None:
        """The connection ended.  A node that said it is returning is not reported as gone: its lease covers it."""
        self._coordinator.forget(self, returning=returning)


class Coordinator:
    """Runs one job; to be made inside a running event loop.  `ended` holds the report once everybody knows it.

    `may_decide` is asked before every decision: a coordinator whose office has run out does nothing more.  What happens
    in the job goes to its journal, and from there to `totals` and `sinks`.
    """

    def __init__(
        self,
        settings: JobSettings,
        may_decide: Callable[[], bool] = lambda: True,
        sinks: Iterable[Sink] = (),
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()  # the last event, by the job's clock
        self._job = Job(settings, self._last)
        self._may_decide = may_decide
        self._sessions: dict[str, Session] = {}
        self._questions: dict[int, tuple[str, asyncio.Future[str]]] = {}  # whom, and what becomes of it
        self._asked = 0
        self._scraper: MetricsCollector | None = None
        self.totals = Totals()
        self._pids: dict[str, tuple[int, tuple[int, ...]]] = {}  # of linked nodes: of which round, by local rank
        self.journal = Journal([self.totals.on, self._note_pids, *sinks])
        self._deadline: float | None = None  # the job's clock does not pass it before its tick
        self._timer: asyncio.TimerHandle | None = None
        self.ended: asyncio.Future[JobReport] = self._loop.create_future()
        self._arm()

    def attach(self, node: str, send: Callable[[FromCoordinator], None], close: Callable[[], None]) -> Session:
        """A node has connected.  `send` and `close` must not call back at once; `close` comes after what was sent."""
        old = self._sessions.get(node)
        session = self._sessions[node] = Session(self, node, send, close)
        if old is not None:
            self._give_up_on(node)
            old.close()
        return session

    def hear(self, session: Session, message: FromAgent) -> None:
        """A session's message; see `Session.receive`."""
        if self._sessions.get(session.node) is not session:
            return
        match message:
            case Events(lines):
                self._take(session.node, lines)
            case Reply():
                self._answered(session.node, message)
            case _:
                self._feed(NodeMessage(session.node, message))

    def forget(self, session: Session, *, returning: bool) -> None:
        """A session's end; see `Session.detach`."""
        if self._sessions.get(session.node) is session:
            del self._sessions[session.node]
            self._give_up_on(session.node)
            if not returning:
                self._feed(NodeDisconnected(session.node))

    # for operators ----------------------------------------------------------------------------------------------------

    @property
    def decides(self) -> bool:
        """Whether this is the coordinator to ask: one whose office has run out does nothing of what it is told."""
        return self._may_decide()

    def status(self) -> JobStatus:
        """The job as it is."""
        status = self._job.status(self._now())
        return replace(status, nodes=tuple(self._with_pids(node, status.round) for node in status.nodes))

    def _with_pids(self, node: NodeStatus, round: int) -> NodeStatus:
        of, pids = self._pids.get(node.name, (-1, ()))
        runs = node.first_rank >= 0 and node.state is not NodeState.DONE and of == round
        return replace(node, pids=pids) if runs else node

    def _note_pids(self, entry: observe.EventRecord) -> None:
        match entry.event:
            case observe.WorkersStarted(round=round, pids=pids) if round >= self._pids.get(entry.node, (-1,))[0]:
                self._pids[entry.node] = round, pids

    def record(self, event: observe.Event) -> None:
        """Have something noted in the job's journal, and said in the log."""
        self.journal.record(event, time.time())
        if text := observe.words(event):
            log.info("%s", text)

    async def ask(self, node: str, question: str, argument: str = "", patience: float = PATIENCE) -> str:
        """Have a node answer; `QueryFailed` says why there is no answer."""
        session = self._sessions.get(node)
        if session is None:
            raise QueryFailed(f"no node {node} is linked to the coordinator; `status` lists them")
        self._asked += 1
        number = self._asked
        answer: asyncio.Future[str] = self._loop.create_future()
        self._questions[number] = (node, answer)
        try:
            session.send(Query(number, question, argument))
            async with asyncio.timeout(patience):
                return await answer
        except TimeoutError:
            raise QueryFailed(f"node {node} did not answer {question!r} in {patience:g} s") from None
        except ProtocolError as error:
            raise QueryFailed(f"node {node} cannot be asked {question!r}: {error}") from error
        finally:
            del self._questions[number]

    async def metrics(self) -> bytes:
        """The page for Prometheus."""
        return await self._scrape().page()

    async def goodput(self) -> float | None:
        """The share of the job's time that was spent in steps that were kept; None while nobody has reported one."""
        return await self._scrape().goodput() if self.totals.goodput.has_steps else None

    def steer(self, wish: OperatorCommand) -> None:
        """An operator wants something; it is had where nothing speaks against it (`model/operator_commands.py`)."""
        self._feed(wish)

    def stop(self) -> None:
        """Let go of the timer and of all connections; nothing is decided any more."""
        self._may_decide = lambda: False
        self._disarm()
        for node, session in self._sessions.items():
            self._give_up_on(node)
            session.close()
        self._sessions.clear()

    def _scrape(self) -> "MetricsCollector":
        if self._scraper is None:
            from ripstop.coordinator.metrics_collector import MetricsCollector  # where somebody asks

            self._scraper = MetricsCollector(self)
        return self._scraper

    def _feed(self, event: JobInput) -> None:
        """A machine that breaks ends the coordinator: nobody may wait for one that decides nothing any more."""
        if not self._may_decide():
            return
        try:
            self._decide(event)
        except Exception as defect:
            if self.ended.done():
                raise
            self.ended.set_exception(defect)

    def _decide(self, event: JobInput) -> None:
        commands = self._job.on(event, self._now())
        for command in commands:
            match command:
                case Send(node, message):
                    if session := self._sessions.get(node):
                        self._send(session, message)
                case Disconnect(node):
                    if session := self._sessions.pop(node, None):
                        self._give_up_on(node)
                        session.close()
                case RecordEvent(noted):
                    self.record(noted)
                case JobEnded(report):
                    if not self.ended.done():
                        self.ended.set_result(report)
        # A beat by itself can only move the deadline further away: the alarm then comes early and is set again, once in
        # a lease instead of once a beat.
        if (
            commands
            or self._timer is None
            or not (isinstance(event, NodeMessage) and isinstance(event.message, Heartbeat))
        ):
            self._arm()

    def _send(self, session: Session, message: FromCoordinator) -> None:
        """A message that cannot be told costs its node the connection, and nobody else anything."""
        try:
            session.send(message)
        except ProtocolError as error:
            log.error("node=%s is dropped, it cannot be told: %s", session.node, error)
            session.close()
            self._loop.call_soon(session.detach)

    def _take(self, node: str, lines: tuple[str, ...]) -> None:
        for line in lines:
            entry = observe.from_json(line)
            if entry is not None and entry.node == node:  # it speaks for itself only
                self.journal.take(bounded_entry(entry))
                self._note_progress(node, entry.event)

    def _note_progress(self, node: str, event: observe.Event) -> None:
        match event:
            case observe.FirstStep(round=round) | observe.CheckpointSaved(round=round):
                if round == self._job.round and not self._job.progressed:
                    self._feed(Progressed(node, round))

    def _answered(self, node: str, answer: Reply) -> None:
        whom, waiting = self._questions.get(answer.number, (None, None))
        if waiting is None or whom != node or waiting.done():
            return
        if answer.error:
            waiting.set_exception(QueryFailed(answer.error))
        else:
            waiting.set_result(answer.body)

    def _give_up_on(self, node: str) -> None:
        """Its connection has ended."""
        self._pids.pop(node, None)  # it tells them again over the next one
        for whom, waiting in self._questions.values():
            if whom == node and not waiting.done():
                waiting.set_exception(QueryFailed(f"the connection of node {node} closed before it answered"))

    def _now(self) -> float:
        now = self._loop.time()
        if self._deadline is not None:
            now = min(now, math.nextafter(self._deadline, -math.inf))
        self._last = max(self._last, now)
        return self._last

    def _arm(self) -> None:
        deadline = self._job.deadline()
        if deadline != self._deadline or self._timer is None:
            self._disarm()
            self._deadline = deadline
            if deadline is not None:
                self._timer = self._loop.call_at(deadline, self._alarm)

    def _alarm(self) -> None:
        self._timer = self._loop.call_later(TURN, self._tick)

    def _tick(self) -> None:
        self._disarm()
        self._feed(Tick())

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._deadline = None
