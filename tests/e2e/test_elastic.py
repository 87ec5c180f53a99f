"""`train.elastic` in real jobs: after a fault, the other workers go on in the same process."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ripstop.telemetry.event_file import NODE_EVENTS
from tests.e2e.harness import SCRIPTS, Agent, Job, wait_until

ELASTIC = SCRIPTS / "elastic.py"
RANKS = 3


class ElasticJob(Job):
    def train(self, name: str, faults: str = "", *flags: str, **env: str) -> None:
        """Run the script to its end on one node."""
        flags = flags or ("--inprocess-timeout=60",)  # a busy machine is slow
        agent = self.run(
            *("--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=9", *flags, str(ELASTIC)),
            env={"LOSSES": str(self.folder / name), "FAULTS": faults, **env},
        )
        assert agent.wait() == 0, agent.err

    def lines(self, name: str, rank: int) -> list[str]:
        return (self.folder / f"{name}.{rank}").read_text().splitlines()

    def entries(self, name: str, rank: int) -> list[list[int]]:
        """The pid, the entry of this process, and the step, each time that a process had this rank."""
        return [[*map(int, line.split()[1:])] for line in self.lines(name, rank) if line.startswith("#")]

    def processes(self, name: str, rank: int) -> int:
        return len({pid for pid, _, _ in self.entries(name, rank)})

    def losses(self, name: str, rank: int) -> dict[int, str]:
        """The losses by step, the last one if a step was repeated; equal each time, if it was."""
        found: dict[int, str] = {}
        for line in self.lines(name, rank):
            if not line.startswith("#"):
                step, loss = line.split()
                assert found.setdefault(int(step), loss) == loss, (rank, step)
        return found

    def recovered(self) -> list[int]:
        """How many workers went on in place, in each recovery."""
        records = [json.loads(line) for file in self.logs.rglob(NODE_EVENTS) for line in file.read_text().splitlines()]
        return [record["kept"] for record in records if record["kind"] == "recovered"]

    def signal_node(self, agent: Agent, signum: int) -> None:
        """The agent first: it must not report how its workers ended."""
        for pid in tree(agent.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signum)


def tree(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [pid] + [each for child in text.split() for each in tree(int(child))]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[ElasticJob]:
    with ElasticJob(tmp_path) as job:
        yield job


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, str]]:
    """The losses of each rank in a run without faults."""
    with ElasticJob(tmp_path_factory.mktemp("right")) as job:
        job.train("right")
        return [job.losses("right", rank) for rank in range(RANKS)]


def test_the_others_go_on_in_the_same_process_with_the_same_numbers(
    job: ElasticJob, right: list[dict[int, str]]
) -> None:
    job.train("found", "1:3:after,0:6:kill,2:9:raise")
    assert [job.losses("found", rank) for rank in range(RANKS)] == right
    assert [job.processes("found", rank) for rank in range(RANKS)] == [2, 2, 2]
    assert [entry for _, entry, _ in job.entries("found", 1)] == [1, 1, 2, 3]
    assert job.recovered() == [2, 2, 2]
    assert "ValueError: the script's own error" in job.agents[-1].err
    assert "[rank2]: [rank2]:" not in job.agents[-1].err  # torch's hook for exceptions does not pile up


def test_a_worker_that_is_stopped_is_replaced_and_its_peers_wait_for_the_new_one(
    job: ElasticJob, right: list[dict[int, str]]
) -> None:
    job.train("found", "2:5:stop,1:5:follow", "--inprocess-timeout=2")
    assert "rank 2 did not leave the last round within 2 s" in job.agents[-1].err
    assert [job.processes("found", rank) for rank in range(RANKS)] == [1, 2, 2]
    assert [job.losses("found", rank) for rank in range(RANKS)] == right


@pytest.mark.long
def test_two_faults_at_once_and_faults_while_a_round_is_formed_or_restored_are_recovered_in_place(
    job: ElasticJob, right: list[dict[int, str]]
) -> None:
    job.train("found", "1:3:kill,0:1:forming,2:2:restoring,0:9:kill,2:9:kill")
    assert [job.losses("found", rank) for rank in range(RANKS)] == right
    assert [job.processes("found", rank) for rank in range(RANKS)] == [3, 2, 3]


@pytest.mark.long
def test_sharded_state_is_rolled_back_in_place(job: ElasticJob) -> None:
    job.train("right", FSDP="1")
    job.train("found", "1:4:kill,0:8:after", FSDP="1")
    assert [job.processes("found", rank) for rank in range(RANKS)] == [2, 2, 1]
    for rank in range(RANKS):
        assert job.losses("found", rank) == job.losses("right", rank)


@pytest.mark.long
def test_without_a_timeout_all_workers_are_replaced(job: ElasticJob) -> None:
    job.train("found", "1:4:kill", "--inprocess-timeout=0")
    assert [job.processes("found", rank) for rank in range(RANKS)] == [2, 2, 2]


def test_workers_go_on_in_place_when_nodes_join_and_are_lost(job: ElasticJob) -> None:
    losses = {"LOSSES": str(job.folder / "found"), "STEPS": "10"}
    first = job.node(nnodes="1:2", script=ELASTIC, env={**losses, "HOLD": "2:1"})
    wait_until(lambda: (job.folder / "found.held0").exists() or None, why=job.describe)
    second = job.node(nnodes="1:2", script=ELASTIC, env={**losses, "HOLD": "7:2"})
    wait_until(lambda: (job.folder / "found.held1").exists() or None, why=job.describe)
    job.signal_node(second, signal.SIGKILL)
    second.wait()
    assert first.wait() == 0, first.err
    assert job.processes("found", 0) == 1
    assert [step for _, _, step in job.entries("found", 0)] == [0, 2, 7]
    assert [step for _, _, step in job.entries("found", 1)] == [2]


@pytest.mark.long
def test_a_collective_that_waits_for_a_frozen_node_is_aborted(job: ElasticJob) -> None:
    losses = {"LOSSES": str(job.folder / "found"), "STEPS": "10"}
    first = job.node(nnodes="1:2", script=ELASTIC, env={**losses, "HOLD": "2:1"})
    wait_until(lambda: (job.folder / "found.held0").exists() or None, why=job.describe)
    second = job.node(nnodes="1:2", script=ELASTIC, env={**losses, "HOLD": "7:2"})
    wait_until(lambda: (job.folder / "found.held1").exists() or None, why=job.describe)
    job.signal_node(second, signal.SIGSTOP)  # no connection is closed
    assert first.wait() == 0, first.err
    job.signal_node(second, signal.SIGKILL)
    second.wait()
    assert job.processes("found", 0) == 1
    assert [step for _, _, step in job.entries("found", 0)] == [0, 2, 7]
