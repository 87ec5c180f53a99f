"""Decides which workers of one node hang.  Pure: the current time is an argument.

`hang_monitor.py` collects the observations: heartbeats, which training scripts send with `ripstop.train.heartbeat`, and
activity samples (bytes written, CPU time, stack) of workers that send no heartbeats.  Rules:

1. Without a timeout (`--hang-timeout=0`), no worker is sampled and none hangs.  Heartbeats are counted all the same.
2. A worker that has sent a heartbeat is not sampled.  It hangs when it sends no other heartbeat for the timeout.
3. A worker that has never sent a heartbeat is sampled `SAMPLES_PER_TIMEOUT` times in the timeout.  The sample includes
   its stack only if it was inactive for half of the timeout, because it is expensive to read a stack.
4. A sample shows activity if, since the previous one, the worker wrote a byte, used more than `IDLE_CPU_SHARE` of a
   core, or changed its stack; or if it is runnable and waits for a CPU.
5. A worker without heartbeats hangs when no sample has shown activity for the timeout, and at least the two latest
   samples had the same stack.
6. If a worker cannot be sampled, its timeout starts again.
7. If nothing could be observed, because the machine was paused or heartbeats could not be received, all timeouts start
   again.
8. A call of `State.commit` is no heartbeat, because scripts may commit rarely.  Its step counts if the worker's
   heartbeats have none.
"""

from collections.abc import Mapping

from msgspec import Struct

from ripstop.model.text_formatting import elapsed
from ripstop.model.usage import StepProfile

SAMPLES_PER_TIMEOUT = 4
IDLE_CPU_SHARE = 0.01
NO_HEARTBEAT = "no heartbeat"  # rule 2
NO_ACTIVITY = "no output, no CPU time, the same stack"  # rule 5
RATE_WEIGHT = 0.3  # of the latest rate in the moving average


class Commits(Struct, frozen=True):
    """The commits of a worker's State in this round: their number and the time they took; size and time of the last."""

    count: int
    stall: float
    size: int
    at: float


class WorkerProgress(Struct, frozen=True):
    """What a worker reports: its step, steps per second, seconds since its last heartbeat, number of heartbeats.

    Then the seconds since it reported a step, its commits with the age of the last one, and its step profile.
    """

    step: int | None
    rate: float
    age: float | None
    beats: int | None
    step_age: float | None = None
    commits: Commits | None = None
    commit_age: float | None = None
    profile: StepProfile | None = None


class ActivitySample(Struct, frozen=True):
    """The totals of one worker at one time: bytes written and seconds of CPU time; and its stack, if requested.

    `is_runnable`: it waits for a CPU of a busy machine.
    """

    written: int
    cpu: float
    stack: str = ""
    is_runnable: bool = False


class HungWorker(Struct, frozen=True):
    """How long a worker has made no progress, and the rule that decided it."""

    seconds: float
    reason: str


class StepRange(Struct, frozen=True):
    """The steps of one worker in its round, and the time from the first to the last."""

    first: int
    last: int
    seconds: float


class _Worker(Struct):
    active_at: float  # when a sample last showed activity (rule 4)
    sampled_at: float
    sample: ActivitySample = ActivitySample(0, 0.0)
    same_stack_samples: int = 0  # consecutive inactive samples with the same stack
    heartbeats: int = 0
    heartbeat_at: float = 0.0
    step: int | None = None
    step_at: float = 0.0
    first_step: tuple[int, float] | None = None
    rate: float = 0.0
    step_reported_at: float = 0.0
    has_heartbeat_steps: bool = False  # rule 8
    commits: Commits | None = None
    profile: StepProfile | None = None


