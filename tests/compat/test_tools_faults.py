"""Other people's tools on ripstop when a worker is killed in the middle: they continue from their own checkpoints.

`make compat` installs the tools (`requirements/tools.txt`) and runs this.  Results are in docs/compat.md.
"""

import sys
from pathlib import Path

import pytest

from tests.compat.test_tools import TOOLS, need, said

pytestmark = pytest.mark.long

COMMAND = [sys.executable, "-m", "ripstop", "run"]
ENTRY_POINT = [sys.executable, "-m", "ripstop.compat", "-m", "torch.distributed.run"]
WORKERS = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", [COMMAND, ENTRY_POINT], ids=["ripstop run", "compat"])
@pytest.mark.parametrize("tool", ["accelerate", "pytorch_lightning", "transformers", "deepspeed"])
def test_training_continues_from_the_tools_checkpoint(tool: str, launcher: list[str], tmp_path: Path) -> None:
    need(tool)
    script = TOOLS / f"{tool.removeprefix('pytorch_')}_resume.py"
    found = said(*launcher, *WORKERS, str(script), str(tmp_path), DS_ACCELERATOR="cpu", deadline=400)
    assert found == [[rank, 2, 10, 30, True] for rank in range(2)]


@pytest.mark.parametrize("launcher", [COMMAND, ENTRY_POINT], ids=["ripstop run", "compat"])
def test_accelerates_own_test_script_passes(launcher: list[str]) -> None:
    need("accelerate")
    said(*launcher, *WORKERS, "-m", "accelerate.test_utils.scripts.test_script", ACCELERATE_USE_CPU="1", deadline=280)


@pytest.mark.parametrize("prefix", [[], ["-m", "ripstop.compat"]], ids=["alone", "compat"])
def test_ray_trains_as_before_beside_ripstop(prefix: list[str], short_tmp_path: Path) -> None:
    need("ray")
    words = [sys.executable, *prefix, str(TOOLS / "ray_trainer.py"), str(short_tmp_path)]
    found = said(*words, deadline=280, RAY_raylet_start_wait_time_s="200")  # its own 30 s are too few on a busy machine
    assert found == [[0, 2, 2.0]]
