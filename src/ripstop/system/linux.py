"""Linux features that Python does not have: prctl, memory policies, and readers for /proc.

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

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261, "s390x": 269}  # libc has no wrapper

_subreaper_lock = threading.Lock()  # launches of one program may overlap, each in its own thread
_subreaper_holds = 0  # counted for the process, since the kernel has one flag for it
_was_subreaper = False  # before the first hold
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# fields of /proc/PID/stat, counted from 0; times include those of children that the process has reaped
_NAME, _STATE, _PARENT, _SESSION, _TIMES, _THREADS, _RESIDENT = 1, 2, 3, 5, slice(13, 17), 19, 23


class LinuxProcess(Struct, frozen=True):
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


def exit_with_parent(parent: int) -> Callable[[], None]:
    """For a child to call after the fork; it exits if its parent died before the parent-death signal was set."""
    set_signal = parent_death_signal(signal.SIGKILL)

    def set_signal_or_exit() -> None:
        set_signal()
        if os.getppid() != parent:
            os._exit(1)

    return set_signal_or_exit


def linux_memory_policy_syscall() -> int | None:
    """The number of the set_mempolicy system call; None where it is not permitted (most containers)."""
    import ctypes

    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is None:
        return None
    no_such_policy = ctypes.c_long(0x7FFF)  # EINVAL if the call is permitted; nothing changes
    ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), no_such_policy, None, ctypes.c_long(0))
    return number if ctypes.get_errno() == errno.EINVAL else None


def read_linux_process(pid: int) -> LinuxProcess | None:
    fields = stat_fields(pid)
    return None if fields is None else _linux_process(pid, fields)


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


def _linux_process(pid: int, fields: list[bytes]) -> LinuxProcess:
    name, state = fields[_NAME].decode(errors="replace"), fields[_STATE].decode()
    return LinuxProcess(pid, name, state, int(fields[_PARENT]), int(fields[_SESSION]))


def linux_processes() -> Iterator[LinuxProcess]:
    """All processes of this machine."""
    return (_linux_process(pid, fields) for pid, fields in _linux_process_fields())


def _linux_process_fields() -> Iterator[tuple[int, list[bytes]]]:
    for name in os.listdir("/proc"):
        if name.isdecimal() and (fields := stat_fields(int(name))) is not None:
            yield int(name), fields


def has_linux_processes(sessions: Container[int]) -> bool:
    """Whether any process, zombies included, is in one of these sessions.

    It only calls getsid, about 1 µs for each process on the machine; `linux_processes` opens a file for each.
    """
    for name in os.listdir("/proc"):
        with suppress(OSError):  # it has ended
            if name.isdecimal() and os.getsid(int(name)) in sessions:
                return True
    return False


def children() -> list[LinuxProcess]:
    """Our direct children, zombies included."""
    me = os.getpid()
    pids: set[int] = set()
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children", "rb", buffering=0) as file:
                pids.update(map(int, file.read(1 << 20).split()))
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN, or a thread that has just ended
        return [process for process in linux_processes() if process.parent == me]
    return [process for pid in pids if (process := read_linux_process(pid)) is not None and process.parent == me]


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
    for pid, fields in _linux_process_fields():
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


def usable_cpu_count() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def linux_system_load() -> float:
    """Processes that run or wait for a CPU or a disk, per CPU, in the last minute."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def linux_stolen_time() -> float | None:
    """Seconds since the start of the machine in which a CPU had work and the hypervisor ran others; None: unknown."""
    try:
        with open("/proc/stat", "rb", buffering=0) as file:
            fields = file.read(256).split(b"\n")[0].split()
        return int(fields[8]) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
    except (OSError, IndexError, ValueError):
        return None


def own_linux_memory() -> int:
    """Resident bytes of this process."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read(256).split()[1]) * _PAGE_BYTES


def catches(pid: int, signum: int) -> bool:
    """Whether the process has a handler for this signal."""
    caught = int(_proc_value(pid, "status", b"SigCgt:"), 16)
    return bool(caught >> (signum - 1) & 1)


def boot_time() -> float:
    """A clock that also counts while the machine sleeps, as etcd's does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
