"""`Coordinator`, the driver of the job's state machine: clock, timer and connections for the pure `Job` (`job.py`).

The driver decides nothing and does not depend on a transport: a connection is two callables, given to `attach`.  A node
has one connection; a second one replaces the first, and later messages of the first are ignored.

No node is lost while one of its messages may still be unread: the job's clock stops just before each deadline until
the event loop has read what has arrived.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

import ripstop
from ripstop.api.replies import HistoryColumns, Usage
from ripstop.coordinator import job_types
from ripstop.coordinator.commit_queue import CommitQueue
from ripstop.coordinator.job import Job
from ripstop.coordinator.job_types import JobInput, JobSettings, Predecessor
from ripstop.coordinator.stragglers import Stragglers
from ripstop.model import events
from ripstop.model.config import StragglerMode
from ripstop.model.errors import ProtocolError, QueryFailed
from ripstop.model.event_json import from_json
from ripstop.model.events import Sink
from ripstop.model.failure import JobEnd
from ripstop.model.operator_commands import OperatorCommand
from ripstop.model.status import JobStatus, NodeState, NodeStatus, Phase
from ripstop.model.text_formatting import rank_list
from ripstop.model.usage import NodeSample, StandbySample
from ripstop.protocol.limits import bounded_record
from ripstop.protocol.messages import Events, FromAgent, FromCoordinator, Heartbeat, Query, Reply
from ripstop.telemetry.history import FIRST_INTERVAL_S, History, history_interval_s
from ripstop.telemetry.journal import Journal
from ripstop.telemetry.metrics import Totals
from ripstop.telemetry.stderr_log import log_event_to_stderr

if TYPE_CHECKING:
    from ripstop.coordinator.metrics_collector import MetricsCollector

READ_TIME_S = 0.01  # in which the event loop reads what has arrived
SAMPLES_PER_LIMIT = 4  # of stragglers
QUERY_TIMEOUT_S = 10.0  # for an agent's reply

log = logging.getLogger("ripstop.coordinator")


class CoordinatorSession(Struct, frozen=True, eq=False):
    """A connection of a node.  `send` and `close` must not call back at once; `close` sends what is queued first."""

    coordinator: "Coordinator"
    node: str
    send: Callable[[FromCoordinator], object]
    close: Callable[[], object]

    def receive(self, message: FromAgent) -> None:
        self.coordinator.receive(self, message)

    def renew(self) -> None:
        """The node sent a heartbeat."""
        self.coordinator.renew(self)

    def detach(self, *, returning: bool = False, closed_by_node: bool = False) -> None:
        """The connection closed.  The job ignores this if the node announced that it returns: its lease covers it."""
        self.coordinator.detach(self, returning=returning, closed_by_node=closed_by_node)


class Coordinator:
    """Runs one job; must be created inside a running event loop.  `ended` holds the report after the nodes received it.

    `may_decide` is checked before every decision: a coordinator that has lost its leadership does nothing.  Events go
    to the job's journal, and from there to `totals` and `sinks`.  With `propose`, a new round and all that follows is
    sent only after `announce`: `propose` gets the round and its nodes, the lowest rank first.  When that round is over,
    `withdraw` returns the newest round that is or may still be committed.
    """

    def __init__(
        self,
        settings: JobSettings,
        may_decide: Callable[[], bool] = lambda: True,
        sinks: Iterable[Sink] = (),
        *,
        predecessor: Predecessor | None = None,
        propose: Callable[[int, tuple[str, ...]], None] | None = None,
        withdraw: Callable[[], int] = lambda: 0,
    ) -> None:
        self.settings = settings
        self._loop = asyncio.get_running_loop()
        self._last_event_time = self._loop.time()  # by the job's clock
        self._job = Job(settings, self._last_event_time, predecessor)
        self._propose = propose
        self._proposed_round = predecessor.round if predecessor else 0
        self._withdraw = withdraw
        self._queue = CommitQueue[CoordinatorSession]()
        self._may_decide = may_decide
        self._sessions: dict[str, CoordinatorSession] = {}
        self._queries: dict[int, tuple[str, asyncio.Future[str]]] = {}  # by number: the node, and its reply
        self._last_query = 0
        self.totals = Totals()
        self._pids: dict[str, tuple[int, tuple[int, ...]]] = {}  # of connected nodes: the round, pids by local rank
        self._standbys: dict[str, tuple[StandbySample, ...]] = {}  # of connected nodes
        self.journal = Journal([self.totals.on, self._store_processes, *sinks])
        limits = settings.min_nodes, settings.max_nodes, settings.budget.max_restarts
        started = events.JobStarted(settings.run_id, ripstop.__version__, settings.own, *limits, settings.is_elected)
        self.journal.record(started, time.time())
        self._deadline: float | None = None  # the job's clock does not pass it before the tick
        self._timer: asyncio.TimerHandle | None = None
        self.ended: asyncio.Future[JobEnd] = self._loop.create_future()
        self.history = History()
        self.stragglers = Stragglers(settings.stragglers)
        self._sampling: asyncio.Task[None] | None = None
        self._sampling_timer = self._loop.call_later(self._sampling_interval(0), self._sample)
        self._arm()

    def attach(
        self, node: str, send: Callable[[FromCoordinator], object], close: Callable[[], object]
    ) -> CoordinatorSession:
        """A node has connected; see `CoordinatorSession`."""
        old = self._sessions.get(node)
        session = self._sessions[node] = CoordinatorSession(self, node, send, close)
        if old is not None:
            self._fail_queries(node)
            old.close()
        return session

    def receive(self, session: CoordinatorSession, message: FromAgent) -> None:
        if self._sessions.get(session.node) is not session:
            return
        match message:
            case Events(lines):
                self._add_events(session.node, lines)
            case Reply():
                self._on_reply(session.node, message)
            case _:
                self._feed(job_types.NodeMessage(session.node, message))

    def renew(self, session: CoordinatorSession) -> None:
        """A heartbeat; almost always, it renews the node's lease and changes nothing else."""
        if self._sessions.get(session.node) is not session or not self._may_decide():
            return
        if self._timer is None or not self._job.renew(session.node, self._now()):
            self._feed(job_types.NodeMessage(session.node, Heartbeat()))

    def detach(self, session: CoordinatorSession, *, returning: bool, closed_by_node: bool) -> None:
        if self._sessions.get(session.node) is session:
            del self._sessions[session.node]
            self._fail_queries(session.node)
            if not returning:
                self._feed(job_types.NodeDisconnected(session.node, closed_by_node))

    # operators --------------------------------------------------------------------------------------------------------

    @property
    def job(self) -> "Coordinator":
        """For the API of the server."""
        return self

    @property
    def decides(self) -> bool:
        """Whether this coordinator leads the job; another one ignores all commands."""
        return self._may_decide()

    @property
    def allows_chaos(self) -> bool:
        return self.settings.allow_chaos or self._job.memory.allow_chaos

    def status(self) -> JobStatus:
        status = self._job.status(self._now())
        nodes = tuple(self._with_processes(node, status.round) for node in status.nodes)
        return replace(status, nodes=nodes, stragglers=self.stragglers.status(self._loop.time()))

    def wait_text(self) -> str:
        """What the job waits for, if it has no round."""
        return self._job.wait_text(self._now())

    def _with_processes(self, node: NodeStatus, round: int) -> NodeStatus:
        of, pids = self._pids.get(node.name, (-1, ()))
        runs = node.first_rank >= 0 and node.state is not NodeState.DONE and of == round
        return replace(node, pids=pids if runs else (), standbys=self._standbys.get(node.name, ()))

    def _store_processes(self, record: events.EventRecord) -> None:
        match record.event:
            case events.WorkersStarted(round=round, pids=pids) if round >= self._pids.get(record.node, (-1,))[0]:
                self._pids[record.node] = round, pids
                self._standbys.pop(record.node, None)  # all that were ready are workers now
            case events.StandbysReady(ranks, memory, gpu_memory, _, until):
                self._standbys[record.node] = tuple(map(StandbySample, ranks, memory, gpu_memory, until))
            case events.StandbyDiscarded(rank):
                left = self._standbys.get(record.node, ())
                self._standbys[record.node] = tuple(each for each in left if each.local_rank != rank)

    def record(self, event: events.Event, level: int = logging.INFO) -> None:
        """Add an event to the job's journal and to the log."""
        log_event_to_stderr(log, self.journal.record(event, time.time()), level)

    async def ask(self, node: str, query: str, argument: str = "", timeout_s: float = QUERY_TIMEOUT_S) -> str:
        """Send a query to a node and return its reply; raises `QueryFailed`."""
        session = self._sessions.get(node)
        if session is None:
            raise QueryFailed(f"no node {node} is connected to the coordinator; `status` lists the nodes")
        self._last_query = number = self._last_query + 1
        reply: asyncio.Future[str] = self._loop.create_future()
        self._queries[number] = (node, reply)
        try:
            session.send(Query(number, query, argument))
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            raise QueryFailed(f"node {node} did not reply to {query!r} in {timeout_s:g} s") from None
        except ProtocolError as error:
            raise QueryFailed(f"the query {query!r} cannot be sent to node {node}: {error}") from error
        finally:
            del self._queries[number]

    async def metrics(self) -> bytes:
        """The metrics page, in Prometheus' text format."""
        return await self._collector.page()

    async def full_status(self) -> JobStatus:
        """The status, with what a node must be queried for."""
        goodput, commit_age = await self._collector.progress() if self.totals.goodput.has_steps else (None, None)
        status = self.status()
        restored_from = tuple(sorted(self.totals.restored_from.get(status.round, ())))
        kept = self.totals.kept if self.totals.recovered_round else None
        return replace(status, goodput=goodput, commit_age=commit_age, restored_from=restored_from, kept=kept)

    async def usage(self) -> Usage:
        """What the workers and the GPUs do and use now."""
        return await self._collector.usage()

    def history_columns(self) -> HistoryColumns:
        return HistoryColumns(**self.history.columns())

    def _sample(self) -> None:
        """Add a point to the history of a running round.  An agent that is busy delays the next one."""
        status = self._job.status(self._now())
        self._sampling_timer = self._loop.call_later(self._sampling_interval(len(status.nodes)), self._sample)
        is_sampling = self._sampling is not None and not self._sampling.done()
        if status.phase is Phase.RUNNING and self.decides and not is_sampling:
            self._sampling = asyncio.create_task(self._collector.extend_history(), name="ripstop-history")

    def _sampling_interval(self, nodes: int) -> float:
        """Stragglers are looked for several times in their limit, but not so often that it loads a large job."""
        usual, limits = history_interval_s(nodes), self.settings.stragglers
        if limits.mode is StragglerMode.OFF:
            return usual
        return min(usual, max(limits.seconds / SAMPLES_PER_LIMIT, usual / FIRST_INTERVAL_S))

    def on_samples(self, round: int, samples: Mapping[str, NodeSample]) -> None:
        """Look for stragglers in new samples of a round's nodes."""
        limits, now = self.settings.stragglers, self._loop.time()
        if limits.mode is StragglerMode.OFF or not self.decides:
            return
        for event in self.stragglers.on_samples(round, samples, now):
            self.record(event, logging.WARNING)
        if limits.mode is StragglerMode.REPLACE:
            for found in self.stragglers.status(now):
                why = f"the other ranks wait for {rank_list(found.ranks)}"
                self._feed(job_types.StragglerFound(found.node, round, why))

    def apply_command(self, command: OperatorCommand) -> None:
        """Apply an operator's command if it is allowed now (`model/operator_commands.py`)."""
        self._feed(command)

    def stop(self) -> None:
        """Cancel the timer and close all connections; the coordinator decides nothing afterwards."""
        self._may_decide = lambda: False
        self._queue.clear()
        self._disarm()
        self._sampling_timer.cancel()
        for node, session in self._sessions.items():
            self._fail_queries(node)
            session.close()
        self._sessions.clear()
        self.journal.close()

    @cached_property
    def _collector(self) -> "MetricsCollector":
        from ripstop.coordinator.metrics_collector import MetricsCollector  # only when it is needed

        return MetricsCollector(self)

    def _feed(self, event: JobInput) -> None:
        """An exception in the machine ends the coordinator: no agent may wait for one that decides nothing."""
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
        if self._propose is not None and self._job.phase is Phase.RUNNING and self._job.round > self._proposed_round:
            self._proposed_round = self._job.round
            self._queue.propose(self._job.round)
            self._propose(self._job.round, tuple(self._job.places))
        elif self._propose is not None and self._job.phase is not Phase.RUNNING and not self._queue.is_empty:
            self._send_all(self._queue.withdraw(self._withdraw()))
        for command in commands:
            match command:
                case job_types.Send(node, message):
                    if session := self._sessions.get(node):
                        self._send_all(self._queue.push(session, message))
                case job_types.Disconnect(node):
                    if session := self._sessions.pop(node, None):
                        self._fail_queries(node)
                        self._send_all(self._queue.push(session, None))
                case job_types.RecordEvent(recorded):
                    self.record(recorded, logging.DEBUG if self._is_logged_by_own_agent(recorded) else logging.INFO)
                case job_types.JobEnded(report):
                    if not self.ended.done():
                        self.ended.set_result(report)
        # A heartbeat only moves the deadline further away.  The timer then fires early and is set again, once a lease
        # instead of once a heartbeat.
        is_heartbeat = isinstance(event, job_types.NodeMessage) and isinstance(event.message, Heartbeat)
        if commands or self._timer is None or not is_heartbeat:
            self._arm()

    def announce(self, round: int) -> None:
        """The proposed round is committed: send it, and what follows up to the next proposed round."""
        self._send_all(self._queue.commit(round))

    def _send_all(self, messages: list[tuple[CoordinatorSession, FromCoordinator | None]]) -> None:
        for session, message in messages:
            self._send_or_close(session, message)

    def _send_or_close(self, session: CoordinatorSession, message: FromCoordinator | None) -> None:
        if message is None:
            session.close()
        elif self._sessions.get(session.node, session) is session:
            self._send(session, message)

    def _is_logged_by_own_agent(self, event: events.Event) -> bool:
        """Whether the agent in this process writes a line about the same fact: it has a place in the round."""
        match event:
            case events.RoundFormed() | events.JobClosing() | events.JobClosed():
                return self.settings.own in self._job.places
        return False

    def _send(self, session: CoordinatorSession, message: FromCoordinator) -> None:
        """A message that cannot be encoded closes only this node's connection."""
        try:
            session.send(message)
        except ProtocolError as error:
            log.error("node=%s is disconnected, a message to it cannot be sent: %s", session.node, error)
            session.close()
            self._loop.call_soon(session.detach)

    def _add_events(self, node: str, lines: tuple[str, ...]) -> None:
        for line in lines:
            record = from_json(line)
            if record is not None and record.node == node:  # a node reports its own events only
                self.journal.take(bounded_record(record))
                self._report_progress(node, record.event)

    def _report_progress(self, node: str, event: events.Event) -> None:
        match event:
            case events.FirstStep(round=round) | events.CheckpointSaved(round=round):
                if round == self._job.round and not self._job.progressed:
                    self._feed(job_types.Progressed(node, round))

    def _on_reply(self, node: str, reply: Reply) -> None:
        asked, waiting = self._queries.get(reply.number, (None, None))
        if waiting is None or asked != node or waiting.done():
            return
        if reply.error:
            waiting.set_exception(QueryFailed(reply.error))
        else:
            waiting.set_result(reply.body)

    def _fail_queries(self, node: str) -> None:
        """The node's connection has closed."""
        self._pids.pop(node, None)  # the node reports them again over its next connection
        self._standbys.pop(node, None)
        for asked, waiting in self._queries.values():
            if asked == node and not waiting.done():
                waiting.set_exception(QueryFailed(f"the connection of node {node} closed before it replied"))

    def _now(self) -> float:
        now = self._loop.time()
        if self._deadline is not None:
            now = min(now, math.nextafter(self._deadline, -math.inf))
        self._last_event_time = max(self._last_event_time, now)
        return self._last_event_time

    def _arm(self) -> None:
        deadline = self._job.deadline()
        if deadline != self._deadline or self._timer is None:
            self._disarm()
            self._deadline = deadline
            if deadline is not None:
                self._timer = self._loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = self._loop.call_later(READ_TIME_S, self._tick)

    def _tick(self) -> None:
        self._disarm()
        self._feed(job_types.Tick())

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._deadline = None