class ProgressTracker:
    """The workers of one node in one round, by local rank."""

    def __init__(self, workers: int, timeout: float, now: float) -> None:
        self._timeout = timeout
        self._timeouts_restarted_at = now  # rule 7
        self._workers = {rank: _Worker(active_at=now, sampled_at=now) for rank in range(workers)}
        self._step_ranges: dict[int, StepRange] = {}

    # observations -----------------------------------------------------------------------------------------------------

    def on_heartbeat(self, rank: int, step: int | None, count: int, now: float) -> None:
        """`count` is how many heartbeats the worker has sent; some may be lost."""
        worker = self._workers.get(rank)
        if worker is None:
            return
        worker.heartbeats, worker.heartbeat_at = max(worker.heartbeats + 1, count), now
        if step is not None:
            worker.has_heartbeat_steps = True
            self._on_step(rank, worker, step, now)

    def on_commit(self, rank: int, step: int, commits: Commits, now: float) -> None:
        if worker := self._workers.get(rank):
            worker.commits = commits if commits.count else None
            if not worker.has_heartbeat_steps:
                self._on_step(rank, worker, step, now)

    def on_profile(self, rank: int, profile: StepProfile) -> None:
        if worker := self._workers.get(rank):
            worker.profile = profile

    def _on_step(self, rank: int, worker: _Worker, step: int, now: float) -> None:
        worker.step_reported_at = now
        if worker.first_step is None or step < worker.first_step[0]:
            worker.first_step = (step, now)
        if worker.step is not None and step > worker.step and now > worker.step_at:
            rate = (step - worker.step) / (now - worker.step_at)
            worker.rate = rate if not worker.rate else worker.rate + RATE_WEIGHT * (rate - worker.rate)
        if step != worker.step:
            worker.step, worker.step_at = step, now
        self._step_ranges[rank] = StepRange(worker.first_step[0], step, now - worker.first_step[1])

    def on_sample(self, rank: int, sample: ActivitySample, now: float) -> None:
        worker = self._workers.get(rank)
        if worker is None:
            return
        previous, worker.sample = worker.sample, sample
        interval, worker.sampled_at = now - worker.sampled_at, now
        is_active = (
            sample.is_runnable
            or sample.written != previous.written
            or sample.cpu - previous.cpu > IDLE_CPU_SHARE * interval
            or (previous.stack != "" and sample.stack not in ("", previous.stack))
        )
        if is_active:
            worker.active_at = now
        worker.same_stack_samples = 0 if is_active or not sample.stack else worker.same_stack_samples + 1

    def on_sample_failed(self, rank: int, now: float) -> None:
        """Rule 6."""
        if worker := self._workers.get(rank):
            worker.sampled_at = worker.active_at = now

    def restart_timeouts(self, now: float) -> None:
        """Rule 7."""
        self._timeouts_restarted_at = now
        for worker in self._workers.values():
            worker.sampled_at = worker.active_at = now
            worker.same_stack_samples = 0

    def remove(self, rank: int) -> None:
        """The worker has ended."""
        self._workers.pop(rank, None)

    # decisions --------------------------------------------------------------------------------------------------------

    def next_check(self) -> float | None:
        """When the next sample or the next timeout is due; None: never."""
        if not self._timeout:
            return None
        return min(
            (
                self._silent_since(worker) + self._timeout
                if worker.heartbeats
                else worker.sampled_at + self._timeout / SAMPLES_PER_TIMEOUT
                for worker in self._workers.values()
            ),
            default=None,
        )

    def due_samples(self, now: float) -> dict[int, bool]:
        """The workers to sample now, and whether the sample must include the stack (rule 3)."""
        return {
            rank: now - worker.active_at >= self._timeout / 2
            for rank, worker in self._workers.items()
            if self._timeout
            and not worker.heartbeats
            and now - worker.sampled_at >= self._timeout / SAMPLES_PER_TIMEOUT
        }

    def hung_workers(self, now: float) -> dict[int, HungWorker]:
        hung: dict[int, HungWorker] = {}
        for rank, worker in self._workers.items() if self._timeout else ():
            if worker.heartbeats:
                if now - self._silent_since(worker) >= self._timeout:
                    hung[rank] = HungWorker(now - worker.heartbeat_at, NO_HEARTBEAT)
            elif now - worker.active_at >= self._timeout and worker.same_stack_samples > 1:
                hung[rank] = HungWorker(now - worker.active_at, NO_ACTIVITY)
        return hung

    def _silent_since(self, worker: _Worker) -> float:
        return max(worker.heartbeat_at, self._timeouts_restarted_at)

    # reports ----------------------------------------------------------------------------------------------------------

    def idle_seconds(self, rank: int, now: float) -> float:
        """Seconds since the last heartbeat, or since the last activity of a worker without heartbeats."""
        worker = self._workers.get(rank)
        if worker is None:
            return 0.0
        return now - (worker.heartbeat_at if worker.heartbeats else worker.active_at)

    def worker_progress(self, now: float) -> Mapping[int, WorkerProgress]:
        """The progress of workers that report any."""
        return {
            rank: WorkerProgress(
                worker.step,
                worker.rate,
                now - worker.heartbeat_at if worker.heartbeats else None,
                worker.heartbeats or None,
                None if worker.step is None else now - worker.step_reported_at,
                worker.commits,
                now - worker.commits.at if worker.commits else None,
                worker.profile,
            )
            for rank, worker in self._workers.items()
            if worker.heartbeats or worker.step is not None
        }

    def step_ranges(self) -> Mapping[int, StepRange]:
        """The steps of all workers that reported any, including workers that have ended."""
        return self._step_ranges


def worker_progress_text(workers: Mapping[int, WorkerProgress]) -> str:
    """The steps of this node's workers; empty if they report none."""
    steps = [worker for worker in workers.values() if worker.step is not None]
    if not steps:
        return ""
    slowest = min(steps, key=lambda worker: worker.step or 0)
    rates = [worker.rate for worker in steps if worker.rate]
    parts = [f"step {slowest.step}"]
    if rates:
        rate = sum(rates) / len(rates)
        parts.append(f"{rate:.1f} steps/s" if rate >= 1 else f"{1 / rate:.1f} s/step")
    ages = [worker.commit_age for worker in steps if worker.commit_age is not None]
    if ages:
        parts.append(f"last commit {elapsed(max(ages))} ago")
    silent = max(worker.step_age or 0.0 for worker in steps)
    if silent > max(10.0, 10 / (min(rates) if rates else 1.0)):
        parts.append(f"no step for {elapsed(silent)}")
    return ", ".join(parts)
