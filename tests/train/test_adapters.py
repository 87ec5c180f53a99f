"""Checkpoints of Lightning and transformers in memory, with the packages of `requirements/tools.txt`."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.harness import Job

SCRIPTS = Path(__file__).parent / "scripts"
TRAINING_TIMEOUT_S = 110.0

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("script", "package", "steps"),
    [("lightning_memory.py", "pytorch_lightning", 24), ("transformers_memory.py", "transformers", 12)],
)
@pytest.mark.timeout(240)
def test_a_killed_training_loses_at_most_one_step_and_ends_with_the_same_weights(tmp_path, script, package, steps):
    if find_spec(package) is None:
        pytest.skip(f"{package} not installed: pip install -r requirements/tools.txt")

    def train(name: str, kill_at: int) -> list[dict]:
        folder = tmp_path / name
        folder.mkdir()
        env = {"MARKER": str(folder / "killed"), "KILL_AT": str(kill_at), "TMPDIR": str(folder), "HF_HUB_OFFLINE": "1"}
        with Job(folder) as job:
            agent = job.run("--standalone", "--nproc-per-node=2", "--max-restarts=1", str(SCRIPTS / script), env=env)
            assert agent.wait(TRAINING_TIMEOUT_S) == 0, agent.err
        assert not list(folder.glob("ripstop-*"))  # the files for the restart are removed
        return [json.loads(line) for line in agent.out.splitlines() if line.startswith('{"started"')]

    undisturbed = train("undisturbed", kill_at=0)
    assert [(run["started"], run["ended"]) for run in undisturbed] == [(0, steps)] * 2
    killed = train("killed", kill_at=steps - 1)
    assert killed[0]["started"] in (steps - 2, steps - 1) and killed[1]["started"] == killed[0]["started"]
    assert [run["weights"] for run in killed] == [run["weights"] for run in undisturbed]
