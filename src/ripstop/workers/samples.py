"""What this node's workers use now: processor time, memory, threads, bytes of logs.  Read when somebody asks.

One look at `/proc/PID/stat` of every process: a worker and whatever it started, data loaders and the like, are the
session that has its pid.  Pages that processes share count in each of them, as in `ps` and `top`.
"""

# Called for every process of the host.
# ruff: noqa: PTH123, PTH208

import os
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ripstop.observe.progress import Pace
from ripstop.observe.sample import GpuSample, NodeSample, RankSample
from ripstop.round import Place
from ripstop.workers.logs import RoundLogs

_TICK = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
# /proc/PID/stat, counted from behind the name
_PARENT, _SESSION, _TIMES, _THREADS, _RESIDENT = 1, 3, slice(11, 15), 17, 21


@dataclass(slots=True)
class Usage:
    """What the processes of one session use together."""

    cpu: float = 0.0
    memory: int = 0
    threads: int = 0
    processes: int = 0


def sample(
    place: Place | None,
    pids: Sequence[int],
    logs: RoundLogs | None,
    paces: Mapping[int, Pace],
    gpus: tuple[GpuSample, ...],
) -> NodeSample:
    """This node now.  It may take a while where there are many processes: to be called in a thread."""
    ranks: list[RankSample] = []
    if place is not None and logs is not None:
        used = usage(pids)
        for local_rank, pid in enumerate(pids):
            if pid in used:
                rank = place.first_rank + local_rank
                files = logs.files(local_rank)
                ranks.append(_of_rank(rank, used[pid], log_bytes(files), paces.get(local_rank)))
    return NodeSample(
        at=time.time(),
        round=place.round if place is not None else 0,
        cpu=time.process_time(),
        memory=_own_memory(),
        ranks=tuple(ranks),
        gpus=gpus,
    )


def _of_rank(rank: int, used: Usage, logged: int, pace: Pace | None) -> RankSample:
    own = (rank, round(used.cpu, 3), used.memory, used.threads, used.processes, logged)
    return RankSample(*own, pace.step, pace.rate, pace.age, pace.beats) if pace else RankSample(*own)


def usage(pids: Iterable[int]) -> dict[int, Usage]:
    """By worker; those that are gone are missing."""
    wanted = {str(pid).encode(): Usage() for pid in pids}
    me = str(os.getpid()).encode()
    alive: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb", buffering=0) as file:
                fields = file.read(1024).rpartition(b")")[2].split(None, _RESIDENT + 1)
        except OSError:
            continue  # it has just ended
        if len(fields) <= _RESIDENT or (used := wanted.get(fields[_SESSION])) is None or fields[0] in b"ZX":
            continue
        if fields[_SESSION] == name.encode():
            if fields[_PARENT] != me:
                continue  # somebody else has its pid now
            alive.add(int(name))
        used.cpu += sum(map(int, fields[_TIMES])) * _TICK
        used.memory += int(fields[_RESIDENT]) * _PAGE
        used.threads += int(fields[_THREADS])
        used.processes += 1
    return {pid: used for pid, used in ((int(name), used) for name, used in wanted.items()) if pid in alive}


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


def _own_memory() -> int:
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read(256).split()[1]) * _PAGE
