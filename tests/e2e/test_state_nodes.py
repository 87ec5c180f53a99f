"""`train.State` with several nodes: lost nodes, new nodes, other numbers of ranks."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, Agent, Job, wait_until
from tests.e2e.test_nodes import tree

STATE = SCRIPTS / "state.py"
SHARDED = SCRIPTS / "sharded_state.py"


class StateJob(Job):
    """Nodes with one rank each, that run the script for $LOSSES."""

    def start(self, nnodes: str, script: Path = STATE, **env: str) -> Agent:
        losses = {"LOSSES": str(self.folder / "losses"), "KILLS": "", **env}
        return self.node(nnodes=nnodes, script=script, env=losses)

    def held(self, step: int, ranks: int) -> None:
        """Wait until the ranks have committed this step and stay there."""
        files = [self.folder / f"losses.held{rank}-{step}" for rank in range(ranks)]
        wait_until(lambda: True if all(map(Path.exists, files)) else None, why=self.describe)

    def lines(self, rank: int) -> list[str]:
        return (self.folder / f"losses.{rank}").read_text().splitlines()

    def starts(self, rank: int) -> list[str]:
        return [line for line in self.lines(rank) if line.startswith("#")]

    def steps(self, rank: int) -> list[int]:
        return [int(line.split()[0]) for line in self.lines(rank) if not line.startswith("#")]

    def lose(self, agent: Agent) -> None:
        """Kill a node: its agent and all its processes."""
        for pid in tree(agent.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[StateJob]:
    with StateJob(tmp_path) as job:
        yield job


@pytest.mark.long
def test_a_lost_node_comes_back_and_receives_the_state(job: StateJob) -> None:
    first = job.start("2", HOLDS="5:2")
    first.wait_for_log("joined")
    second = job.start("2", HOLDS="5:2")
    job.held(5, 2)
    job.lose(second)
    third = job.start("2")
    assert [first.wait(), third.wait()] == [0, 0], job.describe()
    for rank in range(2):
        assert job.starts(rank) == ["# started at 0", "# restored at 5"]
        assert job.steps(rank) == list(range(1, 13))


def test_replicated_state_continues_with_one_rank_and_then_with_three(job: StateJob) -> None:
    holds = "1:1,5:2,8:1,10:2"  # of 2, of 1; perhaps of 1 before the second node is there, and of 2 before the third
    first = job.start("1:3", HOLDS=holds)
    first.wait_for_log("joined")
    second = job.start("1:3", HOLDS=holds)
    job.held(5, 2)
    job.lose(second)
    job.held(8, 1)
    others = [job.start("1:3", HOLDS=holds) for _ in range(2)]
    assert [agent.wait() for agent in (first, *others)] == [0, 0, 0], job.describe()
    starts = [line for line in job.starts(0) if line != "# restored at 1"]
    assert starts[:2] == ["# started at 0", "# restored at 5"]
    assert job.starts(2)[-1] in ("# restored at 8", "# restored at 9", "# restored at 10")
    assert list(dict.fromkeys(job.steps(0))) == list(range(1, 13))
    assert job.steps(2)[-1] == 12


def test_sharded_state_of_two_ranks_continues_with_three(job: StateJob) -> None:
    agents = [job.start("2:3", SHARDED, HOLDS="4:2")]
    agents[0].wait_for_log("joined")
    agents.append(job.start("2:3", SHARDED, HOLDS="4:2"))
    job.held(4, 2)
    agents.append(job.start("2:3", SHARDED))
    assert [agent.wait() for agent in agents] == [0, 0, 0], job.describe()
    held = job.lines(0)[-2]
    assert held.startswith("2 4 ")
    assert [job.lines(rank)[-1] for rank in range(3)] == [held.replace("2 4 ", "3 4 ")] * 3
