"""`train.State` in real jobs: killed workers continue where they were, with the same numbers to the last bit."""

from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, Job

STATE = SCRIPTS / "state.py"
RANKS = 2
STEPS = "60"


@pytest.fixture
def job(tmp_path: Path):
    with Job(tmp_path) as job:
        yield job


def train(job: Job, name: str, kills: str = "", **env: str) -> list[list[str]]:
    """Run the script to its end; return the lines of each rank."""
    losses = job.folder / name
    agent = job.run(
        "--standalone",
        f"--nproc-per-node={RANKS}",
        "--max-restarts=9",
        str(STATE),
        env={"LOSSES": str(losses), "KILLS": kills, "STEPS": STEPS, **env},
    )
    assert agent.wait() == 0, agent.err
    return [Path(f"{losses}.{rank}").read_text().splitlines() for rank in range(RANKS)]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The lines of a job without faults."""
    with Job(tmp_path_factory.mktemp("right")) as job:
        return train(job, "right")


def steps(lines: list[str]) -> list[str]:
    return [line for line in lines if not line.startswith("#")]


def starts(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("#")]


def test_killed_workers_lose_no_committed_step_and_no_bit(job: Job, right: list[list[str]]) -> None:
    found = train(job, "found", kills="1:4:after,0:8:after")
    for rank in range(RANKS):
        assert starts(found[rank]) == ["# started at 0", "# restored at 4", "# restored at 8"]
        assert steps(found[rank]) == steps(right[rank])


def test_a_step_without_a_commit_on_every_rank_is_repeated_with_the_same_result(
    job: Job, right: list[list[str]]
) -> None:
    found = train(job, "found", kills="1:4:before,0:6:before,0:9:during")
    for rank in range(RANKS):
        assert starts(found[rank])[:3] == ["# started at 0", "# restored at 3", "# restored at 5"]
        assert starts(found[rank])[3] in ("# restored at 8", "# restored at 9")
        assert set(steps(found[rank])) == set(steps(right[rank]))


@pytest.mark.long
def test_ranks_commit_after_the_same_steps_if_the_interval_is_a_time(job: Job, right: list[list[str]]) -> None:
    found = train(job, "found", kills="1:20:before,0:45:before", EVERY="10ms")
    assert starts(found[0]) == starts(found[1])
    assert len(starts(found[0])) == 3
    for rank in range(RANKS):
        assert starts(found[rank])[1].startswith("# restored at ")
        assert set(steps(found[rank])) == set(steps(right[rank]))
