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
BUILD = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load()"
BUILD_TIMEOUT_S = 1800.0
WORKERS = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]


@pytest.fixture(scope="session")
def deepspeed_settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which DeepSpeed finds its extension, which is built here: a test has no time for a compiler.

    In a directory of this run: a build that was killed leaves a lock behind, for which all later builds wait.
    """
    need("deepspeed")
    settings = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(tmp_path_factory.mktemp("extensions"))}
    said(sys.executable, "-c", BUILD, deadline=BUILD_TIMEOUT_S, MAX_JOBS="2", **settings)
    return settings


def continues_from_its_checkpoint(tool: str, launcher: list[str], folder: Path, **env: str) -> None:
    found = said(*launcher, *WORKERS, str(TOOLS / f"{tool}_resume.py"), str(folder), deadline=400, **env)
    assert found == [[rank, 2, 10, 30, True] for rank in range(2)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", [COMMAND, ENTRY_POINT], ids=["ripstop run", "compat"])
@pytest.mark.parametrize("tool", ["accelerate", "lightning", "transformers"])
def test_training_continues_from_the_tools_checkpoint(tool: str, launcher: list[str], tmp_path: Path) -> None:
    need("pytorch_lightning" if tool == "lightning" else tool)
    continues_from_its_checkpoint(tool, launcher, tmp_path)


@pytest.mark.timeout(600, func_only=True)  # without the build
@pytest.mark.parametrize("launcher", [COMMAND, ENTRY_POINT], ids=["ripstop run", "compat"])
def test_training_continues_from_deepspeeds_checkpoint(
    launcher: list[str], tmp_path: Path, deepspeed_settings: dict[str, str]
) -> None:
    continues_from_its_checkpoint("deepspeed", launcher, tmp_path, **deepspeed_settings)


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
