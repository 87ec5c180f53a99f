"""Three nodes on this machine elect their coordinator.  `tests/hosts/test_succession.py` has the faults of machines."""

import re
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.harness import Agent, Job, free_port

pytestmark = pytest.mark.long


def start(job: Job, nnodes: str) -> list[Agent]:
    endpoint = ",".join(f"127.0.0.1:{free_port()}" for _ in range(3))
    return [job.node(nnodes=nnodes, endpoint=endpoint) for _ in range(3)]


def coordinator(agents: list[Agent]) -> Agent:
    """The agent that was elected in the highest epoch."""
    return max(agents, key=lambda agent: max(map(int, re.findall(r"elected: .* epoch=(\d+)", agent.err)), default=0))


def test_a_job_that_elects_its_coordinator_succeeds(tmp_path: Path) -> None:
    with Job(tmp_path, TRAIN_STEPS="10", RIPSTOP_TOKEN="s3cret") as job:
        agents = start(job, "3")
        assert [agent.wait() for agent in agents] == [0, 0, 0]


def test_coordinators_leave_one_after_the_other_and_the_last_node_trains_on(tmp_path: Path) -> None:
    with Job(tmp_path, TRAIN_STEPS="100000", RIPSTOP_TOKEN="s3cret") as job:
        agents = start(job, "1:3")
        job.steps(3)
        for world in (2, 1):
            leaving = coordinator(agents)
            agents.remove(leaving)
            left = time.time()
            leaving.signal(signal.SIGTERM)
            assert job.steps(world, after=left)["restart"] == 0
            assert leaving.wait() == 143
            agents[0].wait_for_log("coordinator found again")
        agents[0].signal(signal.SIGTERM)
        assert agents[0].wait() == 143
