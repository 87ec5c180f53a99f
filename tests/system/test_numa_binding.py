"""Workers bound near their GPUs: on simulated machines, and on this one."""

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ripstop.model.config import Binding, Numa, Script, StartMethod
from ripstop.model.errors import UsageError
from ripstop.model.text_formatting import format_cpu_ranges
from ripstop.system.gpus import GpuDevice, visible_to_cuda
from ripstop.system.linux import linux_memory_policy_syscall
from ripstop.system.numa_binding import Cpu, Topology, bindings
from ripstop.system.numa_topology import gpu_numa_nodes, parse_cpu_ranges, read_topology
from ripstop.workers.group import Exit, Group
from ripstop.workers.spawner import ProcessSpec
from tests.worker_fixtures import Stage, new_spawner

NAME = "--numa-binding"


def machine(
    *, sockets: int = 1, nodes: int = 1, caches: int = 1, cores: int = 4, threads: int = 1, without: str = ""
) -> Topology:
    """Nodes per socket, caches per node, cores per cache, threads per core.  As in Linux, the first threads of all
    cores have the lowest numbers.  `without` are processors that must not be used."""
    all_cores = sockets * nodes * caches * cores
    cpus = [
        Cpu(
            number=core + thread * all_cores,
            core=core,
            cache=core // cores * cores,
            node=core // (cores * caches),
            socket=core // (cores * caches * nodes),
        )
        for thread in range(threads)
        for core in range(all_cores)
    ]
    forbidden = parse_cpu_ranges(without)
    return Topology(tuple(cpu for cpu in cpus if cpu.number not in forbidden), frozenset(range(sockets * nodes)))


def bound(mode: Numa, topology: Topology, gpu_nodes: list[int], slots: int | None = None) -> list[str]:
    found = bindings(NAME, mode, topology, gpu_nodes, len(gpu_nodes) if slots is None else slots)
    return [format_cpu_ranges(binding.cpus) for binding in found]


# simulated machines -------------------------------------------------------------------------------------------------


def test_node_gives_a_worker_all_processors_of_its_gpus_node() -> None:
    two_sockets = machine(sockets=2, cores=4, threads=2)
    assert bound(Numa.NODE, two_sockets, [0, 0, 1, 1]) == ["0-3,8-11", "0-3,8-11", "4-7,12-15", "4-7,12-15"]
    assert bound(Numa.NODE, two_sockets, [1, 0]) == ["4-7,12-15", "0-3,8-11"]


def test_socket_gives_a_worker_all_nodes_of_its_gpus_socket() -> None:
    assert bound(Numa.SOCKET, machine(sockets=2, nodes=2, cores=2), [0, 1, 3]) == ["0-3", "0-3", "4-7"]


def test_socket_is_node_where_a_socket_has_one_node() -> None:
    topology = machine(sockets=2, cores=3)
    assert bound(Numa.SOCKET, topology, [0, 1]) == bound(Numa.NODE, topology, [0, 1])


def test_exclusive_divides_a_nodes_cores_among_its_gpus() -> None:
    assert bound(Numa.EXCLUSIVE, machine(sockets=2, cores=16), [0, 0, 1, 1]) == ["0-7", "8-15", "16-23", "24-31"]


def test_exclusive_keeps_the_threads_of_a_core_together_and_gives_the_remainder_to_the_first() -> None:
    assert bound(Numa.EXCLUSIVE, machine(cores=5, threads=2), [0, 0, 0]) == ["0-1,5-6", "2-3,7-8", "4,9"]


def test_exclusive_reserves_cores_for_gpus_without_a_worker() -> None:
    assert bound(Numa.EXCLUSIVE, machine(cores=4), [0, 0], slots=1) == ["0-1"]


def test_core_complex_gives_each_worker_its_own_cache_if_there_are_enough() -> None:
    topology = machine(sockets=2, caches=2, cores=8)
    assert bound(Numa.CORE_COMPLEX, topology, [1, 1]) == ["16-23", "24-31"]
    assert bound(Numa.CORE_COMPLEX, topology, [0, 0, 0]) == ["0-7", "8-15", "0-7"]


def test_core_complex_gives_the_largest_first() -> None:
    assert bound(Numa.CORE_COMPLEX, machine(caches=3, cores=4, without="0-1,5"), [0, 0, 0]) == ["8-11", "4,6-7", "2-3"]


