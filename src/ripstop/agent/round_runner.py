"""Starts, watches and stops the workers of one round at a time, with their logs and the round's store.

The runner executes the machine's commands and reports what happens as inputs of the machine (`machine_io.py`).
`worker_exits.py` decides which exits are failures and which timers kill a worker.  Long work is a task of the driver.
"""

import asyncio
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ripstop.agent import machine_io
from ripstop.agent.event_recorder import EventRecorder
from ripstop.agent.query_handler import QueriedWorkers
from ripstop.agent.recovery_clock import RecoveryClock
from ripstop.agent.round_state import AgentRound
from ripstop.agent.store_ports import StorePorts
from ripstop.agent.worker_exits import ExitKind, WorkerExits
from ripstop.agent.worker_specs import WorkerSpecs, open_standbys_with_specs
from ripstop.diagnostics.evidence import memory_evidence
from ripstop.diagnostics.evidence_events import MAX_RECORDED, evidence_to_event
from ripstop.diagnostics.hang_monitor import HangMonitor, MonitoredWorkers
from ripstop.diagnostics.progress import worker_progress_text
from ripstop.logs.console import Console
from ripstop.logs.directory import KeptLogDirectories, LogDirectory, LogDirectorySource, RoundLogs
from ripstop.model import events
from ripstop.model.config import RunConfig
from ripstop.model.errors import StartError, UnkillableError
from ripstop.model.failure import Failure
from ripstop.model.round import Place
from ripstop.model.usage import StandbySample
from ripstop.protocol.messages import Replicated
from ripstop.protocol.secret import state_key_from_secret
from ripstop.replication.supervisor import Supervisor
from ripstop.workers.elastic_workers import ElasticWorkers
from ripstop.workers.environment import ROUND_VARIABLES
from ripstop.workers.group import Exit, Group
from ripstop.workers.report_socket import ReportSocket, RestoreReport, WorkerReport
from ripstop.workers.saver_process import SaverProcesses
from ripstop.workers.spawner import ProcessSpec, WorkerSpawner
from ripstop.workers.state_memory import StateMemory, WorkerIdentity
from ripstop.workers.store import RoundStore

if TYPE_CHECKING:
    from ripstop.agent.worker_timers import WorkerTimers

log = logging.getLogger("ripstop.agent")


