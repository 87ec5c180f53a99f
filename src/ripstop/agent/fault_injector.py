"""Injects the faults of `ripstop chaos` into this node (`--allow-chaos`): its workers, its agent, its disk.

Rules: (1) only this agent's own workers and this agent itself are signalled; (2) a fault is recorded before it is
injected; (3) one fault at a time; (4) a lasting fault ends after its seconds, even if the client, the job or this agent
ends before: workers end with their agent, the file that fills the disk has no name, and a process of its own continues
a stopped agent; (5) a fault that is impossible on this machine is skipped, and the reply says why.
"""

import asyncio
import errno
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ripstop.agent.event_recorder import EventRecorder
from ripstop.agent.query_handler import QueriedWorkers
from ripstop.model.errors import QueryFailed
from ripstop.model.events import FaultEnded, FaultInjected
from ripstop.model.fault_injection import EXIT_SIGNAL, Fault, FaultKind, Injection
from ripstop.model.text_formatting import format_ascii_json, format_bytes
from ripstop.protocol.messages import Query, Reply
from ripstop.system import linux
from ripstop.system.blocking_calls import run_in_daemon_thread, start_daemon_thread
from ripstop.system.cgroup_memory import limit_below
from ripstop.transport.link import Link

REPLY_TIME_S = 0.1  # in which the reply leaves, before a fault that would stop it
SLOW_PERIOD_S = 0.2
DISK_CHUNK_BYTES = 16 << 20
SMALL_CGROUP_BYTES = 4 << 20
MAX_MOVES = 100
STOP_AGENT = """
import os, signal, sys, time
agent, before, seconds = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_IGN)
for wait, number in ((before, signal.SIGSTOP), (seconds, signal.SIGCONT)):
    time.sleep(wait)
    if os.getppid() == agent:
        os.kill(agent, number)
"""


