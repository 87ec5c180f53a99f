"""`worker_main` with torch's worker server."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ripstop.compat.control_plane import worker_main

SCRIPT = Path(__file__).parent / "scripts" / "served_worker.py"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "w.sock"


def work(path: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=os.environ | {"TORCH_WORKER_SERVER_SOCKET": str(path)} | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_torchs_handlers_and_the_programs_own_answer_and_a_failure_is_recorded(path: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # as a worker leaves it that was killed
    done = work(path, TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"))
    assert done.returncode == 1, done.stderr
    answers = json.loads(done.stdout)
    assert (answers["ping"], answers["hello"]) == ("pong", "hello")
    assert "served_worker.py" in answers["dump_traceback"]
    assert "version" in json.loads(answers["fr_trace_json"])
    error = json.loads((tmp_path / "error.json").read_text())
    assert error["message"]["message"] == "RuntimeError: as it was told"
    assert not path.exists()


def test_a_main_function_may_return_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_WORKER_SERVER_SOCKET", str(path))
    for _ in range(20):
        with worker_main():
            pass
    assert not path.exists()


def test_without_the_variable_it_records_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_WORKER_SERVER_SOCKET", raising=False)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(ValueError, match="mine"), worker_main():
        raise ValueError("mine")
    assert "ValueError: mine" in (tmp_path / "error.json").read_text()


def test_a_worker_runs_without_a_server_that_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_WORKER_SERVER_SOCKET", str(tmp_path / "nowhere" / "w.sock"))
    with worker_main():
        worked = True
    assert worked
    assert "no worker server at TORCH_WORKER_SERVER_SOCKET=" in capfd.readouterr().err
