"""`train.Sampler` in real jobs with real DataLoaders: each sample once, over kills and another number of ranks."""

from pathlib import Path

from tests.e2e.harness import SCRIPTS, Job

SCRIPT = SCRIPTS / "exactly_once.py"
LENGTH = 40  # of the data set


def test_each_sample_of_an_epoch_is_in_one_committed_step(tmp_path: Path) -> None:
    steps: dict[int, dict[int, list[int]]] = {}  # step -> rank -> samples; a repeated step counts as it was committed
    with Job(tmp_path) as job:
        for ranks, end, kills in ((2, 9, "1:2,0:5,1:8"), (3, 20, "2:12,0:17")):
            agent = job.run(
                "--standalone",
                f"--nproc-per-node={ranks}",
                "--max-restarts=5",
                str(SCRIPT),
                env={"SAMPLES": str(tmp_path / "samples"), "STEPS": str(end), "KILLS": kills},
            )
            assert agent.wait() == 0, agent.err
            for rank in range(ranks):
                for line in (tmp_path / f"samples.{rank}").read_text().splitlines():
                    step, samples = line.split()
                    steps.setdefault(int(step), {})[rank] = [int(sample) for sample in samples.split(",")]
    assert len(list(tmp_path.glob("samples.killed-*"))) == 5
    assert sorted(steps) == list(range(1, 21))
    given = [
        steps[step][number % len(steps[step])][number // len(steps[step])]  # ranks take turns in a batch
        for step in sorted(steps)
        for number in range(6)
    ]
    for epoch in range(3):
        assert sorted(given[epoch * LENGTH : (epoch + 1) * LENGTH]) == list(range(LENGTH))
