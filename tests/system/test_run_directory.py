"""The directory of sockets belongs to one user."""

from pathlib import Path

import pytest

from ripstop.model.errors import UsageError
from ripstop.system.run_directory import HeldDirectory, run_directories, run_directory


def test_the_directory_is_this_users_alone(tmp_path: Path) -> None:
    path = run_directory({"XDG_RUNTIME_DIR": str(tmp_path)})
    assert path.stat().st_mode & 0o777 == 0o700
    assert run_directory({"XDG_RUNTIME_DIR": str(tmp_path)}) == path


def test_a_directory_that_lets_others_in_is_refused(tmp_path: Path) -> None:
    run_directory({"XDG_RUNTIME_DIR": str(tmp_path)}).chmod(0o755)
    with pytest.raises(UsageError, match="private"):
        run_directory({"XDG_RUNTIME_DIR": str(tmp_path)})


def test_a_link_to_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "ripstop").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="private"):
        run_directory({"XDG_RUNTIME_DIR": str(tmp_path)})


def test_the_last_to_leave_removes_it_and_nobody_before(tmp_path: Path) -> None:
    environ = {"TMPDIR": str(tmp_path)}
    first, second = HeldDirectory(environ), HeldDirectory(environ)
    assert first.path == second.path
    first.release()
    assert second.path.is_dir()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_what_somebody_else_keeps_there_keeps_it(tmp_path: Path) -> None:
    held = HeldDirectory({"TMPDIR": str(tmp_path)})
    (held.path / "socket").touch()
    held.release()
    assert (held.path / "socket").exists()


def test_who_looks_for_jobs_looks_wherever_agents_may_be_and_makes_nothing(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path / "run"), "TMPDIR": str(tmp_path)}
    assert run_directories(environ) == []
    assert list(tmp_path.iterdir()) == []
    scheduled = run_directory({"TMPDIR": str(tmp_path)})
    (tmp_path / "run").mkdir()
    own = run_directory(environ)
    assert run_directories(environ) == [own, scheduled]
    scheduled.chmod(0o755)  # it may be anybody's
    assert run_directories(environ) == [own]