class RoundRunner:
    """`report` takes inputs for the machine; `run_task` runs work that takes time."""

    def __init__(
        self,
        config: RunConfig,
        spawner: WorkerSpawner,
        directory: LogDirectory,
        environ: Mapping[str, str],
        *,
        node: str,
        recorder: EventRecorder,
        send_replicated: Callable[[Replicated], None],
        report: Callable[[machine_io.AgentInput], None],
        run_task: Callable[[Coroutine[None, None, None]], Any],
        console: Console,
        logs_source: LogDirectorySource | None,
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
        self._timers = self._open_timers(config.timer_pipe) if config.timer_pipe else None
        self._children = spawner.children.open()
        self._standbys = open_standbys_with_specs(config, spawner, environ, recorder.record, self._shadowed_spec)
        self._spawner = self._standbys or spawner
        self._logs_source = logs_source
        if config.logs.specs:
            from ripstop.logs.plugin import LogsPlugin

            self._logs_source = LogsPlugin(config.logs, config.role, environ, self._children)
        self._reports = ReportSocket(environ, self._on_worker_report)
        self._saver = None
        if config.checkpoints is not None:
            self._saver = SaverProcesses(config.checkpoints, config.run_id, spawner, environ, self._children, run_task)
        self._specs = WorkerSpecs(config, environ, self._reports.path)
        self._elastic = ElasticWorkers(
            find_worker=self._find_worker,
            on_registered=self._on_registered,
            on_left=partial(self._on_elastic, machine_io.WorkerLeft),
            on_reformed=self._on_reformed,
            on_peer_lost=lambda round: report(machine_io.WorkerLostPeer(round)),
        )
        self._state_memory = StateMemory(self._reports.path, self._identify_worker, self._saver, self._elastic)
        self._state_memory.on_first_commit = lambda round: report(machine_io.FirstCommit(round))
        self._state_memory.on_final_commits = lambda *made: report(machine_io.FinalCommitDone(*made))
        self._state_memory.on_state_lost = lambda round, why: report(machine_io.StateLost(round, why))
        self.replication = Supervisor(config, node, self._state_memory, self._children, send_replicated)
        self._round: AgentRound | None = None  # the one that runs, or ran last
        self._stores = StorePorts(environ, self._children, run_task, self._on_port_open)
        self._recovery: RecoveryClock | None = None  # of the workers that the next ones replace

    def _open_timers(self, path: Path) -> "WorkerTimers":
        from ripstop.agent.worker_timers import WorkerTimers

        return WorkerTimers(path, lambda: self._round, self._recorder, self._run_task)

    def standbys(self) -> tuple[StandbySample, ...]:
        return self._standbys.samples() if self._standbys is not None else ()

    def _shadowed_spec(self, local_rank: int) -> ProcessSpec:
        """The worker of the current round that a standby shadows; OSError if its log cannot be made."""
        assert self._round is not None, "without a round, standbys wait before the script"
        logs = self._new_logs(place := self._round.place)
        return self._specs.standby(place, local_rank, logs.make_standby_directory(local_rank))

    def workers(self) -> QueriedWorkers | None:
        """The workers that run, or ran last, for queries."""
        return self._round.workers() if self._round is not None else None

    @property
    def workers_have_terminal(self) -> bool:
        """Whether workers exist, or are about to start, that may write to the agent's own stdout or stderr."""
        round = self._round
        return round is not None and not round.stopped.done() and round.logs.is_inherited()

    def progress_text(self) -> str:
        """The steps of the workers that run; empty if they report none."""
        round = self._round
        return worker_progress_text(round.monitor.worker_progress()) if round is not None and round.monitor else ""

    def still_running_text(self) -> str:
        """Which workers have not stopped yet."""
        return self._round.still_running_text() if self._round is not None else ""

    def signal_worker(self, pid: int, signum: int) -> None:
        """Signal a process, if it belongs to a live worker."""
        if self._round is not None and self._round.group is not None:
            self._round.group.send(pid, signum)

    async def stop_all(self) -> None:
        """Kill the workers and close every socket and pipe, however the agent ends."""
        if self._standbys is not None:
            await self._standbys.stop()
        if self._round is not None:
            self._round.exits.on_stop(signal.SIGKILL)
            await self._round.stop_workers(0.0, signal.SIGKILL)
            self._round.close_monitor()
        await self.replication.close()
        if self._saver is not None:
            await self._saver.close(self._config.timing.shutdown)
        self._state_memory.close()
        self._reports.close()
        await self._stores.close()
        if self._timers is not None:
            self._timers.close()

    def close(self) -> None:
        if self._logs_source is not None:
            self._logs_source.close()
        self._spawner.close()
        self._children.close()

    def open_store_port(self, host: str, port: int, *, is_required: bool) -> None:
        """Listen for the store of a later round; StartError if that fails and the port is required."""
        self._stores.open(host, port, is_required=is_required)

    def _on_port_open(self, host: str, port: int) -> None:
        self._report(machine_io.StorePortReady(port, self.replication.port(host)))

    # start ------------------------------------------------------------------------------------------------------------

    def start(self, place: Place, why: str, host: str) -> None:
        self._stores.start(place)
        self._run_task(self._start(place, why, host, self._loop.time()))

    async def _start(self, place: Place, why: str, host: str, began: float) -> None:
        logs = self._new_logs(place)
        round = self._round = AgentRound(place, host, began, logs, memory_evidence(), WorkerExits(place.slots))
        try:
            if self._logs_source is not None:
                round.logs = await self._logs_from_source(self._logs_source, place, logs)
            if self._console.live is not None and round.logs.is_inherited():
                await self._console.live.hide()
            if round.exits.is_stopping:
                return
            round.logs.prepare()
            round.logs.follow(self._console)
            self._stores.serve(place, self._spawner)
            if self._config.hang_timeout:
                round.recorder_sockets = self._reports.renew_recorder_sockets(place.round, place.slots)
            self._state_memory.listen()
            self.replication.start_round(place)
            specs = [self._spec(round, rank) for rank in range(place.slots)]
            round.group = Group(self._children, self._spawner, specs, lambda exit: self._on_exit(round, exit))
            await round.group.start()
        except StartError as error:
            self._on_start_failed(round, error)
            return
        self._on_started(round, round.group, why, began)

    async def _logs_from_source(self, source: LogDirectorySource, place: Place, default: RoundLogs) -> RoundLogs:
        envs = {rank: self._specs.environment(place, rank, default.error_file(rank)) for rank in range(place.slots)}
        return await source.round_logs(self._directory.path, place, envs)

    def _spec(self, round: AgentRound, local_rank: int) -> ProcessSpec:
        recorder = round.recorder_sockets[local_rank] if round.recorder_sockets else ""
        return self._specs.process(round.place, local_rank, round.logs, recorder)

    def _on_started(self, round: AgentRound, group: Group, why: str, began: float) -> None:
        if self._round is not round:
            return  # another round has replaced it meanwhile
        self._record_start(round, group.pids, why, began)
        round.monitor = self._monitor(round, group)
        if self._standbys is not None:
            self._standbys.on_round_started()

    def _new_logs(self, place: Place) -> RoundLogs:
        return RoundLogs(self._directory.path, self._config.logs, place, self._config.role, terminal=os.isatty(2))

    # in place ---------------------------------------------------------------------------------------------------------

    def reform(self, place: Place, why: str, kept: Sequence[int], grace: float, host: str) -> None:
        """The workers with these local ranks go on in this place, if they live; others are replaced."""
        old = self._round
        assert old is not None and old.group is not None, "only workers that exist go on"
        if self._standbys is not None:
            self._standbys.on_round_stopping()
        recovery, began = self._start_recovery_clock(), self._loop.time()
        recovery.decided_at = recovery.decided_at or began
        old_store = self._stores.take(place)
        group = old.group
        staying = {rank for rank in kept if rank in group.live}
        logs = KeptLogDirectories(self._new_logs(place), dict.fromkeys(staying, old.logs))
        exits = WorkerExits(place.slots)
        round = AgentRound(place, host, began, logs, old.memory_at_start, exits, group, reforming=staying)
        round.kept = len(staying)
        if self._config.hang_timeout:
            sockets = {rank: path for rank, path in enumerate(old.recorder_sockets) if rank in staying}
            round.recorder_sockets = self._reports.renew_recorder_sockets(place.round, place.slots, sockets)
        self._round = round
        group.on_exit = lambda exit: self._on_exit(round, exit)
        old.close_monitor()
        if not old.stopped.done():
            old.stopped.set_result(None)
        if self._timers is not None:
            self._timers.new_round()
        round.old_files = [old.logs.files(rank) for rank in range(place.slots) if rank not in staying]
        group.discard([rank for rank in range(place.slots) if rank not in staying])
        for rank in set(kept) - staying:  # it has just exited
            self._loop.call_soon(self._report, machine_io.WorkerReformed(place.round, rank))
        self._run_task(self._reform(round, group, why, grace, old_store))

    async def _reform(
        self, round: AgentRound, group: Group, why: str, grace: float, old_store: RoundStore | None
    ) -> None:
        place = round.place
        try:
            await self._stores.replace(old_store, place, self._config.timing.inprocess)
            round.require_current(self._round)
            self._stores.serve(place, self._spawner)
            self._state_memory.listen()
            self.replication.start_round(place)
            missing = [rank for rank in range(place.slots) if rank not in round.reforming]
            for rank, pid in group.live.items():
                if rank in round.reforming:
                    env = self._specs.environment(place, rank, round.logs.error_file(rank))
                    self._elastic.tell(pid, place.round, {name: env[name] for name in ROUND_VARIABLES})
            round.memory_at_start = memory_evidence()  # after `tell`: the surviving workers must not wait for it
            await self._start_in_place(round, missing, grace)
        except StartError as error:
            self._on_start_failed(round, error)
            return
        self._on_started(round, group, why, round.requested_at)

    async def _start_in_place(self, round: AgentRound, local_ranks: Sequence[int], grace: float) -> None:
        group, logs = round.group, round.logs
        assert group is not None and isinstance(logs, KeptLogDirectories), "only beside workers that went on"
        round.starting |= set(local_ranks)
        ranks = sorted(round.starting)
        if self._logs_source is not None and ranks:
            logs.use(await self._logs_from_source(self._logs_source, round.place, self._new_logs(round.place)))
            round.require_current(self._round)
        logs.start(ranks)
        logs.prepare()
        logs.follow(self._console)
        kept = {pid for rank, pid in group.live.items() if rank not in ranks}
        self._loop.call_soon(self._state_memory.release, kept)  # after the signal
        await group.replace({rank: self._spec(round, rank) for rank in ranks}, grace)
        round.starting.clear()
        for files in round.old_files:
            self._run_task(self._console.finish(files))
        round.old_files = []

    def replace(self, number: int, local_ranks: Sequence[int]) -> None:
        """Kill these workers, and start others in their places."""
        round = self._round
        assert round is not None and round.place.round == number, "only workers of the running round are replaced"
        assert round.group is not None, "its workers exist"
        round.group.discard(local_ranks)
        round.reforming -= set(local_ranks)
        round.kept -= len(local_ranks)
        round.old_files += [round.logs.files(rank) for rank in local_ranks]
        self._run_task(self._replace(round, local_ranks))

    async def _replace(self, round: AgentRound, local_ranks: Sequence[int]) -> None:
        began, group = self._loop.time(), round.group
        assert group is not None, "its workers exist"
        round.close_monitor()
        try:
            await self._start_in_place(round, local_ranks, 0.0)
        except StartError as error:
            self._on_start_failed(round, error)
            return
        self._on_started(round, group, "workers did not go on in place", began)

    def _on_registered(self, pid: int, is_itself: bool) -> None:
        self._on_elastic(machine_io.WorkerRegistered, pid)
        if is_itself and self._standbys is not None and (worker := self._worker(pid)) is not None:
            self._standbys.on_function_called(worker[1])

    def _on_elastic(self, make_input: Callable[[int, int], machine_io.AgentInput], pid: int) -> None:
        if (worker := self._worker(pid)) is not None:
            self._report(make_input(worker[0].place.round, worker[1]))

    def _find_worker(self, pid: int) -> int | None:
        worker = self._worker(pid)
        return None if worker is None or worker[0].group is None else worker[0].group.pids[worker[1]]

    def _on_reformed(self, pid: int, number: int) -> None:
        if (worker := self._worker(pid)) is not None and worker[0].place.round == number:
            worker[0].reforming.discard(worker[1])
            self._report(machine_io.WorkerReformed(number, worker[1]))
            self._record_recovery(worker[0])

    def _record_start(self, round: AgentRound, pids: tuple[int, ...], why: str, began: float) -> None:
        now, place = self._loop.time(), round.place
        pause = now - self._recovery.failed_at if self._recovery else 0.0
        where = place.round, place.first_rank, place.world_size, place.restarts
        taken = (len(self._standbys.taken), self._standbys.taken_run_ahead) if self._standbys else (0, 0)
        self._recorder.record(events.WorkersStarted(*where, pids, now - began, pause, why, *taken))
        round.started_at = now
        self._record_recovery(round)

    def _record_recovery(self, round: AgentRound) -> None:
        """When all workers have started, or have gone on."""
        if self._recovery is not None and round.started_at is not None and not round.reforming:
            recovery, self._recovery = self._recovery, None
            now = self._loop.time() if round.kept else round.started_at
            self._recorder.record(recovery.finish(round.place.round, round.requested_at, now, round.kept))

    def _on_start_failed(self, round: AgentRound, error: StartError) -> None:
        place, why = round.place, str(error)
        if isinstance(error, UnkillableError):
            self._report(machine_io.WorkersUnkillable(place.round, why))
            return
        failed = events.WorkerFailed(place.round, place.first_rank, 0, f"could not be started: {why}")
        self._recorder.record(failed, level=logging.ERROR)
        failure = round.start_failure(why, time.time())
        self._recorder.record(evidence_to_event(failure))
        self._report(machine_io.WorkersFailed(place.round, (failure,)))

    # watch ------------------------------------------------------------------------------------------------------------

    def _monitor(self, round: AgentRound, group: Group) -> HangMonitor:
        subject = MonitoredWorkers(round.place, round.host, group.pids, round.logs, round.recorder_sockets)

        def on_hang(failures: tuple[Failure, ...], seconds: float) -> None:
            self._start_recovery_clock(seconds)
            self._report(machine_io.WorkersFailed(round.place.round, failures))

        monitor = HangMonitor(
            subject, self._config.hang_timeout, self._recorder.record, on_hang, self._reports.ensure_socket
        )
        for local_rank in round.exits.exited:  # workers that exited while the others started
            monitor.on_worker_ended(local_rank)
        return monitor

    def _on_worker_report(self, pid: int, report: WorkerReport) -> None:
        if (worker := self._worker(pid)) is not None and worker[0].monitor is not None:
            worker[0].monitor.on_report(worker[1], report)
            is_training = not isinstance(report, RestoreReport)  # before the first step, this would delay it
            if is_training and self._standbys is not None:
                self._standbys.on_first_step()
            if is_training and self._elastic.has_workers():
                self._stores.prepare(self._spawner)

    def _worker(self, pid: int) -> tuple[AgentRound, int] | None:
        """The round, and the local rank of the live worker that this process is or belongs to."""
        round = self._round
        rank = round.group.rank_of(pid) if round is not None and round.group is not None else None
        return None if round is None or rank is None else (round, rank)

    def _identify_worker(self, pid: int) -> WorkerIdentity | None:
        if (worker := self._worker(pid)) is None:
            return None
        round, rank = worker
        return round.identity(rank, state_key_from_secret(self._secret, self._config.run_id, round.place.round))

    def _on_exit(self, round: AgentRound, exit: Exit) -> None:
        number, rank = round.place.round, exit.local_rank
        if exit.exitcode == 0 and rank in round.reforming:
            self._report(machine_io.WorkerLeft(number, rank, has_exited=True))
            return
        error_file = round.logs.error_file(rank)
        wrote_error_file = exit.exitcode != 0 and error_file.exists()
        kind = round.exits.on_exit(rank, exit.exitcode, exit.signal, wrote_error_file=wrote_error_file)
        if round.monitor is not None:
            round.monitor.on_worker_ended(rank)
        if kind is ExitKind.ALL_SUCCEEDED:
            self._recorder.record(events.WorkersSucceeded(number))
            self._report(machine_io.WorkersSucceeded(number))
        if kind is not ExitKind.FAILED:
            return
        if self._standbys is not None:
            # in place, only the failed worker is replaced; otherwise all are
            self._standbys.check_files([rank] if self._elastic.has_workers() else range(round.place.slots))
        self._start_recovery_clock(max(0.0, time.time() - exit.at))
        failure = round.failure(exit)
        # The coordinator receives a failure twice, and neither message can replace the other.  The event is history: it
        # is numbered, kept in files and sent again after a reconnect, so it must not restart a round.  `Failed` has the
        # evidence and restarts the round; the machine does not send it for workers that are being stopped.
        what = failure.message.split("\n")[0]
        self._recorder.record(events.WorkerFailed(number, failure.rank, exit.pid, what), level=logging.WARNING)
        if round.recorded_evidence < MAX_RECORDED:
            round.recorded_evidence += 1
            self._recorder.record(evidence_to_event(failure))
        self._report(machine_io.WorkersFailed(number, (failure,)))

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
        self._report(machine_io.WorkersInspected(number, failures))

    # the final commit of a round --------------------------------------------------------------------------------------

    def make_final_commit(self, number: int) -> None:
        slots = self._round.place.slots if self._round is not None else 0
        if why_not := self._state_memory.end_after_commit(number, slots):
            self._report(machine_io.FinalCommitDone(number, why_not=why_not))

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
        why_not = await round.stop_workers(grace, signum)
        if not round.stopped.done():
            round.stopped.set_result(None)
        round.close_monitor()
        await self._stores.close_store()
        if self._timers is not None:
            self._timers.new_round()
        for rank in range(round.place.slots):
            self._run_task(self._console.finish(round.logs.files(rank)))
        if why_not:
            self._report(machine_io.WorkersUnkillable(number, why_not))
            return
        now = self._loop.time()
        if self._recovery is not None:
            self._recovery.stopped_at = now
        self._recorder.record(events.WorkersStopped(number, now - began))
        self._report(machine_io.WorkersStopped(number))
