"""SIGKILL at random moments of a commit: no torn one is restored, and no finished one is lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.conftest import Agent

SCRIPT = Path(__file__).parent / "scripts" / "killed_commits.py"


def run(kills: int, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "KILLS": str(kills), **env}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.parametrize("kills", [40, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_no_kill_leaves_a_torn_commit_or_loses_a_finished_one(agent: Agent, kills: int) -> None:
    least = kills // 5  # in the middle of a commit
    done = run(kills, SEED=str(kills), INTERRUPTED=str(least))
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) >= least


@pytest.mark.parametrize(("mutant", "found"), [("stamp first", "torn"), ("old stamp", "torn"), ("same buffer", "lost")])
def test_a_broken_rule_is_found(agent: Agent, mutant: str, found: str) -> None:
    done = run(100, MUTANT=mutant)
    assert (done.returncode, done.stdout) == (1, found + "\n"), done.stderr
