"""Attacks on the coordinator's port while a job trains: they are rejected, and the job is not affected."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, Agent, Job, wait_until

TOKEN = "the job's own"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Two nodes that train during all tests."""
    with Job(tmp_path_factory.mktemp("attacks"), TRAIN_STEPS="1000000", RIPSTOP_TOKEN=TOKEN) as job:
        job.node(nnodes="2")
        job.node(nnodes="2")
        job.steps(2)
        yield job


def attack(job: Job, kind: str, seconds: float, count: int) -> dict[str, float]:
    argv = [sys.executable, SCRIPTS / "attack.py", kind, f"127.0.0.1:{job.port}", str(seconds), str(count)]
    env = {**os.environ, "ATTACK_TOKEN": TOKEN}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, float] = json.loads(done.stdout)
    return result


def assert_trained_through(job: Job, result: dict[str, float]) -> None:
    """The same two processes made steps during the attack and after it."""
    steps = [h["t"] for h in job.worker_events(event="step")]
    assert any(result["began"] < t < result["ended"] for t in steps), job.describe()
    job.steps(2, after=result["ended"])
    assert len(job.worker_events(event="start")) == 2, job.describe()
    assert all(agent.process.poll() is None for agent in job.agents), job.describe()


@pytest.mark.parametrize("kind", ["no-secret", "wrong-secret", "other-job", "replay"])
def test_peers_without_the_secret_are_always_rejected(job: Job, kind: str) -> None:
    result = attack(job, kind, 3, 50)
    assert (result["tried"], result["rejected"], result["accepted"]) == (50, 50, 0), result
    assert_trained_through(job, result)


@pytest.mark.parametrize("kind", ["idle", "half-open", "slow"])
def test_peers_that_take_too_long_are_disconnected(job: Job, kind: str) -> None:
    result = attack(job, kind, 7.5, 100)
    assert (result["tried"], result["rejected"], result["accepted"]) == (100, 100, 0), result
    assert_trained_through(job, result)


def test_a_frame_of_a_gigabyte_is_rejected(job: Job) -> None:
    before = memory(host(job).pid)
    result = attack(job, "huge", 3, 50)
    assert (result["tried"], result["rejected"]) == (50, 50), result
    assert memory(host(job).pid) - before < 64 * 1024, "the frames were kept in memory"
    assert_trained_through(job, result)


def test_no_other_node_joins_a_job_of_one_node_and_its_user_can_stop_it(tmp_path: Path) -> None:
    with Job(tmp_path, TRAIN_STEPS="1000000", XDG_RUNTIME_DIR=str(tmp_path), TMPDIR=str(tmp_path)) as job:
        node = job.node(nnodes="1")
        job.steps(1)
        assert "RIPSTOP_TOKEN" not in node.err
        other = job.node(nnodes="1")
        assert other.wait() == 2
        assert "the job secret does not match" in other.err
        stop = job.ripstop("stop")
        assert stop.wait() == 0, stop.err
        assert node.wait() == 1


@pytest.mark.long
def test_ten_thousand_idle_connections_do_not_affect_the_job(job: Job) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(10_000, hard - 100)
    result = attack(job, "idle", 20, count)
    assert result["accepted"] == 0, result
    assert result["rejected"] > count / 2, result
    assert_trained_through(job, result)
    wait_until(lambda: True if "unauthenticated connections" in host(job).err else None, why=job.describe)


def host(job: Job) -> Agent:
    """The agent that hosts the coordinator."""
    return next(agent for agent in job.agents if "joined from" in agent.err)


def memory(pid: int) -> int:
    """KiB resident."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
