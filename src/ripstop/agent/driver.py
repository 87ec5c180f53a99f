"""Executes the commands of the agent's machine, and turns everything that happens into inputs for it.

The machine (`machine.py`) decides; `round_runner.py` owns the workers.  The driver owns the event loop's side of the
agent: the link to the coordinator, the machine's timer, signals, health checks, queries, and the end.  Everything runs
in one event loop.  Work that takes time is a task.  An input that arrives while commands are executed waits in a queue.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

import ripstop
from ripstop.agent import machine_status
from ripstop.agent.activity import Activity, ActivityKind, node_activity
from ripstop.agent.activity_reporter import ActivityReporter
from ripstop.agent.event_recorder import EventRecorder
from ripstop.agent.health.assessment import assess_health
from ripstop.agent.health.measurements import HealthProbe
from ripstop.agent.machine import Agent
from ripstop.agent.machine_io import (
    AgentCommand,
    AgentInput,
    CoordinatorConnected,
    CoordinatorLost,
    CoordinatorMessage,
    ExitAgent,
    HealthChecked,
    InspectWorkers,
    LogLine,
    MakeFinalCommit,
    OpenStorePort,
    PreemptionNoticed,
    ReformWorkers,
    ReplaceWorkers,
    SendToCoordinator,
    SignalReceived,
    StartWorkers,
    StopWorkers,
    Tick,
    WarmupDone,
)
from ripstop.agent.machine_state import AgentSettings
from ripstop.agent.query_handler import QueryHandler
from ripstop.agent.round_runner import RoundRunner
from ripstop.coordinator.job_end import FINAL_REPORT_TIMEOUT_S
from ripstop.logs.console import Console
from ripstop.logs.directory import LogDirectory, LogDirectorySource
from ripstop.model.config import RunConfig
from ripstop.model.events import AgentEnded, AgentMessage, AgentStarted, Sink, WarmedUp
from ripstop.model.fault_injection import INJECT_QUERY, Injection
from ripstop.model.job_memory import Memory
from ripstop.model.round import Node
from ripstop.model.text_formatting import format_ascii_json
from ripstop.protocol.messages import FromCoordinator, Left, Query, Rejected, Remember, Replicate, Reply
from ripstop.telemetry.run_settings import changed_run_settings, program_setting_text, torch_version_setting
from ripstop.transport.link import Link
from ripstop.workers.spawner import WorkerSpawner

if TYPE_CHECKING:
    from ripstop.agent.fault_injector import FaultInjector

log = logging.getLogger("ripstop.agent")

LOG_FOLLOWERS_TIMEOUT_S = FINAL_REPORT_TIMEOUT_S - 1.0  # at the job's end; the coordinator waits longer
LOG_FOLLOWERS_TIMEOUT_WHEN_LEAVING_S = 1.0  # while the job continues without this node
CONSOLE_TIMEOUT_S = 30.0  # for the last lines
CONSOLE_TIMEOUT_AFTER_SIGNAL_S = 3.0


class AgentDriver:
    """Runs one agent; `run` returns when the agent has ended."""

    def __init__(
        self,
        config: RunConfig,
        node: Node,
        spawner: WorkerSpawner,
        link: Link,
        directory: LogDirectory,
        environ: Mapping[str, str],
        logs_source: LogDirectorySource | None = None,
        sinks: Iterable[Sink] = (),
        console: Console | None = None,
        describe_wait: Callable[[], str] = str,
    ) -> None:
        """`describe_wait` says what the job waits for, if its coordinator is in this process."""
        self._config = config
        self._spawner = spawner
        self._link = link
        self._directory = directory
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[ExitAgent] = self._loop.create_future()
        self._inputs: deque[AgentInput] = deque()
        self._is_executing = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        settings = AgentSettings(
            node,
            config.min_nodes,
            config.max_nodes,
            config.timing,
            config.rank_by,
            health_interval=config.health.interval,
            store_port=config.store_port,
            drain_timeout=config.drain_timeout,
            has_checkpoints=config.checkpoints is not None,
        )
        self._machine = Agent(settings, self._loop.time())
        self._console = console or Console()
        self._recorder = EventRecorder(node.id, link.send, sinks)
        self._runner = RoundRunner(
            config,
            spawner,
            directory,
            environ,
            node=node.id,
            recorder=self._recorder,
            send_replicated=link.send,
            report=self._feed,
            run_task=self._run_task,
            console=self._console,
            logs_source=logs_source,
        )
        self._describe_wait = describe_wait
        self._activity_reporter = ActivityReporter(self._activity, self._console.live)
        self._queries = QueryHandler(self._runner.workers, find_standbys=self._runner.standbys)
        self._faults = self._open_fault_injector() if config.allow_chaos else None
        self._health_probe = HealthProbe(config.health, str(directory.path), environ)
        self._health_checks: asyncio.Task[None] | None = None
        self._signals = _agent_driver_signals(config.signals)
        self._memory: tuple[Memory, float] | None = None  # of the coordinator, for the next one; when it came
        self._last_message: Left | None = None  # sent when the log followers are done

    def _open_fault_injector(self) -> "FaultInjector":
        from ripstop.agent.fault_injector import FaultInjector  # only with --allow-chaos

        return FaultInjector(
            find_workers=self._runner.workers,
            signal_worker=self._runner.signal_worker,
            link=self._link,
            recorder=self._recorder,
            directory=self._directory.path,
            run_task=self._run_task,
        )

    async def run(self) -> ExitAgent:
        """Take part in the job until this node's part is over."""
        for signum in self._signals:
            self._loop.add_signal_handler(signum, self._feed, SignalReceived(signum))
        self._link.open(self)
        self._run_task(self._warm_up())
        if self._config.preemption_notice:
            self._run_task(self._wait_for_notice(self._config.preemption_notice))
        self._recorder.record(_agent_started(self._config))
        self._set_timer()
        self._activity_reporter.update()
        try:
            end = await self._end
            await self._leave(end)
            self._recorder.record(AgentEnded(end.code, end.why))
            return end
        finally:
            await self._clean_up()

    def reason_not_ready(self) -> str:
        """Why this agent cannot work for its job now; "" if it can."""
        return machine_status.status_of_unready_machine(self._machine)

    def _activity(self) -> tuple[Activity, bool]:
        """What this node does, and whether a live line can show it.  Only the node of rank 0 logs its steps."""
        activity = node_activity(self._machine)
        is_shown = self._console.live is not None and not self._runner.workers_have_terminal
        match activity.kind:
            case ActivityKind.CONNECTING:
                activity = replace(activity, detail=self._link.disconnect_reason or activity.detail)
            case ActivityKind.WAITING if text := self._describe_wait():
                activity = Activity(ActivityKind.GATHERING, text)
            case ActivityKind.TRAINING if is_shown or (self._machine.place and self._machine.place.group_rank == 0):
                activity = replace(activity, detail=self._runner.progress_text())
            case ActivityKind.STOPPING:
                activity = replace(activity, detail=self._runner.still_running_text())
        return activity, is_shown

    # inputs -----------------------------------------------------------------------------------------------------------

    def on_connected(self) -> None:
        if self._memory is not None:
            memory, received_at = self._memory
            self._link.send(Remember(memory, self._loop.time() - received_at))
        self._recorder.hold()
        self._feed(CoordinatorConnected(self._link.local_host or "127.0.0.1"))
        self._recorder.send_again()
        self._runner.replication.send_again()
        if self._faults is not None:
            self._faults.on_connected()
        if self._health_checks is None and not self._end.done():  # a check needs the coordinator's clock
            self._health_checks = self._run_task(self._check_health())

    def on_message(self, message: FromCoordinator) -> None:
        if isinstance(message, Query):
            self._run_task(self._answer(message))
        elif isinstance(message, Remember):
            self._memory = message.memory, self._loop.time()
        elif isinstance(message, Replicate):
            self._runner.replication.on_request(message)
        else:
            self._feed(CoordinatorMessage(message))

    def on_disconnected(self, why: str) -> None:
        self._feed(CoordinatorLost(why))

    def on_rejected(self, why: str) -> None:
        self._feed(CoordinatorMessage(Rejected(why)))

    async def _answer(self, query: Query) -> None:
        if query.name != INJECT_QUERY:
            self._link.send(await self._queries.answer(query))
        elif self._faults is not None:
            self._link.send(self._faults.answer(query))
        else:
            self._link.send(Reply(query.number, format_ascii_json(Injection(refused=True))))

    async def _warm_up(self) -> None:
        ready = await self._spawner.wait_ready()
        packages = tuple(dict.fromkeys(name.partition(".")[0] for name in ready.preloaded))
        left_out = tuple(f"{name}: {why}" for name, why in ready.left_out.items())
        self._recorder.record(WarmedUp(ready.start.value, packages, ready.seconds, ready.fallback_reason, left_out))
        self._feed(WarmupDone())

    async def _wait_for_notice(self, source: str) -> None:
        from ripstop.agent.preemption_notice import wait_for_notice  # http.client: only if it is needed

        await wait_for_notice(source, lambda source: self._feed(PreemptionNoticed(source)))

    async def _check_health(self) -> None:
        """Check this node's health periodically.  A check that raises does not end training."""
        limits, has_failed = self._config.health, False
        while True:
            try:
                facts = await self._health_probe.read(self._link.skew)
            except Exception as defect:
                if not has_failed:
                    log.warning("the health check failed and will be retried (logged once): %r", defect)
                has_failed = True
            else:
                is_joining = not self._machine.passed_health_check
                self._feed(HealthChecked(assess_health(facts, limits, joining=is_joining)))
            await asyncio.sleep(limits.interval)

    def _on_timer(self) -> None:
        self._timer = None
        if error := self._link.disconnect_reason:
            self._feed(CoordinatorLost(error))  # a first connection that fails is not lost, but the machine logs why
        self._feed(Tick())

    def _feed(self, event: AgentInput) -> None:
        self._inputs.append(event)
        if self._is_executing or self._end.done():
            return
        self._is_executing = True
        try:
            while self._inputs:
                for command in self._machine.on(self._inputs.popleft(), self._loop.time()):
                    self._execute(command)
        except Exception as error:
            self.fail(error)
        finally:
            self._is_executing = False
        self._set_timer()
        self._activity_reporter.update()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        when = self._machine.deadline()
        if when is not None and not self._end.done():
            self._timer = self._loop.call_at(when, self._on_timer)

    # commands ---------------------------------------------------------------------------------------------------------

    def _execute(self, command: AgentCommand) -> None:
        host = self._machine.node.host
        match command:
            case SendToCoordinator(Left() as message):
                self._last_message = message
            case SendToCoordinator(message):
                self._link.send(message)
            case OpenStorePort(port, is_required):
                self._runner.open_store_port(host, port, is_required=is_required)
            case StartWorkers(place, why):
                self._runner.start(place, why, host)
            case StopWorkers(round, signum, grace, why):
                self._runner.stop(round, signum, grace, why)
            case ReformWorkers(place, why, kept, grace):
                self._runner.reform(place, why, kept, grace, host)
            case ReplaceWorkers(round, local_ranks):
                self._runner.replace(round, local_ranks)
            case MakeFinalCommit(round):
                self._runner.make_final_commit(round)
            case InspectWorkers(round):
                self._run_task(self._runner.inspect(round))
            case LogLine(text, is_warning):
                self._recorder.record(AgentMessage(text), logging.WARNING if is_warning else logging.INFO)
            case ExitAgent():
                if not self._end.done():
                    self._end.set_result(command)

    def _run_task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.fail(error)

    def fail(self, error: BaseException | None) -> None:
        """End the agent with an error of a part that must not fail."""
        if error is not None and not self._end.done():
            self._end.set_exception(error)

    # the end ----------------------------------------------------------------------------------------------------------

    async def _leave(self, end: ExitAgent) -> None:
        """Send the last message after the log followers are done: the coordinator sends no query after it."""
        timeout = LOG_FOLLOWERS_TIMEOUT_S if end.report is not None else LOG_FOLLOWERS_TIMEOUT_WHEN_LEAVING_S
        await self._wait_unless_signalled(self._queries.log_followers.wait(timeout))
        if self._last_message is not None:
            self._link.send(self._last_message)

    async def _clean_up(self) -> None:
        """Leave no process, socket or file behind, however the agent ended."""
        self._activity_reporter.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._health_checks is not None:
            self._health_checks.cancel()
            await asyncio.wait([self._health_checks])
        await self._runner.stop_all()
        await self._link.close()
        await self._drain_console()
        for task in self._tasks:
            task.cancel()
        self._console.close()
        self._runner.close()
        for signum in self._signals:  # last: a second Ctrl-C must not interrupt the clean-up
            self._loop.remove_signal_handler(signum)

    async def _drain_console(self) -> None:
        """Wait until the console has all output, but neither forever nor after another signal: the files have it."""
        is_signalled = not self._end.cancelled() and not self._end.exception() and self._end.result().code >= 128
        timeout = CONSOLE_TIMEOUT_AFTER_SIGNAL_S if is_signalled else CONSOLE_TIMEOUT_S
        if not await self._wait_unless_signalled(self._console.drain(), timeout):
            log.warning("the console is not being read; the complete output is below %s", self._directory.path)

    async def _wait_unless_signalled(self, work: Coroutine[None, None, None], timeout: float | None = None) -> bool:
        """Whether the work was done before the timeout and before a signal."""
        task = self._loop.create_task(work)
        for signum in self._signals:
            self._loop.add_signal_handler(signum, task.cancel)
        await asyncio.wait([task], timeout=timeout)
        is_done = task.done() and not task.cancelled()
        task.cancel()
        return is_done


def _agent_started(config: RunConfig) -> AgentStarted:
    return AgentStarted(
        config.run_id,
        ripstop.__version__,
        sys.version.split()[0],
        torch_version_setting(),
        os.uname().release,
        os.uname().nodename,
        program_setting_text(config.entry),
        changed_run_settings(config),
    )


def _agent_driver_signals(names: Iterable[str]) -> list[signal.Signals]:
    """None outside the main thread, where Python delivers signals; no SIGHUP under nohup, which ignores it."""
    if threading.current_thread() is not threading.main_thread():
        return []
    signums = [signal.Signals[name] for name in names]
    return [s for s in signums if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]
