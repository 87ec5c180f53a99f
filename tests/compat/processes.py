"""A watch on what a test of worker processes leaves behind, and waiting for what will be so."""

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

DEADLINE = 120.0


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Signal handlers are put back, and no process may be left of the test."""
    before = set(_children())
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    }
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    left = [pid for pid in _children() if pid not in before | _helpers()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert not left, f"the test left processes behind: {left}"


def eventually(holds: Callable[[], bool], what: str) -> None:
    """Waits for something that will be so."""
    deadline = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < deadline, f"not within {DEADLINE} s: {what}"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _children() -> list[int]:
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # the thread has just ended; its children are another's now
            found += map(int, (task / "children").read_text().split())
    return found


def _helpers() -> set[int]:
    """multiprocessing's own processes, which live as long as this one."""
    server, tracker = multiprocessing.forkserver._forkserver, multiprocessing.resource_tracker._resource_tracker
    return {pid for pid in (server._forkserver_pid, tracker._pid) if pid is not None}
