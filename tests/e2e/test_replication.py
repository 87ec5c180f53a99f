"""Nodes that are lost with the newest shards: their partners have copies."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, Agent, Job, wait_until

SHARDS = SCRIPTS / "shards.py"


@pytest.fixture
def job(tmp_path: Path):
    with Job(tmp_path) as job:
        yield job


def start(job: Job, *flags: str, **env: str) -> Agent:
    return job.node("--max-restarts=9", *flags, nnodes="3", script=SHARDS, env=env)


def kill_node(job: Job, agent: Agent) -> None:
    """The node disappears: its agent, its workers and all their memory."""
    agent.process.kill()
    agent.wait()
    assert job.leftovers is not None


def test_a_lost_node_s_shard_comes_from_its_partner(job: Job) -> None:
    agents = [start(job) for _ in range(3)]
    job.steps(3)
    agents[0].wait_for_log("copies of state")
    kill_node(job, agents[2])
    start(job)
    print(job.wait_for(event="start", count=6))
