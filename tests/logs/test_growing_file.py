"""Reading files that grow, with inotify and by polling."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ripstop.logs.growing_file import GrowingFile
from ripstop.system.inotify import GrowthWatch


def forbid_inotify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "out.log"
    path.write_bytes(b"first")
    return path


@pytest.fixture(params=["inotify", "polling"])
def watch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[GrowthWatch]:
    if request.param == "polling":
        forbid_inotify(monkeypatch)
    watch = GrowthWatch()
    yield watch
    watch.close()


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_a_file_is_read_from_its_start_or_from_its_end(path: Path) -> None:
    whole, rest = GrowingFile(path), GrowingFile(path, from_end=True)
    append(path, b" second")
    assert (whole.unread(), rest.unread()) == (12, 7)
    assert (whole.read(), rest.read()) == (b"first second", b" second")
    assert (whole.read(), rest.read()) == (b"", b"")
    whole.close()
    rest.close()


def test_a_truncated_file_is_read_again_from_its_start(path: Path) -> None:
    file = GrowingFile(path, from_end=True)
    os.truncate(path, 0)
    append(path, b"new")
    assert file.read() == b"new"
    file.close()


def test_a_write_after_arm_is_reported(path: Path, watch: GrowthWatch) -> None:
    file = GrowingFile(path)
    watch.arm(file.fd)
    assert watch.needs_polling == (watch.fileno() is None)
    append(path, b"more")
    assert watch.grown() == {file.fd}
    file.close()


def test_a_file_that_is_not_armed_is_not_reported(path: Path, watch: GrowthWatch) -> None:
    file = GrowingFile(path)
    watch.arm(file.fd)
    watch.disarm(file.fd)
    append(path, b"more")
    assert watch.grown() == set()
    assert not watch.needs_polling
    file.close()


def test_without_inotify_watches_the_file_is_polled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, file = GrowthWatch(), GrowingFile(path)
    monkeypatch.setattr(watch._libc, "inotify_add_watch", lambda *_: -1)
    watch.arm(file.fd)
    assert (watch.needs_polling, watch.grown()) == (True, {file.fd})
    file.close()
    watch.close()
