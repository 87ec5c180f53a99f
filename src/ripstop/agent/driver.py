"""Carries out what the agent's machine decides: processes, logs, store ports, signals, timers, the link.

Nothing is decided here.  Everything runs in one event loop; what takes time is a task, and every end of a task is an
event for the machine.  Events that come while commands are being executed wait for their turn.
"""

import asyncio
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, field

from ripstop.agent import queries
from ripstop.agent.event_recorder import EventRecorder
from ripstop.agent.health.assessment import problems
from ripstop.agent.health.probe import HealthProbe
from ripstop.agent.machine import (
    Agent,
    AgentInput,
    AgentSettings,
    CoordinatorConnected,
    CoordinatorLost,
    CoordinatorMessage,
    ExitAgent,
    HealthChecked,
    InspectWorkers,
    LogLine,
    OpenStorePort,
    SendToCoordinator,
    Signalled,
    StartWorkers,
    StopWorkers,
    StorePortReady,
    Tick,
    WarmupDone,
    WorkersFailed,
    WorkersFinished,
    WorkersGone,
    WorkersInspected,
)
from ripstop.agent.queries import Workers
from ripstop.agent.recovery_clock import RecoveryClock
from ripstop.coordinator.job import FAREWELL
from ripstop.diagnostics.evidence import Memory, TimerKill, gather, not_started, read_memory
from ripstop.diagnostics.hang_monitor import HangMonitor, MonitoredWorkers
from ripstop.diagnostics.stack_dump import DUMP_SIGNAL, dump_stack
from ripstop.logs.console import Console
from ripstop.logs.directory import LogDirectory, LogsSource, RoundLogs
from ripstop.model import events
from ripstop.model.config import RunConfig
from ripstop.model.errors import QueryFailed, StartError
from ripstop.model.events import (
    AgentEnded,
    AgentMessage,
    Sink,
    TimersMissed,
    WarmedUp,
    WorkerFailed,
    WorkersStarted,
    WorkersStopping,
    WorkersSucceeded,
)
from ripstop.model.failure import Failure
from ripstop.model.round import Node, Place
from ripstop.protocol.messages import FromCoordinator, Left, Query, Rejected, Reply
from ripstop.transport.link import Link
from ripstop.workers.environment import worker_environment
from ripstop.workers.group import Exit, Group
from ripstop.workers.processes import Children
from ripstop.workers.reports import JobReport, Reports
from ripstop.workers.spawner import ProcessSpec, Starter
from ripstop.workers.store import StorePort

if TYPE_CHECKING:
    from ripstop.agent.gpu_usage import GpuUsageReader
    from ripstop.agent.log_followers import LogFollowers
    from ripstop.diagnostics.timer_pipe import Watchdog

log = logging.getLogger("ripstop.agent")

RETRY = 1.0  # seconds until a port is tried again
QUESTIONS = 64  # of operators that are being answered
LONGEST = 4096  # characters of a reason why there is no answer
PARTING = FAREWELL - 1.0  # seconds for whoever follows a log of a job that is over; the coordinator waits for longer
BRIEF = 1.0  # and when the job goes on without this node
DRAIN = 30.0  # seconds a console may take for the last lines
HASTY = 3.0  # and when a signal ends the agent


class Running(Struct):
    """The workers of one round."""

    place: Place
    logs: RoundLogs
    memory: Memory
    left: int  # workers that have not exited 0
    group: Group | None = None
    watch: HangMonitor | None = None
    ended: set[int] = field(default_factory=set)  # local ranks
    sent: set[int] = field(default_factory=set)  # the signals we stop them with; empty while they are to run
    condemned: dict[int, TimerKill] = field(default_factory=dict)  # workers that we killed for their own doing
    stopped: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    recorder_sockets: tuple[str, ...] = ()  # by local rank

    def was_told_to_end(self, exit: Exit) -> bool:
        """A worker that is being stopped may end as it likes; an exception it wrote down is evidence all the same."""
        wrote = self.logs.error_file(exit.local_rank).exists()
        return exit.signal in self.sent or (bool(self.sent) and not wrote)


