"""GPU usage, with drivers that are missing or hang."""

import asyncio
import shutil
import subprocess
import threading
from types import SimpleNamespace

import pytest

from ripstop.agent.gpu_usage import GpuUsageReader
from ripstop.model.usage import GpuSample
from ripstop.system import nvml

ONE = (GpuSample(0, utilisation=0.5),)


def test_a_missing_driver_is_looked_for_once() -> None:
    reads: list[None] = []

    def read() -> tuple[GpuSample, ...]:
        reads.append(None)
        raise nvml.NoNvml("pynvml")

    async def scenario() -> None:
        gpus = GpuUsageReader(read)
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
        gpus = GpuUsageReader(read)
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
    driver = SimpleNamespace(
        NVMLError=Lost,
        NVML_TEMPERATURE_GPU=0,
        NVML_MEMORY_ERROR_TYPE_CORRECTED=0,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=handle,
        **{f"nvmlDeviceGet{name}": unsupported for name in names},
    )
    monkeypatch.setattr(nvml, "load", lambda: driver)
    assert [gpu.index for gpu in asyncio.run(GpuUsageReader().sample(20))] == [0, 2]


def test_a_driver_that_hangs_times_out_and_is_called_once() -> None:
    calls: list[None] = []
    go = threading.Event()

    def read() -> tuple[GpuSample, ...]:
        calls.append(None)
        go.wait(20)
        return ONE

    async def scenario() -> None:
        gpus = GpuUsageReader(read)
        assert [await gpus.sample(0.01), await gpus.sample(0.01)] == [(), ()]
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
    found = asyncio.run(GpuUsageReader().sample(20))
    assert len(found) == len(lines)
    for gpu, line in zip(found, lines, strict=True):
        total, temperature = map(int, line.split(","))
        assert gpu.memory_total is not None and gpu.temperature is not None and gpu.power is not None
        assert abs(gpu.memory_total / 2**20 - total) < 1024  # the driver reserves some
        assert abs(gpu.temperature - temperature) < 20
