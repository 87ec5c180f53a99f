"""`train.Checkpointer` in a script that uses torch.save and torch.load."""

from pathlib import Path

from tests.e2e.harness import SCRIPTS, Job


def test_a_killed_worker_continues_from_memory_and_a_new_job_from_the_file(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    with Job(tmp_path) as job:
        for _ in range(2):
            agent = job.run(
                "--standalone",
                "--nproc-per-node=2",
                "--max-restarts=1",
                str(SCRIPTS / "checkpointer.py"),
                env={"STARTS": str(starts)},
            )
            assert agent.wait() == 0, agent.err
    for rank in range(2):
        found = [line.split() for line in Path(f"{starts}.{rank}").read_text().splitlines()]
        steps, sums = zip(*found, strict=True)
        # rank 0 may have died of its peer's death before its own fifth save
        assert steps in (("0", "5", "end", "10", "end"), ("0", "4", "end", "10", "end"))
        assert sums[2] == sums[4], "the weights do not depend on where the training continued"


def test_saving_before_loading_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from ripstop import train\ntrain.Checkpointer().save({'step': 1})\n")
    with Job(tmp_path) as job:
        agent = job.run("--standalone", str(script))
        assert agent.wait() == 1
        assert "call checkpointer.load() once" in agent.err