class FaultInjector:
    """`signal_worker` signals a process if it belongs to a live worker; `run_task` runs work that takes time."""

    def __init__(
        self,
        *,
        find_workers: Callable[[], QueriedWorkers | None],
        signal_worker: Callable[[int, int], None],
        link: Link,
        recorder: EventRecorder,
        directory: Path,
        run_task: Callable[[Coroutine[None, None, None]], Any],
    ) -> None:
        self._find_workers = find_workers
        self._signal_worker = signal_worker
        self._link = link
        self._recorder = recorder
        self._directory = directory
        self._run_task = run_task
        self._active: Fault | None = None
        self._reconnected: asyncio.Future[None] | None = None

    def answer(self, query: Query) -> Reply:
        """Inject the fault that the query names; without one, reply that this agent may."""
        try:
            if query.argument in ("", "{}"):
                return Reply(query.number, format_ascii_json(Injection()))
            return Reply(query.number, format_ascii_json(self._inject(msgspec.json.decode(query.argument, type=Fault))))
        except msgspec.MsgspecError as error:
            return Reply(query.number, error=f"the fault cannot be read: {error}")
        except QueryFailed as why:
            return Reply(query.number, error=str(why))

    def on_connected(self) -> None:
        if self._reconnected is not None and not self._reconnected.done():
            self._reconnected.set_result(None)

    def _inject(self, fault: Fault) -> Injection:
        if self._active is not None:
            raise QueryFailed(f"the fault {self._active.kind} is not over on this node; wait for its end")
        workers = self._find_workers()
        if fault.kind.has_rank:
            if workers is None or workers.all_stopped:
                raise QueryFailed("no workers run on this node now")
            local_rank = workers.local_rank(fault.rank)
            if local_rank in workers.ended:
                raise QueryFailed(f"rank {fault.rank} has ended")
            pid = workers.pids[local_rank]
        else:
            pid = os.getpid()
        try:
            work = self._work(fault, pid)
        except _Impossible as why:
            return Injection(skipped=str(why))
        round = workers.place.round if workers is not None else 0
        self._active = fault
        duration = fault.seconds if fault.kind.is_lasting else 0
        self._recorder.record(FaultInjected(fault.id, fault.kind, round, fault.rank, pid, duration), logging.WARNING)
        self._run_task(self._do(fault, work))
        return Injection(round)

    async def _do(self, fault: Fault, work: Coroutine[None, None, str]) -> None:
        result = ""
        try:
            result = await work
        except Exception as error:  # an experiment must not end the agent
            result = f"failed: {error}"
        finally:
            self._active = None
        self._recorder.record(FaultEnded(fault.id, fault.kind, result), logging.WARNING)

    def _work(self, fault: Fault, pid: int) -> Coroutine[None, None, str]:
        """What to do, up to the end of the fault; returns a remark.  Raises `_Impossible` (rule 5)."""
        match fault.kind:
            case FaultKind.WORKER_KILL:
                return self._signal(pid, signal.SIGKILL)
            case FaultKind.WORKER_SEGV:
                return self._signal(pid, signal.SIGSEGV)
            case FaultKind.WORKER_EXIT:
                if not linux.catches(pid, EXIT_SIGNAL):
                    raise _Impossible("only workers that the zygote forked can be made to exit; use worker-kill")
                return self._signal(pid, EXIT_SIGNAL)
            case FaultKind.WORKER_OOM:
                return self._exhaust_memory(pid, _small_cgroup(pid), fault.seconds)
            case FaultKind.WORKER_STOP:
                return self._stop_worker(pid, fault.seconds)
            case FaultKind.WORKER_SLOW:
                return self._slow_worker(pid, fault.seconds, fault.percent)
            case FaultKind.AGENT_KILL:
                return self._signal_agent(signal.SIGKILL)
            case FaultKind.AGENT_STOP:
                return self._stop_agent(fault.seconds)
            case FaultKind.CONNECTION_DROP:
                if self._link.local_host is None:
                    raise _Impossible("this agent hosts the coordinator, so there is no connection to drop")
                return self._drop_connection()
            case FaultKind.DISK_FILL:
                return self._fill_disk(_unnamed_file_for_fault(self._directory), fault.bytes, fault.seconds)

    # workers ----------------------------------------------------------------------------------------------------------

    async def _signal(self, pid: int, signum: int) -> str:
        self._signal_worker(pid, signum)
        return ""

    async def _stop_worker(self, pid: int, seconds: float) -> str:
        self._signal_worker(pid, signal.SIGSTOP)
        try:
            return await _await_injected_fault_end(pid, seconds)
        finally:
            self._signal_worker(pid, signal.SIGCONT)

    async def _slow_worker(self, pid: int, seconds: float, percent: int) -> str:
        loop, stopped = asyncio.get_running_loop(), SLOW_PERIOD_S * percent / 100
        end, why = loop.time() + seconds, ""
        while loop.time() < end and not why:
            why = await self._stop_worker(pid, stopped) or await _await_injected_fault_end(pid, SLOW_PERIOD_S - stopped)
        return why

    async def _exhaust_memory(self, pid: int, group: Path, seconds: float) -> str:
        """Memory that the worker has is not counted in its new cgroup; what it allocates from now on is."""
        try:
            _move_process_for_fault(pid, group)
            return await _await_injected_fault_end(pid, seconds) or "the worker allocated too little to be killed"
        finally:
            _close_fault_cgroup(group)

    # the agent --------------------------------------------------------------------------------------------------------

    async def _signal_agent(self, signum: int) -> str:
        await asyncio.sleep(REPLY_TIME_S)
        os.kill(os.getpid(), signum)
        return ""

    async def _stop_agent(self, seconds: float) -> str:
        """By another process, which continues this one, too.  No signal to the agent's process group ends it."""
        process = subprocess.Popen(  # noqa: ASYNC220  # not in a thread: it ends with the thread that started it
            [sys.executable, "-ISc", STOP_AGENT, str(os.getpid()), str(REPLY_TIME_S), str(seconds)],
            stdin=subprocess.DEVNULL,
            preexec_fn=linux.exit_with_parent(os.getpid()),  # noqa: PLW1509  # it only calls prctl and getppid
        )
        await run_in_daemon_thread(process.wait, timeout=None)
        return ""

    async def _drop_connection(self) -> str:
        await asyncio.sleep(REPLY_TIME_S)
        self._reconnected = asyncio.get_running_loop().create_future()
        self._link.drop()
        await self._reconnected
        return ""

    # the disk ---------------------------------------------------------------------------------------------------------

    async def _fill_disk(self, file: BinaryIO, size: int, seconds: float) -> str:
        is_over = threading.Event()
        try:
            filling = start_daemon_thread(partial(_inject_disk_fill, file, size, is_over), "ripstop-disk-fill")
            await asyncio.sleep(seconds)
        finally:
            is_over.set()
        taken = await filling
        return "" if taken == size else f"{format_bytes(taken)} were taken, then the disk was full"


