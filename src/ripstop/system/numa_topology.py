"""Reads the input of `numa_binding.py`: processors, caches and NUMA nodes from /sys, and those of visible GPUs."""

import os
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from ripstop.model.errors import UsageError
from ripstop.system.gpus import PROC_GPUS, SYS, GpuDevice, list_gpus, visible_to_cuda
from ripstop.system.numa_binding import Cpu, Topology


class GpuNumaNodes(Struct, frozen=True):
    """The NUMA nodes of the GPUs that a worker sees, in its order, and a warning."""

    nodes: tuple[int, ...]
    note: str = ""


def read_topology(sys: Path = SYS, allowed: frozenset[int] | None = None) -> Topology:
    """This machine; `allowed` are the processors to use (None: those that this process may use)."""
    may_use = frozenset(os.sched_getaffinity(0)) if allowed is None else allowed
    node_of = _numa_topology_nodes(sys)
    try:
        cpus = [_numa_topology_cpu(sys, number, node_of.get(number, 0)) for number in sorted(may_use)]
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the processors' topology cannot be read from {sys}: {error}; omit the NUMA binding"
        ) from None
    return Topology(tuple(cpus), _memory_nodes(sys))


def gpu_numa_nodes(environ: Mapping[str, str], sys: Path = SYS, proc: Path = PROC_GPUS) -> GpuNumaNodes:
    """The GPUs a worker with this environment will see.

    With several models CUDA puts the fastest first, unless CUDA_DEVICE_ORDER=PCI_BUS_ID; the note warns of that.
    """
    gpus = list_gpus(sys, proc)
    seen = visible_to_cuda(environ.get("CUDA_VISIBLE_DEVICES"), gpus)
    nodes = [_gpu_node(sys, gpu) for gpu in seen]
    notes = []
    if None in nodes and len(set(_numa_topology_nodes(sys).values())) > 1:
        unknown = ", ".join(gpu.pci for gpu, node in zip(seen, nodes, strict=True) if node is None)
        notes.append(f"the kernel reports no NUMA node for GPU {unknown}: using 0")
    if len({gpu.model for gpu in gpus}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        notes.append("GPUs of several models: CUDA may order them differently; set CUDA_DEVICE_ORDER=PCI_BUS_ID")
    return GpuNumaNodes(tuple(node or 0 for node in nodes), "; ".join(notes))


def _numa_topology_cpu(sys: Path, number: int, node: int) -> Cpu:
    home = sys / f"devices/system/cpu/cpu{number}"
    core = min(parse_cpu_ranges(_read_numa_topology(home / "topology/thread_siblings_list")))
    socket = max(int(_read_numa_topology(home / "topology/physical_package_id")), 0)
    return Cpu(number, core, _numa_topology_last_cache(home, number), node, socket)


def _numa_topology_last_cache(home: Path, number: int) -> int:
    """The number of the last-level cache; a processor with unknown caches (some virtual machines) has its own."""
    level, sharers = 0, frozenset({number})
    for cache in sorted(home.glob("cache/index[0-9]*")):
        if _read_numa_topology(cache / "type") != "Instruction" and int(_read_numa_topology(cache / "level")) > level:
            level, sharers = (
                int(_read_numa_topology(cache / "level")),
                parse_cpu_ranges(_read_numa_topology(cache / "shared_cpu_list")),
            )
    return min(sharers)


def _numa_topology_nodes(sys: Path) -> dict[int, int]:
    """The NUMA node of every processor; empty for a kernel without NUMA."""
    homes = sys.glob("devices/system/node/node[0-9]*")
    return {
        cpu: int(home.name.removeprefix("node"))
        for home in homes
        for cpu in parse_cpu_ranges(_read_numa_topology(home / "cpulist"))
    }


def _memory_nodes(sys: Path) -> frozenset[int]:
    try:
        return parse_cpu_ranges(_read_numa_topology(sys / "devices/system/node/has_memory"))
    except (OSError, ValueError):
        return frozenset()


def _gpu_node(sys: Path, gpu: GpuDevice) -> int | None:
    """None if the kernel does not report one."""
    path = sys / "bus/pci/devices" / gpu.pci / "numa_node"
    try:
        node = int(_read_numa_topology(path))
    except (OSError, ValueError):
        raise UsageError(f"the NUMA node of GPU {gpu.pci} cannot be read from {path}; omit the NUMA binding") from None
    return None if node < 0 else node


def _read_numa_topology(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()


def parse_cpu_ranges(text: str) -> frozenset[int]:
    """`0-2,4`, as the kernel writes processors and NUMA nodes."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)
