"""What NVML says of this machine's GPUs, where there is an NVML: its driver, and the package nvidia-ml-py.

It is asked in a thread of its own: a driver that hangs keeps nobody waiting, and nobody from ending.  Where there is no
NVML, it is looked for once.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from ripstop.observe.sample import GpuSample

PATIENCE = 0.4  # seconds for all GPUs; the first time the driver may take longer, and is heard the next time


class Gpus:
    """The GPUs of this machine; `read` is another's in tests."""

    def __init__(self, read: Callable[[], tuple[GpuSample, ...]] | None = None) -> None:
        self._read = read or _Nvml().read
        self._asked: Future[tuple[GpuSample, ...]] | None = None
        self._absent = False

    async def sample(self, patience: float = PATIENCE) -> tuple[GpuSample, ...]:
        """What is known of them within this time: everything, or nothing."""
        if self._absent:
            return ()
        if self._asked is None or self._asked.done():
            self._asked = self._ask()
        heard = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wake(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(heard.set)

        asked = self._asked
        asked.add_done_callback(wake)
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await heard.wait()
                return asked.result()
        return ()

    def _ask(self) -> Future[tuple[GpuSample, ...]]:
        future: Future[tuple[GpuSample, ...]] = Future()

        def ask() -> None:
            found: tuple[GpuSample, ...] = ()
            try:
                found = self._read()
            except Exception:  # no package, no driver, or one that says anything at all
                self._absent = True
            future.set_result(found)

        threading.Thread(target=ask, name="nvml", daemon=True).start()
        return future


class _Nvml:
    def __init__(self) -> None:
        self._nvml: Any = None

    def read(self) -> tuple[GpuSample, ...]:
        if self._nvml is None:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
        return tuple(map(self._one, range(self._nvml.nvmlDeviceGetCount())))

    def _one(self, index: int) -> GpuSample:
        nvml = self._nvml
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        rates = self._try(nvml.nvmlDeviceGetUtilizationRates, gpu)
        memory = self._try(nvml.nvmlDeviceGetMemoryInfo, gpu)
        power = self._try(nvml.nvmlDeviceGetPowerUsage, gpu)
        return GpuSample(
            index,
            utilisation=None if rates is None else rates.gpu / 100,
            memory_used=None if memory is None else int(memory.used),
            memory_total=None if memory is None else int(memory.total),
            temperature=self._try(nvml.nvmlDeviceGetTemperature, gpu, nvml.NVML_TEMPERATURE_GPU),
            power=None if power is None else power / 1000,
            ecc_corrected=self._errors(gpu, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ecc_uncorrected=self._errors(gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
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
