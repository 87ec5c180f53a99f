"""GPUs, and drivers that are not there, or hang."""

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


def test_a_driver_that_is_not_there_is_looked_for_once() -> None:
    looked: list[None] = []

    def read() -> tuple[GpuSample, ...]:
        looked.append(None)
        raise nvml.NoNvml("pynvml")

    async def scenario() -> None:
        gpus = GpuUsageReader(read)
        assert [await gpus.sample(20), await gpus.sample(20)] == [(), ()]

    asyncio.run(scenario())
    assert len(looked) == 1


def test_a_look_that_fails_is_of_its_moment_only() -> None:
    answers = iter([OSError("busy"), ONE])

    def read() -> tuple[GpuSample, ...]:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def scenario() -> None:
        gpus = GpuUsageReader(read)
        assert [await gpus.sample(20), await gpus.sample(20)] == [(), ONE]

    asyncio.run(scenario())


def test_a_gpu_that_is_lost_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(Exception):
        pass

    def handle(index: int) -> int:
        if index == 1:
            raise Lost
        return index

    def silent(*_: object) -> None:
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
        **{f"nvmlDeviceGet{name}": silent for name in names},
    )
    monkeypatch.setattr(nvml, "load", lambda: driver)
    assert [gpu.index for gpu in asyncio.run(GpuUsageReader().sample(20))] == [0, 2]


def test_a_driver_that_hangs_keeps_nobody_waiting_and_is_asked_once() -> None:
    asked: list[None] = []
    go = threading.Event()

    def read() -> tuple[GpuSample, ...]:
        asked.append(None)
        go.wait(20)
        return ONE

    async def scenario() -> None:
        gpus = GpuUsageReader(read)
        assert [await gpus.sample(0.01), await gpus.sample(0.01)] == [(), ()]
        assert len(asked) == 1
        go.set()
        assert await gpus.sample(20) == ONE
        assert await gpus.sample(20) == ONE

    asyncio.run(scenario())


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no NVIDIA GPU here")
def test_a_gpu_says_what_nvidia_smi_says() -> None:
    pytest.importorskip("pynvml", reason="pip install nvidia-ml-py")
    told = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.total,temperature.gpu", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    found = asyncio.run(GpuUsageReader().sample(20))
    assert len(found) == len(told)
    for gpu, line in zip(found, told, strict=True):
        total, temperature = map(int, line.split(","))
        assert gpu.memory_total is not None and gpu.temperature is not None and gpu.power is not None
        assert abs(gpu.memory_total / 2**20 - total) < 1024  # the driver keeps some for itself
        assert abs(gpu.temperature - temperature) < 20
