"""The memory cgroups of this process, in versions 1 and 2: limits, use, OOM kills, and what is still available.

Workers read them too, so this module imports nothing else of ripstop.  Rules: (1) reading a cgroup never raises; (2) a
value that the kernel does not give is None, and so is the limit of a cgroup without one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path("/")
_NO_LIMIT = 1 << 60  # version 1 has a very large number for "no limit"
_MAX_CHARS = 1 << 20  # of one file


class _Files(NamedTuple):
    mount: str
    limit: str
    used: str
    reclaimable: str  # the name of a line in `memory.stat`
    peak: str
    oom_kills: str


_FILES = {
    1: _Files(
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
        "memory.max_usage_in_bytes",
        "memory.oom_control",
    ),
    2: _Files("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file", "memory.peak", "memory.events"),
}


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """One cgroup, in bytes.  What the kernel can reclaim from files is not in use."""

    limit: int | None
    used: int | None
    peak: int | None
    oom_kills: int | None  # processes that the OOM killer has killed


def memory_cgroups(root: Path = ROOT) -> Iterator[MemoryCgroup]:
    """The cgroup of this process, and then those that contain it.

    In a container, the path may be the host's; then only the mounted cgroup has values, and it comes last.
    """
    version, path = memory_cgroup_path(_cgroup_text(root / "proc/self/cgroup"))
    if not version:
        return
    files = _FILES[version]
    mount = root / files.mount
    group = mount / path.lstrip("/")
    while group.is_relative_to(mount):
        yield _read(group, files)
        group = group.parent


def available_memory(root: Path = ROOT) -> int:
    """Bytes that this process can still use: the machine's, or less in a cgroup with a limit."""
    free = 0
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for group in memory_cgroups(root):
        if group.limit is not None and group.used is not None:
            free = min(free, group.limit - group.used)
    return max(0, free)


def limit_below(process: int | str, name: str) -> Path:
    """The file with the limit of a cgroup of this name, below the one of a process; it may not exist."""
    version, path = memory_cgroup_path(_cgroup_text(ROOT / f"proc/{process}/cgroup"))
    files = _FILES[version or 2]
    return ROOT / files.mount / path.lstrip("/") / name / files.limit


def memory_cgroup_path(text: str) -> tuple[int, str]:
    """The version of the memory controller (0: none) and the path of the cgroup, from `/proc/self/cgroup`."""
    version, path = 0, ""
    for line in text.splitlines():
        match line.split(":", 2):
            case [_, controllers, group] if "memory" in controllers.split(","):
                return 1, group.rstrip("/")
            case ["0", "", group]:
                version, path = 2, group.rstrip("/")
    return version, path


def machine_oom_kills(root: Path = ROOT) -> int | None:
    """The processes that the OOM killer has killed on the whole machine."""
    return _cgroup_memory_counter(root / "proc/vmstat", "oom_kill")


def _read(group: Path, files: _Files) -> MemoryCgroup:
    limit, used = (
        _cgroup_memory_number(_cgroup_text(group / files.limit)),
        _cgroup_memory_number(_cgroup_text(group / files.used)),
    )
    if used is not None:
        used -= _cgroup_memory_counter(group / "memory.stat", files.reclaimable) or 0
    return MemoryCgroup(
        limit=limit if limit is not None and limit < _NO_LIMIT else None,
        used=used,
        peak=_cgroup_memory_number(_cgroup_text(group / files.peak)),
        oom_kills=_cgroup_memory_counter(group / files.oom_kills, "oom_kill"),
    )


def _cgroup_memory_counter(file: Path, name: str) -> int | None:
    """The value of a `name value` line."""
    for line in _cgroup_text(file).splitlines():
        match line.split():
            case [key, value] if key == name:
                return _cgroup_memory_number(value)
    return None


def _cgroup_text(file: Path) -> str:
    try:
        with file.open(encoding="utf-8", errors="replace") as content:
            return content.read(_MAX_CHARS)
    except OSError:
        return ""


def _cgroup_memory_number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None
