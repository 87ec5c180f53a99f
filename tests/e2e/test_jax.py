"""JAX jobs with real collectives on CPUs: `make test-jax` installs JAX and runs this."""

import os
import re
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.harness import Agent, Job, wait_until

pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed: make test-jax")

EXAMPLE = str(Path(__file__).parents[2] / "examples/jax_data_parallel.py")
SLURM = {  # what `srun` sets for one task a node: it describes agents, not workers
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "no-such-node",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, JAX_PLATFORMS="cpu") as job:
        yield job


def shown(agent: Agent, pattern: str, after: int = 0) -> re.Match[str]:
    """Wait for this text on stdout, beyond so many characters."""
    return wait_until(
        lambda: re.compile(pattern).search(agent.out, after),
        why=lambda: f"never showed {pattern!r}:\n{agent.out}\n{agent.err}",
    )


def one_node(job: Job, name: str, *words: str, workers: int = 2, **env: str) -> Agent:
    flags = ("--standalone", f"--nproc-per-node={workers}", "--max-restarts=3")
    return job.run(*flags, EXAMPLE, f"--checkpoint={job.folder / name}", *words, env=env)


@pytest.mark.parametrize("rank", [0, 1])
def test_training_continues_from_its_checkpoint_when_a_worker_is_killed(job: Job, rank: int) -> None:
    """Rank 0 has JAX's coordinator in its process."""
    agent = one_node(job, "killed.npz", "--steps=60")
    shown(agent, r"step +20 .* saved\n")
    pids = re.findall(rf"worker {rank} is process (\d+)\n", agent.out)
    killed = len(agent.out)
    os.kill(int(pids[-1]), signal.SIGKILL)
    assert int(shown(agent, r"training from step (\d+) to 60, 2 workers", killed)[1]) >= 20
    assert agent.wait() == 0, agent.err

    whole = one_node(job, "whole.npz", "--steps=60", "--step-time=0")
    assert whole.wait() == 0, whole.err
    with np.load(job.folder / "killed.npz") as one, np.load(job.folder / "whole.npz") as other:
        assert all(np.array_equal(one[name], other[name]) for name in ("first", "second", "step"))


def test_a_job_of_nodes_grows_and_shrinks(job: Job) -> None:
    words = (EXAMPLE, f"--checkpoint={job.folder / 'nodes.npz'}", "--steps=1000000", "--step-time=0.01")
    nodes = [node(job, *words) for _ in range(2)]
    begun = shown(nodes[0], r"training from step (\d+) to 1000000, 2 workers")
    shown(nodes[0], r"step .* saved", begun.end())
    third = node(job, *words)
    grown = shown(nodes[0], r"training from step (\d+) to 1000000, 3 workers")
    shown(nodes[0], r"step .* saved", grown.end())
    third.signal(signal.SIGKILL)
    shrunk = shown(nodes[0], r"training from step (\d+) to 1000000, 2 workers", grown.end())
    assert 0 == int(begun[1]) < int(grown[1]) < int(shrunk[1])
    for agent in reversed(nodes):
        agent.signal(signal.SIGTERM)
        assert agent.wait() == 143


def node(job: Job, *words: str) -> Agent:
    return job.run(
        "--nnodes=2:3",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{job.port}",
        "--rdzv-id=jax",
        "--shutdown-timeout=600",  # workers end at SIGTERM
        "--rdzv-conf=last_call_timeout=0",
        f"--node-rank={len(job.agents)}",
        *words,
    )


def test_the_variables_of_another_starter_do_not_mislead_jax(job: Job) -> None:
    agent = one_node(job, "slurm.npz", "--steps=10", "--step-time=0", "--save-every=10", **SLURM)
    assert agent.wait() == 0, agent.err
    assert "training from step 0 to 10, 2 workers" in agent.out
