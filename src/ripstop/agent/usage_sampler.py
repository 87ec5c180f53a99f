"""Reads what this node uses now, when an operator asks: processor time, memory, threads and log bytes of the workers,
and its GPUs.

A worker includes every process of its session, such as data loaders.  A GPU driver that hangs does not block the agent
(`system/blocking_calls.py`).  If NVML is missing, the agent does not look for it again.  Any other error affects only
this sample, or only one GPU.
"""

import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ripstop.agent.query_handler import QueriedWorkers
from ripstop.model.usage import GpuSample, NodeSample, RankSample, StandbySample
from ripstop.system import linux
from ripstop.system.blocking_calls import ExclusiveCall
from ripstop.system.gpus import NoNvml, load_nvml, read_gpu_usage

GPU_TIMEOUT_S = 0.4  # for all GPUs; a first read that takes longer is part of the next sample


class GpuUsageSampler:
    """The GPUs of this machine; tests replace `read`."""

    def __init__(self, read: Callable[[], tuple[GpuSample, ...]] | None = None) -> None:
        self._read = read or self._read_nvml
        self._call = ExclusiveCall[tuple[GpuSample, ...]](self._read_or_nothing, ())
        self._is_missing = False
        self._nvml: ModuleType | None = None

    async def sample(self, timeout: float = GPU_TIMEOUT_S) -> tuple[GpuSample, ...]:
        """All GPUs; none if NVML does not reply within the timeout."""
        return () if self._is_missing else await self._call.call(timeout) or ()

    def _read_nvml(self) -> tuple[GpuSample, ...]:
        self._nvml = self._nvml or load_nvml()
        return read_gpu_usage(self._nvml)

    def _read_or_nothing(self) -> tuple[GpuSample, ...]:
        try:
            return self._read()
        except NoNvml:
            self._is_missing = True
            return ()
        except Exception:  # an older sample would be wrong
            return ()


def sample(
    workers: QueriedWorkers | None, gpus: tuple[GpuSample, ...], standbys: tuple[StandbySample, ...] = ()
) -> NodeSample:
    """A sample of this node.  Call it in a thread: with many processes it takes a while."""
    number, ranks = (workers.place.round, _sample_usage_of_ranks(workers)) if workers else (0, ())
    own = time.process_time(), linux.own_linux_memory()
    return NodeSample(
        time.time(), number, *own, tuple(ranks), gpus, standbys, linux.linux_system_load(), linux.linux_stolen_time()
    )


def _sample_usage_of_ranks(workers: QueriedWorkers) -> Iterator[RankSample]:
    children = {child.pid for child in linux.children() if not child.dead}  # a dead worker's pid may be reused
    used_by = linux.usage_of_sessions(children.intersection(workers.pids))
    for local_rank, pid in enumerate(workers.pids):
        if used := used_by.get(pid):
            rank, written = workers.place.first_rank + local_rank, sample_log_usage(workers.logs.files(local_rank))
            usage: tuple[Any, ...] = (rank, round(used.cpu, 3), used.memory, used.threads, used.processes, written)
            if told := workers.progress.get(local_rank):
                usage += (told.step, told.rate, told.age, told.beats, told.step_age)
                made = told.commits
                usage += (made.count, told.commit_age, made.size, made.stall) if made else (None,) * 4
                usage += (told.profile,)
            yield RankSample(*usage)


def sample_log_usage(files: Iterable[Path]) -> int:
    """All bytes ever written to these files.  The size of a log that keeps only its end counts the dropped part too."""
    total = 0
    for file in files:
        try:
            found = file.stat()
        except OSError:
            continue
        if stat.S_ISREG(found.st_mode):
            total += found.st_size
    return total
