"""The memory limits of cgroups, read from files as the kernel shows them."""

from pathlib import Path

import pytest

from ripstop.diagnostics.evidence import MemoryEvidence, memory_evidence
from ripstop.system.cgroup_memory import MemoryCgroup, available_memory, memory_cgroup_path, memory_cgroups

MIB, GIB = 1 << 20, 1 << 30
HYBRID = "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n"
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root of a file system: a machine with 64 GiB of free memory, and without cgroups."""
    write(tmp_path / "proc", {"meminfo": f"MemTotal: {99 << 20} kB\nMemAvailable:  {64 << 20} kB\n"})
    write(tmp_path / "proc", {"vmstat": "pgfault 7\noom_kill 3\n"})
    return tmp_path


def write(directory: Path, files: dict[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)


def v1_cgroup(limit: int, used: int = 3 * GIB, kills: int = 5) -> dict[str, str]:
    return {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{used}\n",
        "memory.max_usage_in_bytes": f"{used + MIB}\n",
        "memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n",
        "memory.stat": f"cache 1\ninactive_file 1\ntotal_inactive_file {GIB}\n",
    }


def v2_cgroup(limit: int | str, used: int = 3 * GIB, kills: int = 2) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{used}\n",
        "memory.peak": f"{used + MIB}\n",
        "memory.events": f"low 0\nhigh 0\nmax 31\noom 9\noom_kill {kills}\noom_group_kill 0\n",
        "memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file 1\n",
    }


def test_a_limit_of_version_1_is_read(root: Path) -> None:
    write(root / "proc/self", {"cgroup": HYBRID})
    write(root / V1 / "docker/abc", v1_cgroup(4 * GIB))
    assert next(memory_cgroups(root)) == MemoryCgroup(limit=4 * GIB, used=2 * GIB, peak=3 * GIB + MIB, oom_kills=5)
    assert available_memory(root) == 2 * GIB
    assert memory_evidence(root) == MemoryEvidence(kills=5, limit=4 * GIB, peak=3 * GIB + MIB)


def test_a_limit_of_version_2_is_read(root: Path) -> None:
    write(root / "proc/self", {"cgroup": "0::/user.slice/job:7.scope\n"})
    write(root / V2 / "user.slice/job:7.scope", v2_cgroup(8 * GIB))
    assert next(memory_cgroups(root)) == MemoryCgroup(limit=8 * GIB, used=2 * GIB, peak=3 * GIB + MIB, oom_kills=2)
    assert available_memory(root) == 6 * GIB
    assert memory_evidence(root) == MemoryEvidence(kills=2, limit=8 * GIB, peak=3 * GIB + MIB)


def test_no_limit_of_version_1_is_none(root: Path) -> None:
    write(root / "proc/self", {"cgroup": HYBRID})
    write(root / V1 / "docker/abc", v1_cgroup(9223372036854771712))
    assert available_memory(root) == 64 * GIB
    assert memory_evidence(root).limit is None


def test_no_limit_of_version_2_is_none(root: Path) -> None:
    write(root / "proc/self", {"cgroup": "0::/job\n"})
    write(root / V2 / "job", v2_cgroup("max"))
    assert available_memory(root) == 64 * GIB
    assert memory_evidence(root).limit is None


def test_a_lower_limit_of_a_cgroup_above_counts(root: Path) -> None:
    write(root / "proc/self", {"cgroup": "0::/pod/container\n"})
    write(root / V2 / "pod", v2_cgroup(6 * GIB, used=5 * GIB, kills=7))
    write(root / V2 / "pod/container", v2_cgroup("max"))
    assert available_memory(root) == 2 * GIB
    assert memory_evidence(root).kills == 2, "those of this process's own cgroup"


@pytest.mark.parametrize(
    ("path", "mount", "files"),
    [(HYBRID, V1, v1_cgroup(4 * GIB)), ("0::/kubepods/pod7/abc\n", V2, v2_cgroup(4 * GIB))],
)
def test_in_a_container_that_has_the_host_s_path_the_mounted_cgroup_counts(
    root: Path, path: str, mount: str, files: dict[str, str]
) -> None:
    write(root / "proc/self", {"cgroup": path})
    write(root / mount, files)
    assert available_memory(root) == 2 * GIB
    assert memory_evidence(root).limit == 4 * GIB


@pytest.mark.parametrize("path", ["", "0::/\n", HYBRID])
def test_without_a_memory_cgroup_the_machine_counts(root: Path, path: str) -> None:
    write(root / "proc/self", {"cgroup": path})
    assert available_memory(root) == 64 * GIB
    assert memory_evidence(root) == MemoryEvidence(kills=3, machine=True)


def test_a_cgroup_over_its_limit_has_nothing_left(root: Path) -> None:
    write(root / "proc/self", {"cgroup": "0::/job\n"})
    write(root / V2 / "job", v2_cgroup(GIB))
    assert available_memory(root) == 0


def test_a_kernel_that_does_not_count_oom_kills(root: Path) -> None:
    write(root / "proc/self", {"cgroup": HYBRID})
    write(root / V1 / "docker/abc", v1_cgroup(4 * GIB) | {"memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n"})
    assert memory_evidence(root) == MemoryEvidence(kills=3, machine=True)
    assert available_memory(root) == 2 * GIB


def test_the_path_of_the_memory_cgroup_is_found_in_both_versions() -> None:
    assert memory_cgroup_path(HYBRID) == (1, "/docker/abc")
    assert memory_cgroup_path("0::/user.slice/job:7.scope\n") == (2, "/user.slice/job:7.scope")
    assert memory_cgroup_path("0::/\n") == (2, "")
    assert memory_cgroup_path("") == (0, "")
