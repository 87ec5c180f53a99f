"""Selects the processors of a worker so that its memory is near its GPU: a pure function of the machine's topology.

The worker with local rank n belongs to the n-th visible GPU, and gets processors of that GPU's NUMA node (or socket).
Rules: (1) a worker gets only processors that the agent itself may use; (2) all threads of a core go to the same worker;
(3) cores, caches and GPUs are ordered by number, and the remainder of a division goes to the first GPUs, so every node
and every round gets the same result; (4) a NUMA node is divided among all its GPUs, with or without a worker of this
job, because another job may use the others.

`numa_topology.py` reads the machine; the zygote binds.
"""

from collections.abc import Sequence

from msgspec import Struct

from ripstop.model.config import Binding, Numa
from ripstop.model.errors import UsageError
from ripstop.model.text_formatting import format_cpu_ranges


class Cpu(Struct, frozen=True):
    """One processor.  A core and a cache have the number of the lowest processor that shares them."""

    number: int
    core: int
    cache: int  # of the last level
    node: int
    socket: int


class Topology(Struct, frozen=True):
    """The processors that may be used, and the NUMA nodes that have memory."""

    cpus: tuple[Cpu, ...]
    memory: frozenset[int] = frozenset()


def bindings(name: str, mode: Numa, topology: Topology, gpu_nodes: Sequence[int], slots: int) -> tuple[Binding, ...]:
    """The binding of each local rank.  `gpu_nodes` are the visible GPUs' NUMA nodes; `name` is the option's."""
    option = f"{name}={mode.value}"
    if not gpu_nodes:
        raise UsageError(f"{option}: workers are bound near their GPUs, and no GPU is visible; omit {name}")
    if slots > len(gpu_nodes):
        raise UsageError(
            f"{option}: {slots} workers need a GPU each, and {len(gpu_nodes)} are visible here; "
            f"start {len(gpu_nodes)} workers, or omit {name}"
        )
    return tuple(_binding(option, mode, topology, gpu_nodes, gpu) for gpu in range(slots))


def _binding(option: str, mode: Numa, topology: Topology, gpu_nodes: Sequence[int], gpu: int) -> Binding:
    node = gpu_nodes[gpu]
    near = [cpu for cpu in topology.cpus if cpu.node == node]
    if not near:
        raise UsageError(
            f"{option}: GPU {gpu} is on NUMA node {node}, which has no processor that may be used here "
            f"(allowed are {format_cpu_ranges(cpu.number for cpu in topology.cpus)}, on nodes "
            f"{format_cpu_ranges({cpu.node for cpu in topology.cpus})}); allow some of node {node}, "
            "or omit the NUMA binding"
        )
    gpus = [other for other, its_node in enumerate(gpu_nodes) if its_node == node]
    match mode:
        case Numa.NODE:
            chosen = near
        case Numa.SOCKET:
            socket = min(near, key=lambda cpu: cpu.number).socket
            chosen = [cpu for cpu in topology.cpus if cpu.socket == socket]
        case Numa.EXCLUSIVE:
            chosen = _exclusive_binding_cpus(option, near, gpus, gpu)
        case Numa.CORE_COMPLEX:
            chosen = _core_complex_binding_cpus(near, gpus.index(gpu))
    numbers = tuple(sorted(cpu.number for cpu in chosen))
    return Binding(numbers, node if node in topology.memory else None)


def _exclusive_binding_cpus(option: str, near: Sequence[Cpu], gpus: Sequence[int], gpu: int) -> list[Cpu]:
    """The cores of a node, divided among its GPUs into contiguous parts."""
    cores = sorted({cpu.core for cpu in near})
    each, left = divmod(len(cores), len(gpus))
    if not each:
        raise UsageError(
            f"{option}: the {len(gpus)} GPUs of NUMA node {near[0].node} need a core each, "
            f"and {len(cores)} may be used; write node instead of exclusive"
        )
    place = gpus.index(gpu)
    first = place * each + min(place, left)
    mine = set(cores[first : first + each + (place < left)])
    return [cpu for cpu in near if cpu.core in mine]


def _core_complex_binding_cpus(near: Sequence[Cpu], place: int) -> list[Cpu]:
    """One cache's processors, the largest groups first; with more GPUs than groups, groups are reused."""
    groups: dict[int, list[Cpu]] = {}
    for cpu in near:
        groups.setdefault(cpu.cache, []).append(cpu)
    order = sorted(groups, key=lambda cache: (-len(groups[cache]), cache))
    return groups[order[place % len(order)]]
