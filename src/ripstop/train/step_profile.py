"""Measures where the time of a worker's steps goes, so that the coordinator can tell which rank the others wait for.

In synchronous training all ranks have the same time per step, because the fast ones wait in collectives for the slowest
one.  What differs is *when* a rank enters its collectives after the step began.  torch's flight recorder has these
times for gloo and NCCL.  For NCCL with TORCH_NCCL_ENABLE_TIMING=1, it also has the times that collectives took on the
GPU.

Rules
1.  A step begins where the script reports it (`heartbeat(step)`, or `State.commit` in a script without such
    heartbeats).  Only consecutive steps count.
2.  Reading the recorder takes milliseconds, in which all other ranks wait.  So all ranks read it at the same steps,
    and rarely: it takes at most `MAX_COST` of the time.
3.  A worker that sends point-to-point messages has no profile: the stages of a pipeline differ by design.
4.  It is read by the thread that trains, between two steps.  So no CUDA graph is being captured.
"""

import os
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple

OFF_VARIABLE = "RIPSTOP_STRAGGLER"  # "off": no profiles
MAX_STEPS = 64  # in one profile
MIN_STEPS = 3
MAX_ARRIVALS = 8
MIN_INTERVAL_S = 1.0
MAX_COST = 1 / 500  # share of the time that profiles may take
NS = 1e-9

Entries = Sequence[dict[str, Any]]


class StepProfile(NamedTuple):
    """Medians over some steps, in seconds.

    `period` is the time of a step, `arrivals` the times from its start until the worker entered some of its
    collectives, and `waiting` the time that the collectives took on the GPU; None if torch does not measure it.
    """

    period: float
    arrivals: list[float]
    waiting: float | None


class StepProfiler:
    """The steps of one process; `read` returns the entries of torch's flight recorders."""

    def __init__(
        self,
        read: Callable[[], Entries],
        clock_ns: Callable[[], int] = time.time_ns,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._read = read
        self._clock_ns = clock_ns
        self._timer = timer
        self._starts: deque[tuple[int, int]] = deque(maxlen=MAX_STEPS + 1)  # step and time
        self._has_heartbeats = False
        self._cost = 0.0  # seconds that the last profile took
        self.count = 0

    def on_heartbeat(self, step: int) -> StepProfile | None:
        if not self._has_heartbeats:
            self._has_heartbeats = True
            self._starts.clear()
        return self._on_step(step)

    def on_commit(self, step: int) -> StepProfile | None:
        return None if self._has_heartbeats else self._on_step(step)

    def _on_step(self, step: int) -> StepProfile | None:
        """A step begins; the result is a new profile, if one is due."""
        starts = self._starts
        if starts and step != starts[-1][0] + 1:
            starts.clear()  # rule 1
        starts.append((step, self._clock_ns()))
        if len(starts) <= MIN_STEPS or step % self._steps_between():
            return None
        began = self._timer()
        found = measure_step_profile([at for _, at in starts], self._read())
        now = self._timer()
        self._cost = max(now - began, self._cost / 2)
        starts.clear()  # the profile is part of no step
        starts.append((step, self._clock_ns()))
        self.count += found is not None
        return found

    def _steps_between(self) -> int:
        """A power of two, so that ranks that choose differently still read at common steps (rule 2)."""
        (first, began), (last, now) = self._starts[0], self._starts[-1]
        period = max(1e-6, (now - began) * NS / (last - first))
        wanted = max(MIN_INTERVAL_S, self._cost / MAX_COST) / period
        return 1 << max(2, round(wanted) - 1).bit_length()


def measure_step_profile(starts: Sequence[int], entries: Entries) -> StepProfile | None:
    """The profile of the steps that began at these times (ns); None if too few of them have collectives."""
    steps: list[list[tuple[float, float | None]]] = [[] for _ in starts[1:]]
    index = 0
    times = (_profiled_times(entry) for entry in entries if entry.get("time_created_ns"))
    for created, duration in sorted(times, key=itemgetter(0)):
        while index < len(steps) and created >= starts[index + 1]:
            index += 1
        if index < len(steps) and created >= starts[index]:
            steps[index].append(((created - starts[index]) * NS, duration))
    if any(entry.get("is_p2p") for entry in entries):  # rule 3
        return None
    periods = [end - begin for begin, end in pairwise(starts)]
    used = [(step, period) for step, period in zip(steps, periods, strict=True) if step]
    sizes = sorted(len(step) for step, _ in used)
    if not used:
        return StepProfile(median(periods) * NS, [], None)
    if len(used) < MIN_STEPS:
        return None
    size = sizes[len(sizes) // 2]
    alike = [(step, period) for step, period in used if len(step) == size]
    chosen = sorted({round(i * (size - 1) / max(1, MAX_ARRIVALS - 1)) for i in range(MAX_ARRIVALS)})
    timed = [[duration for _, duration in step] for step, _ in alike]
    waits = [sum(d for d in step if d is not None) for step in timed if all(d is not None for d in step)]
    return StepProfile(
        median(period for _, period in alike) * NS,
        [median(step[i][0] for step, _ in alike) for i in chosen],
        median(waits) if waits else None,
    )


def _profiled_times(entry: dict[str, Any]) -> tuple[int, float | None]:
    duration = entry.get("duration_ms")
    return int(entry["time_created_ns"]), None if duration is None else duration / 1000


def read_collectives_for_step_profile() -> Entries:
    """The latest collectives of this process, of all backends."""
    core = sys.modules.get("torch._C._distributed_c10d")
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        if dump := getattr(core, name, None):
            # torch's own bytes, from this process; its JSON takes twice as long
            found = pickle.loads(dump(includeCollectives=True, includeStackTraces=False, onlyActive=False))
            entries += found.get("entries", ())
    return entries


def open_profiler() -> StepProfiler | None:
    """None if this worker has no peers, or stragglers are not looked for."""
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    return None if alone or os.environ.get(OFF_VARIABLE) == "off" else StepProfiler(read_collectives_for_step_profile)
