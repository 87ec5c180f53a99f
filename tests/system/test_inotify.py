"""Writes to open files are reported, with and without inotify."""

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ripstop.system.inotify import GrowthWatch


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "out.log"
    path.write_bytes(b"first")
    return path


@pytest.fixture
def fd(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture(params=["inotify", "polling"])
def watch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[GrowthWatch]:
    if request.param == "polling":
        monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace())
    watch = GrowthWatch()
    yield watch
    watch.close()


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_a_write_after_arm_is_reported(path: Path, fd: int, watch: GrowthWatch) -> None:
    watch.arm(fd)
    assert watch.needs_polling == (watch.fileno() is None)
    append(path, b"more")
    assert watch.grown() == {fd}


def test_a_file_that_is_not_armed_is_not_reported(path: Path, fd: int, watch: GrowthWatch) -> None:
    watch.arm(fd)
    watch.disarm(fd)
    append(path, b"more")
    assert watch.grown() == set()
    assert not watch.needs_polling


def test_without_inotify_watches_the_file_is_polled(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = GrowthWatch()
    monkeypatch.setattr(watch._libc, "inotify_add_watch", lambda *_: -1)
    watch.arm(fd)
    assert (watch.needs_polling, watch.grown()) == (True, {fd})
    watch.close()


def test_a_watch_reports_one_change_until_it_is_armed_again(tmp_path: Path) -> None:
    watch, path = GrowthWatch(), tmp_path / "file"
    with path.open("ab", buffering=0) as file:
        watch.arm(file.fileno())
        assert watch.grown() == set()
        file.write(b"1")
        file.write(b"2")
        assert watch.grown() == {file.fileno()}
        file.write(b"3")
        assert watch.grown() == set()
        watch.arm(file.fileno())
        file.write(b"4")
        assert watch.grown() == {file.fileno()}
        watch.arm(file.fileno())
        watch.disarm(file.fileno())
        file.write(b"5")
        assert watch.grown() == set()
    watch.close()


WRITER = """
import os, sys
file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
while os.getppid() == int(sys.argv[2]):
    os.write(file, b"x")
    for _ in range(1000):
        pass
"""


def test_no_write_is_missed_while_another_process_writes_all_the_time(path: Path, fd: int) -> None:
    """The kernel may remove a watch just after it was armed again."""
    watch, reported = GrowthWatch(), select.poll()
    notifications = watch.fileno()
    assert notifications is not None
    reported.register(notifications, select.POLLIN)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, path, str(os.getpid())])
    try:
        watch.arm(fd)
        seen = 0
        while seen < 2000:
            assert reported.poll(30_000), f"no report after {seen} of them, and the file still grows"
            for grown in watch.grown():
                watch.arm(grown)
                seen += 1
    finally:
        writer.kill()
        writer.wait()
        watch.close()
