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

ARGUMENTS_OF_ITS_OWN = """
import os
import jax
host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1
jax.distributed.initialize(f"{host}:{port}", int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
print(f"process {jax.process_index()} of {jax.process_count()}\\n", end="", flush=True)
"""
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


def test_a_script_can_pass_the_arguments_itself(job: Job) -> None:
    """As docs/jax.md shows it, without an import of ripstop."""
    script = job.folder / "own.py"
    script.write_text(ARGUMENTS_OF_ITS_OWN)
    agent = job.run("--standalone", "--nproc-per-node=2", str(script))
    assert agent.wait() == 0, agent.err
    assert sorted(re.findall("process . of .", agent.out)) == ["process 0 of 2", "process 1 of 2"]
    assert re.search("start=zygote preloaded=.*jax", agent.err), agent.err


def test_what_jax_gets_is_in_the_workers_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    from ripstop.jax import RipstopCluster

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not RipstopCluster.is_env_present()
    assert jax.config.jax_enable_preemption_service  # as without the import
    worker = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in {**worker, "MASTER_ADDR": "fd00::7", "MASTER_PORT": "4000"}.items():
        monkeypatch.setenv(name, value)
    assert RipstopCluster.is_env_present()
    assert RipstopCluster.get_coordinator_address() == "[fd00::7]:4001"
    assert RipstopCluster.get_coordinator_address(override_coordinator_port="9") == "[fd00::7]:9"
    assert (RipstopCluster.get_process_id(), RipstopCluster.get_process_count()) == (5, 8)
    assert RipstopCluster.get_local_process_id() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert RipstopCluster.get_local_process_id() is None


def test_the_variables_of_another_starter_do_not_mislead_jax(job: Job) -> None:
    agent = one_node(job, "slurm.npz", "--steps=10", "--step-time=0", "--save-every=10", **SLURM)
    assert agent.wait() == 0, agent.err
    assert "training from step 0 to 10, 2 workers" in agent.out
