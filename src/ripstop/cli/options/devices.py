"""Count the CPUs and GPUs that workers can use, without torch."""

import os
from collections.abc import Mapping
from pathlib import Path

PROC_GPUS = Path("/proc/driver/nvidia/gpus")


def cpus() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpus(environ: Mapping[str, str]) -> int:
    """NVIDIA GPUs that a worker would see."""
    return count_visible(environ.get("CUDA_VISIBLE_DEVICES"), installed())


def count_visible(choice: str | None, installed: int | None) -> int:
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


def installed() -> int | None:
    """GPUs of this machine or container, from NVML, the driver or its tool; None if there is none of these."""
    for count_gpus in (_nvml, _driver, _nvidia_smi):
        if (count := count_gpus()) is not None:
            return count
    return None


def _nvml() -> int | None:
    from ripstop.system.gpus import NvmlError, open_nvml

    try:
        with open_nvml() as nvml:
            return int(nvml.nvmlDeviceGetCount())
    except NvmlError:
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