class _Impossible(Exception):
    """Why this machine cannot inject the fault."""


async def _await_injected_fault_end(pid: int, seconds: float) -> str:
    """Wait for this time, or until the process ends; a remark if it ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return "the worker ended"
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        async with asyncio.timeout(seconds):
            await ended.wait()
            return "the worker ended"
    except TimeoutError:
        return ""
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def _small_cgroup(pid: int) -> Path:
    """A new memory cgroup with a small limit, below the worker's own."""
    try:
        limit = limit_below(pid, f"ripstop-chaos-{pid}")
        group = limit.parent
        with suppress(OSError):  # of an agent that was killed
            group.rmdir()
        group.mkdir()
        try:
            if not limit.exists():
                raise OSError(errno.ENOTSUP, "its memory controller is not enabled for children")
            limit.write_text(str(SMALL_CGROUP_BYTES))
        except OSError:
            group.rmdir()
            raise
    except OSError as error:
        raise _Impossible(f"a memory cgroup below the worker's is needed: {error.strerror}") from error
    return group


def _move_process_for_fault(pid: int, group: Path) -> None:
    (group / "cgroup.procs").write_text(str(pid))


def _close_fault_cgroup(group: Path) -> None:
    """Move the worker and its children back; they may fork meanwhile."""
    for _ in range(MAX_MOVES):
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(OSError):  # it has ended
                _move_process_for_fault(int(pid), group.parent)
        with suppress(OSError):
            group.rmdir()
            return
    raise OSError(errno.EBUSY, f"processes stay in {group}")


def _unnamed_file_for_fault(directory: Path) -> BinaryIO:
    """A file without a name: the kernel frees it when the agent ends.  Links are not followed."""
    from tempfile import TemporaryFile  # rarely needed

    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if _fault_would_fill_memory(fd):
                raise _Impossible(f"{directory} is in memory; choose a directory on disk with --log-dir")
            return TemporaryFile(dir=f"/proc/self/fd/{fd}", buffering=0)
        finally:
            os.close(fd)
    except OSError as error:
        raise _Impossible(f"no file can be made in {directory}: {error.strerror}") from error


def _fault_would_fill_memory(fd: int) -> bool:
    """Whether this directory is in memory: the fault must fill a disk, and nothing else."""
    device = os.fstat(fd).st_dev
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        fields = line.split()
        if fields[2] == f"{os.major(device)}:{os.minor(device)}":
            return fields[fields.index("-") + 1] in ("tmpfs", "ramfs")
    return False


def _inject_disk_fill(file: BinaryIO, size: int, is_over: threading.Event) -> int:
    """Take disk space up to this size, or until the disk is full; keep it until the fault is over."""
    taken = 0
    with file:
        while taken < size and not is_over.is_set():
            chunk = min(DISK_CHUNK_BYTES, size - taken)
            try:
                os.posix_fallocate(file.fileno(), taken, chunk)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    break
                raise
            taken += chunk
        is_over.wait()
    return taken
