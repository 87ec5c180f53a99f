"""Watches over the workers of one round: what they report, whether they hang, and where they are when they do.

Decides nothing: `observe/progress.py` says who hangs, `observe/stacks.py` what stacks mean.  Rules: (1) one look at
all workers a hang, whoever asks for it, and it is on disk before anybody is stopped; (2) what was known before comes
first: native stacks, which are slow to read, are added while the coordinator decides; (3) whatever goes wrong here is
said, and no worker is disturbed by it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ripstop.observe.events import CheckpointSaved, Event, FirstStep, StepsDone, WorkerHangs
from ripstop.observe.failure import Failure, Hang
from ripstop.observe.progress import Pace, Progress, Signs, Stuck
from ripstop.observe.stacks import Spot, spot
from ripstop.observe.text import clean, cut_middle
from ripstop.round import Place
from ripstop.workers import linux
from ripstop.workers.logs import RoundLogs
from ripstop.workers.reports import Beat, Report, Saved
from ripstop.workers.stacks import Look, look_at, native, size

log = logging.getLogger("ripstop.agent")

STACK = 8192  # bytes of a stack that travels
PATIENCE = 10.0  # seconds that stopping waits for what is being found out


@dataclass(frozen=True, slots=True)
class Subject:
    """Whom to watch: the workers of one round, by local rank."""

    place: Place
    host: str
    pids: tuple[int, ...]
    logs: RoundLogs


class Watch:
    """`on_hang` is called once, with what is known of all workers of this node, when one of them hangs."""

    def __init__(
        self,
        subject: Subject,
        timeout: float,
        record: Callable[[Event, int], None],
        on_hang: Callable[[tuple[Failure, ...], float], None],
    ) -> None:
        self._subject = subject
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._progress = Progress(len(subject.pids), timeout, self._began)
        self._live = dict(enumerate(subject.pids))
        self._record = record
        self._on_hang = on_hang
        self._stepped = False
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None
        self._inspection: asyncio.Task[tuple[Failure, ...]] | None = None
        self._natives: asyncio.Task[None] | None = None
        self._arm()

    def report(self, rank: int, report: Report) -> None:
        """What a worker says, by its local rank, or a process that belongs to it."""
        place, now = self._subject.place, self._loop.time()
        match report:
            case Saved(step, path):
                self._record(CheckpointSaved(place.round, place.first_rank + rank, step, clean(path)), logging.INFO)
            case Beat(step, count):
                self._progress.beat(rank, step, count, now)
                if step is not None and not self._stepped:
                    self._stepped = True
                    first = FirstStep(place.round, place.first_rank + rank, step, now - self._began)
                    self._record(first, logging.INFO)

    def gone(self, local_rank: int) -> None:
        """This worker has ended."""
        self._live.pop(local_rank, None)
        self._progress.gone(local_rank)

    def paces(self) -> Mapping[int, Pace]:
        """What the workers report, by local rank."""
        return self._progress.paces(self._loop.time())

    async def inspect(self) -> tuple[Failure, ...]:
        """Where the workers are; on disk, too, when this returns.  Native stacks come there later."""
        if self._inspection is None:
            self._inspection = self._loop.create_task(self._inspect({}))
        return await asyncio.shield(self._inspection)

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
        place = self._subject.place
        for rank, stride in sorted(self._progress.stepped().items())[:1]:  # one speaks for the node
            steps = StepsDone(place.round, place.first_rank + rank, stride.first, stride.last, stride.seconds)
            self._record(steps, logging.INFO)

    # looking for hangs ------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        self._disarm()
        when = self._progress.deadline()
        if when is not None and self._inspection is None:
            self._timer = self._loop.call_at(when, self._wake)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        self._timer = None
        self._looking = self._loop.create_task(self._watch())
        self._looking.add_done_callback(_say_what_broke)

    async def _watch(self) -> None:
        await self._look()
        now = self._loop.time()
        stuck = self._progress.stuck(now)
        if not stuck or self._inspection is not None:
            self._arm()
            return
        self._inspection = self._loop.create_task(self._inspect(stuck))
        failures = await asyncio.shield(self._inspection)
        self._on_hang(failures, max(hang.seconds for hang in stuck.values()))

    async def _look(self) -> None:
        """See how those do that report nothing."""
        due = {rank: wanted for rank, wanted in self._progress.due(self._loop.time()).items() if rank in self._live}
        if not due:
            return
        asked_for = {rank: size(self._with_file(rank)[1]) for rank in due}  # stacks that it wrote are no sign of life
        used = linux.usage_of_sessions(self._live[rank] for rank in due)
        wanted = [rank for rank, stack in due.items() if stack]
        looks = await look_at(self._with_file(rank) for rank in wanted)
        stacks = {rank: found.stack for rank, found in zip(wanted, looks, strict=True)}
        now = self._loop.time()
        for rank in due:
            if work := used.get(self._live.get(rank, 0)):
                written = work.written - asked_for[rank]
                self._progress.look(rank, Signs(written, work.cpu, stacks.get(rank, ""), work.ready), now)
            else:
                self._progress.unseen(rank, now)

    def _with_file(self, rank: int) -> tuple[int, Path]:
        return self._live[rank], self._subject.logs.stack_file(rank)

    # evidence ---------------------------------------------------------------------------------------------------------

    async def _inspect(self, stuck: Mapping[int, Stuck]) -> tuple[Failure, ...]:
        ranks = list(self._live)
        now, at = self._loop.time(), time.time()
        idle = {rank: self._progress.idle(rank, now) for rank in ranks}
        looks = await look_at(self._with_file(rank) for rank in ranks)
        failures = []
        for rank, found in zip(ranks, looks, strict=True):
            failure = self._failure(rank, found, stuck.get(rank) or Stuck(idle[rank], ""), at)
            failures.append(failure)
            self._write(failure, found, "")
            if rank in stuck:
                where = f"in {failure.hang.call} ({failure.hang.where})" if failure.hang and failure.hang.where else ""
                hangs = WorkerHangs(
                    failure.round, failure.rank, found.pid, stuck[rank].seconds, stuck[rank].sign, where
                )
                self._record(hangs, logging.WARNING)
        self._natives = self._loop.create_task(self._add_native(failures, looks))
        self._natives.add_done_callback(_say_what_broke)
        return tuple(failures)

    async def _add_native(self, failures: list[Failure], looks: list[Look]) -> None:
        texts = await native(found.pid for found in looks)
        for failure, found, text in zip(failures, looks, texts, strict=True):
            self._write(failure, found, text)

    def _failure(self, rank: int, found: Look, stuck: Stuck, at: float) -> Failure:
        place = self._subject.place
        here, file = spot(found.frames), str(self._file(place.first_rank + rank))
        return Failure(
            rank=place.first_rank + rank,
            local_rank=rank,
            round=place.round,
            host=self._subject.host,
            at=at - stuck.seconds,
            pid=found.pid,
            message=_message(here, stuck, found),
            traceback=cut_middle(clean(found.stack), STACK),
            logs=str(self._subject.logs.directory(rank)),
            hang=Hang(round(stuck.seconds, 3), stuck.sign, here.call, here.where, here.waits, found.state, file),
        )

    def _file(self, rank: int) -> Path:
        return self._subject.logs.hang_directory() / f"rank_{rank}.txt"

    def _write(self, failure: Failure, found: Look, native: str) -> None:
        parts = [
            f"rank {failure.rank}, pid {found.pid} on {failure.host}, round {failure.round}: {failure.message}",
            f"state: {found.doing}",
            f"kernel stack\n{found.kernel}" if found.kernel else "",
            f"Python stacks ({found.source}{f'; {found.why}' if found.why else ''})\n{found.stack}",
            f"Python and native stacks\n{native}" if native else "",
        ]
        path = self._file(failure.rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8", errors="replace")
        except OSError as error:
            log.warning("stacks cannot be written to %s: %s", path, error.strerror)


def _message(here: Spot, stuck: Stuck, found: Look) -> str:
    doing = f"{'waits' if here.waits else 'is'} in {here.call} ({here.where})" if here.where else found.doing
    return f"{stuck.sign} for {stuck.seconds:.0f} s; {doing}" if stuck.sign else doing


def _say_what_broke(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("looking for hangs went wrong: %r", error)
