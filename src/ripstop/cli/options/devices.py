"""The flags about the CPUs and GPUs of workers: how many workers, and which devices each one uses.  Without torch."""

import os
from collections.abc import Mapping
from pathlib import Path

from ripstop.cli.options.flags import ParsedArguments
from ripstop.model.config import MAX_SLOTS, Binding, Numa
from ripstop.model.errors import UsageError
from ripstop.model.parsers import integer

PROC_GPUS = Path("/proc/driver/nvidia/gpus")


def note_omp_threads(environ: Mapping[str, str], slots: int, notes: list[str]) -> None:
    """`workers/environment.py` sets the variable."""
    if slots > 1 and "OMP_NUM_THREADS" not in environ:
        notes.append(f"OMP_NUM_THREADS is not set: using 1 for each of the {slots} workers, to avoid overload")


def workers_per_node(args: ParsedArguments, environ: Mapping[str, str]) -> int:
    name, text = args.labelled("--nproc-per-node", "1")
    if text not in ("auto", "gpu", "cpu"):
        if text == "xpu":
            raise UsageError(f"{name}=xpu: ripstop cannot count XPUs in this version; give their number")
        return integer(name, text, minimum=1, maximum=MAX_SLOTS, remedy="give a number above 0, or auto, gpu or cpu")
    found = 0 if text == "cpu" else gpus(environ)
    if text == "gpu" and not found:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        why = "this node has no NVIDIA GPU" if visible is None else f"CUDA_VISIBLE_DEVICES={visible} selects no GPU"
        raise UsageError(f"{name}=gpu: {why}; give a number, or {name}=cpu")
    return found or cpus()


def bindings(args: ParsedArguments, environ: Mapping[str, str], slots: int, notes: list[str]) -> tuple[Binding, ...]:
    if "--numa-binding" not in args:
        return ()
    name, text = args.labelled("--numa-binding")
    modes = {mode.value: mode for mode in Numa}
    if text not in modes:
        raise UsageError(f"{name}={text}: unknown mode; write {', '.join(modes)}")
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError(f"{name}={text}: this system cannot bind a process to CPUs; leave {name} out")
    from ripstop.system import numa_binding
    from ripstop.system.linux import memory_policy_syscall
    from ripstop.system.numa_topology import gpu_numa_nodes, read_topology

    visible = gpu_numa_nodes(environ)
    found = numa_binding.bindings(name, modes[text], read_topology(), visible.nodes, slots)
    if visible.note:
        notes.append(f"{name}={text}: {visible.note}")
    if memory_policy_syscall() is None:
        notes.append(f"{name}={text}: memory is not bound: the kernel or the container forbids memory policies")
    return found


def virtual_local_rank(args: ParsedArguments, environ: Mapping[str, str], slots: int) -> bool:
    if "--virtual-local-rank" not in args:
        return False
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and len(visible.split(",")) < slots:
        name = args.label("--virtual-local-rank")
        raise UsageError(
            f"{name}: each of the {slots} workers needs a GPU, and CUDA_VISIBLE_DEVICES={visible} has fewer; "
            f"add GPUs to it, or leave {name} out"
        )
    return True


# how many this machine has --------------------------------------------------------------------------------------------


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
