"""What NVML says of this machine's GPUs now: what they do and what they hold.  Read when somebody asks.

A driver that hangs keeps nobody waiting (`look.py`).  Where there is no NVML, it is looked for once; whatever else goes
wrong is of now, or of one GPU, and says nothing of the others or of later.
"""

from collections.abc import Callable
from typing import Any

from ripstop.model.usage import GpuSample
from ripstop.system import nvml
from ripstop.system.blocking_calls import ExclusiveCall

PATIENCE = 0.4  # seconds for all GPUs; the first time the driver may take longer, and is heard the next time


class GpuUsageReader:
    """The GPUs of this machine; `read` is another's in tests."""

    def __init__(self, read: Callable[[], tuple[GpuSample, ...]] | None = None) -> None:
        self._read = read or _Nvml().read
        self._look = ExclusiveCall[tuple[GpuSample, ...]](self._ask, ())
        self._absent = False

    async def sample(self, patience: float = PATIENCE) -> tuple[GpuSample, ...]:
        """What is known of them within this time: everything, or nothing."""
        return () if self._absent else await self._look.call(patience) or ()

    def _ask(self) -> tuple[GpuSample, ...]:
        try:
            return self._read()
        except nvml.NoNvml:
            self._absent = True
            return ()
        except Exception:  # what was seen before is no answer
            return ()


class _Nvml:
    def __init__(self) -> None:
        self._nvml: Any = None

    def read(self) -> tuple[GpuSample, ...]:
        if self._nvml is None:
            self._nvml = nvml.load()
        found = map(self._one, range(self._nvml.nvmlDeviceGetCount()))
        return tuple(gpu for gpu in found if gpu is not None)

    def _one(self, index: int) -> GpuSample | None:
        found = self._nvml
        gpu = self._try(found.nvmlDeviceGetHandleByIndex, index)
        if gpu is None:
            return None
        rates = self._try(found.nvmlDeviceGetUtilizationRates, gpu)
        memory = self._try(found.nvmlDeviceGetMemoryInfo, gpu)
        power = self._try(found.nvmlDeviceGetPowerUsage, gpu)
        return GpuSample(
            index,
            utilisation=None if rates is None else rates.gpu / 100,
            memory_used=None if memory is None else int(memory.used),
            memory_total=None if memory is None else int(memory.total),
            temperature=self._try(found.nvmlDeviceGetTemperature, gpu, found.NVML_TEMPERATURE_GPU),
            power=None if power is None else power / 1000,
            ecc_corrected=self._errors(gpu, found.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ecc_uncorrected=self._errors(gpu, found.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        )

    def _errors(self, gpu: Any, kind: int) -> int | None:
        found = self._try(self._nvml.nvmlDeviceGetTotalEccErrors, gpu, kind, self._nvml.NVML_VOLATILE_ECC)
        return None if found is None else int(found)

    def _try(self, ask: Callable[..., Any], *of: Any) -> Any:
        """What a GPU cannot tell is None."""
        try:
            return ask(*of)
        except self._nvml.NVMLError:
            return None
