"""Real training with DDP on the CPU: the rank that the others wait for is named; without one, none is."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import SCRIPTS, Job, wait_until
from tests.e2e.test_operator_commands import status

STRAGGLER = SCRIPTS / "straggler.py"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    env = {"WHEN": str(tmp_path / "when"), "SLOW": "1", "RIPSTOP_TOKEN": "secret"}
    with Job(tmp_path, XDG_RUNTIME_DIR=str(tmp_path), TMPDIR=str(tmp_path), **env) as job:
        yield job


def job_events(job: Job, kind: str) -> list[dict[str, Any]]:
    files = list(job.logs.glob("*/job-events.jsonl"))
    lines = files[0].read_text().rpartition("\n")[0].splitlines() if files else []
    return [event for line in lines if (event := json.loads(line))["kind"] == kind]


def until(job: Job, kind: str) -> dict[str, Any]:
    return wait_until(lambda: next(iter(job_events(job, kind)), None), why=job.describe)


def test_a_slow_rank_of_a_ddp_job_is_named_with_evidence_until_it_is_fast_again(job: Job) -> None:
    when = job.folder / "when"
    when.touch()
    agent = job.run("--standalone", "--nproc-per-node=3", "--straggler-time=2", str(STRAGGLER))
    event = until(job, "straggler_detected")
    assert event["ranks"] == [1] and event["step_time"] > 1.5 * event["median"], event
    assert "load" in event["why"] and "rank 1 on node" in event["why"]
    agent.wait_for_log(r"W round=1 straggler: rank 1 on node .*: a step takes \d+ ms")
    when.unlink()
    assert until(job, "straggler_ended")["ranks"] == [1]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_equal_ranks_with_jitter_on_a_busy_machine_are_no_stragglers(job: Job) -> None:
    """Each CPU has three more processes than it can run."""
    burn = "while True: sum(range(100_000))"
    others = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(3 * (os.cpu_count() or 1))]
    try:
        agent = job.run(
            *("--standalone", "--nproc-per-node=3", "--straggler-time=8", str(STRAGGLER)),
            env={"STEPS": "400", "JITTER": "0.05"},
        )
        assert agent.wait(240) == 0, job.describe()
    finally:
        for process in others:
            process.kill()
            process.wait()
    assert job_events(job, "job_closed") and not job_events(job, "straggler_detected")


@pytest.mark.long
def test_with_replace_a_spare_takes_the_place_of_the_slow_node(job: Job) -> None:
    flags = ("--straggler=replace", "--straggler-time=4", "--rdzv-conf=target=2", "--max-restarts=0")
    (job.folder / "when").touch()
    first = job.node(*flags, nnodes="2:3", script=STRAGGLER)
    first.wait_for_log("joined from")
    job.node(*flags, nnodes="2:3", script=STRAGGLER)
    wait_until(lambda: status(job)["world_size"] == 2 or None, why=job.describe)
    slow = next(node["name"] for node in status(job)["nodes"] if node["first_rank"] == 1)
    job.node(*flags, nnodes="2:3", script=STRAGGLER)
    assert until(job, "straggler_detected")["name"] == slow
    wait_until(lambda: {n["name"]: n["state"] for n in status(job)["nodes"]}.get(slow) == "quarantined" or None)
    ended = until(job, "round_ended")
    assert ended["cause"] == "node_unfit" and "the other ranks wait for rank 1" in ended["why"]
    assert job_events(job, "budget_charged") == []
