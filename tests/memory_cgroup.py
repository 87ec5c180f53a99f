"""A memory cgroup with a limit, of version 1 or 2, for tests that need a real one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SEES = "import sys; from ripstop.system.cgroup_memory import available_memory as a; sys.exit(a() > int(sys.argv[1]))"


def command_in(group: Path) -> list[str]:
    """What comes before a command that is to run in the group."""
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]


@contextmanager
def limited_memory(limit: int) -> Iterator[Path]:
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    if "memory" in paths:
        parent, file = Path("/sys/fs/cgroup/memory" + paths["memory"]), "memory.limit_in_bytes"
    else:
        parent, file = Path("/sys/fs/cgroup" + paths.get("", "/")), "memory.max"
    group = parent / f"ripstop_test_{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs the right to make a memory cgroup: {error}")
    try:
        try:
            (group / file).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"needs the right to limit the memory of a cgroup: {error}")
        if subprocess.run([*command_in(group), sys.executable, "-c", SEES, str(limit)], check=False).returncode:
            pytest.skip("ripstop does not read the limits of cgroups of this version")
        yield group
    finally:
        group.rmdir()
