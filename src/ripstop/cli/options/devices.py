"""The flags about the CPUs and GPUs of workers: how many workers, and which devices each one uses.  Without torch."""

import os
from collections.abc import Mapping

from ripstop.cli.options.flags import ParsedArguments
from ripstop.model.config import MAX_SLOTS, Binding, Numa
from ripstop.model.errors import UsageError
from ripstop.model.parsers import integer


def note_device_omp_threads_option(environ: Mapping[str, str], slots: int, notes: list[str]) -> None:
    """`workers/environment.py` sets the variable."""
    if slots > 1 and "OMP_NUM_THREADS" not in environ:
        notes.append(f"OMP_NUM_THREADS is not set: using 1 for each of the {slots} workers, to avoid overload")


def workers_per_node(args: ParsedArguments, environ: Mapping[str, str]) -> int:
    name, text = args.labelled("--nproc-per-node", "1")
    if text not in ("auto", "gpu", "cpu"):
        if text == "xpu":
            raise UsageError(f"{name}=xpu: ripstop cannot count XPUs in this version; give their number")
        return integer(name, text, minimum=1, maximum=MAX_SLOTS, remedy="give a number above 0, or auto, gpu or cpu")
    from ripstop.system.gpus import visible_gpu_count  # --help needs neither
    from ripstop.system.linux import usable_cpu_count

    found = 0 if text == "cpu" else visible_gpu_count(environ)
    if text == "gpu" and not found:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        why = "this node has no NVIDIA GPU" if visible is None else f"CUDA_VISIBLE_DEVICES={visible} selects no GPU"
        raise UsageError(f"{name}=gpu: {why}; give a number, or {name}=cpu")
    return found or usable_cpu_count()


def device_numa_binding_option(
    args: ParsedArguments, environ: Mapping[str, str], slots: int, notes: list[str]
) -> tuple[Binding, ...]:
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


def device_virtual_local_rank_option(args: ParsedArguments, environ: Mapping[str, str], slots: int) -> bool:
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