def test_only_allowed_processors_are_used() -> None:
    topology = machine(sockets=2, cores=4, without="0,4-6")
    assert bound(Numa.NODE, topology, [0, 1]) == ["1-3", "7"]
    assert bound(Numa.EXCLUSIVE, topology, [0, 0]) == ["1-2", "3"]


def test_memory_is_on_the_gpus_node_if_that_node_has_memory() -> None:
    topology = Topology(machine(sockets=2).cpus, frozenset({0}))
    assert [b.memory for b in bindings(NAME, Numa.SOCKET, topology, [0, 1], 2)] == [0, None]


@given(
    st.builds(
        machine,
        sockets=st.integers(1, 3),
        nodes=st.integers(1, 2),
        caches=st.integers(1, 3),
        cores=st.integers(1, 5),
        threads=st.integers(1, 2),
    ),
    st.data(),
)
def test_on_any_machine_every_worker_has_processors_and_exclusive_ones_are_not_shared(
    topology: Topology, data: st.DataObject
) -> None:
    nodes = sorted({cpu.node for cpu in topology.cpus})
    gpu_nodes = data.draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=6))
    core_of = {cpu.number: cpu.core for cpu in topology.cpus}
    near = {node: {cpu.number for cpu in topology.cpus if cpu.node == node} for node in nodes}
    for mode in (Numa.NODE, Numa.SOCKET, Numa.CORE_COMPLEX):
        for gpu, binding in enumerate(bindings(NAME, mode, topology, gpu_nodes, len(gpu_nodes))):
            assert binding.cpus
            assert mode is Numa.SOCKET or set(binding.cpus) <= near[gpu_nodes[gpu]]
            assert mode is not Numa.SOCKET or set(binding.cpus) >= near[gpu_nodes[gpu]]
    try:
        exclusive = bindings(NAME, Numa.EXCLUSIVE, topology, gpu_nodes, len(gpu_nodes))
    except UsageError:  # more GPUs on a node than cores
        assert any(gpu_nodes.count(node) > len({core_of[cpu] for cpu in near[node]}) for node in nodes)
        return
    cores = [{core_of[cpu] for cpu in binding.cpus} for binding in exclusive]
    assert sum(map(len, cores)) == len(set().union(*cores))
    for node in set(gpu_nodes):  # without a remainder
        assert set().union(*(b.cpus for b, n in zip(exclusive, gpu_nodes, strict=True) if n == node)) == near[node]


@pytest.mark.parametrize(
    ("mode", "topology", "gpu_nodes", "slots", "line"),
    [
        (
            Numa.NODE,
            machine(),
            [],
            1,
            "--numa-binding=node: workers are bound near their GPUs, and no GPU is visible; omit --numa-binding",
        ),
        (
            Numa.SOCKET,
            machine(),
            [0, 0],
            3,
            "--numa-binding=socket: 3 workers need a GPU each, and 2 are visible here; "
            "start 2 workers, or omit --numa-binding",
        ),
        (
            Numa.NODE,
            machine(sockets=2, cores=2),
            [0, 5],
            2,
            "--numa-binding=node: GPU 1 is on NUMA node 5, which has no processor that may be used here "
            "(allowed are 0-3, on nodes 0-1); allow some of node 5, or omit the NUMA binding",
        ),
        (
            Numa.EXCLUSIVE,
            machine(cores=2, threads=2),
            [0, 0, 0],
            1,
            "--numa-binding=exclusive: the 3 GPUs of NUMA node 0 need a core each, and 2 may be used; "
            "write node instead of exclusive",
        ),
    ],
)
def test_an_impossible_binding_is_a_usage_error(
    mode: Numa, topology: Topology, gpu_nodes: list[int], slots: int, line: str
) -> None:
    with pytest.raises(UsageError) as refused:
        bindings(NAME, mode, topology, gpu_nodes, slots)
    assert str(refused.value) == line


@given(st.frozensets(st.integers(0, 300)))
def test_ranges_are_parsed_and_formatted_as_the_kernel_does(numbers: frozenset[int]) -> None:
    assert numbers == (parse_cpu_ranges(format_cpu_ranges(numbers)) if numbers else frozenset())


