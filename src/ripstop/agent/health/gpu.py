"""Reads the health of GPUs from NVML.

NVML has no query for Xid errors.  Some of them appear as a lost GPU or as a memory row that needs replacement.
"""

from types import ModuleType

from ripstop.agent.health.assessment import GpuHealth
from ripstop.system import topology
from ripstop.system.nvml import uuids as uuids_of


def read(nvml: ModuleType, visible: str | None) -> tuple[GpuHealth, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES selects; `nvml` is open (`system/nvml.py`)."""
    found = [_read_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    selected = topology.choose(visible, [topology.GpuDevice(str(gpu.index), uuids=uuids) for gpu, uuids in found])
    chosen = {int(gpu.pci) for gpu in selected}
    return tuple(gpu for gpu, _ in found if gpu.index in chosen)


def _read_gpu(nvml: ModuleType, index: int) -> tuple[GpuHealth, tuple[str, ...]]:
    """The health of one GPU, and its UUIDs.  A value that NVML does not support is no error."""
    uuids: tuple[str, ...] = ()
    problem = ""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuids = uuids_of(nvml, handle)
        problem = _memory_problem(nvml, handle)
    except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired, nvml.NVMLError_Unknown) as error:
        problem = f"NVML reports: {error}; reset the GPU, or restart the machine"
    except nvml.NVMLError:
        pass
    return GpuHealth(index, uuids[0] if uuids else "", problem), uuids


def _memory_problem(nvml: ModuleType, handle: object) -> str:
    """GPUs since A100 replace bad memory rows.  Older ones only count ECC errors since the last reset."""
    try:
        _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    except nvml.NVMLError_NotSupported:
        return _ecc_problem(nvml, handle)
    if failed:
        return "a bad memory row could not be replaced; replace the GPU"
    return "a bad memory row is waiting to be replaced; reset the GPU" if pending else ""


def _ecc_problem(nvml: ModuleType, handle: object) -> str:
    errors = nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    return f"{errors} uncorrectable memory errors; reset the GPU" if errors else ""
