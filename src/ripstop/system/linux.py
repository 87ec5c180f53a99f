"""The few things Linux offers and Python does not: prctl, memory policies, holes in files, and what /proc says.

A look at every process of a large host is cheap: one small file each, `/proc/PID/stat`.
"""

# Called for every process of the host.
# ruff: noqa: PTH123, PTH208

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from msgspec import Struct

from ripstop.model.errors import StartError

FULL = (errno.ENOSPC, errno.EDQUOT)
NEWBORN = "ripstop-newborn"  # the name of a worker that the agent does not know yet; `zygote.py` gives and takes it
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261, "s390x": 269}  # libc has no function
_BLOCK = 1 << 16  # bytes: at least what a file system gives back at once
_TICK = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
# /proc/PID/stat, counted from 0; times are the process's own, and those of children that it has buried
_NAME, _STATE, _PARENT, _SESSION, _TIMES, _THREADS, _RESIDENT = 1, 2, 3, 5, slice(13, 17), 19, 23


class Process(Struct, frozen=True):
    """One line of `/proc/PID/stat`."""

    pid: int
    name: str
    state: str
    parent: int
    session: int

    @property
    def dead(self) -> bool:
        return self.state in "ZX"


def become_subreaper() -> None:
    """Orphans among our descendants become our children instead of init's."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise StartError(
            f"the agent must adopt its workers' orphans, and the kernel refused: {os.strerror(ctypes.get_errno())}; "
            "allow prctl(PR_SET_CHILD_SUBREAPER)."
        )


def is_subreaper() -> bool:
    import ctypes

    answer = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0)
    return bool(answer.value)


def stop_being_subreaper() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def parent_death_signal(signum: int) -> Callable[[], None]:
    """For a new child to call: the kernel sends it this signal when the thread that started it is gone.

    Everything it needs is loaded now, so that it may be called between fork and exec.
    """
    import ctypes

    return partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, int(signum), 0, 0, 0)


def memory_policy_call() -> int | None:
    """The number of the system call that sets a memory policy; None where it may not be made (most containers)."""
    import ctypes

    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is None:
        return None
    no_such_policy = ctypes.c_long(0x7FFF)  # whoever may call is told that it is invalid, and nothing changes
    ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), no_such_policy, None, ctypes.c_long(0))
    return number if ctypes.get_errno() == errno.EINVAL else None


def look(pid: int) -> Process | None:
    """The process with this pid, or None."""
    fields = stat_fields(pid)
    return None if fields is None else _process(pid, fields)


def stat_fields(pid: int) -> list[bytes] | None:
    """What `/proc/PID/stat` says, in the order of proc(5); None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            line = file.read(2048)
    except OSError:
        return None
    head, _, rest = line.rpartition(b")")  # a name may hold spaces and brackets
    number, _, name = head.partition(b" (")
    fields = [number, name, *rest.split()]
    return fields if len(fields) > _RESIDENT else None


def _process(pid: int, fields: list[bytes]) -> Process:
    name, state = fields[_NAME].decode(errors="replace"), fields[_STATE].decode()
    return Process(pid, name, state, int(fields[_PARENT]), int(fields[_SESSION]))


def processes() -> Iterator[Process]:
    """Every process there is."""
    return (_process(pid, fields) for pid, fields in _all_fields())


def _all_fields() -> Iterator[tuple[int, list[bytes]]]:
    for name in os.listdir("/proc"):
        if name.isdecimal() and (fields := stat_fields(int(name))) is not None:
            yield int(name), fields


def children() -> list[Process]:
    """Our direct children, zombies included."""
    me = os.getpid()
    pids: set[int] = set()
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children", "rb", buffering=0) as file:
                pids.update(map(int, file.read(1 << 20).split()))
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN, or a thread that has just ended
        return [process for process in processes() if process.parent == me]
    return [process for pid in pids if (process := look(pid)) is not None and process.parent == me]


class Usage(Struct):
    """What the processes of one session use together; pages that they share count in each, as in `ps` and `top`."""

    cpu: float = 0.0  # seconds until now
    memory: int = 0
    threads: int = 0
    processes: int = 0
    written: int = 0  # bytes until now
    ready: bool = False  # one of them runs, or could


def usage_of_sessions(sessions: Iterable[int]) -> dict[int, Usage]:
    """By session; those in which nobody lives are missing."""
    found = {session: Usage() for session in sessions}
    for pid, fields in _all_fields():
        used = found.get(int(fields[_SESSION]))
        if used is not None and fields[_STATE] not in b"ZX":
            used.cpu += sum(map(int, fields[_TIMES])) * _TICK
            used.memory += int(fields[_RESIDENT]) * _PAGE
            used.threads += int(fields[_THREADS])
            used.processes += 1
            used.written += _written(pid)
            used.ready |= fields[_STATE] == b"R"
    return {session: used for session, used in found.items() if used.processes}


def _written(pid: int) -> int:
    """Bytes; 0 where they are not ours to see, as those of a program with other rights."""
    try:
        with open(f"/proc/{pid}/io", "rb", buffering=0) as file:
            lines = file.read(1024).splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(b"wchar:")), 0)


def own_memory() -> int:
    """Bytes that this process holds."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read(256).split()[1]) * _PAGE


def catches(pid: int, signum: int) -> bool:
    """Whether the process has a handler for this signal."""
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
            lines = file.read(1 << 16).splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith(b"SigCgt:")), 0)
    return bool(caught >> (signum - 1) & 1)


def free_range(fd: int, start: int, end: int) -> int:
    """Gives the disk space of a part of a file back, without moving the rest; up to where it is free now."""
    end -= end % _BLOCK
    if end <= start:
        return start
    _fallocate(fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, start, end - start)
    return end  # a file system that cannot do it keeps it all


def reserve_range(fd: int, start: int, end: int) -> bool:
    """Has disk space ready for what is going to be written there; false if the disk is full.

    A file system that cannot do it has as much room as it says.
    """
    why = _fallocate(fd, _FALLOC_FL_KEEP_SIZE, start, end - start)
    if why in (errno.EOPNOTSUPP, errno.ENOSYS):
        return not is_full(fd)
    return why not in FULL


def is_full(where: "int | str | os.PathLike[str]") -> bool:
    """Whether nothing can be written to this file system any more."""
    try:
        found = os.statvfs(where)
    except OSError:
        return False
    return found.f_blocks > 0 and found.f_bavail * found.f_frsize < _PAGE


def _fallocate(fd: int, mode: int, start: int, size: int) -> int:
    """What went wrong, as a number; 0 if nothing did."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return ctypes.get_errno() if libc.fallocate(fd, mode, start, size) else 0
