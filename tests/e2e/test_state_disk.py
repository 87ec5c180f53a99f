"""`train.State` with `--checkpoint-dir`: jobs that are lost as a whole continue from disk, in a new job."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, Agent, Job, wait_until
from tests.e2e.test_nodes import tree
from tests.memory_cgroup import command_in, limited_memory

STATE = SCRIPTS / "state.py"
STEPS = 40
LIMIT, STATE_BYTES = 700 << 20, 100_000_000  # the job needs about half of it; buffers for two commits are too much


class DiskJob(Job):
    """Jobs of one checkpoint directory."""

    @property
    def flags(self) -> tuple[str, str]:
        return f"--checkpoint-dir={self.folder / 'checkpoints'}", "--checkpoint-interval=0.001"

    def start(self, name: str, *flags: str, **env: str) -> Agent:
        base = {"LOSSES": str(self.folder / name), "KILLS": "", "STEPS": str(STEPS)}
        return self.run("--standalone", "--nproc-per-node=2", *flags, str(STATE), env={**base, **env})

    def lines(self, name: str, rank: int) -> list[str]:
        return (self.folder / f"{name}.{rank}").read_text().splitlines()

    def held(self, name: str, step: int, ranks: int) -> None:
        """Wait until the ranks have committed this step and stay there."""
        files = [self.folder / f"{name}.held{rank}-{step}" for rank in range(ranks)]
        wait_until(lambda: True if all(map(Path.exists, files)) else None, why=self.describe)

    def lose(self, *agents: Agent) -> None:
        """Kill agents with all their processes, as when their machines are lost."""
        for agent in agents:
            for pid in tree(agent.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            agent.wait()

    def newest_checkpoint(self) -> int:
        found = sorted((self.folder / "checkpoints" / "state").glob("commit-*"))
        return int(found[-1].name.split("-")[2])


@pytest.fixture
def job(tmp_path: Path) -> Iterator[DiskJob]:
    with DiskJob(tmp_path, TMPDIR=str(tmp_path)) as job:
        yield job


def test_a_job_that_is_lost_as_a_whole_continues_from_disk_with_every_bit(job: DiskJob) -> None:
    assert job.start("right").wait() == 0
    first = job.start("found", *job.flags, HOLDS="30:2")
    job.held("found", 30, 2)
    first.wait_for_log("is saved")
    job.lose(first)
    number = job.newest_checkpoint()
    again = job.start("found", *job.flags)
    assert again.wait() == 0, again.err
    for rank in range(2):
        right, found = job.lines("right", rank), job.lines("found", rank)
        assert [line for line in found if line.startswith("#")] == ["# started at 0", f"# restored at {number}"]
        assert set(found) - set(right) == {f"# restored at {number}"}
        assert [line.split()[0] for line in found if not line.startswith("#")] == [
            str(step) for step in (*range(1, 31), *range(number + 1, STEPS + 1))
        ]


def savers(agent: Agent) -> list[int]:
    found = []
    for pid in tree(agent.pid):
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "ripstop-saver":
                found.append(pid)
    return found


@pytest.mark.long
def test_a_killed_saver_costs_one_checkpoint(job: DiskJob) -> None:
    agent = job.start("found", *job.flags, STEPS="1000000")
    (saver,) = wait_until(lambda: savers(agent) or None, why=job.describe)
    assert os.getpriority(os.PRIO_PROCESS, saver) >= 0
    os.kill(saver, signal.SIGKILL)
    agent.wait_for_log(rf"commit \d+ is not saved: the saver pid={saver} died: signal 9")
    agent.wait_for_log(r"commit \d+ is saved path=")
    agent.signal(signal.SIGTERM)
    agent.wait()
    assert not re.search("round=2", agent.err)  # training went on
    names = {path.name for path in (job.folder / "checkpoints" / "state").iterdir()}
    assert all(name.startswith("commit-") for name in names)


@pytest.mark.long
def test_state_that_is_equal_on_several_nodes_is_saved_once_and_restored_by_all(job: DiskJob) -> None:
    def node(steps: int) -> Agent:
        env = {"LOSSES": str(job.folder / "found"), "KILLS": "", "STEPS": str(steps)}
        return job.node(*job.flags, nnodes="2", script=STATE, env=env)

    nodes = [node(1_000_000), node(1_000_000)]  # the first commits are not known to be equal
    wait_until(lambda: True if any("is saved" in each.err for each in nodes) else None, why=job.describe)
    job.lose(*nodes)
    number = job.newest_checkpoint()
    again = [node(number + 5), node(number + 5)]
    assert [each.wait() for each in again] == [0, 0], job.describe()
    for rank in range(2):
        assert f"# restored at {number}" in job.lines("found", rank)
    env = {"LOSSES": str(job.folder / "alone"), "KILLS": "", "STEPS": str(number + 10)}
    alone = job.run("--standalone", *job.flags, str(STATE), env=env)
    assert alone.wait() == 0, alone.err
    restored = int(job.lines("alone", 0)[0].removeprefix("# restored at "))
    assert number <= restored <= number + 5  # the nodes may have saved another one before they ended


def test_a_directory_that_cannot_be_made_is_one_line_and_nothing_starts(job: DiskJob) -> None:
    agent = job.run("--standalone", "--checkpoint-dir=/proc/here", str(STATE))
    assert agent.wait() == 2
    assert "--checkpoint-dir=/proc/here: cannot be written to: " in agent.err
    assert len(agent.err.strip().splitlines()) == 1


def test_without_memory_for_commits_a_killed_worker_continues_from_disk(job: DiskJob) -> None:
    with limited_memory(LIMIT) as group:
        env = {"SHARD_BYTES": str(STATE_BYTES), "PAUSE_S": "0.05"}
        flags = job.flags[0], "--max-restarts=2", "--checkpoint-interval=0.2", str(SCRIPTS / "shards.py")
        agent = job.run("--standalone", *flags, env=env, wrap=command_in(group))
        agent.wait_for_log(r"state 'state' is kept on disk only from now on, about every 0.2 s: a buffer needs 0.1 GB")
        agent.wait_for_log(r"commit \d+ is saved path=")
        os.kill(job.worker_events(event="start")[0]["pid"], signal.SIGKILL)
        start = job.wait_for(event="start", count=2)  # the script checks what is restored
        assert start["source"] == "disk"
        assert start["step"] == start["commits"] > 0
        job.wait_for(event="step", step=start["step"] + 10)
        agent.signal(signal.SIGTERM)
        agent.wait()
        assert "OOM" not in agent.err
