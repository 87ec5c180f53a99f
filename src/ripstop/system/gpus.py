"""The GPUs of this machine: which there are, which of them workers see, their usage and their health.

The source is NVML, NVIDIA's management library, through its Python bindings (nvidia-ml-py) if they are installed.  The
list of GPUs can come from the kernel, too.  GPUs are ordered by PCI address, as CUDA orders GPUs of one model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from msgspec import Struct

from ripstop.model.usage import GpuSample

SYS = Path("/sys")
PROC_GPUS = Path("/proc/driver/nvidia/gpus")
NVIDIA_VENDOR, DISPLAY_CLASS = "0x10de", "0x03"  # PCI vendor; prefix of the PCI class of GPUs

# NVML's bits; an idle GPU, and one with clocks that the user has set, are not throttled
THROTTLE_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "heat (driver)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}


class GpuDevice(Struct, frozen=True):
    """One GPU of this machine; `uuids` include those of its MIG instances; "" means unknown."""

    pci: str  # as /sys writes it: 0000:dc:00.0
    model: str = ""
    uuids: tuple[str, ...] = ()


class GpuHealth(Struct, frozen=True):
    """One GPU; `error` is empty if it is healthy."""

    index: int
    uuid: str
    error: str = ""


# NVML ----------------------------------------------------------------------------------------------------------------


class NvmlError(Exception):
    """An NVML call failed."""


class NoNvml(NvmlError):
    """This machine has no NVML: no bindings, or no driver."""


@contextmanager
def open_nvml() -> Iterator[ModuleType]:
    """The bindings, closed afterwards; their errors become NvmlError."""
    nvml = load_nvml()
    try:
        yield nvml
    except nvml.NVMLError as error:
        raise NvmlError(str(error)) from error
    finally:
        nvml.nvmlShutdown()


def load_nvml() -> ModuleType:
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


def _uuids(nvml: ModuleType, handle: object) -> tuple[str, ...]:
    """The UUIDs of a GPU and of its MIG instances."""
    uuids = [_nvml_text(nvml.nvmlDeviceGetUUID(handle))]
    with suppress(nvml.NVMLError):  # no further instance, or no MIG
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            uuids.append(_nvml_text(nvml.nvmlDeviceGetUUID(instance)))
    return tuple(uuids)


def _nvml_text(value: str | bytes) -> str:
    """Older bindings return bytes, newer ones text."""
    return value.decode() if isinstance(value, bytes) else value


# the list ------------------------------------------------------------------------------------------------------------


def list_gpus(sys: Path = SYS, proc: Path = PROC_GPUS) -> list[GpuDevice]:
    """From NVML, or from the driver (all, or those of this container), or all on the PCI bus."""
    return _gpus_from_nvml() or _gpus_from_driver(proc) or _gpus_from_pci(sys)


def visible_to_cuda(choice: str | None, gpus: Sequence[GpuDevice]) -> list[GpuDevice]:
    """CUDA's rule: the GPUs that CUDA_VISIBLE_DEVICES names by number or UUID prefix, up to the first unknown name."""
    if choice is None:
        return list(gpus)
    chosen: list[GpuDevice] = []
    for name in map(str.strip, choice.split(",")):
        if name.isascii() and name.isdigit():
            found = [gpus[int(name)]] if int(name) < len(gpus) else []
        else:
            found = [gpu for gpu in gpus if name and any(uuid.startswith(name) for uuid in gpu.uuids)]
        if not found:
            break
        chosen.append(found[0])
    return chosen


