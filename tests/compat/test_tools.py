"""Other people's tools on ripstop, as they come from PyPI: `requirements/tools.txt` installs them.

Each script says, a line a worker, who it is and that our engine started it.
"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import free_port

ROOT = Path(__file__).parents[2]
TOOLS = Path(__file__).parent / "tools"
DEADLINE = 100.0

pytestmark = pytest.mark.long


def need(*modules: str) -> None:
    if missing := [name for name in modules if find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)} not installed: pip install -r requirements/tools.txt")


def said(*words: str, deadline: float = DEADLINE, **env: str) -> list[Any]:
    """The output of this command's workers, by rank; the command must succeed."""
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": beside}
    done = subprocess.run(
        words, env=os.environ | offline | env, capture_output=True, text=True, timeout=deadline, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(json.loads(found[0]) for found in re.finditer(r"\[\d+, 2, .*\]$", done.stdout + done.stderr, re.M))


def test_accelerate_launches_on_our_engine() -> None:
    need("accelerate")
    launch = [sys.executable, "-m", "ripstop.compat", "-m", "accelerate.commands.launch"]
    found = said(*launch, "--multi_gpu", "--num_machines=1", "--num_processes=2", str(TOOLS / "accelerate_ddp.py"))
    assert found == [[rank, 2, "DistributedDataParallel", True, True] for rank in range(2)]


def test_a_failing_script_under_accelerate_is_in_the_report(tmp_path: Path) -> None:
    need("accelerate")
    script = tmp_path / "broken.py"
    script.write_text("raise ValueError('broken')")
    launch = [sys.executable, "-m", "ripstop.compat", "-m", "accelerate.commands.launch"]
    words = [*launch, "--multi_gpu", "--num_machines=1", "--num_processes=2", str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 1 and "ValueError: broken" in done.stderr and "FAILED" in done.stderr


def test_lightnings_trainer_runs_under_ripstop_run() -> None:
    need("pytorch_lightning")
    run = [sys.executable, "-m", "ripstop", "run", "--nproc-per-node=2"]
    assert said(*run, str(TOOLS / "lightning_trainer.py")) == [[rank, 2, True, 2, True] for rank in range(2)]


def test_transformers_trainer_runs_under_ripstop_run() -> None:
    need("transformers", "accelerate")
    run = [sys.executable, "-m", "ripstop", "run", "--nproc-per-node=2"]
    found = said(*run, str(TOOLS / "transformers_trainer.py"))
    assert found == [[rank, 2, "DistributedDataParallel", 8, True] for rank in range(2)]


@pytest.mark.parametrize("size", ["1x2", "2x1"])
def test_a_torchx_component_starts_ripstop_run(size: str, tmp_path: Path) -> None:
    need("torchx")
    torchx = [sys.executable, "-c", "from torchx.cli.main import main; main()", "run", "-s", "local_cwd"]
    component = f"{ROOT / 'examples/torchx_component.py'}:ripstop"
    flags = ["-j", size, f"--rdzv_port={free_port()}", "--script", str(TOOLS / "plain_ddp.py")]
    settings = f"log_dir={tmp_path},prepend_cwd=false"
    found = said(*torchx, "-cfg", settings, component, *flags, RIPSTOP_TOKEN="a secret")
    assert found == [[rank, 2, 0.5, True] for rank in range(2)]


def test_torchxs_local_scheduler_finds_our_torchrun(tmp_path: Path) -> None:
    """It runs the `torchrun` of its machine, which the environment makes ours."""
    need("torchx")
    lines = subprocess.run(
        [sys.executable, "-m", "ripstop.compat", "--environment"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    variables = dict(line.removeprefix("export ").split("=", 1) for line in lines)
    torchx = [sys.executable, "-c", "from torchx.cli.main import main; main()"]
    settings = f"log_dir={tmp_path},prepend_cwd=false"
    words = [
        "run",
        "-s",
        "local_cwd",
        "-cfg",
        settings,
        "dist.ddp",
        "-j",
        "1x2",
        "--script",
        str(TOOLS / "plain_ddp.py"),
    ]
    assert said(*torchx, *words, **variables) == [[rank, 2, 0.5, True] for rank in range(2)]
