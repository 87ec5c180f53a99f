"""Linux features that Python does not have: prctl, memory policies, fallocate, and readers for /proc.

Reading every process of a large host is cheap: one small file each, `/proc/PID/stat`.
"""

# Called for every process of the host: pathlib is too slow.
# ruff: noqa: PTH123, PTH208

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import suppress
from functools import partial

from msgspec import Struct

from ripstop.model.errors import StartError

DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261, "s390x": 269}  # libc has no wrapper

_subreaper_lock = threading.Lock()  # launches of one program may overlap, each in its own thread
_subreaper_holds = 0  # counted for the process, since the kernel has one flag for it
_was_subreaper = False  # before the first hold
_APPEND_MARGIN_BYTES = 1 << 16  # after the end of a file, which another process may just fill
_PUNCH_BYTES = 1 << 16  # a multiple of every usual block size
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# fields of /proc/PID/stat, counted from 0; times include those of children that the process has reaped
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
    """Adopt orphans among our descendants, instead of init."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise StartError(
            f"the agent must adopt its workers' orphans, and the kernel refuses: {os.strerror(ctypes.get_errno())}; "
            "allow prctl(PR_SET_CHILD_SUBREAPER)."
        )


def is_subreaper() -> bool:
    import ctypes

    flag = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(flag), 0, 0, 0)
    return bool(flag.value)


def stop_being_subreaper() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def hold_subreaper() -> None:
    """Be a subreaper until `release_subreaper` was called as often as this."""
    global _subreaper_holds, _was_subreaper
    with _subreaper_lock:
        if _subreaper_holds == 0:
            _was_subreaper = is_subreaper()
        become_subreaper()
        _subreaper_holds += 1


def release_subreaper() -> None:
    global _subreaper_holds
    with _subreaper_lock:
        _subreaper_holds -= 1
        if _subreaper_holds == 0 and not _was_subreaper:
            stop_being_subreaper()


def parent_death_signal(signum: int) -> Callable[[], None]:
    """Return a function for a new child: the kernel sends it this signal when the thread that started it ends.

    All imports happen now, so that the child may call it between fork and exec.
    """
    import ctypes

    return partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, int(signum), 0, 0, 0)


def memory_policy_call() -> int | None:
    """The number of the set_mempolicy system call; None where it is not permitted (most containers)."""
    import ctypes

    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is None:
        return None
    no_such_policy = ctypes.c_long(0x7FFF)  # EINVAL if the call is permitted; nothing changes
    ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), no_such_policy, None, ctypes.c_long(0))
    return number if ctypes.get_errno() == errno.EINVAL else None


def read_process(pid: int) -> Process | None:
    fields = stat_fields(pid)
    return None if fields is None else _process(pid, fields)


def stat_fields(pid: int) -> list[bytes] | None:
    """The fields of `/proc/PID/stat`, in the order of proc(5); None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            line = file.read(2048)
    except OSError:
        return None
    head, _, rest = line.rpartition(b")")  # a name may contain spaces and brackets
    number, _, name = head.partition(b" (")
    fields = [number, name, *rest.split()]
    return fields if len(fields) > _RESIDENT else None


def _process(pid: int, fields: list[bytes]) -> Process:
    name, state = fields[_NAME].decode(errors="replace"), fields[_STATE].decode()
    return Process(pid, name, state, int(fields[_PARENT]), int(fields[_SESSION]))


def processes() -> Iterator[Process]:
    """All processes of this machine."""
    return (_process(pid, fields) for pid, fields in _all_fields())


def _all_fields() -> Iterator[tuple[int, list[bytes]]]:
    for name in os.listdir("/proc"):
        if name.isdecimal() and (fields := stat_fields(int(name))) is not None:
            yield int(name), fields


def has_processes(sessions: Container[int]) -> bool:
    """Whether any process, zombies included, is in one of these sessions.

    It only calls getsid, about 1 µs for each process on the machine; `processes` opens a file for each.
    """
    for name in os.listdir("/proc"):
        with suppress(OSError):  # it has ended
            if name.isdecimal() and os.getsid(int(name)) in sessions:
                return True
    return False


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
    return [process for pid in pids if (process := read_process(pid)) is not None and process.parent == me]


