"""Opening NVML, on machines with and without it."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ripstop.system.gpus import NoNvml, NvmlError, free_gpu_memory, load_nvml, open_nvml


class _Error(Exception):
    pass


class _NoDriver(_Error):
    pass


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = SimpleNamespace(
        NVMLError=_Error, NVMLError_LibraryNotFound=_NoDriver, NVMLError_DriverNotLoaded=_NoDriver, closed=0
    )

    def close() -> None:
        found.closed += 1

    found.nvmlInit, found.nvmlShutdown = (lambda: None), close
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


def test_a_machine_without_bindings_or_driver_has_no_nvml(monkeypatch: pytest.MonkeyPatch, bindings: Any) -> None:
    def no_driver() -> None:
        raise _NoDriver("no driver")

    bindings.nvmlInit = no_driver
    with pytest.raises(NoNvml, match="no driver"):
        load_nvml()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NoNvml):
        load_nvml()


def test_a_failing_driver_is_not_reported_as_missing(bindings: Any) -> None:
    def mismatch() -> None:
        raise _Error("library and driver differ")

    bindings.nvmlInit = mismatch
    with pytest.raises(NvmlError, match="differ") as caught, open_nvml():
        pass
    assert not isinstance(caught.value, NoNvml)


def test_the_free_memory_is_that_of_the_visible_gpu(monkeypatch: pytest.MonkeyPatch, bindings: Any) -> None:
    bindings.nvmlDeviceGetCount = lambda: 3
    bindings.nvmlDeviceGetHandleByIndex = lambda index: index
    bindings.nvmlDeviceGetUUID = "GPU-{}".format
    bindings.nvmlDeviceGetMaxMigDeviceCount = lambda handle: 0
    bindings.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(free=1000 + handle)
    assert [free_gpu_memory(None, index) for index in range(4)] == [1000, 1001, 1002, None]
    assert free_gpu_memory("2,0", 0) == 1002
    assert free_gpu_memory("GPU-1", 0) == 1001
    assert bindings.closed == 6
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert free_gpu_memory(None, 0) is None


def test_nvml_is_closed_after_an_error_too(bindings: Any) -> None:
    with pytest.raises(NvmlError, match="lost"), open_nvml():
        raise _Error("the GPU is lost")
    with open_nvml() as found:
        assert found is bindings
    assert bindings.closed == 2
