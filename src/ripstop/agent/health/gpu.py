"""The health of GPUs: what NVML says of broken ones.

NVML has no word for Xid errors that one could ask for; they show as a lost GPU, a row of memory to be replaced, or not
at all.
"""

from types import ModuleType

from ripstop.agent.health.assessment import GpuHealth
from ripstop.system import topology
from ripstop.system.nvml import uuids as uuids_of


def read(nvml: ModuleType, choice: str | None) -> tuple[GpuHealth, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves; `nvml` is open (`system/nvml.py`)."""
    found = [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    seen = topology.choose(choice, [topology.GpuDevice(str(gpu.index), uuids=uuids) for gpu, uuids in found])
    chosen = {int(gpu.pci) for gpu in seen}
    return tuple(gpu for gpu, _ in found if gpu.index in chosen)


def _gpu(nvml: ModuleType, index: int) -> tuple[GpuHealth, tuple[str, ...]]:
    """What NVML cannot say of a GPU, or may not, is no trouble; what it says of a broken one is."""
    uuids: tuple[str, ...] = ()
    trouble = ""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuids = uuids_of(nvml, handle)
        trouble = _trouble(nvml, handle)
    except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired, nvml.NVMLError_Unknown) as error:
        trouble = f"NVML says: {error}; reset the GPU, or restart the machine"
    except nvml.NVMLError:
        pass
    return GpuHealth(index, uuids[0] if uuids else "", trouble), uuids


def _trouble(nvml: ModuleType, handle: object) -> str:
    """GPUs since A100 replace bad rows of memory; of older ones the errors since the last reset are asked for."""
    try:
        _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    except nvml.NVMLError_NotSupported:
        return _ecc_trouble(nvml, handle)
    if failed:
        return "a bad row of its memory could not be replaced; have the GPU replaced"
    return "a bad row of its memory is to be replaced; reset the GPU" if pending else ""


def _ecc_trouble(nvml: ModuleType, handle: object) -> str:
    errors = nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    return f"{errors} uncorrectable memory errors; reset the GPU" if errors else ""
