"""What this node's workers use now: processor time, memory, threads, bytes of logs.  Read when somebody asks.

A worker and whatever it started, data loaders and the like, are the session that has its pid.
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
    paces: Mapping[int, WorkerProgress],
    gpus: tuple[GpuSample, ...],
) -> NodeSample:
    """This node now.  It may take a while where there are many processes: to be called in a thread."""
    ranks: list[RankSample] = []
    if place is not None and logs is not None:
        ours = {child.pid for child in linux.children() if not child.dead}  # others may have a dead worker's pid now
        used = linux.usage_of_sessions(ours.intersection(pids))
        for local_rank, pid in enumerate(pids):
            if pid in used:
                rank = place.first_rank + local_rank
                files = logs.files(local_rank)
                ranks.append(_of_rank(rank, used[pid], log_bytes(files), paces.get(local_rank)))
    return NodeSample(
        at=time.time(),
        round=place.round if place is not None else 0,
        cpu=time.process_time(),
        memory=linux.own_memory(),
        ranks=tuple(ranks),
        gpus=gpus,
    )


def _of_rank(rank: int, used: linux.Usage, logged: int, pace: WorkerProgress | None) -> RankSample:
    own = (rank, round(used.cpu, 3), used.memory, used.threads, used.processes, logged)
    return RankSample(*own, pace.step, pace.rate, pace.age, pace.beats) if pace else RankSample(*own)


def log_bytes(files: Iterable[Path]) -> int:
    """What was ever written to these; a file of which only the end is kept has the size of all that was written."""
    total = 0
    for file in files:
        try:
            found = file.stat()
        except OSError:
            continue
        if stat.S_ISREG(found.st_mode):
            total += found.st_size
    return total