class Usage(Struct):
    """The resources of one session's processes; shared pages count for each process, as in `ps` and `top`."""

    cpu: float = 0.0  # seconds in total
    memory: int = 0
    threads: int = 0
    processes: int = 0
    written: int = 0  # bytes in total
    ready: bool = False  # at least one is running or runnable


def usage_of_sessions(sessions: Iterable[int]) -> dict[int, Usage]:
    """By session; without sessions that have no live process."""
    found = {session: Usage() for session in sessions}
    for pid, fields in _all_fields():
        used = found.get(int(fields[_SESSION]))
        if used is not None and fields[_STATE] not in b"ZX":
            used.cpu += sum(map(int, fields[_TIMES])) * _TICK_S
            used.memory += int(fields[_RESIDENT]) * _PAGE_BYTES
            used.threads += int(fields[_THREADS])
            used.processes += 1
            used.written += int(_proc_value(pid, "io", b"wchar:"))  # 0 for a program of another user
            used.ready |= fields[_STATE] == b"R"
    return {session: used for session, used in found.items() if used.processes}


def _proc_value(pid: int, file_name: str, key: bytes) -> bytes:
    """The first word after this key in a file of /proc/PID; 0 if it cannot be read."""
    try:
        with open(f"/proc/{pid}/{file_name}", "rb", buffering=0) as file:
            lines = file.read(1 << 16).splitlines()
    except OSError:
        return b"0"
    return next((line.split()[1] for line in lines if line.startswith(key)), b"0")


def load() -> float:
    """Processes that run or wait for a CPU or a disk, per CPU, in the last minute."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def stolen_time() -> float | None:
    """Seconds since the start of the machine in which a CPU had work and the hypervisor ran others; None: unknown."""
    try:
        with open("/proc/stat", "rb", buffering=0) as file:
            fields = file.read(256).split(b"\n")[0].split()
        return int(fields[8]) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
    except (OSError, IndexError, ValueError):
        return None


def own_memory() -> int:
    """Resident bytes of this process."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read(256).split()[1]) * _PAGE_BYTES


def catches(pid: int, signum: int) -> bool:
    """Whether the process has a handler for this signal."""
    caught = int(_proc_value(pid, "status", b"SigCgt:"), 16)
    return bool(caught >> (signum - 1) & 1)


def free_range(fd: int, start: int, end: int) -> int:
    """Free the disk space of a part of a file, without moving the rest; return up to where it is free now."""
    end -= end % _PUNCH_BYTES
    if end <= start:
        return start
    _fallocate(fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, start, end - start)
    return end  # on a file system without holes, nothing is freed


def reserve_range(fd: int, start: int, end: int) -> bool:
    """Allocate disk space for a later write; False if the disk is full.

    On a file system without allocation, the free space that it reports decides.
    """
    error = _fallocate(fd, _FALLOC_FL_KEEP_SIZE, start, end - start)
    if error in (errno.EOPNOTSUPP, errno.ENOSYS):
        return not is_full(fd)
    return error not in DISK_FULL_ERRORS


def release_reserved(fd: int, size: int) -> None:
    """Free the disk space that `reserve_range` allocated in the `size` bytes after the end of the file.

    Only ftruncate frees it on all file systems, but it also removes what another process appends meanwhile.  So it is
    used only with a lease, which the kernel grants if no other process has the file open.  Otherwise a hole is made
    behind the end; ext4 and btrfs ignore it.
    """
    import fcntl

    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # for a process that opens the file; the default ends ours
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        hole = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
        _fallocate(fd, hole, os.fstat(fd).st_size + _APPEND_MARGIN_BYTES, size)
        return
    try:
        os.ftruncate(fd, os.fstat(fd).st_size)
    finally:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def boot_time() -> float:
    """A clock that also counts while the machine sleeps, as etcd's does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def is_full(where: "int | str | os.PathLike[str]") -> bool:
    """Whether this file system has less than a page of free space."""
    try:
        found = os.statvfs(where)
    except OSError:
        return False
    return found.f_blocks > 0 and found.f_bavail * found.f_frsize < _PAGE_BYTES


def _fallocate(fd: int, mode: int, start: int, size: int) -> int:
    """Return the errno; 0 for success."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return ctypes.get_errno() if libc.fallocate(fd, mode, start, size) else 0
