"""Unhealthy nodes do not join, lose their place to a spare, and become spares after recovery."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, Agent, Job, wait_until

SOON = "--health-interval=0.5"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as job:
        yield job


def node(job: Job, *flags: str, nnodes: str = "2") -> Agent:
    return job.node(*flags, nnodes=nnodes, script=SCRIPTS / "steps.py")


def finish(*agents: Agent) -> None:
    for agent in reversed(agents):
        agent.signal(signal.SIGTERM)
    assert [agent.wait() for agent in agents] == [143] * len(agents)


def kinds(job: Job) -> list[str]:
    """The kinds of the events that the coordinator recorded."""
    (file,) = job.logs.glob("*/job-events.jsonl")
    return [json.loads(line)["kind"] for line in file.read_text().splitlines()]


def test_a_spare_replaces_an_unhealthy_node_and_no_restart_is_charged(job: Job, tmp_path: Path) -> None:
    sick = tmp_path / "sick"
    check = f"""--health-check=sh -c 'test ! -e {sick} || {{ echo the fan is loud; exit 1; }}'"""
    host = node(job, SOON)
    host.wait_for_log("joined")
    patient = node(job, SOON, check)
    job.steps(2)
    spare = node(job, SOON)
    spare.wait_for_log("spare")
    rank = re.search(r"ranks=(\d)", patient.err)[1]
    sick.touch()
    patient.wait_for_log("unhealthy: --health-check sh exited with code 1: the fan is loud")
    spare.wait_for_log(f"ranks={rank}-{rank} world=2")
    assert job.steps(2, after=time.time())["restart"] == 0
    sick.unlink()
    patient.wait_for_log("healthy again")
    host.wait_for_log("is healthy again")
    finish(host, spare, patient)
    found = kinds(job)
    assert found.index("node_unhealthy") < found.index("node_healthy")
    assert "budget_charged" not in found


def test_a_spare_replaces_a_node_whose_workers_crash_repeatedly(job: Job) -> None:
    host = node(job, "--max-restarts=9")
    host.wait_for_log("joined")
    bad = node(job, "--max-restarts=9")
    job.steps(2)
    spare = node(job, "--max-restarts=9")
    spare.wait_for_log("spare")
    rank = re.search(r"ranks=(\d)", bad.err)[1]
    for restart in range(3):
        worker = job.wait_for(event="step", rank=int(rank), restart=restart)
        os.kill(worker["pid"], signal.SIGKILL)
    host.wait_for_log("is in quarantine for 600 s: at fault 3 times in .* died of SIGKILL")
    spare.wait_for_log(f"ranks={rank}-{rank} world=2 restarts=3")
    bad.wait_for_log("in quarantine: at fault 3 times")
    job.steps(2, after=time.time())
    finish(host, spare, bad)
    assert kinds(job).count("node_quarantined") == 1


def test_a_node_with_clock_skew_does_not_join_and_logs_why(job: Job, tmp_path: Path) -> None:
    host = node(job, nnodes="1:2")
    job.steps(1)
    (tmp_path / "sitecustomize.py").write_text("import time\nnow = time.time\ntime.time = lambda: now() + 120\n")
    off = job.node(nnodes="1:2", script=SCRIPTS / "steps.py", env={"PYTHONPATH": str(tmp_path)})
    off.wait_for_log("unhealthy: the clock is 120 s ahead of the coordinator's, more than 60 s")
    host.wait_for_log("is unhealthy: the clock is")
    assert not job.worker_events(world=2)
    finish(host, off)


def test_a_health_command_that_hangs_exits_with_its_agent(job: Job) -> None:
    agent = job.run("--standalone", "--health-check=sleep 1000", "--health-interval=1000", str(SCRIPTS / "steps.py"))
    wait_until(
        lambda: any("sleep 1000" in process for process in job.leftovers()) or None
    )  # it may not have called exec yet
    agent.signal(signal.SIGKILL)
    agent.wait()
    wait_until(lambda: not job.leftovers() or None, why=lambda: str(job.leftovers()))
