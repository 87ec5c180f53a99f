"""Three nodes on this machine elect their coordinator.  `tests/hosts/test_succession.py` has the faults of machines."""

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Agent, Job, free_port, wait_until

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


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "suspended"])
def test_the_events_of_a_job_are_followed_from_one_coordinator_to_the_next(tmp_path: Path, signum: int) -> None:
    here = {"XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    with Job(tmp_path, TRAIN_STEPS="100000", RIPSTOP_TOKEN="s3cret", **here) as job:
        agents = start(job, "2:3")
        job.steps(3)
        follower = job.ripstop("events", "--follow", "--json", "--job=e2e")
        wait_until(lambda: "round_formed" in follower.out or None, why=job.describe)
        lost = coordinator(agents)
        agents.remove(lost)
        since = time.time()
        lost.signal(signum)
        job.steps(2, after=since)
        lost.signal(signal.SIGCONT)  # its coordinator learns that it is one no more
        formed = wait_until(lambda: _formed_after(follower.out, since), why=lambda: f"{follower.err}{job.describe()}")
        assert formed["round"] == 2
        keys = [(event["node"], event["seq"], event["at"]) for event in map(json.loads, follower.out.splitlines()[:-1])]
        assert len(keys) == len(set(keys))
        assert follower.process.poll() is None


def _formed_after(out: str, since: float) -> dict[str, Any] | None:
    events = map(json.loads, out.rpartition("\n")[0].splitlines())
    return next((e for e in events if e["kind"] == "round_formed" and e["at"] > since), None)