# reading a machine --------------------------------------------------------------------------------------------------


@pytest.fixture
def sys_tree(tmp_path: Path) -> Path:
    """A /sys of two nodes with a core of two threads each, and GPUs on both; one has no known node."""
    for cpu in range(4):
        core = cpu % 2
        write(tmp_path, f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{core},{core + 2}")
        write(tmp_path, f"devices/system/cpu/cpu{cpu}/topology/physical_package_id", "0")
        for index, kind, level, shared in (
            (0, "Data", 1, f"{core},{core + 2}"),
            (1, "Instruction", 9, f"{cpu}"),
            (2, "Unified", 3, "0-3"),
        ):
            home = f"devices/system/cpu/cpu{cpu}/cache/index{index}"
            write(tmp_path, f"{home}/type", kind)
            write(tmp_path, f"{home}/level", str(level))
            write(tmp_path, f"{home}/shared_cpu_list", shared)
    write(tmp_path, "devices/system/node/node0/cpulist", "0,2")
    write(tmp_path, "devices/system/node/node1/cpulist", "1,3")
    write(tmp_path, "devices/system/node/has_memory", "0")
    for pci, vendor, kind, node in (
        ("0000:01:00.0", "0x10de", "0x030200", 1),
        ("0000:02:00.0", "0x10de", "0x030200", 0),
        ("0000:02:00.1", "0x10de", "0x040300", 0),  # a sound card
        ("0000:03:00.0", "0x8086", "0x030000", 0),  # not NVIDIA's
        ("0000:04:00.0", "0x10de", "0x030000", -1),
    ):
        for name, text in (("vendor", vendor), ("class", kind), ("numa_node", str(node))):
            write(tmp_path, f"bus/pci/devices/{pci}/{name}", text)
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text + "\n")


def test_a_machine_is_read_from_sys(sys_tree: Path) -> None:
    topology = read_topology(sys_tree, frozenset({0, 1, 3}))
    assert topology == Topology((Cpu(0, 0, 0, 0, 0), Cpu(1, 1, 0, 1, 0), Cpu(3, 1, 0, 1, 0)), frozenset({0}))


def test_a_machine_that_cannot_be_read_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"topology cannot be read from .*; omit the NUMA binding"):
        read_topology(tmp_path, frozenset({0}))


def test_without_nvml_and_driver_gpus_are_read_from_the_pci_bus(sys_tree: Path, no_nvml: None) -> None:
    gpus = gpu_numa_nodes({}, sys_tree, sys_tree / "nothing")
    assert gpus.nodes == (1, 0, 0)
    assert gpus.note == "the kernel reports no NUMA node for GPU 0000:04:00.0: using 0"


def test_the_drivers_list_of_gpus_is_used_without_nvml(sys_tree: Path, no_nvml: None) -> None:
    proc = sys_tree / "proc"
    write(proc, "0000:02:00.0/information", "Model: \t\t NVIDIA H200\nGPU UUID:   \t GPU-bb")
    write(proc, "0000:01:00.0/information", "Model: \t\t NVIDIA H100\nGPU UUID:   \t GPU-aa")
    assert gpu_numa_nodes({"CUDA_VISIBLE_DEVICES": "GPU-b,0"}, sys_tree, proc).nodes == (0, 1)
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in gpu_numa_nodes({}, sys_tree, proc).note
    assert gpu_numa_nodes({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, sys_tree, proc).note == ""


def test_nvml_is_preferred(sys_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def no_mig(handle: int, index: int) -> int:
        raise NVMLError

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=f"00000000:0{2 - handle}:00.0"),
        nvmlDeviceGetName=lambda handle: b"H200",
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: 1,
        nvmlDeviceGetMigDeviceHandleByIndex=no_mig,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert gpu_numa_nodes({}, sys_tree, sys_tree / "nothing").nodes == (0, 1)


def test_a_gpu_whose_node_cannot_be_read_is_a_clear_error(sys_tree: Path, no_nvml: None) -> None:
    write(sys_tree / "proc", "0000:77:00.0/information", "")
    with pytest.raises(UsageError, match=r"NUMA node of GPU 0000:77:00\.0 cannot be read"):
        gpu_numa_nodes({}, sys_tree, sys_tree / "proc")


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        (None, "abc"),
        ("", ""),
        ("2,0", "ca"),
        (" 1 , 2 ", "bc"),
        ("0,7,1", "a"),
        ("0,-1,1", "a"),
        ("GPU-b", "b"),
        ("MIG-c,GPU-a", "ca"),
        ("GPU-x,0", ""),
    ],
)
def test_devices_are_chosen_by_cudas_rule(choice: str | None, chosen: str) -> None:
    gpus = [GpuDevice(name, uuids=(f"GPU-{name}", f"MIG-{name}")) for name in "abc"]
    assert "".join(gpu.pci for gpu in visible_to_cuda(choice, gpus)) == chosen


