"""The registry of jobs: an agent's file exists as long as the agent."""

import fcntl
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from ripstop.api.local_jobs import JobRecord, Registration, read_local_jobs


def record(run_id: str = "job", since: float = 1.0, **more: str) -> JobRecord:
    return JobRecord(run_id, "node", os.getpid(), since, **more)  # type: ignore[arg-type]


def test_a_record_is_found_until_it_is_closed(tmp_path: Path) -> None:
    late, early = Registration(tmp_path, "a"), Registration(tmp_path, "b")
    late.write(record("late", since=2.0))
    early.write(record("early", since=1.0, endpoint="head:29400", token="t"))
    assert read_local_jobs(tmp_path) == [
        record("early", since=1.0, endpoint="head:29400", token="t"),
        record("late", since=2.0),
    ]
    late.write(record("moved", since=3.0))
    assert [found.run_id for found in read_local_jobs(tmp_path)] == ["early", "moved"]
    late.close(), early.close()
    assert read_local_jobs(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_only_this_user_can_read_a_record_and_its_token_is_not_printed(tmp_path: Path) -> None:
    Registration(tmp_path, "a").write(record(token="t0ken"))
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o600
    assert "t0ken" not in repr(record(token="t0ken"))


def test_the_file_of_a_killed_agent_is_removed_with_its_socket(tmp_path: Path) -> None:
    def agent(ready: "multiprocessing.synchronize.Event") -> None:
        kept = Registration(tmp_path, "a")
        kept.write(record())
        (tmp_path / "a.sock").touch()
        ready.set()
        signal.pause()

    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    process = fork.Process(target=agent, args=(ready,), daemon=True)
    process.start()
    try:
        assert ready.wait(120)
        assert len(read_local_jobs(tmp_path)) == 1
    finally:
        process.kill()
        process.join()
    assert read_local_jobs(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_replaced_during_a_read_is_kept_with_its_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Registration(tmp_path, "a")
    kept.write(record("before"))
    (tmp_path / "a.sock").touch()
    flock = fcntl.flock

    def after_a_moment(file: int, how: int) -> None:
        if how & fcntl.LOCK_SH:  # the reader has opened it
            monkeypatch.undo()
            kept.write(record("after"))
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", after_a_moment)
    assert [found.run_id for found in read_local_jobs(tmp_path)] == ["after"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.sock"]
    kept.close()


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"run_id": "job"}', b'{"run_id": 1, "node": 2, "pid": 3, "since": 4}']
)
def test_an_invalid_file_is_no_record(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text)
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert read_local_jobs(tmp_path) == []
