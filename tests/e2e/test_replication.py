"""Nodes that are lost with their shards of a State: their partners have copies."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from ripstop.model.events import StateReplicated, event_kind
from ripstop.protocol.secret import api_token_from_secret
from tests.e2e.harness import SCRIPTS, Agent, Job, WorkerEvent, wait_until

SHARDS = SCRIPTS / "shards.py"
SECRET = "secret"


class ReplicatedJob(Job):
    nodes = 2


@pytest.fixture
def job(tmp_path: Path) -> Iterator[ReplicatedJob]:
    with ReplicatedJob(tmp_path, RIPSTOP_TOKEN=SECRET) as job:
        yield job


def start(job: ReplicatedJob, *flags: str, **env: str) -> Agent:
    return job.node("--max-restarts=9", *flags, nnodes=str(job.nodes), script=SHARDS, env=env)


def start_all(job: ReplicatedJob, *flags: str, **env: str) -> list[Agent]:
    """The first one has the coordinator."""
    first = start(job, *flags, **env)
    first.wait_for_log("joined from")
    return [first, *(start(job, *flags, **env) for _ in range(job.nodes - 1))]


def copies(job: Job) -> dict[str, Any] | None:
    """The complete set of the job's State."""
    url = f"http://127.0.0.1:{job.port}/api/v1/status"
    request = Request(url, headers={"Authorization": f"Bearer {api_token_from_secret(SECRET, 'e2e')}"})
    with urlopen(request, timeout=120) as reply:
        found = json.load(reply)["replication"]
    return found[0] if found and found[0]["commits"] is not None else None


def wait_for_copies(job: Job, after: int = 0) -> int:
    """The number of a complete set after this one."""

    def find() -> int | None:
        found = copies(job)
        return found["number"] if found is not None and found["number"] > after else None

    return wait_until(find, why=job.describe)


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def newest_step(job: Job) -> int:
    return max(event["step"] for event in job.worker_events(event="step"))


def restart_of_all(job: ReplicatedJob, round: int) -> list[WorkerEvent]:
    """Where the workers of this round started, by rank; each checks that its own shard is that of the step."""
    job.wait_for(event="start", count=round * job.nodes)
    return sorted(job.worker_events(event="start")[(round - 1) * job.nodes :], key=lambda event: event["rank"])


def replicators(agents: list[Agent]) -> list[int]:
    """The pids of the agents' replicators."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and parent_of(int(entry.name)) in {agent.pid for agent in agents}:
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"ripstop.replication.replicator" in command:
                found.append(int(entry.name))
    return found


def test_a_lost_node_s_shard_comes_from_its_partner(job: ReplicatedJob) -> None:
    job.nodes = 3
    agents = start_all(job)
    copied = wait_for_copies(job)
    agents[1].process.kill()
    agents[1].wait()
    lost_at = newest_step(job)
    start(job)
    starts = restart_of_all(job, 2)
    steps = {event["step"] for event in starts}
    assert len(steps) == 1, "a restore is of one commit on all ranks"
    assert copied <= steps.pop() <= lost_at + 1
    assert [event["source"] for event in starts].count("peer") == 1
    assert wait_for_copies(job, after=lost_at) > lost_at, "the new round has copies, too"


@pytest.mark.long
def test_a_job_after_another_s_checkpoints_has_copies_too(job: ReplicatedJob, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    (directory / "state" / "commit-000007-000000000042").mkdir(parents=True)  # damaged, but its round counts
    agents = start_all(job, f"--checkpoint-dir={directory}")
    copied = wait_for_copies(job)
    agents[1].process.kill()
    agents[1].wait()
    start(job, f"--checkpoint-dir={directory}")
    starts = restart_of_all(job, 2)
    assert len({event["step"] for event in starts}) == 1
    assert starts[0]["step"] >= copied
    assert [event["source"] for event in starts].count("peer") == 1


@pytest.mark.long
def test_copies_outlive_a_restart_of_the_workers(job: ReplicatedJob) -> None:
    job.nodes = 3
    agents = start_all(job, PAUSE_S="0.1")
    copied = wait_for_copies(job)
    os.kill(job.worker_events(event="start")[-1]["pid"], signal.SIGKILL)
    starts = restart_of_all(job, 2)
    assert all(event["source"] == "memory" and event["step"] >= copied for event in starts)
    agents[1].process.kill()  # before the second round has copies of its own
    start(job)
    starts = restart_of_all(job, 3)
    assert len({event["step"] for event in starts}) == 1
    assert starts[0]["step"] >= copied


def test_a_killed_replicator_is_one_warning_and_comes_back(job: ReplicatedJob) -> None:
    agents = start_all(job)
    copied = wait_for_copies(job)
    (pid,) = replicators(agents[1:2])
    os.kill(pid, signal.SIGKILL)
    agents[1].wait_for_log(r"W the replicator has ended \(signal 9\); training goes on")
    later = wait_for_copies(job, after=max(copied, newest_step(job)))
    assert len(job.worker_events(event="start")) == job.nodes, "no worker was restarted"
    agents[1].process.kill()
    agents[1].wait()
    start(job)
    assert restart_of_all(job, 2)[0]["step"] >= later


def test_a_job_that_ends_leaves_no_replicator(job: ReplicatedJob) -> None:
    agents = start_all(job, END=str(job.folder / "end"))
    wait_for_copies(job)
    (job.folder / "end").touch()
    assert [agent.wait() for agent in agents] == [0, 0], job.describe()
    text = "".join(path.read_text() for path in job.logs.rglob("job-events.jsonl"))
    assert text.count(event_kind(StateReplicated(1, "", 0, 0))) == 1, "the job had copies"


@pytest.mark.long
def test_without_replication_the_loss_of_a_node_loses_the_state(job: ReplicatedJob) -> None:
    agents = start_all(job, "--replicate=off")
    job.steps(job.nodes)
    assert replicators(agents) == []
    agents[1].process.kill()
    agents[1].wait()
    start(job, "--replicate=off")
    assert {event["step"] for event in restart_of_all(job, 2)} == {0}


def test_a_job_without_a_secret_makes_no_copies_and_says_so_once(tmp_path: Path) -> None:
    with ReplicatedJob(tmp_path) as job:
        agents = start_all(job, STEPS="20")
        assert [agent.wait() for agent in agents] == [0, 0], job.describe()
        for agent in agents:
            assert agent.err.count("has no copies on other nodes: the job has no secret; set RIPSTOP_TOKEN") == 1
        text = "".join(path.read_text() for path in job.logs.rglob("job-events.jsonl"))
        assert event_kind(StateReplicated(1, "", 0, 0)) not in text
