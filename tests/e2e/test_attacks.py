"""Strangers at the coordinator's port, while a job trains: they are refused, and nobody in the job notices."""

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
    """Two nodes that train for as long as the tests last."""
    with Job(tmp_path_factory.mktemp("siege"), TRAIN_STEPS="1000000", RIPSTOP_TOKEN=TOKEN) as job:
        job.node(nnodes="2")
        job.node(nnodes="2")
        job.steps(2)
        yield job


def attack(job: Job, kind: str, seconds: float, count: int) -> dict[str, float]:
    argv = [sys.executable, SCRIPTS / "attack.py", kind, f"127.0.0.1:{job.port}", str(seconds), str(count)]
    env = {**os.environ, "ATTACK_TOKEN": TOKEN}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    tally: dict[str, float] = json.loads(done.stdout)
    return tally


def trained_through(job: Job, tally: dict[str, float]) -> None:
    """Steps were made during the attack and after it, and always by the same two processes."""
    steps = [h["t"] for h in job.worker_events(event="step")]
    assert any(tally["began"] < t < tally["ended"] for t in steps), job.describe()
    job.steps(2, after=tally["ended"])
    assert len(job.worker_events(event="start")) == 2, job.describe()
    assert all(agent.process.poll() is None for agent in job.agents), job.describe()


@pytest.mark.parametrize("kind", ["no-secret", "wrong-secret", "other-job", "replay"])
def test_who_cannot_prove_the_secret_is_refused_every_time(job: Job, kind: str) -> None:
    tally = attack(job, kind, 3, 50)
    assert (tally["tried"], tally["refused"], tally["accepted"]) == (50, 50, 0), tally
    trained_through(job, tally)


@pytest.mark.parametrize("kind", ["idle", "half-open", "slow"])
def test_who_takes_too_long_is_cut_off(job: Job, kind: str) -> None:
    tally = attack(job, kind, 7.5, 100)
    assert (tally["tried"], tally["accepted"]) == (100, 0), tally
    assert tally["refused"] >= 50, tally  # those that came early enough to see their five seconds end
    trained_through(job, tally)


def test_a_frame_of_a_gigabyte_is_not_taken(job: Job) -> None:
    before = memory(host(job).pid)
    tally = attack(job, "huge", 3, 50)
    assert (tally["tried"], tally["refused"]) == (50, 50), tally
    assert memory(host(job).pid) - before < 64 * 1024, "the frames were kept"
    trained_through(job, tally)


def test_nobody_else_joins_a_job_of_one_node_and_its_user_steers_it(tmp_path: Path) -> None:
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
def test_ten_thousand_idle_connections_are_too_many_and_no_matter(job: Job) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(10_000, hard - 100)
    tally = attack(job, "idle", 20, count)
    assert tally["accepted"] == 0, tally
    assert tally["refused"] > count / 2, tally
    trained_through(job, tally)
    wait_until(lambda: True if "unknown connections" in host(job).err else None, why=job.describe)


def host(job: Job) -> Agent:
    """The agent that has the coordinator."""
    return next(agent for agent in job.agents if "joined from" in agent.err)


def memory(pid: int) -> int:
    """KiB resident."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
