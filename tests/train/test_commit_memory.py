"""Memory for buffers: what several processes of a node allocate at the same time."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from ripstop import commit_memory
from ripstop.commit_memory import RESERVE_BYTES, NotEnoughMemory, create_memory
from tests.memory_cgroup import command_in, limited_memory

MB = 1 << 20
ROOM = 64 * MB


def buffers() -> dict[int, int]:
    """The inode and the bytes of each buffer of this process."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "ripstop-state" in str(entry.readlink()):
                status = os.fstat(int(entry.name))
                found[status.st_ino] = status.st_blocks * 512
        except OSError:  # closed meanwhile
            continue
    return found


def test_together_they_never_allocate_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    free: list[int] = []
    of_others = buffers().keys()

    def allocated() -> int:
        return sum(size for inode, size in buffers().items() if inode not in of_others)

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
import os
from ripstop.commit_memory import NotEnoughMemory, create_memory, usable_commit_memory
wanted = usable_commit_memory() * 6 // 10
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
print(*sorted(map(os.waitstatus_to_exitcode, tried)), flush=True)
os.waitpid(-1, 0)
"""


def test_no_process_is_killed_for_lack_of_memory() -> None:
    with limited_memory(LIMIT) as group:
        command = [*command_in(group), sys.executable, "-c", ALLOCATE]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            _, errors = process.communicate(timeout=60)  # ends the one that keeps its buffer
        assert line.split() == ["3"] * 5, errors
