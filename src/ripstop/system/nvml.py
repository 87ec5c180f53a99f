"""Access to NVML, NVIDIA's management library, through its Python bindings (nvidia-ml-py) if they are installed."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType


class NvmlError(Exception):
    """An NVML call failed."""


class NoNvml(NvmlError):
    """This machine has no NVML: no bindings, or no driver."""


@contextmanager
def opened() -> Iterator[ModuleType]:
    """The bindings, closed afterwards; their errors become NvmlError."""
    nvml = load()
    try:
        yield nvml
    except nvml.NVMLError as error:
        raise NvmlError(str(error)) from error
    finally:
        nvml.nvmlShutdown()


def load() -> ModuleType:
    """The bindings, initialised.  Opening NVML may take seconds, so a frequent user keeps them."""
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
    """The UUIDs of a GPU and of its MIG instances."""
    return text(nvml.nvmlDeviceGetUUID(handle)), *_mig_uuids(nvml, handle)


def _mig_uuids(nvml: ModuleType, handle: object) -> list[str]:
    uuids: list[str] = []
    with suppress(nvml.NVMLError):  # no further instance, or no MIG
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            uuids.append(text(nvml.nvmlDeviceGetUUID(instance)))
    return uuids


def text(value: str | bytes) -> str:
    """Older bindings return bytes, newer ones text."""
    return value.decode() if isinstance(value, bytes) else value
