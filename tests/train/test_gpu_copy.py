"""Commits from a GPU while training goes on."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU of NVIDIA's")

SCRIPT = """
import torch
from ripstop import train

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = train.State(model=model, optimizer=optimizer, step=0)
state.restore()
for step in range(4):
    model(torch.randn(4, 8, device="cuda")).square().mean().backward()
    optimizer.step()
    state.step = step
    state.commit()
print("done")
"""


def test_the_running_means_of_batch_norm_may_change_after_a_commit(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "ripstop", "run", "--standalone", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert "done" in done.stdout, done.stderr
    assert "withdrawn" not in done.stderr
