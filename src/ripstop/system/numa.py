"""Which processors a worker runs on, so that its memory is near its GPU: a pure function of the machine's topology.

The worker with local rank n belongs to the n-th GPU that it sees, and its processors are of that GPU's NUMA node (or
socket).  Rules: (1) only processors that the agent may use itself are given away; (2) all threads of a core go to the
same worker; (3) cores, caches and GPUs are counted in the order of their numbers, and the earlier GPUs get what does
not divide evenly, so every node of a job and every round comes to the same result; (4) a node is shared out among all
GPUs on it, whether they have a worker in this job or not, because another job may have them.

`topology.py` reads the machine, the zygote binds.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from ripstop.model.config import Binding, Numa
from ripstop.model.errors import UsageError


class Cpu(Struct, frozen=True):
    """One processor.  A core and a cache are named by the lowest processor that shares them."""

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
    """The binding of each local rank.  `gpu_nodes` are the visible GPUs' NUMA nodes; `name` is for the errors."""
    said = f"{name}={mode.value}"
    if not gpu_nodes:
        raise UsageError(f"{said}: workers are bound near their GPUs, and none is visible; leave {name} out")
    if slots > len(gpu_nodes):
        raise UsageError(
            f"{said}: {slots} workers need a GPU each, and {len(gpu_nodes)} are visible here; "
            f"start {len(gpu_nodes)} workers, or leave {name} out"
        )
    return tuple(_binding(said, mode, topology, gpu_nodes, gpu) for gpu in range(slots))


def _binding(said: str, mode: Numa, topology: Topology, gpu_nodes: Sequence[int], gpu: int) -> Binding:
    node = gpu_nodes[gpu]
    near = [cpu for cpu in topology.cpus if cpu.node == node]
    if not near:
        raise UsageError(
            f"{said}: GPU {gpu} is on NUMA node {node}, which has no processor that may be used here "
            f"(there are {format_ranges(cpu.number for cpu in topology.cpus)}, on nodes "
            f"{format_ranges({cpu.node for cpu in topology.cpus})}); allow some of its, or leave the NUMA binding out"
        )
    gpus = [other for other, its_node in enumerate(gpu_nodes) if its_node == node]
    match mode:
        case Numa.NODE:
            chosen = near
        case Numa.SOCKET:
            socket = min(near, key=lambda cpu: cpu.number).socket
            chosen = [cpu for cpu in topology.cpus if cpu.socket == socket]
        case Numa.EXCLUSIVE:
            chosen = _share(said, near, gpus, gpu)
        case Numa.CORE_COMPLEX:
            chosen = _complex(near, gpus.index(gpu))
    numbers = tuple(sorted(cpu.number for cpu in chosen))
    return Binding(numbers, node if node in topology.memory else None)


def _share(said: str, near: Sequence[Cpu], gpus: Sequence[int], gpu: int) -> list[Cpu]:
    """The cores of a node, shared out among its GPUs in runs of neighbours."""
    cores = sorted({cpu.core for cpu in near})
    each, left = divmod(len(cores), len(gpus))
    if not each:
        raise UsageError(
            f"{said}: the {len(gpus)} GPUs of NUMA node {near[0].node} cannot have a core each, there are {len(cores)} "
            "that may be used; write node in place of exclusive"
        )
    place = gpus.index(gpu)
    first = place * each + min(place, left)
    mine = set(cores[first : first + each + (place < left)])
    return [cpu for cpu in near if cpu.core in mine]


def _complex(near: Sequence[Cpu], place: int) -> list[Cpu]:
    """One group of a node's cores, the largest groups first; with more GPUs than groups, they start over."""
    groups: dict[int, list[Cpu]] = {}
    for cpu in near:
        groups.setdefault(cpu.cache, []).append(cpu)
    order = sorted(groups, key=lambda cache: (-len(groups[cache]), cache))
    return groups[order[place % len(order)]]


# numbers as the kernel writes them -----------------------------------------------------------------------------------


def parse_ranges(text: str) -> frozenset[int]:
    """`0-2,4`."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def format_ranges(numbers: Iterable[int]) -> str:
    """`0-2,4`; `none` for no number."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"
