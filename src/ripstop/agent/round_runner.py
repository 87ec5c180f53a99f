"""Starts, watches and stops the workers of one round at a time, with their logs and the round's store.

The runner executes the machine's commands and reports what happens as inputs of the machine (`machine_io.py`).
`worker_exits.py` decides which exits are failures and which timers kill a worker.  Work that takes time is a task of
the driver.
"""

import asyncio
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from ripstop.agent.activity import progress_text
from ripstop.agent.event_recorder import EventRecorder
from ripstop.agent.machine_io import (
    AgentInput,
    FirstCommit,
    LastCommitDone,
    StorePortReady,
    WorkersFailed,
    WorkersInspected,
    WorkersStopped,
    WorkersSucceeded,
)
from ripstop.agent.query_handler import Workers
from ripstop.agent.recovery_clock import RecoveryClock
from ripstop.agent.worker_exits import ExitKind, TimerAction, WorkerExits
from ripstop.diagnostics.evidence import Memory, TimerKill, gather, not_started, read_memory
from ripstop.diagnostics.evidence_events import MAX_RECORDED, to_event
from ripstop.diagnostics.hang_monitor import HangMonitor, MonitoredWorkers
from ripstop.diagnostics.stack_dump import DUMP_SIGNAL, dump_stack
from ripstop.logs.console import Console
from ripstop.logs.directory import LogDirectory, LogsSource, RoundLogs
from ripstop.model import events
from ripstop.model.config import RunConfig, Script, StragglerMode
from ripstop.model.errors import StartError
from ripstop.model.failure import Failure
from ripstop.model.fault_injection import EXIT_SIGNAL
from ripstop.model.round import Place
from ripstop.model.text_formatting import rank_list
from ripstop.model.usage import StandbySample
from ripstop.protocol.messages import LastCommit, Replicated
from ripstop.protocol.secret import state_key
from ripstop.replication.supervisor import Supervisor
from ripstop.workers.environment import local_environment, worker_environment
from ripstop.workers.group import Exit, Group
from ripstop.workers.reports import Reports, WorkerReport
from ripstop.workers.saver import Saver
from ripstop.workers.spawner import ProcessSpec, Spawner, Starter
from ripstop.workers.state_memory import StateMemory, WorkerIdentity
from ripstop.workers.store import StorePort

if TYPE_CHECKING:
    from ripstop.diagnostics.timer_pipe import Watchdog
    from ripstop.workers.standby import Standbys

log = logging.getLogger("ripstop.agent")

STORE_PORT_RETRY_S = 1.0


