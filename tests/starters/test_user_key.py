"""The key from which a job's secret is derived."""

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ripstop.model.config import UserKey
from ripstop.model.errors import UsageError
from ripstop.starters.user_key import job_secret_from_user_key

CONTEXT = "slurm lab 1234.0 0"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".config" / "ripstop" / "key"


def test_the_first_node_creates_a_key_that_only_the_user_can_read(path: Path) -> None:
    secret = job_secret_from_user_key(UserKey(path, CONTEXT, is_creator=True))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [file.name for file in path.parent.iterdir()] == ["key"]
    assert secret not in path.read_text()
    assert path.read_text().strip() not in secret


def test_all_nodes_of_a_job_have_one_secret_and_other_jobs_another(path: Path) -> None:
    first = job_secret_from_user_key(UserKey(path, CONTEXT, is_creator=True))
    assert job_secret_from_user_key(UserKey(path, CONTEXT, is_creator=True)) == first
    assert job_secret_from_user_key(UserKey(path, CONTEXT, is_creator=False)) == first
    assert job_secret_from_user_key(UserKey(path, "slurm lab 1234.0 1", is_creator=False)) != first


def test_the_other_nodes_wait_for_the_key(path: Path) -> None:
    with ThreadPoolExecutor() as nodes:
        waiting = [nodes.submit(job_secret_from_user_key, UserKey(path, CONTEXT, is_creator=False)) for _ in range(3)]
        created = job_secret_from_user_key(UserKey(path, CONTEXT, is_creator=True))
        assert {each.result(60) for each in waiting} == {created}


def test_first_nodes_of_two_jobs_that_create_the_key_at_once_agree_on_it(path: Path) -> None:
    start = threading.Barrier(8)

    def create() -> str:
        start.wait()
        return job_secret_from_user_key(UserKey(path, CONTEXT, is_creator=True))

    with ThreadPoolExecutor(8) as nodes:
        secrets = [each.result(60) for each in [nodes.submit(create) for _ in range(8)]]
    assert len(set(secrets)) == 1


def test_a_home_directory_that_is_not_shared_is_an_error_with_a_remedy(path: Path) -> None:
    with pytest.raises(UsageError, match=r"did not appear within 0.3 s.*that they share, or set.*export RIPSTOP_TOKEN"):
        job_secret_from_user_key(UserKey(path, CONTEXT, is_creator=False), timeout=0.3)


def test_a_file_system_that_does_not_answer_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(Path, "iterdir", lambda _: released.wait(120) and [])
    try:
        with pytest.raises(UsageError, match=r"did not answer within 0.2 s; correct this, or set .*RIPSTOP_TOKEN"):
            job_secret_from_user_key(UserKey(path, CONTEXT, is_creator=True), timeout=0.1)
    finally:
        released.set()


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be used for the job's secret: Not a directory; correct this, or set"):
        job_secret_from_user_key(UserKey(tmp_path / "file" / "key", CONTEXT, is_creator=True))


def test_a_home_directory_that_is_missing_is_an_error_and_is_not_created(tmp_path: Path) -> None:
    home = tmp_path / "not-mounted"
    with pytest.raises(UsageError, match=r"cannot be used for the job's secret: No such file or directory; correct"):
        job_secret_from_user_key(UserKey(home / ".config" / "ripstop" / "key", CONTEXT, is_creator=True))
    assert not home.exists()


@pytest.mark.parametrize(("mode", "seen"), [(0o640, "mode 640"), (0o604, "mode 604"), (0o620, "mode 620")])
def test_a_key_that_others_may_read_or_change_is_rejected(path: Path, mode: int, seen: str) -> None:
    job_secret_from_user_key(UserKey(path, CONTEXT, is_creator=True))
    path.chmod(mode)
    with pytest.raises(UsageError, match=f"others may read or change it .{seen}.; remove it"):
        job_secret_from_user_key(UserKey(path, CONTEXT, is_creator=False))


def test_a_key_that_is_a_link_a_pipe_or_too_short_is_rejected(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir(parents=True, mode=0o700)
    key = UserKey(path, CONTEXT, is_creator=True)
    (tmp_path / "elsewhere").write_text("x" * 64)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="symbolic links"):
        job_secret_from_user_key(key)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(UsageError, match="not a regular file; remove it"):
        job_secret_from_user_key(key)
    path.unlink()
    path.touch(0o600)
    with pytest.raises(UsageError, match="has 0 characters, a key has 64; remove the file"):
        job_secret_from_user_key(key)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_of_another_user_is_rejected(path: Path) -> None:
    job_secret_from_user_key(UserKey(path, CONTEXT, is_creator=True))
    os.chown(path, 65534, -1)
    with pytest.raises(UsageError, match="belongs to user 65534, not to you; remove it"):
        job_secret_from_user_key(UserKey(path, CONTEXT, is_creator=False))
