"""The resource usage of real worker processes."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ripstop.agent import usage
from ripstop.diagnostics.progress import WorkerProgress
from ripstop.logs.directory import RoundLogs
from ripstop.model.config import Logs, OutputStreams, StreamMap
from ripstop.model.round import Address, Place
from ripstop.system import linux

WORKER = """
import os, subprocess, sys, threading, time
child = "held = bytearray(32 << 20); print('here', flush=True); import sys; sys.stdin.read()"
loader = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
loader.stdout.readline()
held = bytearray(64 << 20)
threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
while time.process_time() < 0.3:
    pass
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def worker(code: str = WORKER) -> Iterator[subprocess.Popen[str]]:
    """A process in its own session, as workers are; ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.communicate()  # closes its stdin, which ends it


def place(slots: int) -> Place:
    return Place(
        round=3,
        group_rank=1,
        group_size=2,
        first_rank=4,
        slots=slots,
        world_size=4 + slots,
        role_first_rank=4,
        role_size=4 + slots,
        store=Address("127.0.0.1", 1),
        restarts=0,
    )


def test_a_worker_is_all_processes_of_its_session() -> None:
    with worker() as process:
        used = linux.usage_of_sessions([process.pid])[process.pid]
    assert used.processes == 2
    assert used.threads >= 3
    assert used.memory > 96 << 20
    assert 0.3 <= used.cpu < 60


def test_an_exited_worker_and_another_process_with_its_pid_are_not_sampled(tmp_path: Path) -> None:
    logs = RoundLogs(tmp_path, Logs(tmp_path), place(2), "default", terminal=False)
    with worker("print('ready', flush=True)") as process:
        process.wait()
        parent = os.getsid(os.getppid())  # a session leader that is not a child of this process
        assert usage.sample(place(2), (process.pid, parent), logs, {}, ()).ranks == ()


def test_a_sample_has_the_log_bytes_and_progress_of_every_rank(tmp_path: Path) -> None:
    logs = RoundLogs(
        tmp_path, Logs(tmp_path, redirects=StreamMap(OutputStreams.ALL)), place(2), "default", terminal=False
    )
    logs.prepare()
    for stream in ("stdout.log", "stderr.log"):
        (tmp_path / "round_3" / "4" / stream).write_text("12345")
    with worker() as process:
        before = time.time()
        sample = usage.sample(place(2), (process.pid, 2**22), logs, {0: WorkerProgress(7, 2.5, 0.5, 9)}, ())
    (rank,) = sample.ranks
    assert (rank.rank, rank.log_bytes, rank.step, rank.steps_per_second, rank.beats) == (4, 10, 7, 2.5, 9)
    assert sample.round == 3 and sample.at >= before
    assert sample.cpu > 0 and sample.memory > 1 << 20


def test_a_node_without_workers_has_a_sample() -> None:
    sample = usage.sample(None, (), None, {}, ())
    assert (sample.round, sample.ranks) == (0, ())


def test_only_regular_files_count_as_log_bytes(tmp_path: Path) -> None:
    assert usage.log_bytes([Path(os.devnull), tmp_path / "missing", tmp_path]) == 0