class Driver:
    """One agent's hands; `run` lasts as long as the agent."""

    def __init__(
        self,
        config: RunConfig,
        node: Node,
        spawner: Starter,
        link: Link,
        directory: LogDirectory,
        environ: Mapping[str, str],
        logs_source: LogsSource | None = None,
        sinks: Iterable[Sink] = (),
        console: Console | None = None,
    ) -> None:
        self._config = config
        self._spawner = spawner
        self._link = link
        self._directory = directory
        self._timers = self._watch_timers(config.timer_pipe) if config.timer_pipe else None
        self._environ = environ
        self._loop = asyncio.get_running_loop()
        self._machine = Agent(
            AgentSettings(
                node, config.min_nodes, config.max_nodes, config.timing, config.rank_by, config.health.interval
            ),
            self._loop.time(),
        )
        self._children = Children()
        self._checkup = HealthProbe(config.health, str(directory.path), environ)
        self._checking: asyncio.Task[None] | None = None
        self._questions = 0
        self._console = console or Console()
        self._plugin = self._load_plugin() if config.logs.specs else logs_source
        self._events: deque[AgentInput] = deque()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: Running | None = None
        self._offered: StorePort | None = None
        self._store: StorePort | None = None
        self._end: asyncio.Future[ExitAgent] = self._loop.create_future()
        # signals come to the main thread only: within a program that has it for itself, they are that program's
        handled = config.signals if threading.current_thread() is threading.main_thread() else ()
        signums = [signal.Signals[name] for name in handled]
        self._signals = [s for s in signums if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]  # nohup
        self._outage: RecoveryClock | None = None  # of the workers that are to be replaced
        self._diary = EventRecorder(node.id, link.send, sinks)
        self._gpus: GpuUsageReader | None = None
        self._readers: LogFollowers | None = None
        self._farewell: Left | None = None  # the last word to the coordinator
        self._reports = Reports(environ, self._reported)

    async def run(self) -> ExitAgent:
        """Take part in the job until it is over for this node."""
        for signum in self._signals:
            self._loop.add_signal_handler(signum, self._feed, Signalled(signum))
        self._link.open(self)
        self._task(self._warm_up())
        self._arm()
        try:
            end = await self._end
            await self._take_leave(end)
            self._diary.record(AgentEnded(end.code, end.why))
            return end
        finally:
            await self._clean_up()

    def unready(self) -> str:
        """Why this agent is of no use to its job at the moment; "" if it is."""
        return self._machine.unready()

    # events in --------------------------------------------------------------------------------------------------------

    def on_linked(self) -> None:
        self._feed(CoordinatorConnected(self._link.local_host or "127.0.0.1"))
        self._diary.tell_again()
        if self._checking is None and not self._end.done():  # not before: the coordinator's clock is part of it
            self._checking = self._task(self._check_up())

    def on_message(self, message: FromCoordinator) -> None:
        if isinstance(message, Query):
            self._task(self._answer(message))
        else:
            self._feed(CoordinatorMessage(message))

    async def _answer(self, ask: Query) -> None:
        self._questions += 1
        try:
            if self._questions > QUESTIONS:
                raise QueryFailed(
                    f"a node is busy that has {QUESTIONS} questions to answer, as this one; ask again later"
                )
            answer = Reply(ask.number, await queries.reply(ask.question, ask.argument, self._asked_about()))
        except QueryFailed as why:
            answer = Reply(ask.number, error=str(why)[:LONGEST])
        finally:
            self._questions -= 1
        self._link.send(answer)

    def _asked_about(self) -> queries.QueriedNode:
        if self._gpus is None or self._readers is None:
            from ripstop.agent.gpu_usage import GpuUsageReader
            from ripstop.agent.log_followers import LogFollowers  # nobody may ever ask

            self._gpus, self._readers = GpuUsageReader(), LogFollowers()
        return queries.QueriedNode(self._gpus, self._workers(), self._readers)

    def _workers(self) -> Workers | None:
        running = self._running
        if running is None or running.group is None or (running.watch is None and not running.stopped.done()):
            return None
        group, ended = running.group, frozenset(running.ended)
        paces = running.watch.worker_progress() if running.watch is not None else {}
        return Workers(running.place, group.pids, running.logs, paces, ended, running.recorder_sockets, running.stopped)

    def _reported(self, pid: int, report: JobReport) -> None:
        running = self._running
        if running is None or running.group is None or running.watch is None:
            return
        rank = running.group.rank_of(pid)
        if rank is not None:
            running.watch.on_report(rank, report)

    def on_unlinked(self, why: str) -> None:
        self._feed(CoordinatorLost(why))

    def on_refused(self, why: str) -> None:
        self._feed(CoordinatorMessage(Rejected(why)))

    def _tick(self) -> None:
        self._timer = None
        if trouble := self._link.trouble:
            self._feed(CoordinatorLost(trouble))  # a link that never was is not lost, but the reason is wanted
        self._feed(Tick())

    def _feed(self, event: AgentInput) -> None:
        self._events.append(event)
        if self._busy or self._end.done():
            return
        self._busy = True
        try:
            while self._events:
                for command in self._machine.on(self._events.popleft(), self._loop.time()):
                    self._execute(command)
        except Exception as error:
            self.fail(error)
        finally:
            self._busy = False
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        when = self._machine.deadline()
        if when is not None and not self._end.done():
            self._timer = self._loop.call_at(when, self._tick)

    # commands out -----------------------------------------------------------------------------------------------------

    def _execute(
        self,
        command: SendToCoordinator | OpenStorePort | StartWorkers | StopWorkers | InspectWorkers | LogLine | ExitAgent,
    ) -> None:
        match command:
            case SendToCoordinator(Left() as message):
                self._farewell = message
            case SendToCoordinator(message):
                self._link.send(message)
            case OpenStorePort():
                self._offer()
            case StartWorkers(place, why):
                if place.group_rank == 0:
                    self._store, self._offered = self._offered, None
                self._task(self._start_workers(place, why))
            case StopWorkers(round, signum, grace, why):
                self._diary.record(WorkersStopping(round, why))
                now = self._loop.time()
                self._outage = self._outage or RecoveryClock(now, now)
                self._outage.told = self._outage.told or now
                self._task(self._stop_workers(round, signum, grace))
            case InspectWorkers(round):
                self._task(self._inspect(round))
            case LogLine(text, warning):
                self._diary.record(AgentMessage(text), logging.WARNING if warning else logging.INFO)
            case ExitAgent():
                if not self._end.done():
                    self._end.set_result(command)

    def _task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.fail(error)

    def fail(self, error: BaseException | None) -> None:
        """A part that must not break is broken; this ends the agent."""
        if error is not None and not self._end.done():
            self._end.set_exception(error)

    async def _warm_up(self) -> None:
        warm = await self._spawner.warm()
        self._diary.record(WarmedUp(warm.start.value, tuple(warm.preloaded), warm.seconds, warm.why))
        self._feed(WarmupDone())

    async def _check_up(self) -> None:
        """Look at this node's health, now and again.  A look that goes wrong is no reason to end training."""
        health, failed = self._config.health, False
        while True:
            try:
                facts = await self._checkup.look(self._link.skew)
            except Exception as defect:
                if not failed:
                    log.warning("looking at this node's health went wrong, and is tried again (said once): %r", defect)
                failed = True
            else:
                self._feed(HealthChecked(problems(facts, health, joining=not self._machine.admitted)))
            await asyncio.sleep(health.interval)

    def _offer(self) -> None:
        """Have a port listen for the store of a later round.

        A port that the user fixed is bound now for the first round, and for a later one when the store before is gone.
        """
        if self._end.done():
            return
        fixed = self._config.store_port
        if not fixed or not (self._offered or self._machine.held):
            if self._offered is not None:
                self._task(self._offered.close())
                self._offered = None
            try:
                self._offered = StorePort(self._machine.node.host, fixed)
            except StartError as error:
                if self._machine.held is None:
                    raise  # it never worked
                log.warning("no port for the next round's store, trying again: %s", error)
                self._loop.call_later(RETRY, self._offer)
                return
        self._feed(StorePortReady(self._offered.port if self._offered else fixed))

    # workers ----------------------------------------------------------------------------------------------------------

    async def _start_workers(self, place: Place, why: str) -> None:
        began = self._loop.time()
        logs = RoundLogs(self._directory.path, self._config.logs, place, self._config.role, terminal=os.isatty(2))
        running = self._running = Running(place, logs, read_memory(), left=place.slots)
        try:
            if self._plugin is not None:
                envs = {rank: self._environment(place, rank, logs.error_file(rank)) for rank in range(place.slots)}
                running.logs = logs = await self._plugin.round_logs(self._directory.path, place, envs)
                if running.sent:  # stopped while the plugin was thinking
                    return
            logs.prepare()
            logs.follow(self._console)
            if place.group_rank == 0:
                self._store = self._store or StorePort(place.store.host, place.store.port)
                self._store.serve(self._spawner, self._environ, self._children)
            if self._config.hang_timeout:
                running.recorder_sockets = self._reports.renew_recorder_sockets(place.round, place.slots)
            births = [self._birth(running, rank) for rank in range(place.slots)]
            running.group = Group(self._children, self._spawner, births, lambda e: self._exited(running, e))
            await running.group.start()
        except StartError as error:
            self._could_not_start(running, str(error))
            return
        self._note_start(place, running.group.pids, why, began)
        self._watch_over(running, running.group)

    def _note_start(self, place: Place, pids: tuple[int, ...], why: str, began: float) -> None:
        now = self._loop.time()
        outage, self._outage = self._outage, None
        pause = now - outage.happened if outage else 0.0
        self._diary.record(
            WorkersStarted(
                place.round, place.first_rank, place.world_size, place.restarts, pids, now - began, pause, why
            )
        )
        if outage:
            self._diary.record(outage.over(place.round, began, now))

    def _watch_over(self, running: Running, group: Group) -> None:
        place = running.place
        subject = MonitoredWorkers(place, self._machine.node.host, group.pids, running.logs, running.recorder_sockets)

        def hung(failures: tuple[Failure, ...], seconds: float) -> None:
            now = self._loop.time()
            self._outage = self._outage or RecoveryClock(now - seconds, now)
            self._feed(WorkersFailed(place.round, failures))

        running.watch = HangMonitor(subject, self._config.hang_timeout, self._diary.record, hung, self._reports.audible)
        for local_rank in running.ended:  # sooner than we came to it
            running.watch.on_worker_ended(local_rank)

    async def _inspect(self, round: int) -> None:
        running, failures = self._running, tuple[Failure, ...]()
        if running is not None and running.place.round == round and running.watch is not None:
            try:
                failures = await running.watch.inspect()
            except Exception as defect:
                log.error("where the workers of round %d are cannot be found out: %r", round, defect)
        self._feed(WorkersInspected(round, failures))

    def _load_plugin(self) -> LogsSource:
        from ripstop.logs.plugin import LogsPlugin

        return LogsPlugin(self._config.logs, self._config.role, self._environ)

    def _environment(self, place: Place, local_rank: int, error_file: Path) -> dict[str, str]:
        return worker_environment(
            self._environ,
            place,
            local_rank,
            run_id=self._config.run_id,
            role=self._config.role,
            max_restarts=self._config.budget.max_restarts,
            error_file=error_file,
            signals=self._config.signals,
            virtual_local_rank=self._config.virtual_local_rank,
            timer_pipe=self._config.timer_pipe,
            socket=self._reports.path,
        )

    def _birth(self, running: Running, local_rank: int) -> ProcessSpec:
        logs = running.logs
        env = self._environment(running.place, local_rank, logs.error_file(local_rank))
        env |= logs.environment(local_rank)
        binding = self._config.bindings[local_rank] if self._config.bindings else None
        looked_at = self._config.hang_timeout or self._config.timer_pipe
        stacks = (DUMP_SIGNAL, logs.stack_file(local_rank)) if looked_at else None
        recorder = running.recorder_sockets[local_rank] if running.recorder_sockets else ""
        outputs = logs.stdout(local_rank), logs.stderr(local_rank)
        return ProcessSpec(env, self._config.entry, *outputs, binding, stacks, recorder)

    def _exited(self, running: Running, exit: Exit) -> None:
        round = running.place.round
        running.ended.add(exit.local_rank)
        if running.watch is not None:
            running.watch.on_worker_ended(exit.local_rank)
        if exit.exitcode == 0:
            running.left -= 1
            if not running.left:
                self._diary.record(WorkersSucceeded(round))
                self._feed(WorkersFinished(round))
            return
        if running.was_told_to_end(exit):
            return
        if self._outage is None:
            now = self._loop.time()
            self._outage = RecoveryClock(now - max(0.0, time.time() - exit.at), now)
        failure = gather(
            running.place,
            exit.local_rank,
            host=self._machine.node.host,
            at=exit.at,
            pid=exit.pid,
            returncode=exit.returncode,
            logs=running.logs.directory(exit.local_rank),
            error_file=running.logs.error_file(exit.local_rank),
            stderr=running.logs.stderr(exit.local_rank),
            before=running.memory,
            timer_kill=running.condemned.get(exit.local_rank),
        )
        self._diary.record(
            WorkerFailed(round, failure.rank, exit.pid, failure.message.split("\n")[0]), level=logging.WARNING
        )
        self._feed(WorkersFailed(round, (failure,)))

    def _could_not_start(self, running: Running, why: str) -> None:
        round, rank = running.place.round, running.place.first_rank
        self._diary.record(WorkerFailed(round, rank, 0, f"could not be started: {why}"), level=logging.ERROR)
        failure = not_started(
            running.place,
            0,
            host=self._machine.node.host,
            at=time.time(),
            why=why,
            logs=running.logs.directory(0),
        )
        self._feed(WorkersFailed(running.place.round, (failure,)))

    def _watch_timers(self, pipe: Path) -> "Watchdog":
        from ripstop.diagnostics.timer_pipe import Watchdog

        return Watchdog(pipe, self._timers_missed)

    def _timers_missed(self, pid: int, why: str, signum: int) -> None:
        """A process of the workers' did not leave in time what it had set a timer for."""
        running = self._running
        if running is None or running.group is None or running.sent or (rank := running.group.rank_of(pid)) is None:
            return  # it is not, or no more, one that is to run
        missed = TimersMissed(running.place.round, running.place.first_rank + rank, pid, why)
        self._diary.record(missed, level=logging.WARNING)
        if signum:
            self._task(self._condemn(running, running.group, rank, pid, why, signum))

    async def _condemn(self, running: Running, group: Group, rank: int, pid: int, why: str, signum: int) -> None:
        """The signal, and before it the evidence: where the worker is."""
        if pid in group.pids:
            found = await dump_stack(pid, running.logs.stack_file(rank))
            running.condemned[rank] = TimerKill(why, found.stack)
        if not running.sent:
            group.send(pid, signum)

    async def _stop_workers(self, round: int, signum: int, grace: float) -> None:
        running = self._running
        assert running is not None and running.place.round == round, "only the round that runs is stopped"
        began = self._loop.time()
        running.sent |= {signum, signal.SIGKILL}
        if running.watch is not None and grace > 0:
            await running.watch.finish_inspection()
        if running.group is not None:
            await running.group.stop(grace, signum)
        if not running.stopped.done():
            running.stopped.set_result(None)
        if running.watch is not None:
            running.watch.close()
            running.watch = None
        if self._store is not None:
            await self._store.close()
            self._store = None
        if self._timers is not None:
            self._timers.new_round()
        for rank in range(running.place.slots):
            self._task(self._console.finish(running.logs.files(rank)))
        now = self._loop.time()
        if self._outage is not None:
            self._outage.stopped = now
        self._diary.record(events.WorkersStopped(round, now - began))
        self._feed(WorkersGone(round))

    # the end ----------------------------------------------------------------------------------------------------------

    async def _take_leave(self, end: ExitAgent) -> None:
        """Say good-bye, once those who follow the logs have had the end of them: after it, nothing can be asked."""
        if self._readers is not None:
            parting = self._loop.create_task(self._readers.part(PARTING if end.report is not None else BRIEF))
            self._let_signals_cancel(parting)
            await asyncio.wait([parting])
        if self._farewell is not None:
            self._link.send(self._farewell)

    async def _clean_up(self) -> None:
        """Leave nothing behind, however it ended."""
        if self._timer is not None:
            self._timer.cancel()
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.wait([self._checking])
        if self._running is not None and self._running.group is not None:
            self._running.sent.add(signal.SIGKILL)
            with suppress(StartError):  # said already
                await self._running.group.stop(0.0)
        if self._running is not None and self._running.watch is not None:
            self._running.watch.close()
        self._reports.close()
        for port in (self._store, self._offered):
            if port is not None:
                await port.close()
        if self._timers is not None:
            self._timers.close()
        await self._link.close()
        await self._drain()
        for task in self._tasks:
            task.cancel()
        self._console.close()
        if self._plugin is not None:
            self._plugin.close()
        self._spawner.close()
        self._children.close()
        for signum in self._signals:  # at last: a second Ctrl-C must not break this off
            self._loop.remove_signal_handler(signum)

    async def _drain(self) -> None:
        """Wait until the console has everything, but not for ever, nor against a signal: the files have it too."""
        drained = self._loop.create_task(self._console.drain())
        self._let_signals_cancel(drained)
        leaving = not self._end.cancelled() and not self._end.exception() and self._end.result().code >= 128
        await asyncio.wait([drained], timeout=HASTY if leaving else DRAIN)
        if not drained.done() or drained.cancelled():
            log.warning("the console is not being read; what it did not show is below %s", self._directory.path)
        drained.cancel()

    def _let_signals_cancel(self, task: asyncio.Task[None]) -> None:
        for signum in self._signals:
            self._loop.add_signal_handler(signum, task.cancel)
