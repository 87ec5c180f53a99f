"""How many processors and GPUs this node has for workers.  No torch: CUDA's own rules are few."""

import os
from collections.abc import Mapping
from pathlib import Path

PROC_GPUS = Path("/proc/driver/nvidia/gpus")


def cpus() -> int:
    """Processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpus(environ: Mapping[str, str]) -> int:
    """NVIDIA GPUs that a worker would see."""
    return visible(environ.get("CUDA_VISIBLE_DEVICES"), installed())


def visible(choice: str | None, installed: int | None) -> int:
    """CUDA's rule: the devices named, up to the first name that is none.  `installed` None: nobody could be asked."""
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


def installed() -> int | None:
    """GPUs of this machine or container, from whoever knows: NVML, the driver, its tool."""
    for ask in (_nvml, _driver, _nvidia_smi):
        if (count := ask()) is not None:
            return count
    return None


def _nvml() -> int | None:
    from ripstop.system import nvml

    try:
        with nvml.opened() as found:
            return int(found.nvmlDeviceGetCount())
    except nvml.NvmlError:
        return None


def _driver() -> int | None:
    return len(list(PROC_GPUS.iterdir())) if PROC_GPUS.is_dir() else None


def _nvidia_smi() -> int | None:
    import subprocess

    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return sum(line.startswith("GPU ") for line in listing.splitlines())