def _gpus_from_nvml() -> list[GpuDevice]:
    try:
        with open_nvml() as nvml:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            return [
                GpuDevice(
                    _sysfs_address(_nvml_text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
                    _nvml_text(nvml.nvmlDeviceGetName(handle)),
                    _uuids(nvml, handle),
                )
                for handle in handles
            ]
    except NvmlError:
        return []


def _sysfs_address(pci: str) -> str:
    """NVML writes the domain with eight digits, /sys with four."""
    domain, _, rest = pci.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _gpus_from_driver(proc: Path) -> list[GpuDevice]:
    try:
        texts = {home.name: (home / "information").read_text(encoding="utf-8") for home in sorted(proc.iterdir())}
    except OSError:
        return []
    return [_gpu_from_driver(pci, text) for pci, text in texts.items()]


def _gpu_from_driver(pci: str, information: str) -> GpuDevice:
    parts = (line.partition(":") for line in information.splitlines())
    fields = {key.strip(): value.strip() for key, _, value in parts}
    return GpuDevice(pci, fields.get("Model", ""), (fields.get("GPU UUID", ""),))


def _gpus_from_pci(sys: Path) -> list[GpuDevice]:
    return [
        GpuDevice(home.name)
        for home in sorted(sys.glob("bus/pci/devices/*"))
        if (home / "vendor").read_text().strip() == NVIDIA_VENDOR
        and (home / "class").read_text().startswith(DISPLAY_CLASS)
    ]


# the count, also without NVML ----------------------------------------------------------------------------------------


def visible_gpu_count(environ: Mapping[str, str]) -> int:
    """NVIDIA GPUs that a worker would see."""
    return count_visible_gpus(environ.get("CUDA_VISIBLE_DEVICES"), installed_gpu_count())


def count_visible_gpus(choice: str | None, installed: int | None) -> int:
    """Count as CUDA does: the devices in the list, up to the first invalid one.  `installed` None: not known."""
    if choice is None:
        return installed or 0
    count = 0
    for name in map(str.strip, choice.split(",")):
        is_index = name.isascii() and name.isdigit()
        if not is_index and not name.startswith(("GPU-", "MIG-")):
            break
        if is_index and installed is not None and int(name) >= installed:
            break
        count += 1
    return count


def installed_gpu_count() -> int | None:
    """GPUs of this machine or container, from NVML, the driver or its tool; None if there is none of these."""
    for count in (_count_by_nvml, _count_by_driver, _count_by_nvidia_smi):
        if (found := count()) is not None:
            return found
    return None


def _count_by_nvml() -> int | None:
    try:
        with open_nvml() as nvml:
            return int(nvml.nvmlDeviceGetCount())
    except NvmlError:
        return None


def _count_by_driver() -> int | None:
    return len(list(PROC_GPUS.iterdir())) if PROC_GPUS.is_dir() else None


def _count_by_nvidia_smi() -> int | None:
    import subprocess

    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return sum(line.startswith("GPU ") for line in listing.splitlines())


# usage ---------------------------------------------------------------------------------------------------------------


def read_gpu_usage(nvml: ModuleType) -> tuple[GpuSample, ...]:
    """All GPUs that NVML can access."""
    samples = (_gpu_usage(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    return tuple(sample for sample in samples if sample is not None)


def _gpu_usage(nvml: ModuleType, index: int) -> GpuSample | None:
    def read(function: Callable[..., Any], *arguments: Any) -> Any:
        """None for a value that the GPU does not support."""
        with suppress(nvml.NVMLError):
            return function(*arguments)

    gpu = read(nvml.nvmlDeviceGetHandleByIndex, index)
    if gpu is None:
        return None
    rates = read(nvml.nvmlDeviceGetUtilizationRates, gpu)
    memory = read(nvml.nvmlDeviceGetMemoryInfo, gpu)
    power = read(nvml.nvmlDeviceGetPowerUsage, gpu)
    ecc_kinds = (nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
    corrected, uncorrected = (
        read(nvml.nvmlDeviceGetTotalEccErrors, gpu, kind, nvml.NVML_VOLATILE_ECC) for kind in ecc_kinds
    )
    return GpuSample(
        index,
        utilisation=None if rates is None else rates.gpu / 100,
        memory_used=None if memory is None else int(memory.used),
        memory_total=None if memory is None else int(memory.total),
        temperature=read(nvml.nvmlDeviceGetTemperature, gpu, nvml.NVML_TEMPERATURE_GPU),
        power=None if power is None else power / 1000,
        ecc_corrected=None if corrected is None else int(corrected),
        ecc_uncorrected=None if uncorrected is None else int(uncorrected),
        clock=read(nvml.nvmlDeviceGetClockInfo, gpu, nvml.NVML_CLOCK_SM),
        clock_max=read(nvml.nvmlDeviceGetMaxClockInfo, gpu, nvml.NVML_CLOCK_SM),
        throttled=_throttled(read(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu) or 0),
    )


def _throttled(reasons: int) -> tuple[str, ...]:
    return tuple(name for bit, name in THROTTLE_REASONS.items() if reasons & bit)


def free_gpu_memory(visible: str | None, index: int) -> int | None:
    """Free bytes of the GPU with this index among those that CUDA_VISIBLE_DEVICES selects; None if unknown."""
    try:
        with open_nvml() as nvml:
            handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
            devices = [GpuDevice(str(number), uuids=_uuids(nvml, handle)) for number, handle in enumerate(handles)]
            chosen = visible_to_cuda(visible, devices)
            if index >= len(chosen):
                return None
            return int(nvml.nvmlDeviceGetMemoryInfo(handles[int(chosen[index].pci)]).free)
    except NoNvml:
        return None


# health: NVML has no query for Xid errors.  Some appear as a lost GPU or as a memory row that needs replacement -------


def read_gpu_health(visible: str | None) -> tuple[GpuHealth, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES selects; none if NVML is missing."""
    if visible is not None and not visible.strip():
        return ()
    try:
        with open_nvml() as nvml:
            return health_of_visible(nvml, visible)
    except NoNvml:
        return ()


def health_of_visible(nvml: ModuleType, visible: str | None) -> tuple[GpuHealth, ...]:
    found = [_gpu_health(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    devices = [GpuDevice(str(gpu.index), uuids=uuids) for gpu, uuids in found]
    chosen = {int(device.pci) for device in visible_to_cuda(visible, devices)}
    return tuple(gpu for gpu, _ in found if gpu.index in chosen)


def _gpu_health(nvml: ModuleType, index: int) -> tuple[GpuHealth, tuple[str, ...]]:
    """The health of one GPU, and its UUIDs.  A value that NVML does not support is no error."""
    uuids: tuple[str, ...] = ()
    problem = ""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuids = _uuids(nvml, handle)
        problem = _gpu_memory_problem(nvml, handle)
    except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired, nvml.NVMLError_Unknown) as error:
        problem = f"NVML reports: {error}; reset the GPU, or restart the machine"
    except nvml.NVMLError:
        pass
    return GpuHealth(index, uuids[0] if uuids else "", problem), uuids


def _gpu_memory_problem(nvml: ModuleType, handle: object) -> str:
    """GPUs since A100 replace bad memory rows.  Older ones only count ECC errors since the last reset."""
    try:
        _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    except nvml.NVMLError_NotSupported:
        kind = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        errors = nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC)
        return f"{errors} uncorrectable memory errors; reset the GPU" if errors else ""
    if failed:
        return "a bad memory row could not be replaced; replace the GPU"
    return "a bad memory row is waiting to be replaced; reset the GPU" if pending else ""
