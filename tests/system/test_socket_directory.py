"""The directory for sockets is private."""

import fcntl
import os
import socket
from pathlib import Path

import pytest

from ripstop.model.errors import UsageError
from ripstop.system.socket_directory import HeldDirectory, socket_address, socket_directories, socket_directory


def test_the_directory_is_private(tmp_path: Path) -> None:
    path = socket_directory({"XDG_RUNTIME_DIR": str(tmp_path)})
    assert path.stat().st_mode & 0o777 == 0o700
    assert socket_directory({"XDG_RUNTIME_DIR": str(tmp_path)}) == path


def test_a_directory_with_access_for_others_is_rejected(tmp_path: Path) -> None:
    socket_directory({"XDG_RUNTIME_DIR": str(tmp_path)}).chmod(0o755)
    with pytest.raises(UsageError, match="private"):
        socket_directory({"XDG_RUNTIME_DIR": str(tmp_path)})


def test_a_link_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "ripstop").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="private"):
        socket_directory({"XDG_RUNTIME_DIR": str(tmp_path)})


def test_the_last_holder_removes_it(tmp_path: Path) -> None:
    environ = {"TMPDIR": str(tmp_path)}
    first, second = HeldDirectory(environ), HeldDirectory(environ)
    assert first.path == second.path
    first.release()
    assert second.path.is_dir()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_empty_is_kept(tmp_path: Path) -> None:
    held = HeldDirectory({"TMPDIR": str(tmp_path)})
    (held.path / "socket").touch()
    held.release()
    assert (held.path / "socket").exists()


def test_a_directory_that_another_process_has_locked_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    environ = {"TMPDIR": str(tmp_path)}
    other = os.open(socket_directory(environ), os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another process has locked"):
            HeldDirectory(environ)
    finally:
        os.close(other)


def test_a_directory_that_another_agent_is_about_to_remove_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"TMPDIR": str(tmp_path)}
    other = os.open(socket_directory(environ), os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)

    def remove(seconds: float) -> None:
        socket_directory(environ).rmdir()
        os.close(other)

    monkeypatch.setattr("time.sleep", remove)
    held = HeldDirectory(environ)
    assert held.path.is_dir()
    held.release()


def test_a_lock_that_fails_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match="No locks available"):
        HeldDirectory({"TMPDIR": str(tmp_path)})
    assert set(Path("/proc/self/fd").iterdir()) <= before


def test_the_search_covers_both_places_and_creates_none(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path / "run"), "TMPDIR": str(tmp_path)}
    assert socket_directories(environ) == []
    assert list(tmp_path.iterdir()) == []
    scheduled = socket_directory({"TMPDIR": str(tmp_path)})
    (tmp_path / "run").mkdir()
    own = socket_directory(environ)
    assert socket_directories(environ) == [own, scheduled]
    scheduled.chmod(0o755)  # no longer private
    assert socket_directories(environ) == [own]


def test_a_socket_path_may_be_longer_than_an_address(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as caller:
        with socket_address(directory / "a.sock") as where:
            listening.bind(where)
        listening.listen()
        with socket_address(directory / "a.sock") as where:
            caller.connect(where)
