"""`torch.distributed.run` and `torch.distributed.launch` as other tools call them, compared with torch."""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed.launch as torch_launch
import torch.distributed.run as torch_run

from ripstop.compat import launch, run
from tests.e2e.harness import free_port

MODULES = [torch_run, run]
DEADLINE = 120.0
SAY = """
import json, os, sys
said = [sys.argv[1:], os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]]
sys.stdout.write(json.dumps(said) + chr(10))  # in one piece
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SAY)
    return path


def execute(*words: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *words], env=os.environ | env, capture_output=True, text=True, timeout=DEADLINE, check=False
    )


def said(*words: str, **env: str) -> list[Any]:
    done = execute(*words, **env)
    assert done.returncode == 0, done.stderr
    return sorted(json.loads(line) for line in done.stdout.splitlines())


# the parser -----------------------------------------------------------------------------------------------------------


def described(parser: argparse.ArgumentParser) -> dict[str, tuple[Any, ...]]:
    return {
        action.dest: (sorted(action.option_strings), action.default, action.nargs, action.choices, action.required)
        for action in parser._actions
    }


@pytest.mark.parametrize(("theirs", "ours"), [(torch_run.get_args_parser(), run.get_args_parser())])
def test_the_parser_has_torchs_options_and_defaults(
    theirs: argparse.ArgumentParser, ours: argparse.ArgumentParser
) -> None:
    known = described(theirs)  # an older torch has fewer
    assert {name: one for name, one in described(ours).items() if name in known} == known


def namespace(module: ModuleType, words: list[str]) -> dict[str, Any]:
    """What both know, an older torch being the one that knows less."""
    found, known = vars(module.parse_args(words)), vars(torch_run.parse_args(["t.py"])).keys() | {"use_env"}
    return {name: value for name, value in found.items() if name in known}


@pytest.mark.parametrize(
    "words",
    [
        ["t.py"],
        ["--nnodes=2:4", "--nproc_per_node", "8", "--rdzv-backend", "c10d", "t.py", "--lr", "1"],
        ["-m", "pkg.mod", "-m", "x"],
        ["--no-python", "--tee=3", "-r", "0:1,1:2", "prog"],
        ["--duplicate-stdout-filters=a,b,,c", "--standalone", "t.py"],
    ],
    ids=" ".join,
)
def test_arguments_are_parsed_as_torch_parses_them(words: list[str]) -> None:
    assert namespace(run, words) == namespace(torch_run, words)


def test_variables_are_read_as_torch_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PET_NNODES": "3", "PET_STANDALONE": "1", "PET_MAX_RESTARTS": "7", "PET_TEE": "3"}.items():
        monkeypatch.setenv(name, value)
    assert namespace(run, ["t.py"]) == namespace(torch_run, ["t.py"])
    assert namespace(launch, ["--use_env", "t.py"]) == namespace(torch_launch, ["--use_env", "t.py"])


def test_a_variable_for_a_switch_is_a_bool_or_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, on in (("true", True), ("0", False), ("", False)):
        monkeypatch.setenv("PET_STANDALONE", text)
        assert run.parse_args(["t.py"]).standalone is on
    monkeypatch.setenv("PET_STANDALONE", "perhaps")
    with pytest.raises(ValueError, match="PET_STANDALONE=perhaps: neither true nor false"):
        run.parse_args(["t.py"])


@pytest.mark.parametrize(
    "words",
    [
        ["--rdzv-backend=c10d", "--rdzv-endpoint=h:1", "--rdzv-conf=timeout=5,is_host=1", "t.py", "a"],
        ["--node-rank=1", "--nnodes=2", "--master-port=7", "-m", "pkg"],
        ["--no-python", "--role=r", "--max-restarts=2", "prog", "x"],
        ["--local-ranks-filter=0,1", "--shutdown-timeout=3", "--numa-binding=node", "t.py"],
    ],
    ids=" ".join,
)
def test_a_namespace_gives_the_same_launch_as_torchs(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (theirs, their_command, their_args), (ours, command, args) = (
        module.config_from_args(module.parse_args(words)) for module in MODULES
    )
    assert (command, args) == (their_command, their_args)

    def plain(config: Any) -> dict[str, Any]:
        ours_alone = ("standby", "standby_warmup", "standby_until")
        fields = {key: value for key, value in vars(config).items() if key not in ("logs_specs", *ours_alone)}
        numa = fields.pop("numa_options")
        return fields | {"numa": numa and numa.affinity_mode.value, "ranks": config.logs_specs._local_ranks_filter}

    assert plain(ours) == plain(theirs)
    for config in (ours, theirs):
        Path(config.logs_specs.root_log_dir).rmdir()


@pytest.mark.parametrize("module", MODULES)
def test_small_helpers_answer_as_torchs(module: ModuleType) -> None:
    assert module.parse_min_max_nnodes("4") == (4, 4) and module.parse_min_max_nnodes("1:4") == (1, 4)
    with pytest.raises(RuntimeError, match='nnodes=1:2:3 is not in "MIN:MAX" format'):
        module.parse_min_max_nnodes("1:2:3")
    assert module.determine_local_world_size("3") == 3
    assert module.determine_local_world_size("auto") == module.determine_local_world_size("cpu")
    with pytest.raises(ValueError, match="Unsupported nproc_per_node value: many"):
        module.determine_local_world_size("many")
    with pytest.raises(ValueError, match="Cuda is not available"):
        module.determine_local_world_size("gpu")
    assert module.get_use_env(argparse.Namespace()) and not module.get_use_env(argparse.Namespace(use_env=False))


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--nnodes=3:2", "t.py"], AssertionError),
        (["--max-restarts=-1", "t.py"], AssertionError),
        (["--local-ranks-filter=a", "t.py"], ValueError),
        (["--no-python", "-m", "t.py"], ValueError),
        (["--logs-specs=none_such", "t.py"], ValueError),
    ],
    ids=str,
)
def test_an_invalid_namespace_is_rejected(module: ModuleType, words: list[str], error: type[Exception]) -> None:
    with pytest.raises(error):
        module.config_from_args(module.parse_args(words))


# launches -------------------------------------------------------------------------------------------------------------


def test_the_module_runs_a_script(script: Path) -> None:
    words = ["-m", "ripstop.compat.run", "--standalone", "--nproc-per-node=2", str(script), "--lr", "1"]
    assert said(*words) == [[["--lr", "1"], rank, rank, "2"] for rank in "01"]


def test_run_path_runs_the_script_in_the_workers_interpreter(script: Path) -> None:
    assert said("-m", "ripstop.compat.run", "--run-path", str(script), "x") == [[["x"], "0", "0", "1"]]


@pytest.mark.long
def test_a_static_job_is_two_launches(script: Path) -> None:
    port = free_port()
    nodes = [
        subprocess.Popen(
            [
                sys.executable, "-m", "ripstop.compat.run", "--nnodes=2", f"--node-rank={rank}",
                f"--master-port={port}", str(script),
            ],
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outs = [node.communicate(timeout=DEADLINE)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert [json.loads(out) for out in outs] == [[[], str(rank), "0", "2"] for rank in range(2)]


def test_a_failing_script_ends_the_launcher_with_one_and_the_report(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise ValueError('broken')")
    error_file = tmp_path / "error.json"
    words = ["-m", "ripstop.compat.run", "--nproc-per-node=2", str(script)]
    done = execute(*words, TORCHELASTIC_ERROR_FILE=str(error_file))
    assert done.returncode == 1
    assert (
        "ChildFailedError" in done.stderr and f"{script} FAILED" in done.stderr and "ValueError: broken" in done.stderr
    )
    assert "broken" in error_file.read_text()  # for the process that started the launcher


def test_a_signal_to_the_launcher_stops_the_workers(tmp_path: Path) -> None:
    script = tmp_path / "sleeper.py"
    script.write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    launcher = subprocess.Popen(
        [sys.executable, "-m", "ripstop.compat.run", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert launcher.stdout is not None
        worker = int(launcher.stdout.readline())
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(DEADLINE) == 1
        assert not Path(f"/proc/{worker}").exists()
    finally:
        launcher.kill()
        launcher.wait()


@pytest.mark.long
def test_the_old_launcher_gives_scripts_their_local_rank(script: Path) -> None:
    words = ["-W", "ignore", "-m", "ripstop.compat.launch", "--nproc-per-node=2"]
    assert said(*words, str(script), "x") == [[[f"--local-rank={rank}", "x"], rank, rank, "2"] for rank in "01"]
    assert said(*words, "--use-env", str(script), "x") == [[["x"], rank, rank, "2"] for rank in "01"]


@pytest.mark.parametrize("module", [torch_launch, launch])
def test_the_old_launcher_warns_and_needs_use_env_for_programs(module: ModuleType) -> None:
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match="--use-env"):
        module.main(["--no-python", "true"])


def test_a_no_op_launch_is_quick(tmp_path: Path) -> None:
    """torch's takes seconds.  This is the time on a processor: that on the clock depends on what else runs."""
    script = tmp_path / "nothing.py"
    script.touch()
    before = os.times()
    assert execute("-m", "ripstop.compat.run", str(script)).returncode == 0
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 5
