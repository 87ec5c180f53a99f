"""NVML, NVIDIA's library that knows the GPUs: opened here and nowhere else, with its bindings (nvidia-ml-py) if any."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType


class NvmlError(Exception):
    """NVML has no answer."""


class NoNvml(NvmlError):
    """This machine has no NVML: no bindings, or no driver."""


@contextmanager
def opened() -> Iterator[ModuleType]:
    """The bindings, for as long as they are needed; NvmlError for whatever goes wrong with them."""
    nvml = load()
    try:
        yield nvml
    except nvml.NVMLError as error:
        raise NvmlError(str(error)) from error
    finally:
        nvml.nvmlShutdown()


def load() -> ModuleType:
    """The bindings, ready for use and for good: opening NVML may take seconds."""
    try:
        import pynvml
    except ImportError as error:
        raise NoNvml(str(error)) from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = isinstance(error, pynvml.NVMLError_LibraryNotFound | pynvml.NVMLError_DriverNotLoaded)
        raise (NoNvml if absent else NvmlError)(str(error)) from error
    return pynvml  # type: ignore[no-any-return]


def uuids(nvml: ModuleType, handle: object) -> tuple[str, ...]:
    """Of a GPU, and of its MIG instances."""
    return text(nvml.nvmlDeviceGetUUID(handle)), *_mig_uuids(nvml, handle)


def _mig_uuids(nvml: ModuleType, handle: object) -> list[str]:
    uuids: list[str] = []
    with suppress(nvml.NVMLError):  # no more of them, or none at all
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            uuids.append(text(nvml.nvmlDeviceGetUUID(instance)))
    return uuids


def text(value: str | bytes) -> str:
    """NVML's bindings have answered in bytes, and now do in text."""
    return value.decode() if isinstance(value, bytes) else value
