"""Watches over the workers of one round: what they report, whether they hang, and where they are when they do.

Decides nothing: `diagnostics/progress.py` says who hangs, `diagnostics/stacks.py` what stacks mean.  Rules: (1) one
look at
all workers a hang, whoever asks for it, and it is on disk before anybody is stopped; (2) what was known before comes
first: native stacks, which are slow to read, are added while the coordinator decides; (3) whatever goes wrong here is
said, no worker is disturbed by it, and it is tried again; (4) no file is touched in the event loop.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from ripstop.diagnostics.progress import LOOKS, SILENT, ActivitySample, Progress, Stuck, WorkerProgress
from ripstop.diagnostics.stack_dump import ProcessStack, look_at, native, size
from ripstop.diagnostics.stacks import Spot, spot
from ripstop.logs.directory import RoundLogs
from ripstop.model.events import CheckpointSaved, Event, FirstStep, StepsDone, WorkerHangs
from ripstop.model.failure import Failure, Hang
from ripstop.model.round import Place
from ripstop.model.text import clean, truncate_middle
from ripstop.system import linux
from ripstop.system.blocking_calls import run_in_daemon_thread
from ripstop.system.own_directory import make_own_directory
from ripstop.workers.reports import CheckpointReport, JobReport, WorkerHeartbeat

if TYPE_CHECKING:
    from ripstop.diagnostics.flight_dump import Flight

log = logging.getLogger("ripstop.agent")

STACK = 8192  # bytes of a stack that travels
PATIENCE = 10.0  # seconds that stopping waits for what is being found out
WRITE = 1.0  # seconds in which what was found is to be on disk
LATE = 1.0  # seconds after which a timer that is late tells that this machine stood still
RETRY = 1.0  # seconds until a look that went wrong is tried again
SAVED = 1.0  # seconds between two checkpoints of a worker that are told


class Subject(Struct, frozen=True):
    """Whom to watch: the workers of one round, by local rank."""

    place: Place
    host: str
    pids: tuple[int, ...]
    logs: RoundLogs
    recorder_sockets: tuple[str, ...] = ()


class HangMonitor:
    """`on_hang` is called once, with what is known of all workers of this node, when one of them hangs.

    `audible` says whether workers could report until now.
    """

    def __init__(
        self,
        subject: Subject,
        timeout: float,
        record: Callable[[Event, int], None],
        on_hang: Callable[[tuple[Failure, ...], float], None],
        audible: Callable[[], bool] = lambda: True,
    ) -> None:
        self._subject = subject
        self._timeout = timeout
        self._audible = audible
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._progress = Progress(len(subject.pids), timeout, self._began)
        self._live = dict(enumerate(subject.pids))
        self._record = record
        self._on_hang = on_hang
        self._stepped = False
        self._unsaid: dict[int, CheckpointReport] = {}  # checkpoints, by local rank: the latest
        self._resting: dict[int, asyncio.TimerHandle] = {}  # after the one before
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None
        self._inspection: asyncio.Task[tuple[Failure, ...]] | None = None
        self._natives: asyncio.Task[None] | None = None
        self._arm()

    def report(self, rank: int, report: JobReport) -> None:
        """What a worker says, by its local rank, or a process that belongs to it."""
        place, now = self._subject.place, self._loop.time()
        match report:
            case CheckpointReport():
                self._unsaid[rank] = report
                if rank not in self._resting:
                    self._tell_saved(rank)
            case WorkerHeartbeat(step, count):
                self._progress.beat(rank, step, count, now)
                if step is not None and not self._stepped:
                    self._stepped = True
                    first = FirstStep(place.round, place.first_rank + rank, step, now - self._began)
                    self._record(first, logging.INFO)

    def _tell_saved(self, rank: int) -> None:
        self._resting.pop(rank, None)
        if saved := self._unsaid.pop(rank, None):
            place = self._subject.place
            told = CheckpointSaved(place.round, place.first_rank + rank, saved.step, clean(saved.path))
            self._record(told, logging.INFO)
            self._resting[rank] = self._loop.call_later(SAVED, self._tell_saved, rank)

    def gone(self, local_rank: int) -> None:
        """This worker has ended."""
        self._live.pop(local_rank, None)
        self._progress.gone(local_rank)

    def paces(self) -> Mapping[int, WorkerProgress]:
        """What the workers report, by local rank."""
        return self._progress.paces(self._loop.time())

    async def inspect(self) -> tuple[Failure, ...]:
        """Where the workers are; on disk, too, when this returns.  Native stacks come there later."""
        return await self._inspect_once({})

    async def settle(self) -> None:
        """Waits until an inspection that has begun is over: the workers are about to be stopped."""
        if self._inspection is not None:
            await asyncio.wait([self._inspection], timeout=PATIENCE)
        if self._natives is not None:
            await asyncio.wait([self._natives], timeout=PATIENCE)

    def close(self) -> None:
        """The workers are gone."""
        self._disarm()
        for task in (self._looking, self._inspection, self._natives):
            if task is not None:
                task.cancel()
        for rank in list(self._unsaid):
            self._resting[rank].cancel()
            self._tell_saved(rank)
        for resting in self._resting.values():
            resting.cancel()
        place = self._subject.place
        for rank, stride in sorted(self._progress.stepped().items())[:1]:  # one speaks for the node
            steps = StepsDone(place.round, place.first_rank + rank, stride.first, stride.last, stride.seconds)
            self._record(steps, logging.INFO)

    # looking for hangs ------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        self._disarm()
        when = self._progress.deadline()
        if when is not None and self._inspection is None:
            now = self._loop.time()
            self._due = max(now, min(when, now + self._timeout / LOOKS))  # soon enough to notice that time stood still
            self._timer = self._loop.call_at(self._due, self._wake)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        self._timer = None
        now = self._loop.time()
        if now - self._due > LATE:  # so did the workers, or what they said has not been read yet
            self._progress.excuse(now)
            self._arm()
            return
        self._looking = self._loop.create_task(self._watch())
        self._looking.add_done_callback(_say_what_broke)

    async def _watch(self) -> None:
        try:
            await self._look()
        except Exception as defect:
            _say(defect)
            now = self._loop.time()
            for rank in self._progress.due(now):
                self._progress.unseen(rank, now)
        stuck = self._stuck()
        if not stuck or self._inspection is not None:
            self._arm()
            return
        failures = await self._inspect_once(stuck)
        self._on_hang(failures, max(hang.seconds for hang in stuck.values()))

    def _stuck(self) -> Mapping[int, Stuck]:
        now = self._loop.time()
        stuck = self._progress.stuck(now)
        if any(hang.sign == SILENT for hang in stuck.values()) and not self._audible():
            self._progress.excuse(now)
            return {}
        return stuck

    async def _look(self) -> None:
        """See how those do that report nothing."""
        due = {rank: wanted for rank, wanted in self._progress.due(self._loop.time()).items() if rank in self._live}
        if not due:
            return
        files = {rank: self._with_file(rank)[1] for rank in due}
        asked_for, used = await run_in_daemon_thread(partial(_measure, files, [self._live[rank] for rank in due]))
        wanted = [rank for rank, stack in due.items() if stack and rank in self._live]
        looks = await look_at(self._with_file(rank) for rank in wanted)
        stacks = {rank: found.stack for rank, found in zip(wanted, looks, strict=True)}
        now = self._loop.time()
        for rank in due:
            if work := used.get(self._live.get(rank, 0)):
                written = work.written - asked_for[rank]
                self._progress.look(rank, ActivitySample(written, work.cpu, stacks.get(rank, ""), work.ready), now)
            else:
                self._progress.unseen(rank, now)

    def _with_file(self, rank: int) -> tuple[int, Path]:
        return self._live[rank], self._subject.logs.stack_file(rank)

    # evidence ---------------------------------------------------------------------------------------------------------

    async def _inspect_once(self, stuck: Mapping[int, Stuck]) -> tuple[Failure, ...]:
        if self._inspection is None:
            self._disarm()
            self._inspection = self._loop.create_task(self._inspect(stuck))
        inspection = self._inspection
        try:
            return await asyncio.shield(inspection)
        except Exception:
            if self._inspection is inspection:
                self._inspection = None
                self._disarm()
                self._timer = self._loop.call_later(RETRY, self._arm)
            raise

    async def _inspect(self, stuck: Mapping[int, Stuck]) -> tuple[Failure, ...]:
        from ripstop.diagnostics.flight_dump import HANGING, ask_ranks  # only where something hangs

        ranks = list(self._live)
        now, at = self._loop.time(), time.time()
        idle = {rank: self._progress.idle(rank, now) for rank in ranks}
        looks, flights = await asyncio.gather(
            look_at(self._with_file(rank) for rank in ranks),
            ask_ranks(self._subject.recorder_sockets, ranks, HANGING),
        )
        failures = [
            self._failure(rank, found, flight, stuck.get(rank) or Stuck(idle[rank], ""), at)
            for rank, found, flight in zip(ranks, looks, flights, strict=True)
        ]
        await self._write(failures, looks, flights, [""] * len(looks))
        for rank, failure, found in zip(ranks, failures, looks, strict=True):
            if rank in stuck:
                where = f"in {failure.hang.call} ({failure.hang.where})" if failure.hang and failure.hang.where else ""
                hangs = WorkerHangs(
                    failure.round, failure.rank, found.pid, stuck[rank].seconds, stuck[rank].sign, where
                )
                self._record(hangs, logging.WARNING)
        self._natives = self._loop.create_task(self._add_native(failures, looks, flights))
        self._natives.add_done_callback(_say_what_broke)
        return tuple(failures)

    async def _add_native(
        self, failures: list[Failure], looks: list[ProcessStack], flights: "list[Flight | None]"
    ) -> None:
        texts = await native(found.pid for found in looks)
        await self._write(failures, looks, flights, texts)

    def _failure(self, rank: int, found: ProcessStack, flight: "Flight | None", stuck: Stuck, at: float) -> Failure:
        place = self._subject.place
        here, file = spot(found.frames), clean(str(self._file(place.first_rank + rank)))
        standings = flight.standings if flight else None
        return Failure(
            rank=place.first_rank + rank,
            local_rank=rank,
            round=place.round,
            host=self._subject.host,
            at=at - stuck.seconds,
            pid=found.pid,
            message=_message(here, stuck, found),
            traceback=truncate_middle(clean(found.stack), STACK),
            logs=clean(str(self._subject.logs.directory(rank))),
            hang=Hang(
                round(stuck.seconds, 3), stuck.sign, here.call, here.where, here.waits, found.state, file, standings
            ),
        )

    def _file(self, rank: int, what: str = "txt") -> Path:
        return self._subject.logs.hang_directory() / f"rank_{rank}.{what}"

    async def _write(
        self, failures: list[Failure], looks: list[ProcessStack], flights: "list[Flight | None]", natives: list[str]
    ) -> None:
        files: dict[Path, bytes] = {}
        for failure, found, flight, stacks in zip(failures, looks, flights, natives, strict=True):
            text = self._text(failure, found, flight, stacks)
            files[self._file(failure.rank)] = text.encode("utf-8", "replace")
            if flight and flight.raw and not stacks:  # once
                files[self._file(failure.rank, "flight.json")] = flight.raw
        try:
            await run_in_daemon_thread(partial(_put, files), WRITE)
        except (OSError, RuntimeError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
            log.warning("stacks cannot be written to %s: %s", self._subject.logs.hang_directory(), why)

    def _text(self, failure: Failure, found: ProcessStack, flight: "Flight | None", native: str) -> str:
        parts = [
            f"rank {failure.rank}, pid {found.pid} on {failure.host}, round {failure.round}: {failure.message}",
            f"state: {found.doing}",
            f"kernel stack\n{found.kernel}" if found.kernel else "",
            f"Python stacks ({found.source}{f'; {found.why}' if found.why else ''})\n{found.stack}",
            f"Flight recorder{f': none: {flight.why}' if flight.why else ''}\n{flight.text}".rstrip() if flight else "",
            f"Python and native stacks\n{native}" if native else "",
        ]
        return "\n\n".join(filter(None, parts)) + "\n"


def _measure(files: Mapping[int, Path], sessions: list[int]) -> tuple[dict[int, int], dict[int, linux.Usage]]:
    """The sizes of stacks that workers wrote, which are no sign of life; and what these sessions use."""
    return {rank: size(file) for rank, file in files.items()}, linux.usage_of_sessions(sessions)


def _put(files: Mapping[Path, bytes]) -> None:
    for path, content in files.items():
        make_own_directory(path.parent.parent)  # with a plugin, there may be none
        make_own_directory(path.parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
            file.write(content)


def _message(here: Spot, stuck: Stuck, found: ProcessStack) -> str:
    doing = f"{'waits' if here.waits else 'is'} in {here.call} ({here.where})" if here.where else found.doing
    return f"{stuck.sign} for {stuck.seconds:.0f} s; {doing}" if stuck.sign else doing


def _say_what_broke(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        _say(error)


def _say(defect: BaseException) -> None:
    log.error("looking for hangs went wrong: %r", defect)
