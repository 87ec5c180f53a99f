"""Observes the workers of one round on this node, finds those that hang, and collects evidence.

`progress.py` decides which workers hang; `stack_dump.py` reads stacks.  Rules:

1. A timer fires when `ProgressTracker.next_check` is due, at the latest after a quarter of the timeout.  Without
   `--hang-timeout` there is no timer; heartbeats and checkpoints are recorded all the same.
2. A timer that fires more than `MAX_TIMER_DELAY_S` late shows that the machine was paused: all timeouts start again.
3. A sample of a worker covers all processes of its session: bytes written and CPU time from /proc, and the stack from
   py-spy or faulthandler if `ProgressTracker.due_samples` requests it.  Stacks that faulthandler writes to a file do
   not count as bytes written.
4. If workers could not send heartbeats (`can_report`), missing heartbeats are no hang: all timeouts start again.
5. When a worker hangs, all workers of the node are inspected: stacks and torch's flight recorder.  The coordinator
   starts the same inspection (`inspect`) when workers of another node hang.  There is one inspection per round, and its
   results are on disk before any worker is stopped.
6. Native stacks, which are slow to read, are added to the files afterwards, while the coordinator decides.
7. An error in this module is logged, changes nothing for the workers, and the step is tried again.
8. No file is accessed in the event loop.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from ripstop.diagnostics.evidence_events import MAX_RECORDED, evidence_to_event
from ripstop.diagnostics.failure_ranking import rank_failures
from ripstop.diagnostics.progress import (
    NO_HEARTBEAT,
    SAMPLES_PER_TIMEOUT,
    ActivitySample,
    Commits,
    HungWorker,
    ProgressTracker,
    WorkerProgress,
)
from ripstop.diagnostics.stack_dump import StackDump, dump_stacks, native_stacks, stack_dump_size
from ripstop.diagnostics.stack_parser import stack_location
from ripstop.logs.directory import RoundLogs
from ripstop.model.events import CheckpointSaved, Event, FirstStep, StateRestored, StepsDone, WorkerHangs
from ripstop.model.failure import Failure, Hang
from ripstop.model.round import Place
from ripstop.model.text_formatting import format_clean_text, truncate_middle
from ripstop.model.usage import StepProfile
from ripstop.system import linux
from ripstop.system.blocking_calls import run_in_daemon_thread
from ripstop.system.safe_files import make_own_directory
from ripstop.workers.report_socket import CheckpointReport, CommitReport, RestoreReport, WorkerHeartbeat, WorkerReport

if TYPE_CHECKING:
    from ripstop.diagnostics.flight_recorder_query import FlightDump

log = logging.getLogger("ripstop.agent")

MAX_STACK_BYTES = 8192  # of a stack in a `Failure`
INSPECTION_TIMEOUT_S = 10.0  # that stopping the workers waits for the inspection, and then for native stacks
WRITE_TIMEOUT_S = 1.0
MAX_TIMER_DELAY_S = 1.0
RETRY_DELAY_S = 1.0  # after an inspection that failed
CHECKPOINT_INTERVAL_S = 1.0  # between two recorded checkpoints of one worker


class MonitoredWorkers(Struct, frozen=True):
    """The workers of one round; `pids` and `recorder_sockets` by local rank."""

    place: Place
    host: str
    pids: tuple[int, ...]
    logs: RoundLogs
    recorder_sockets: tuple[str, ...] = ()


class _Inspected(Struct, frozen=True):
    """The evidence of one worker; `flight` None: the worker has no socket for its flight recorder."""

    failure: Failure
    stack: StackDump
    flight: "FlightDump | None"


class HangMonitor:
    """`on_hang` is called at most once: with the evidence of all workers of this node, when one of them hangs.

    `can_report` returns whether workers could send heartbeats since its last call.
    """

    def __init__(
        self,
        workers: MonitoredWorkers,
        timeout: float,
        record: Callable[[Event, int], None],
        on_hang: Callable[[tuple[Failure, ...], float], None],
        can_report: Callable[[], bool] = lambda: True,
    ) -> None:
        self._workers = workers
        self._timeout = timeout
        self._can_report = can_report
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self._progress = ProgressTracker(len(workers.pids), timeout, self._started_at)
        self._live_pids = dict(enumerate(workers.pids))
        self._record = record
        self._on_hang = on_hang
        self._first_step_recorded = False
        self._restore_sources: set[str] = set()  # that are recorded
        self._unrecorded_checkpoints: dict[int, CheckpointReport] = {}  # the latest, by local rank
        self._checkpoint_timers: dict[int, asyncio.TimerHandle] = {}
        self._check_due_at = 0.0
        self._check_timer: asyncio.TimerHandle | None = None
        self._check: asyncio.Task[None] | None = None
        self._inspection: asyncio.Task[tuple[Failure, ...]] | None = None
        self._native_stacks: asyncio.Task[None] | None = None
        self._schedule_check()

    def on_report(self, local_rank: int, report: WorkerReport) -> None:
        """A worker, or a process that belongs to it, sent a report."""
        place, now = self._workers.place, self._loop.time()
        rank = place.first_rank + local_rank
        match report:
            case CheckpointReport():
                self._unrecorded_checkpoints[local_rank] = report
                if local_rank not in self._checkpoint_timers:
                    self._record_checkpoint(local_rank)
            case WorkerHeartbeat(step, count):
                self._progress.on_heartbeat(local_rank, step, count, now)
                if step is not None:
                    self._record_first_step(rank, step, now)
            case CommitReport(step, count, size, stall, age):
                self._progress.on_commit(local_rank, step, Commits(count, stall, size, now - age), now)
                self._record_first_step(rank, step, now)
            case StepProfile():
                self._progress.on_profile(local_rank, report)
            case RestoreReport(source, step, seconds) if source not in self._restore_sources:
                self._restore_sources.add(source)
                self._record(StateRestored(place.round, rank, source, step, seconds), logging.INFO)

    def _record_first_step(self, rank: int, step: int, now: float) -> None:
        if not self._first_step_recorded:
            self._first_step_recorded = True
            self._record(FirstStep(self._workers.place.round, rank, step, now - self._started_at), logging.INFO)

    def _record_checkpoint(self, local_rank: int) -> None:
        """Record the latest checkpoint, at most one in `CHECKPOINT_INTERVAL_S`."""
        self._checkpoint_timers.pop(local_rank, None)
        if saved := self._unrecorded_checkpoints.pop(local_rank, None):
            place = self._workers.place
            event = CheckpointSaved(
                place.round, place.first_rank + local_rank, saved.step, format_clean_text(saved.path)
            )
            self._record(event, logging.INFO)
            self._checkpoint_timers[local_rank] = self._loop.call_later(
                CHECKPOINT_INTERVAL_S, self._record_checkpoint, local_rank
            )

    def on_worker_ended(self, local_rank: int) -> None:
        self._live_pids.pop(local_rank, None)
        self._progress.remove(local_rank)

    def worker_progress(self) -> Mapping[int, WorkerProgress]:
        """What workers report, by local rank."""
        return self._progress.worker_progress(self._loop.time())

    async def inspect(self) -> tuple[Failure, ...]:
        """Rule 5: the evidence of all workers; it is on disk, too, when this returns."""
        return await self._inspect_once({})

    async def finish_inspection(self) -> None:
        """Wait for an inspection that has begun: the workers are about to be stopped."""
        if self._inspection is not None:
            await asyncio.wait([self._inspection], timeout=INSPECTION_TIMEOUT_S)
        if self._native_stacks is not None:
            await asyncio.wait([self._native_stacks], timeout=INSPECTION_TIMEOUT_S)

    def close(self) -> None:
        """The workers have ended."""
        self._cancel_check()
        for task in (self._check, self._inspection, self._native_stacks):
            if task is not None:
                task.cancel()
        for local_rank in list(self._unrecorded_checkpoints):
            self._checkpoint_timers[local_rank].cancel()
            self._record_checkpoint(local_rank)
        for timer in self._checkpoint_timers.values():
            timer.cancel()
        place = self._workers.place
        for local_rank, steps in sorted(self._progress.step_ranges().items())[:1]:  # one worker represents the node
            done = StepsDone(place.round, place.first_rank + local_rank, steps.first, steps.last, steps.seconds)
            self._record(done, logging.INFO)

    # sampling ---------------------------------------------------------------------------------------------------------

    def _schedule_check(self) -> None:
        self._cancel_check()
        next_check = self._progress.next_check()
        if next_check is not None and self._inspection is None:
            now = self._loop.time()
            self._check_due_at = max(now, min(next_check, now + self._timeout / SAMPLES_PER_TIMEOUT))  # rules 1 and 2
            self._check_timer = self._loop.call_at(self._check_due_at, self._start_check)

    def _cancel_check(self) -> None:
        if self._check_timer is not None:
            self._check_timer.cancel()
            self._check_timer = None

    def _start_check(self) -> None:
        self._check_timer = None
        now = self._loop.time()
        if now - self._check_due_at > MAX_TIMER_DELAY_S:  # rule 2; also, heartbeats may be unread
            self._progress.restart_timeouts(now)
            self._schedule_check()
            return
        self._check = self._loop.create_task(self._check_workers())
        self._check.add_done_callback(_log_failed_hang_check)

    async def _check_workers(self) -> None:
        try:
            await self._sample()
        except Exception as error:
            _log_hang_check_error(error)
            now = self._loop.time()
            for local_rank in self._progress.due_samples(now):
                self._progress.on_sample_failed(local_rank, now)
        hung = self._hung_workers()
        if not hung or self._inspection is not None:
            self._schedule_check()
            return
        failures = await self._inspect_once(hung)
        self._on_hang(failures, max(worker.seconds for worker in hung.values()))

    def _hung_workers(self) -> Mapping[int, HungWorker]:
        now = self._loop.time()
        hung = self._progress.hung_workers(now)
        if any(worker.reason == NO_HEARTBEAT for worker in hung.values()) and not self._can_report():  # rule 4
            self._progress.restart_timeouts(now)
            return {}
        return hung

    async def _sample(self) -> None:
        """Rule 3."""
        due = {
            local_rank: with_stack
            for local_rank, with_stack in self._progress.due_samples(self._loop.time()).items()
            if local_rank in self._live_pids
        }
        if not due:
            return
        pids = [self._live_pids[local_rank] for local_rank in due]

        def measure() -> tuple[dict[int, int], dict[int, linux.Usage]]:
            sizes = {local_rank: stack_dump_size(self._workers.logs.stack_file(local_rank)) for local_rank in due}
            return sizes, linux.usage_of_sessions(pids)

        stack_bytes, usage = await run_in_daemon_thread(measure)
        with_stack = {rank: pid for rank, pid in self._live_pids.items() if due.get(rank)}
        stacks = dict(zip(with_stack, await self._dump_stacks(with_stack), strict=True))
        now = self._loop.time()
        for local_rank in due:
            if used := usage.get(self._live_pids.get(local_rank, 0)):
                stack = stacks[local_rank].stack if local_rank in stacks else ""
                sample = ActivitySample(used.written - stack_bytes[local_rank], used.cpu, stack, used.ready)
                self._progress.on_sample(local_rank, sample, now)
            else:
                self._progress.on_sample_failed(local_rank, now)

    async def _dump_stacks(self, pids: Mapping[int, int]) -> list[StackDump]:
        return await dump_stacks((pid, self._workers.logs.stack_file(local_rank)) for local_rank, pid in pids.items())

    # inspection -------------------------------------------------------------------------------------------------------

    async def _inspect_once(self, hung: Mapping[int, HungWorker]) -> tuple[Failure, ...]:
        if self._inspection is None:
            self._cancel_check()
            self._inspection = self._loop.create_task(self._inspect(hung))
        inspection = self._inspection
        try:
            return await asyncio.shield(inspection)
        except Exception:
            if self._inspection is inspection:  # rule 7
                self._inspection = None
                self._cancel_check()
                self._check_timer = self._loop.call_later(RETRY_DELAY_S, self._schedule_check)
            raise

    async def _inspect(self, hung: Mapping[int, HungWorker]) -> tuple[Failure, ...]:
        from ripstop.diagnostics.flight_recorder_query import HANGING, query_ranks  # only if a worker hangs

        pids = dict(self._live_pids)
        ranks = list(pids)
        now, at = self._loop.time(), time.time()
        idle = {rank: HungWorker(self._progress.idle_seconds(rank, now), "") for rank in ranks}
        stacks, flights = await asyncio.gather(
            self._dump_stacks(pids), query_ranks(self._workers.recorder_sockets, ranks, HANGING)
        )
        inspected = [
            _Inspected(self._failure(rank, stack, flight, hung.get(rank, idle[rank]), at), stack, flight)
            for rank, stack, flight in zip(ranks, stacks, flights, strict=True)
        ]
        await self._write_files(inspected)
        for worker in inspected:
            failure, hang = worker.failure, worker.failure.hang
            if known := hung.get(failure.local_rank):
                where = f"in {hang.call} ({hang.where})" if hang and hang.where else ""
                event = WorkerHangs(failure.round, failure.rank, worker.stack.pid, known.seconds, known.reason, where)
                self._record(event, logging.WARNING)
        for failure in rank_failures(worker.failure for worker in inspected)[:MAX_RECORDED]:
            self._record(evidence_to_event(failure), logging.INFO)
        self._native_stacks = self._loop.create_task(self._add_native_stacks(inspected))
        self._native_stacks.add_done_callback(_log_failed_hang_check)
        return tuple(worker.failure for worker in inspected)

    def _failure(
        self, rank: int, stack: StackDump, flight: "FlightDump | None", hung: HungWorker, at: float
    ) -> Failure:
        place, location = self._workers.place, stack_location(stack.frames)
        doing = stack.doing
        if location.where:
            doing = f"{'waits' if location.waits else 'is'} in {location.call} ({location.where})"
        return Failure(
            rank=place.first_rank + rank,
            local_rank=rank,
            round=place.round,
            host=self._workers.host,
            at=at - hung.seconds,
            pid=stack.pid,
            message=f"{hung.reason} for {hung.seconds:.0f} s; {doing}" if hung.reason else doing,
            traceback=truncate_middle(format_clean_text(stack.stack), MAX_STACK_BYTES),
            logs=format_clean_text(str(self._workers.logs.directory(rank))),
            hang=Hang(
                seconds=round(hung.seconds, 3),
                sign=hung.reason,
                call=location.call,
                where=location.where,
                waits=location.waits,
                state=stack.state,
                file=format_clean_text(str(self._file(place.first_rank + rank))),
                collectives=flight.collectives if flight else None,
            ),
        )

    async def _add_native_stacks(self, inspected: list[_Inspected]) -> None:
        await self._write_files(inspected, await native_stacks(worker.stack.pid for worker in inspected))

    # files ------------------------------------------------------------------------------------------------------------

    def _file(self, rank: int, suffix: str = "txt") -> Path:
        return self._workers.logs.hang_directory() / f"rank_{rank}.{suffix}"

    async def _write_files(self, inspected: list[_Inspected], native: Sequence[str] = ()) -> None:
        files: dict[Path, bytes] = {}
        for index, worker in enumerate(inspected):
            text = _hang_monitor_text(worker, native[index] if native else "")
            files[self._file(worker.failure.rank)] = text.encode("utf-8", "replace")
            if worker.flight and worker.flight.raw and not native:  # written once
                files[self._file(worker.failure.rank, "flight.json")] = worker.flight.raw
        try:
            await run_in_daemon_thread(partial(_write_hang_monitor_files, self._workers.logs, files), WRITE_TIMEOUT_S)
        except (OSError, RuntimeError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
            log.warning("stacks cannot be written to %s: %s", self._workers.logs.hang_directory(), why)


def _hang_monitor_text(worker: _Inspected, native: str) -> str:
    failure, stack, flight = worker.failure, worker.stack, worker.flight
    parts = [
        f"rank {failure.rank}, pid {stack.pid} on {failure.host}, round {failure.round}: {failure.message}",
        f"state: {stack.doing}",
        f"kernel stack\n{stack.kernel}" if stack.kernel else "",
        f"Python stacks ({stack.source}{f'; {stack.why}' if stack.why else ''})\n{stack.stack}",
        f"Flight recorder{f': none: {flight.why}' if flight.why else ''}\n{flight.text}".rstrip() if flight else "",
        f"Python and native stacks\n{native}" if native else "",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _write_hang_monitor_files(logs: RoundLogs, files: Mapping[Path, bytes]) -> None:
    logs.make_round_directory()  # a log plugin may not have made it
    make_own_directory(logs.hang_directory())
    for path, content in files.items():
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
            file.write(content)


def _log_failed_hang_check(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        _log_hang_check_error(error)


def _log_hang_check_error(error: BaseException) -> None:
    log.error("the check for hangs failed: %r", error)