class Round(Struct):
    """The workers of one round; `group` is set when they start, `monitor` when all have started."""

    place: Place
    host: str
    logs: RoundLogs
    memory: Memory  # at the start
    exits: WorkerExits
    group: Group | None = None
    monitor: HangMonitor | None = None
    recorder_sockets: tuple[str, ...] = ()  # by local rank
    recorded_evidence: int = 0  # events
    timer_kills: dict[int, TimerKill] = field(default_factory=dict)  # workers that the agent killed, by local rank
    stopped: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class RoundRunner:
    """`report` takes inputs for the machine; `run_task` runs work that takes time."""

    def __init__(
        self,
        config: RunConfig,
        spawner: Starter,
        directory: LogDirectory,
        environ: Mapping[str, str],
        *,
        node: str,
        recorder: EventRecorder,
        send_replicated: Callable[[Replicated], None],
        report: Callable[[AgentInput], None],
        run_task: Callable[[Coroutine[None, None, None]], Any],
        console: Console,
        logs_source: LogsSource | None,
    ) -> None:
        self._config = config
        self._secret = config.token or (secrets.token_hex(32) if config.max_nodes == 1 else "")  # for the workers' key
        self._directory = directory
        self._environ = environ
        self._recorder = recorder
        self._report = report
        self._run_task = run_task
        self._console = console
        self._loop = asyncio.get_running_loop()
        self._timers = self._open_timer_pipe(config.timer_pipe) if config.timer_pipe else None
        self._children = spawner.children.open()
        self._standbys = self._open_standbys(spawner) if isinstance(spawner, Spawner) else None
        self._spawner = self._standbys or spawner
        self._logs_source = logs_source
        if config.logs.specs:
            from ripstop.logs.plugin import LogsPlugin

            self._logs_source = LogsPlugin(config.logs, config.role, environ, self._children)
        self._reports = Reports(environ, self._on_worker_report)
        self._saver = None
        if config.checkpoints is not None:
            self._saver = Saver(config.checkpoints, config.run_id, spawner, environ, self._children, run_task)
        self._state_memory = StateMemory(self._reports.path, self._identify_worker, self._saver)
        self._state_memory.on_first_commit = lambda round: report(FirstCommit(round))
        self._state_memory.on_last_commits = self._on_last_commits
        self.replication = Supervisor(config, node, self._state_memory, self._children, send_replicated)
        self._round: Round | None = None  # the one that runs, or ran last
        self._offered_port: StorePort | None = None
        self._port_retry: asyncio.TimerHandle | None = None
        self._store: StorePort | None = None
        self._recovery: RecoveryClock | None = None  # of the workers that the next ones replace

    def _open_standbys(self, spawner: Spawner) -> "Standbys | None":
        config = self._config
        if not config.standby.count:
            return None
        from ripstop.workers.standby import Place as StandbyPlace
        from ripstop.workers.standby import Standbys

        places = [
            StandbyPlace(
                local_environment(self._environ, config.slots, rank, virtual_local_rank=config.virtual_local_rank),
                config.bindings[rank] if config.bindings else None,
            )
            for rank in range(config.standby.count)
        ]
        script = Path(config.entry.path) if isinstance(config.entry, Script) else None
        return Standbys(spawner, config.standby, places, self._recorder.record, script)

    def standbys(self) -> tuple[StandbySample, ...]:
        return self._standbys.samples() if self._standbys is not None else ()

    def workers(self) -> Workers | None:
        """The workers that run, or ran last, for queries."""
        round = self._round
        if round is None or round.group is None or (round.monitor is None and not round.stopped.done()):
            return None
        progress = round.monitor.worker_progress() if round.monitor is not None else {}
        exited = frozenset(round.exits.exited)
        return Workers(
            round.place, round.group.pids, round.logs, progress, exited, round.recorder_sockets, round.stopped
        )

    @property
    def workers_have_terminal(self) -> bool:
        """Whether workers exist, or are about to start, that may write to the agent's own stdout or stderr."""
        round = self._round
        return round is not None and not round.stopped.done() and round.logs.is_inherited()

    def progress_text(self) -> str:
        """The steps of the workers that run; empty if they report none."""
        round = self._round
        return progress_text(round.monitor.worker_progress()) if round is not None and round.monitor else ""

    def still_running_text(self) -> str:
        """Which workers have not stopped yet."""
        round = self._round
        if round is None:
            return ""
        ranks = [round.place.first_rank + r for r in range(round.place.slots) if r not in round.exits.exited]
        if not ranks:
            return "the workers have exited, their child processes have not"
        return f"{rank_list(ranks)} still {'run' if ranks[1:] else 'runs'}"

    def signal_worker(self, pid: int, signum: int) -> None:
        """Signal a process, if it belongs to a live worker."""
        if self._round is not None and self._round.group is not None:
            self._round.group.send(pid, signum)

    async def stop_all(self) -> None:
        """Kill the workers and close every socket and pipe, however the agent ends."""
        if self._standbys is not None:
            await self._standbys.stop()
        if self._round is not None and self._round.group is not None:
            self._round.exits.on_stop(signal.SIGKILL)
            with suppress(StartError):  # reported before
                await self._round.group.stop(0.0)
        if self._round is not None and self._round.monitor is not None:
            self._round.monitor.close()
        await self.replication.close()
        if self._saver is not None:
            await self._saver.close(self._config.timing.shutdown)
        self._state_memory.close()
        self._reports.close()
        if self._port_retry is not None:
            self._port_retry.cancel()
        for port in (self._store, self._offered_port):
            if port is not None:
                await port.close()
        if self._timers is not None:
            self._timers.close()

    def close(self) -> None:
        if self._logs_source is not None:
            self._logs_source.close()
        self._spawner.close()
        self._children.close()

    # the store port ---------------------------------------------------------------------------------------------------

    def open_store_port(self, host: str, port: int, *, is_required: bool) -> None:
        """Listen for the store of a later round; StartError if that fails and the port is required."""
        if self._offered_port is not None:
            self._run_task(self._offered_port.close())
            self._offered_port = None
        try:
            self._offered_port = StorePort(host, port)
        except StartError as error:
            if is_required:
                raise
            log.warning("no port for the next round's store, retrying: %s", error)
            retry = partial(self.open_store_port, host, port, is_required=False)
            self._port_retry = self._loop.call_later(STORE_PORT_RETRY_S, retry)
            return
        self._report(StorePortReady(self._offered_port.port, self.replication.port(host)))

    # start ------------------------------------------------------------------------------------------------------------

    def start(self, place: Place, why: str, host: str) -> None:
        if place.group_rank == 0:
            self._store, self._offered_port = self._offered_port, None
        self._run_task(self._start(place, why, host))

    async def _start(self, place: Place, why: str, host: str) -> None:
        began = self._loop.time()
        logs = RoundLogs(self._directory.path, self._config.logs, place, self._config.role, terminal=os.isatty(2))
        round = self._round = Round(place, host, logs, read_memory(), WorkerExits(place.slots))
        try:
            if self._logs_source is not None:
                envs = {rank: self._environment(place, rank, logs.error_file(rank)) for rank in range(place.slots)}
                round.logs = await self._logs_source.round_logs(self._directory.path, place, envs)
            if self._console.live is not None and round.logs.is_inherited():
                await self._console.live.hide()
            if round.exits.is_stopping:
                return
            round.logs.prepare()
            round.logs.follow(self._console)
            if place.group_rank == 0:
                self._store = self._store or StorePort(place.store.host, place.store.port)
                self._store.serve(self._spawner, self._environ, self._children)
            if self._config.hang_timeout:
                round.recorder_sockets = self._reports.renew_recorder_sockets(place.round, place.slots)
            self._state_memory.listen()
            self.replication.start_round(place)
            specs = [self._process_spec(round, rank) for rank in range(place.slots)]
            round.group = Group(self._children, self._spawner, specs, lambda exit: self._on_exit(round, exit))
            await round.group.start()
        except StartError as error:
            self._on_start_failed(round, str(error))
            return
        self._record_start(place, round.group.pids, why, began)
        round.monitor = self._monitor(round, round.group)
        if self._standbys is not None:
            self._standbys.on_round_started()

    def _environment(self, place: Place, local_rank: int, error_file: Path) -> dict[str, str]:
        return worker_environment(
            self._environ,
            place,
            local_rank,
            run_id=self._config.run_id,
            role=self._config.role,
            max_restarts=self._config.budget.max_restarts,
            error_file=error_file,
            earlier_restarts=self._config.earlier_restarts,
            signals=self._config.signals,
            virtual_local_rank=self._config.virtual_local_rank,
            timer_pipe=self._config.timer_pipe,
            socket=self._reports.path,
            finds_stragglers=self._config.stragglers.mode is not StragglerMode.OFF,
        )

    def _process_spec(self, round: Round, local_rank: int) -> ProcessSpec:
        logs = round.logs
        env = self._environment(round.place, local_rank, logs.error_file(local_rank))
        env |= logs.environment(local_rank)
        binding = self._config.bindings[local_rank] if self._config.bindings else None
        needs_stacks = self._config.hang_timeout or self._config.timer_pipe
        stacks = (DUMP_SIGNAL, logs.stack_file(local_rank)) if needs_stacks else None
        recorder = round.recorder_sockets[local_rank] if round.recorder_sockets else ""
        outputs = logs.stdout(local_rank), logs.stderr(local_rank)
        exit_signal = EXIT_SIGNAL if self._config.allow_chaos else 0
        return ProcessSpec(env, self._config.entry, *outputs, binding, stacks, recorder, local_rank, exit_signal)

    def _record_start(self, place: Place, pids: tuple[int, ...], why: str, began: float) -> None:
        now = self._loop.time()
        recovery, self._recovery = self._recovery, None
        pause = now - recovery.failed_at if recovery else 0.0
        self._recorder.record(
            events.WorkersStarted(
                place.round,
                place.first_rank,
                place.world_size,
                place.restarts,
                pids,
                now - began,
                pause,
                why,
                len(self._standbys.taken) if self._standbys else 0,
            )
        )
        if recovery:
            self._recorder.record(recovery.finish(place.round, began, now))

    def _on_start_failed(self, round: Round, why: str) -> None:
        place = round.place
        failed = events.WorkerFailed(place.round, place.first_rank, 0, f"could not be started: {why}")
        self._recorder.record(failed, level=logging.ERROR)
        failure = not_started(place, 0, host=round.host, at=time.time(), why=why, logs=round.logs.directory(0))
        self._recorder.record(to_event(failure))
        self._report(WorkersFailed(place.round, (failure,)))

    # watch ------------------------------------------------------------------------------------------------------------

    def _monitor(self, round: Round, group: Group) -> HangMonitor:
        subject = MonitoredWorkers(round.place, round.host, group.pids, round.logs, round.recorder_sockets)

        def on_hang(failures: tuple[Failure, ...], seconds: float) -> None:
            self._start_recovery_clock(seconds)
            self._report(WorkersFailed(round.place.round, failures))

        monitor = HangMonitor(
            subject, self._config.hang_timeout, self._recorder.record, on_hang, self._reports.ensure_socket
        )
        for local_rank in round.exits.exited:  # workers that exited while the others started
            monitor.on_worker_ended(local_rank)
        return monitor

    def _on_worker_report(self, pid: int, report: WorkerReport) -> None:
        round = self._round
        if round is not None and round.group is not None and round.monitor is not None:
            rank = round.group.rank_of(pid)
            if rank is not None:
                round.monitor.on_report(rank, report)
                if self._standbys is not None:
                    self._standbys.on_first_step()

    def _identify_worker(self, pid: int) -> WorkerIdentity | None:
        round = self._round
        rank = round.group.rank_of(pid) if round is not None and round.group is not None else None
        if round is None or rank is None:
            return None
        place = round.place
        local_ranks = range(place.first_rank, place.first_rank + place.slots)
        key = state_key(self._secret, self._config.run_id, place.round)
        return WorkerIdentity(place.round, local_ranks[rank], place.world_size, local_ranks, key)

    def _on_exit(self, round: Round, exit: Exit) -> None:
        number, rank = round.place.round, exit.local_rank
        error_file = round.logs.error_file(rank)
        wrote_error_file = exit.exitcode != 0 and error_file.exists()
        kind = round.exits.on_exit(rank, exit.exitcode, exit.signal, wrote_error_file=wrote_error_file)
        if round.monitor is not None:
            round.monitor.on_worker_ended(rank)
        if kind is ExitKind.ALL_SUCCEEDED:
            self._recorder.record(events.WorkersSucceeded(number))
            self._report(WorkersSucceeded(number))
        if kind is not ExitKind.FAILED:
            return
        self._start_recovery_clock(max(0.0, time.time() - exit.at))
        failure = gather(
            round.place,
            rank,
            host=round.host,
            at=exit.at,
            pid=exit.pid,
            returncode=exit.returncode,
            logs=round.logs.directory(rank),
            error_file=error_file,
            stderr=round.logs.stderr(rank),
            before=round.memory,
            timer_kill=round.timer_kills.get(rank),
        )
        # The coordinator receives a failure twice, and neither message can replace the other.  The event is history: it
        # is numbered, kept in files and sent again after a reconnect, so it must not restart a round.  `Failed` has the
        # evidence and restarts the round; the machine does not send it for workers that are being stopped.
        what = failure.message.split("\n")[0]
        self._recorder.record(events.WorkerFailed(number, failure.rank, exit.pid, what), level=logging.WARNING)
        if round.recorded_evidence < MAX_RECORDED:
            round.recorded_evidence += 1
            self._recorder.record(to_event(failure))
        self._report(WorkersFailed(number, (failure,)))

    def _start_recovery_clock(self, seconds_ago: float = 0.0) -> RecoveryClock:
        """The clock of the current recovery; a new one starts at a failure `seconds_ago`."""
        if self._recovery is None:
            now = self._loop.time()
            self._recovery = RecoveryClock(now - seconds_ago, now)
        return self._recovery

    async def inspect(self, number: int) -> None:
        """Report the stacks of the workers of this round; none if they do not run or cannot be inspected."""
        round, failures = self._round, tuple[Failure, ...]()
        if round is not None and round.place.round == number and round.monitor is not None:
            try:
                failures = await round.monitor.inspect()
            except Exception as defect:
                log.error("cannot inspect the workers of round %d: %r", number, defect)
        self._report(WorkersInspected(number, failures))

    # timers that workers set for themselves ---------------------------------------------------------------------------

    def _open_timer_pipe(self, path: Path) -> "Watchdog":
        from ripstop.diagnostics.timer_pipe import Watchdog

        return Watchdog(path, self._on_timers_expired)

    def _on_timers_expired(self, pid: int, why: str, signum: int) -> None:
        round = self._round
        if round is None or round.group is None:
            return
        rank = round.group.rank_of(pid)
        action = round.exits.on_timer_expired(rank, signum)
        if rank is None or action is TimerAction.IGNORE:
            return
        missed = events.TimersMissed(round.place.round, round.place.first_rank + rank, pid, why)
        self._recorder.record(missed, level=logging.WARNING)
        if action is TimerAction.KILL:
            self._run_task(self._kill_for_timer(round, round.group, rank, pid, why, signum))

    async def _kill_for_timer(self, round: Round, group: Group, rank: int, pid: int, why: str, signum: int) -> None:
        """Save the worker's stack as evidence, then send the signal, unless the workers are stopped meanwhile."""
        if pid in group.pids:
            found = await dump_stack(pid, round.logs.stack_file(rank))
            round.timer_kills[rank] = TimerKill(why, found.stack)
        if not round.exits.is_stopping:
            group.send(pid, signum)

    # the last commit of a round ---------------------------------------------------------------------------------------

    def make_last_commit(self, number: int) -> None:
        slots = self._round.place.slots if self._round is not None else 0
        if why_not := self._state_memory.end_after_commit(slots):
            self._report(LastCommitDone(number, why_not=why_not))

    def _on_last_commits(self, round: int, state: str, number: int, is_replicated: bool) -> None:
        self._report(LastCommitDone(round, (LastCommit(state, number, needs_copies=not is_replicated),)))

    # stop -------------------------------------------------------------------------------------------------------------

    def stop(self, number: int, signum: int, grace: float, why: str) -> None:
        self._recorder.record(events.WorkersStopping(number, why))
        if self._standbys is not None:
            self._standbys.on_round_stopping()
        recovery = self._start_recovery_clock()
        recovery.decided_at = recovery.decided_at or self._loop.time()
        self._run_task(self._stop(number, signum, grace))

    async def _stop(self, number: int, signum: int, grace: float) -> None:
        round = self._round
        assert round is not None and round.place.round == number, "only the running round is stopped"
        began = self._loop.time()
        round.exits.on_stop(signum)
        if round.monitor is not None and grace > 0:
            await round.monitor.finish_inspection()
        if round.group is not None:
            self._loop.call_soon(self._state_memory.release)  # after the signal, which `stop` sends before it waits
            await round.group.stop(grace, signum)
        if not round.stopped.done():
            round.stopped.set_result(None)
        if round.monitor is not None:
            round.monitor.close()
            round.monitor = None
        if self._store is not None:
            await self._store.close()
            self._store = None
        if self._timers is not None:
            self._timers.new_round()
        for rank in range(round.place.slots):
            self._run_task(self._console.finish(round.logs.files(rank)))
        now = self._loop.time()
        if self._recovery is not None:
            self._recovery.stopped_at = now
        self._recorder.record(events.WorkersStopped(number, now - began))
        self._report(WorkersStopped(number))
