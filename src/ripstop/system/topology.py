"""Reads the input of `numa.py`: processors, caches and NUMA nodes from /sys, GPUs from NVML or the kernel.

GPUs are ordered by PCI address, as CUDA orders GPUs of one model.  With several models CUDA puts the fastest first,
unless CUDA_DEVICE_ORDER=PCI_BUS_ID; `VisibleGpus.note` warns of that.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from ripstop.model.errors import UsageError
from ripstop.system import nvml
from ripstop.system.numa import Cpu, Topology, parse_ranges

SYS = Path("/sys")
PROC_GPUS = Path("/proc/driver/nvidia/gpus")
NVIDIA_VENDOR, DISPLAY_CLASS = "0x10de", "0x03"  # PCI vendor; prefix of the PCI class of GPUs


class GpuDevice(Struct, frozen=True):
    """One GPU of this machine; `uuids` include those of its MIG instances; "" means unknown."""

    pci: str  # as /sys writes it: 0000:dc:00.0
    model: str = ""
    uuids: tuple[str, ...] = ()


class VisibleGpus(Struct, frozen=True):
    """The NUMA nodes of the GPUs that a worker sees, in its order, and a warning."""

    nodes: tuple[int, ...]
    note: str = ""


def read_topology(sys: Path = SYS, allowed: frozenset[int] | None = None) -> Topology:
    """This machine; `allowed` are the processors to use (None: those that this process may use)."""
    may_use = frozenset(os.sched_getaffinity(0)) if allowed is None else allowed
    node_of = _nodes(sys)
    try:
        cpus = [_cpu(sys, number, node_of.get(number, 0)) for number in sorted(may_use)]
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the processors' topology cannot be read from {sys}: {error}; omit the NUMA binding"
        ) from None
    return Topology(tuple(cpus), _memory_nodes(sys))


def visible_gpus(environ: Mapping[str, str], sys: Path = SYS, proc: Path = PROC_GPUS) -> VisibleGpus:
    """The GPUs a worker with this environment will see."""
    gpus = _from_nvml() or _from_driver(proc) or _from_pci(sys)
    seen = choose(environ.get("CUDA_VISIBLE_DEVICES"), gpus)
    nodes = [_node(sys, gpu) for gpu in seen]
    notes = []
    if None in nodes and len(set(_nodes(sys).values())) > 1:
        unknown = ", ".join(gpu.pci for gpu, node in zip(seen, nodes, strict=True) if node is None)
        notes.append(f"the kernel reports no NUMA node for GPU {unknown}: using 0")
    if len({gpu.model for gpu in gpus}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        notes.append("GPUs of several models: CUDA may order them differently; set CUDA_DEVICE_ORDER=PCI_BUS_ID")
    return VisibleGpus(tuple(node or 0 for node in nodes), "; ".join(notes))


def choose(choice: str | None, gpus: Sequence[GpuDevice]) -> list[GpuDevice]:
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


# /sys ---------------------------------------------------------------------------------------------------------------


def _cpu(sys: Path, number: int, node: int) -> Cpu:
    home = sys / f"devices/system/cpu/cpu{number}"
    return Cpu(
        number=number,
        core=min(parse_ranges(_read(home / "topology/thread_siblings_list"))),
        cache=_last_cache(home, number),
        node=node,
        socket=max(int(_read(home / "topology/physical_package_id")), 0),
    )


def _last_cache(home: Path, number: int) -> int:
    """The number of the last-level cache; a processor with unknown caches (some virtual machines) has its own."""
    level, sharers = 0, frozenset({number})
    for cache in sorted(home.glob("cache/index[0-9]*")):
        if _read(cache / "type") != "Instruction" and int(_read(cache / "level")) > level:
            level, sharers = int(_read(cache / "level")), parse_ranges(_read(cache / "shared_cpu_list"))
    return min(sharers)


def _nodes(sys: Path) -> dict[int, int]:
    """The NUMA node of every processor; empty for a kernel without NUMA."""
    node_of: dict[int, int] = {}
    for home in sys.glob("devices/system/node/node[0-9]*"):
        for cpu in parse_ranges(_read(home / "cpulist")):
            node_of[cpu] = int(home.name.removeprefix("node"))
    return node_of


def _memory_nodes(sys: Path) -> frozenset[int]:
    try:
        return parse_ranges(_read(sys / "devices/system/node/has_memory"))
    except (OSError, ValueError):
        return frozenset()


def _node(sys: Path, gpu: GpuDevice) -> int | None:
    """The GPU's NUMA node; None if the kernel does not report one."""
    path = sys / "bus/pci/devices" / gpu.pci / "numa_node"
    try:
        node = int(_read(path))
    except (OSError, ValueError):
        raise UsageError(f"the NUMA node of GPU {gpu.pci} cannot be read from {path}; omit the NUMA binding") from None
    return None if node < 0 else node


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()


# GPUs ---------------------------------------------------------------------------------------------------------------


def _from_nvml() -> list[GpuDevice]:
    try:
        with nvml.opened() as found:
            handles = [found.nvmlDeviceGetHandleByIndex(index) for index in range(found.nvmlDeviceGetCount())]
            return [
                GpuDevice(
                    _sysfs_address(nvml.text(found.nvmlDeviceGetPciInfo(handle).busId)),
                    nvml.text(found.nvmlDeviceGetName(handle)),
                    nvml.uuids(found, handle),
                )
                for handle in handles
            ]
    except nvml.NvmlError:
        return []


def _sysfs_address(pci: str) -> str:
    """NVML writes the domain with eight digits, /sys with four."""
    domain, _, rest = pci.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _from_driver(proc: Path) -> list[GpuDevice]:
    """The GPUs that the driver lists: all, or those of this container."""
    try:
        homes = sorted(proc.iterdir())
        return [_described(home.name, (home / "information").read_text(encoding="utf-8")) for home in homes]
    except OSError:
        return []


def _described(pci: str, information: str) -> GpuDevice:
    parts = (line.partition(":") for line in information.splitlines())
    fields = {key.strip(): value.strip() for key, _, value in parts}
    return GpuDevice(pci, fields.get("Model", ""), (fields.get("GPU UUID", ""),))


def _from_pci(sys: Path) -> list[GpuDevice]:
    """All GPUs on the PCI bus, if the driver lists none."""
    return [
        GpuDevice(home.name)
        for home in sorted(sys.glob("bus/pci/devices/*"))
        if _read(home / "vendor") == NVIDIA_VENDOR and _read(home / "class").startswith(DISPLAY_CLASS)
    ]
