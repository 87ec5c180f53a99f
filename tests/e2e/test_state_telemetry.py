"""What operators see of `train.State` in a real job, before and after a kill."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import SCRIPTS, Job, wait_until

HOLD = {"STEPS": "41", "HOLDS": "20:2,40:2"}  # both ranks wait after these steps


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, XDG_RUNTIME_DIR=str(tmp_path), TMPDIR=str(tmp_path), LOSSES=str(tmp_path / "losses")) as job:
        yield job


def output_of(job: Job, *argv: str) -> str:
    command = job.ripstop(*argv)
    assert command.wait() == 0, command.err
    return command.out


def status(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output_of(job, "status", "--json"))
    return found


def metrics(job: Job) -> dict[str, float]:
    """By name and labels; without the node's name, which the job has chosen."""
    lines = [line for line in output_of(job, "metrics").splitlines() if not line.startswith("#")]
    found = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
    node = status(job)["nodes"][0]["name"]
    return {name.replace(f'node="{node}",', ""): value for name, value in found.items()}


def wait_for_step(job: Job, step: int) -> None:
    marks = [job.folder / f"losses.held{rank}-{step}" for rank in range(2)]
    wait_until(lambda: all(mark.exists() for mark in marks) or None, why=job.describe)


def test_status_metrics_and_events_show_commits_and_where_they_were_restored_from(job: Job) -> None:
    flags = ("--standalone", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-id=seen")
    agent = job.run(*flags, str(SCRIPTS / "state.py"), env=HOLD)
    wait_for_step(job, 20)  # its report may be unsent: workers send a few a second
    first = wait_until(lambda: found if (found := status(job))["commit_age"] is not None else None, why=job.describe)
    assert first["restored_from"] == []
    assert first["commit_age"] > 0 and first["goodput"] is not None
    page = wait_until(
        lambda: found if 'ripstop_state_bytes{rank="1"}' in (found := metrics(job)) else None, why=job.describe
    )
    for rank in "01":
        assert 1 <= page[f'ripstop_state_commits_total{{rank="{rank}"}}'] <= 20
        assert page[f'ripstop_state_bytes{{rank="{rank}"}}'] > 1000
        assert page[f'ripstop_state_commit_stall_seconds_total{{rank="{rank}"}}'] > 0
        assert page[f'ripstop_state_commit_age_seconds{{rank="{rank}"}}'] > 0
    assert not any(name.startswith("ripstop_state_restore") for name in page)

    os.kill(first["nodes"][0]["pids"][1], signal.SIGKILL)
    wait_for_step(job, 40)
    second = wait_until(lambda: found if (found := status(job))["restored_from"] else None, why=job.describe)
    assert (second["round"], second["restored_from"]) == (2, ["memory"])
    aged = wait_until(lambda: found if (found := status(job))["commit_age"] is not None else None, why=job.describe)
    assert aged["round"] == 2
    text = output_of(job, "status")
    assert "last commit " in text and ", state restored from memory\n" in text
    restores = 'ripstop_state_restore_seconds_count{source="memory"}'
    page = wait_until(lambda: found if restores in (found := metrics(job)) else None, why=job.describe)  # it is cached
    assert page[restores] == 1  # one event for the node
    assert page["ripstop_lost_steps_total"] == 0
    events = [json.loads(line) for line in output_of(job, "events", "--json").splitlines()]
    (restored,) = [event for event in events if event["kind"] == "state_restored"]
    assert (restored["round"], restored["source"], restored["step"]) == (2, "memory", 20)
    firsts = [event["step"] for event in events if event["kind"] == "first_step"]
    assert firsts == [1, 21]
    agent.signal(signal.SIGTERM)
    agent.wait()
