"""The few things Linux offers and Python does not: prctl, memory policies, and what /proc says of a process.

Reading only `/proc/PID/stat` keeps a look at every process of a large host cheap.
"""

# Called for every process of the host.
# ruff: noqa: PTH123, PTH208

import os
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import partial

from ripstop.errors import StartError

NEWBORN = "ripstop-newborn"  # the name of a worker that the agent does not know yet; `zygote.py` gives and takes it
_PR_SET_PDEATHSIG = 1
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_PR_SET_CHILD_SUBREAPER = 36
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261, "s390x": 269}  # libc has no function
_PR_GET_CHILD_SUBREAPER = 37


@dataclass(frozen=True, slots=True)
class Process:
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
    import errno

    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is None:
        return None
    no_such_policy = ctypes.c_long(0x7FFF)  # whoever may call is told that it is invalid, and nothing changes
    ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), no_such_policy, None, ctypes.c_long(0))
    return number if ctypes.get_errno() == errno.EINVAL else None


def look(pid: int) -> Process | None:
    """The process with this pid, or None."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            line = file.read(1024)
    except OSError:
        return None
    head, _, rest = line.rpartition(b")")  # a name may hold spaces and brackets
    fields = rest.split(None, 5)
    if len(fields) < 5:
        return None
    name = head.partition(b"(")[2].decode(errors="replace")
    return Process(pid, name, fields[0].decode(), int(fields[1]), int(fields[3]))


def processes() -> Iterator[Process]:
    """Every process there is."""
    for name in os.listdir("/proc"):
        if name.isdecimal() and (process := look(int(name))) is not None:
            yield process


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


@dataclass(frozen=True, slots=True)
class Work:
    """What processes have done since they were started: bytes written, seconds of CPU time; `ready` to do more."""

    written: int
    cpu: float
    ready: bool


def work_of_sessions(sessions: Container[int]) -> dict[int, Work]:
    """The work of everybody who lives in these sessions, by session."""
    done: dict[int, Work] = {}
    for process in processes():
        if process.session in sessions and (work := _work(process.pid)) is not None:
            so_far = done.get(process.session, Work(0, 0.0, False))
            ready = so_far.ready or process.state == "R"
            done[process.session] = Work(so_far.written + work[0], so_far.cpu + work[1], ready)
    return done


def _work(pid: int) -> tuple[int, float] | None:
    """Bytes written and CPU time of one process."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            fields = file.read(2048).rpartition(b")")[2].split()
        cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return None
    try:
        with open(f"/proc/{pid}/io", "rb", buffering=0) as file:
            lines = file.read(1024).splitlines()
        written = next(int(line.split()[1]) for line in lines if line.startswith(b"wchar:"))
    except (OSError, StopIteration):
        written = 0  # not ours to see, as that of a program with other rights
    return written, cpu


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
    import ctypes

    libc = ctypes.CDLL(None)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, start, end - start)
    return end  # a file system that cannot do it keeps it all
