"""The resource usage of real worker processes, and of GPUs with drivers that are missing or hang."""

import asyncio
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from ripstop.agent import usage_sampler
from ripstop.agent.query_handler import QueriedWorkers
from ripstop.agent.usage_sampler import GpuUsageSampler, sample, sample_log_usage
from ripstop.diagnostics.progress import Commits, WorkerProgress
from ripstop.logs.directory import RoundLogs
from ripstop.model.config import ConfiguredStreams, Logs, OutputStreams
from ripstop.model.round import Address, Place
from ripstop.model.usage import GpuSample
from ripstop.system import linux
from ripstop.system.gpus import NoNvml

ONE = (GpuSample(0, utilisation=0.5),)
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
        assert sample(QueriedWorkers(place(2), (process.pid, parent), logs, {}), ()).ranks == ()


def test_a_sample_has_the_log_bytes_and_progress_of_every_rank(tmp_path: Path) -> None:
    logs = RoundLogs(
        tmp_path, Logs(tmp_path, redirects=ConfiguredStreams(OutputStreams.ALL)), place(2), "default", terminal=False
    )
    logs.prepare()
    for stream in ("stdout.log", "stderr.log"):
        (tmp_path / "round_3" / "4" / stream).write_text("12345")
    with worker() as process:
        before = time.time()
        progress = WorkerProgress(7, 2.5, 0.5, 9, 0.25, Commits(3, 0.125, 1000, at=0.0), 2.0)
        workers = QueriedWorkers(place(2), (process.pid, 2**22), logs, {0: progress})
        found = sample(workers, ())
    (rank,) = found.ranks
    assert (rank.rank, rank.log_bytes, rank.step, rank.steps_per_second, rank.beats) == (4, 10, 7, 2.5, 9)
    assert (rank.step_age, rank.commits, rank.commit_age) == (0.25, 3, 2.0)
    assert (rank.commit_bytes, rank.commit_stall) == (1000, 0.125)
    assert found.round == 3 and found.at >= before
    assert found.cpu > 0 and found.memory > 1 << 20


def test_a_node_without_workers_has_a_sample() -> None:
    found = sample(None, ())
    assert (found.round, found.ranks) == (0, ())


def test_only_regular_files_count_as_log_bytes(tmp_path: Path) -> None:
    assert sample_log_usage([Path(os.devnull), tmp_path / "missing", tmp_path]) == 0


# GPUs


def test_a_missing_driver_is_looked_for_once() -> None:
    reads: list[None] = []

    def read() -> tuple[GpuSample, ...]:
        reads.append(None)
        raise NoNvml("pynvml")

    async def scenario() -> None:
        gpus = GpuUsageSampler(read)
        assert [await gpus.sample(20), await gpus.sample(20)] == [(), ()]

    asyncio.run(scenario())
    assert len(reads) == 1


def test_a_read_that_fails_affects_only_its_own_sample() -> None:
    results = iter([OSError("busy"), ONE])

    def read() -> tuple[GpuSample, ...]:
        result = next(results)
        if isinstance(result, OSError):
            raise result
        return result

    async def scenario() -> None:
        gpus = GpuUsageSampler(read)
        assert [await gpus.sample(20), await gpus.sample(20)] == [(), ONE]

    asyncio.run(scenario())


def test_a_lost_gpu_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(Exception):
        pass

    def handle(index: int) -> int:
        if index == 1:
            raise Lost
        return index

    def unsupported(*_: object) -> None:
        raise Lost

    names = ("UtilizationRates", "MemoryInfo", "PowerUsage", "Temperature", "TotalEccErrors")
    names += ("ClockInfo", "MaxClockInfo", "CurrentClocksThrottleReasons")
    driver = SimpleNamespace(
        NVMLError=Lost,
        NVML_TEMPERATURE_GPU=0,
        NVML_MEMORY_ERROR_TYPE_CORRECTED=0,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        NVML_CLOCK_SM=1,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=handle,
        **{f"nvmlDeviceGet{name}": unsupported for name in names},
    )
    monkeypatch.setattr(usage_sampler, "load_nvml", lambda: driver)
    assert [gpu.index for gpu in asyncio.run(GpuUsageSampler().sample(20))] == [0, 2]


def test_a_driver_that_hangs_times_out_and_is_called_once() -> None:
    calls: list[None] = []
    go = threading.Event()

    def read() -> tuple[GpuSample, ...]:
        calls.append(None)
        go.wait(120)
        return ONE

    async def scenario() -> None:
        gpus = GpuUsageSampler(read)
        assert [await gpus.sample(0.01), await gpus.sample(0.01)] == [(), ()]
        while not calls:  # noqa: ASYNC110 - by another thread
            await asyncio.sleep(0.01)
        assert len(calls) == 1
        go.set()
        assert await gpus.sample(20) == ONE
        assert await gpus.sample(20) == ONE

    asyncio.run(scenario())


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no NVIDIA GPU here")
def test_the_sample_agrees_with_nvidia_smi() -> None:
    pytest.importorskip("pynvml", reason="pip install nvidia-ml-py")
    lines = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.total,temperature.gpu", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    found = asyncio.run(GpuUsageSampler().sample(20))
    assert len(found) == len(lines)
    for gpu, line in zip(found, lines, strict=True):
        total, temperature = map(int, line.split(","))
        assert gpu.memory_total is not None and gpu.temperature is not None and gpu.power is not None
        assert abs(gpu.memory_total / 2**20 - total) < 1024  # the driver reserves some
        assert abs(gpu.temperature - temperature) < 20
