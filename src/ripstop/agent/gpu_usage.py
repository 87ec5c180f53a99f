"""Reads the usage of this machine's GPUs from NVML, when an operator asks for it.

A driver that hangs does not block the agent (`system/blocking_calls.py`).  If NVML is missing, the agent does not look
for it again.  Any other error affects only this sample, or only one GPU.
"""

from collections.abc import Callable
from typing import Any

from ripstop.model.usage import GpuSample
from ripstop.system import nvml
from ripstop.system.blocking_calls import ExclusiveCall

READ_TIMEOUT_S = 0.4  # for all GPUs; a first read that takes longer is part of the next sample


class GpuUsageReader:
    """The GPUs of this machine; tests replace `read`."""

    def __init__(self, read: Callable[[], tuple[GpuSample, ...]] | None = None) -> None:
        self._read = read or _Nvml().read
        self._call = ExclusiveCall[tuple[GpuSample, ...]](self._read_or_nothing, ())
        self._is_missing = False

    async def sample(self, timeout: float = READ_TIMEOUT_S) -> tuple[GpuSample, ...]:
        """All GPUs; none if NVML does not reply within the timeout."""
        return () if self._is_missing else await self._call.call(timeout) or ()

    def _read_or_nothing(self) -> tuple[GpuSample, ...]:
        try:
            return self._read()
        except nvml.NoNvml:
            self._is_missing = True
            return ()
        except Exception:  # an older sample would be wrong
            return ()


class _Nvml:
    def __init__(self) -> None:
        self._nvml: Any = None

    def read(self) -> tuple[GpuSample, ...]:
        if self._nvml is None:
            self._nvml = nvml.load()
        gpus = map(self._read_gpu, range(self._nvml.nvmlDeviceGetCount()))
        return tuple(gpu for gpu in gpus if gpu is not None)

    def _read_gpu(self, index: int) -> GpuSample | None:
        api = self._nvml
        gpu = self._try(api.nvmlDeviceGetHandleByIndex, index)
        if gpu is None:
            return None
        rates = self._try(api.nvmlDeviceGetUtilizationRates, gpu)
        memory = self._try(api.nvmlDeviceGetMemoryInfo, gpu)
        power = self._try(api.nvmlDeviceGetPowerUsage, gpu)
        return GpuSample(
            index,
            utilisation=None if rates is None else rates.gpu / 100,
            memory_used=None if memory is None else int(memory.used),
            memory_total=None if memory is None else int(memory.total),
            temperature=self._try(api.nvmlDeviceGetTemperature, gpu, api.NVML_TEMPERATURE_GPU),
            power=None if power is None else power / 1000,
            ecc_corrected=self._ecc_errors(gpu, api.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ecc_uncorrected=self._ecc_errors(gpu, api.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        )

    def _ecc_errors(self, gpu: Any, kind: int) -> int | None:
        count = self._try(self._nvml.nvmlDeviceGetTotalEccErrors, gpu, kind, self._nvml.NVML_VOLATILE_ECC)
        return None if count is None else int(count)

    def _try(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """None for a value that the GPU does not support."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None
