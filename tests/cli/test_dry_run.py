"""`--dry-run` shows the configuration and starts nothing."""

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import fields

from ripstop.cli import main
from ripstop.cli.dry_run import describe_dry_run
from ripstop.model.config import (
    Binding,
    Budget,
    HealthLimits,
    Logs,
    OwnLog,
    QuarantineLimits,
    RunConfig,
    Script,
    Timing,
)

PARTS = {
    "budget": Budget,
    "health": HealthLimits,
    "quarantine": QuarantineLimits,
    "timing": Timing,
    "logs": Logs,
    "own_log": OwnLog,
}

BINDINGS = (Binding((0, 1, 2, 8), 1), Binding((3,)))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def dry(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["run", "--dry-run", *arguments.split()]) == 0
    return capsys.readouterr().out


def test_nothing_is_started_or_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "train.py --lr 0.1" in dry("--standalone --log-dir=logs train.py --lr 0.1", capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_every_setting_is_shown_and_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    config = RunConfig(Script("train.py"), "job7", token="hush", notify_url="http://hush", bindings=BINDINGS)
    output = describe_dry_run(config, {})
    shown = {line.split()[0] for line in output.splitlines() if line.startswith("  ")}
    for field in fields(RunConfig):
        parts = [f"{field.name}.{inner.name}" for inner in fields(PARTS[field.name])] if field.name in PARTS else []
        assert {*(parts or [field.name])} <= shown | {"token", "notify_url", "notes"}, field.name
    assert "hush" not in output
    assert "processors 0-2,8, memory of node 1; processors 3\n" in output


def test_each_workers_environment_is_what_the_worker_will_have(capsys: pytest.CaptureFixture[str]) -> None:
    output = dry("--standalone --rdzv-id=job7 --nproc-per-node=2 --log-dir=logs train.py", capsys)
    first, second = output.split("\n\n")[2:4]
    assert first.startswith("worker 0: ")
    assert {"  RANK=0", "  WORLD_SIZE=2", "  OMP_NUM_THREADS=1", "  MASTER_PORT=(a free port)"} <= set(
        first.split("\n")
    )
    assert "  TORCHELASTIC_ERROR_FILE=logs/job7/round_1/1/error.json" in second.split("\n")
    assert "OMP_NUM_THREADS is not set" in output.split("notes\n")[1]


def test_values_that_the_rendezvous_decides_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    output = dry("--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=node0 train.py", capsys)
    assert "  RANK=(after the rendezvous)\n" in output
    assert "  LOCAL_RANK=0\n" in output
    assert "node0:29400" in output


def test_a_wrong_flag_is_rejected_in_a_dry_run_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--dry-run", "--nnodes=4:2", "train.py"]) == 2
    assert capsys.readouterr().out == ""


def test_a_dry_run_does_not_import_torch() -> None:
    code = "import sys; from ripstop.cli import main; main(['run', '--dry-run', 'train.py']); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "torch" not in result.stdout.splitlines()[-1].split()


def test_a_dry_run_shows_modules_that_the_last_start_did_not_preload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "unfit.py").write_text("import os; os.environ.get('RANK')")
    (tmp_path / "train.py").write_text("import unfit")
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def ripstop(*words: str) -> str:
        command = [sys.executable, "-m", "ripstop", "run", *words, "--standalone", "train.py"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout + done.stderr

    assert "left out" not in ripstop("--dry-run")
    assert " left_out='unfit: it reads RANK'" in ripstop()
    assert "  preload: unfit left out: it reads RANK\n" in ripstop("--dry-run")