# this machine -------------------------------------------------------------------------------------------------------

REPORT = """
import ctypes, json, os, threading
mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
call = {"x86_64": 239, "aarch64": 236}.get(os.uname().machine)
if call is None or ctypes.CDLL(None).syscall(call, ctypes.byref(mode), mask, 1024, None, 0):
    mode.value = -1
seen = []
thread = threading.Thread(target=lambda: seen.append(sorted(os.sched_getaffinity(0))))
thread.start(); thread.join()
print(json.dumps([sorted(os.sched_getaffinity(0)), seen[0], mode.value, mask[0]]))
"""


def start_bound(stage: Stage, binding: Binding | None, start: StartMethod) -> tuple[Exit, str, str]:
    """Run a worker that prints its processors and memory policy."""
    script = Script(str(stage.script(REPORT)))
    files = stage.directory / "out", stage.directory / "err"

    async def run() -> Exit:
        ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        with new_spawner(script, dict(os.environ), start) as spawner:
            group = Group(
                spawner.children, spawner, [ProcessSpec(dict(os.environ), script, *files, binding)], ended.set_result
            )
            try:
                await group.start()
                return await asyncio.wait_for(ended, 120)
            finally:
                await group.stop(0)

    return asyncio.run(run()), files[0].read_text(), files[1].read_text()


@pytest.mark.parametrize("start", list(StartMethod))
def test_a_worker_its_threads_and_its_memory_are_bound(stage: Stage, start: StartMethod) -> None:
    topology = read_topology()
    last = topology.cpus[-1]
    memory = last.node if last.node in topology.memory else None
    end, out, err = start_bound(stage, Binding((last.number,), memory), start)
    assert (end.exitcode, err) == (0, "")
    cpus, threads_cpus, policy, nodes = json.loads(out)
    assert cpus == threads_cpus == [last.number]
    if memory is not None and linux_memory_policy_syscall() is not None and policy != -1:
        assert (policy, nodes) == (1, 1 << memory)


def test_a_worker_that_is_not_bound_runs_anywhere(stage: Stage) -> None:
    end, out, _ = start_bound(stage, None, StartMethod.ZYGOTE)
    assert end.exitcode == 0
    assert json.loads(out)[0] == sorted(os.sched_getaffinity(0))


def test_a_worker_that_cannot_be_bound_reports_it_and_does_not_run(stage: Stage) -> None:
    end, out, err = start_bound(stage, Binding((1023,)), StartMethod.ZYGOTE)
    assert end.exitcode not in (0, None)
    assert out == ""
    assert "ripstop: cannot run on processors (1023,): Invalid argument" in err


def test_this_machine_can_be_bound_in_every_mode() -> None:
    topology = read_topology()
    assert {cpu.number for cpu in topology.cpus} == os.sched_getaffinity(0)
    for mode in Numa:
        (binding,) = bindings(NAME, mode, topology, [topology.cpus[0].node], 1)
        assert set(binding.cpus) <= os.sched_getaffinity(0)


def test_bindings_equal_torchs_on_a_machine_with_gpus() -> None:
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("torch.numa.binding")
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    gpus, topology = gpu_numa_nodes(os.environ), read_topology()
    assert len(gpus.nodes) == torch.cuda.device_count()
    for mode in Numa:
        options = theirs.NumaOptions(affinity_mode=theirs.AffinityMode(mode.value))
        for gpu, binding in enumerate(bindings(NAME, mode, topology, gpus.nodes, len(gpus.nodes))):
            assert set(binding.cpus) == theirs._get_logical_cpus_to_bind_to(gpu_index=gpu, numa_options=options)
