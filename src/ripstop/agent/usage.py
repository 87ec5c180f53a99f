"""Reads what this node's workers use now: processor time, memory, threads and log bytes.

A worker includes every process of its session, such as data loaders.
"""

import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ripstop.diagnostics.progress import WorkerProgress
from ripstop.logs.directory import RoundLogs
from ripstop.model.round import Place
from ripstop.model.usage import GpuSample, NodeSample, RankSample
from ripstop.system import linux


def sample(
    place: Place | None,
    pids: Sequence[int],
    logs: RoundLogs | None,
    progress: Mapping[int, WorkerProgress],
    gpus: tuple[GpuSample, ...],
) -> NodeSample:
    """A sample of this node.  Call it in a thread: with many processes it takes a while."""
    ranks: list[RankSample] = []
    if place is not None and logs is not None:
        children = {child.pid for child in linux.children() if not child.dead}  # a dead worker's pid may be reused
        used = linux.usage_of_sessions(children.intersection(pids))
        for local_rank, pid in enumerate(pids):
            if pid in used:
                written = log_bytes(logs.files(local_rank))
                ranks.append(_rank_sample(place.first_rank + local_rank, used[pid], written, progress.get(local_rank)))
    return NodeSample(
        at=time.time(),
        round=place.round if place is not None else 0,
        cpu=time.process_time(),
        memory=linux.own_memory(),
        ranks=tuple(ranks),
        gpus=gpus,
    )


def _rank_sample(rank: int, used: linux.Usage, written: int, progress: WorkerProgress | None) -> RankSample:
    usage = (rank, round(used.cpu, 3), used.memory, used.threads, used.processes, written)
    if progress is None:
        return RankSample(*usage)
    return RankSample(*usage, progress.step, progress.rate, progress.age, progress.beats)


def log_bytes(files: Iterable[Path]) -> int:
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
