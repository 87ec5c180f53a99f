"""Memory for buffers: what several processes of a node allocate at the same time."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from ripstop import commit_memory
from ripstop.commit_memory import RESERVE_BYTES, NotEnoughMemory, create_memory

MB = 1 << 20
ROOM = 64 * MB


def allocated() -> int:
    """Bytes of all buffers of this process."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "ripstop-state" in str(entry.readlink()):
                total += os.fstat(int(entry.name)).st_blocks * 512
        except OSError:  # closed meanwhile
            continue
    return total


def test_together_they_never_allocate_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    free: list[int] = []

    def available() -> int:
        free.append(ROOM + RESERVE_BYTES - allocated())
        return free[-1]

    monkeypatch.setattr(commit_memory, "available_memory", available)
    count = 8
    barrier = Barrier(count)

    def allocate(_: int) -> int | None:
        barrier.wait()
        try:
            return create_memory(ROOM * 6 // 10)
        except NotEnoughMemory:
            return None

    with ThreadPoolExecutor(count) as pool:
        made = [fd for fd in pool.map(allocate, range(count)) if fd is not None]
    try:
        assert len(made) <= 1
        assert min(free) > 0, "without the reserve, the kernel would have killed a process"
        assert allocated() == len(made) * -(-ROOM * 6 // 10 // 4096) * 4096, "what failed is freed"
    finally:
        for fd in made:
            os.close(fd)
    os.close(create_memory(ROOM * 6 // 10))
    assert allocated() == 0


LIMIT = 600 * MB
ALLOCATE = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from ripstop.commit_memory import NotEnoughMemory, available_memory, create_memory, usable_memory
if available_memory() > int(sys.argv[2]):
    sys.exit("the limit is not seen")
wanted = usable_memory() * 6 // 10
pids = []
begin, go = os.pipe()
for _ in range(6):
    if not (pid := os.fork()):
        os.close(go)
        os.read(begin, 1)
        try:
            create_memory(wanted)
        except NotEnoughMemory:
            os._exit(3)
        os.read(0, 1)  # keep it until all have tried
        os._exit(0)
    pids.append(pid)
os.close(go)
tried = [os.waitpid(-1, 0)[1] for _ in range(5)]  # at most one keeps its buffer
print(*sorted(map(os.waitstatus_to_exitcode, tried)))
"""


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup of version 1 or 2 with LIMIT."""
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
            (group / file).write_text(str(LIMIT))
        except OSError as error:
            pytest.skip(f"needs the right to limit the memory of a cgroup: {error}")
        yield group
    finally:
        group.rmdir()


def test_no_process_is_killed_for_lack_of_memory(small_cgroup: Path) -> None:
    command = [sys.executable, "-c", ALLOCATE, str(small_cgroup), str(LIMIT)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        _, errors = process.communicate(timeout=60)  # ends the one that keeps its buffer
    if "the limit is not seen" in errors:
        pytest.skip("this version of cgroups is not read")
    assert line.split() == ["3"] * 5, errors
