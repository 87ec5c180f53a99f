"""Opening NVML, on machines with and without it."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ripstop.system import nvml


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
    with pytest.raises(nvml.NoNvml, match="no driver"):
        nvml.load()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(nvml.NoNvml):
        nvml.load()


def test_a_failing_driver_is_not_reported_as_missing(bindings: Any) -> None:
    def mismatch() -> None:
        raise _Error("library and driver differ")

    bindings.nvmlInit = mismatch
    with pytest.raises(nvml.NvmlError, match="differ") as caught, nvml.opened():
        pass
    assert not isinstance(caught.value, nvml.NoNvml)


def test_nvml_is_closed_after_an_error_too(bindings: Any) -> None:
    with pytest.raises(nvml.NvmlError, match="lost"), nvml.opened():
        raise _Error("the GPU is lost")
    with nvml.opened() as found:
        assert found is bindings
    assert bindings.closed == 2
