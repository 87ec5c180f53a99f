"""Jobs on a real Slurm."""

import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, wait_until
from tests.slurm.cluster import RIPSTOP, BatchJob, Cluster, needs_cgroup, needs_slurm, running_cluster

WORKER = Path(__file__).parent / "worker.py"
STATE = SCRIPTS / "state.py"
RUN = f"{RIPSTOP} run --log-dir=logs"
SRUN = "srun --ntasks-per-node=1"
CONF = "--rdzv-conf=last_call_timeout=2"

pytestmark = needs_slurm


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cgroup_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("slurm"), tracking="cgroup") as cluster:
        yield cluster


def batch(*lines: str, options: str = "") -> str:
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options.split()), *lines]) + "\n"


def started(output: str) -> list[str]:
    return sorted(re.findall(r"(\S+ rank=\d/\d) run=\S+ restarts=\d+ started", output))


def test_srun_needs_no_flags(cluster: Cluster) -> None:
    done = cluster.run(*SRUN.split(), "-N3", "--nodelist=n[1,3],p-07", *RUN.split(), str(WORKER), "--once")
    assert done.returncode == 0, done.stderr
    assert started(done.stdout) == ["n1 rank=0/3", "n3 rank=1/3", "p-07 rank=2/3"]
    assert len(re.findall(r"run=\d+\.0 restarts=0 started secret=\[\]", done.stdout)) == 3
    key = cluster.home / ".config" / "ripstop" / "key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert "anyone" not in done.stderr


def test_several_tasks_a_node_are_an_error(cluster: Cluster) -> None:
    done = cluster.run("srun", "-N2", "--ntasks-per-node=2", *RUN.split(), str(WORKER), "--once")
    assert done.returncode == 2
    assert "2 tasks on one node; ripstop needs one and starts the workers itself" in done.stderr


def rendered(cluster: Cluster, *flags: str) -> str:
    """A script of `ripstop slurm render` with this checkout's ripstop, and without a home directory."""
    line = ["slurm", "render", "--log-dir=logs", *flags, str(WORKER)]
    script = cluster.run(*RIPSTOP.split(), *line).stdout
    assert "ripstop run" in script
    return script.replace("ripstop run", f"env HOME=/nowhere {RIPSTOP} run")


@pytest.mark.long
def test_a_rendered_script_runs_a_job_without_a_shared_home(cluster: Cluster) -> None:
    script = rendered(cluster, "--nnodes=2", "--cpus=2", "--memory=100M").replace("worker.py", "worker.py --once")
    job = cluster.submit(script, "--nodelist=n[1-2]")
    assert job.wait_until_over() == "COMPLETED", job.output
    assert started(job.output) == ["n1 rank=0/2", "n2 rank=1/2"]
    assert "secret=['" not in job.output


@pytest.mark.long
def test_ripstop_slurm_submit_starts_a_job(cluster: Cluster) -> None:
    setup = f"--setup=export PATH={Path(sys.executable).parent}:$PATH"
    line = ["slurm", "submit", "--nnodes=2", "--cpus=2", "--memory=100M", "--log-dir=logs", setup, str(WORKER)]
    submitted = cluster.run("env", "SBATCH_OUTPUT=%j.out", *RIPSTOP.split(), *line, "--once")
    assert submitted.returncode == 0, submitted.stderr
    job = BatchJob(cluster, int(submitted.stdout.split()[-1]))
    assert job.wait_until_over() == "COMPLETED", job.output
    assert [where.split()[1] for where in started(job.output)] == ["rank=0/2", "rank=1/2"]


@pytest.mark.long
def test_steps_of_one_allocation_are_jobs_of_their_own(cluster: Cluster) -> None:
    steps = [f"{SRUN} --nodes=1 --exact {RUN} {WORKER} --once &"] * 2
    job = cluster.submit(batch(*steps, "wait", options="--nodes=2"))
    assert job.wait_until_over() == "COMPLETED", job.output
    assert sorted(re.findall(r"run=\d+\.(\d)", job.output)) == ["0", "1"]


@pytest.mark.long
def test_srun_works_inside_salloc(cluster: Cluster) -> None:
    done = cluster.run("salloc", "--nodes=2", "--nodelist=n[1-2]", *SRUN.split(), *RUN.split(), str(WORKER), "--once")
    assert done.returncode == 0, done.stderr
    assert started(done.stdout) == ["n1 rank=0/2", "n2 rank=1/2"]


@pytest.mark.long
def test_a_job_of_two_to_four_nodes_takes_what_is_free(cluster: Cluster) -> None:
    other = cluster.submit(batch("sleep 1000"), "--nodelist=n2", "--exclusive")
    try:
        wait_until(lambda: other.state() == "RUNNING" or None)
        job = cluster.submit(batch(f"exec {SRUN} {RUN} {CONF} --nnodes=2:4 {WORKER} --once", options="--nodes=2-4"))
        assert job.wait_until_over() == "COMPLETED", job.output
    finally:
        other.cancel()
    assert started(job.output) == ["n1 rank=0/3", "n3 rank=1/3", "p-07 rank=2/3"]


@pytest.mark.long
def test_with_ntasks_per_node_in_sbatch_slurm_gives_the_minimum_of_nodes(cluster: Cluster) -> None:
    """Why rendered scripts have it in the line of srun only."""
    job = cluster.submit(batch("true", options="--nodes=2-4 --ntasks-per-node=1"))
    assert job.wait_until_over() == "COMPLETED"
    assert "NumNodes=2 " in cluster.run("scontrol", "show", "job", str(job.number)).stdout


@pytest.mark.long
def test_with_kill_on_bad_exit_no_node_waits_for_one_that_failed_to_start(cluster: Cluster) -> None:
    line = f'[ "$SLURM_NODEID" != 1 ] || exit 2; exec {RUN} {WORKER}'
    done = cluster.run(*SRUN.split(), "--nodes=2", "--kill-on-bad-exit=1", "bash", "-c", line)
    assert done.returncode != 0
    assert "started" not in done.stdout


@pytest.mark.long
def test_a_job_that_loses_a_node_without_no_kill_is_requeued_on_other_nodes(cluster: Cluster) -> None:
    job = cluster.submit(batch(f"exec {SRUN} {RUN} {WORKER}", options="--nodes=2 --requeue --open-mode=append"))
    job.wait_for("restarts=0 started", 2)
    (lost,) = re.findall(r"(\S+) rank=1/2", job.output)
    try:
        cluster.kill_node(lost)
        job.release()
        job.wait_for(rf"rank=\d/2 run={job.number}\.0 restarts=1 started", 2)
    finally:
        job.cancel()
        cluster.start_node(lost)
    cluster.wait_until_idle()


@pytest.mark.long
def test_with_no_kill_the_job_goes_on_without_a_lost_node(cluster: Cluster) -> None:
    job = cluster.submit(
        batch(
            f"{SRUN} --no-kill --kill-on-bad-exit=0 {RUN} {CONF} --nnodes=2:4 {WORKER}", options="--nodes=2-4 --no-kill"
        )
    )
    try:
        job.wait_for("started", 4)
        where = f"srun --jobid={job.number} --overlap --nodes=1 --ntasks=1 --nodelist=n1"
        status = cluster.run(*where.split(), *RIPSTOP.split(), "status", f"--job={job.number}.0")
        assert "p-07" in status.stdout, status.stderr
        cluster.kill_node("n3")
        job.wait_for(r"rank=\d/3 run=\S+ restarts=0 started", 3)
        job.wait_for("Node failure on n3")
        assert job.state() == "RUNNING"
    finally:
        job.cancel()
        cluster.start_node("n3")
    cluster.wait_until_idle()
    assert len(re.findall("rank=./3 .* saved after SIGTERM", job.output)) == 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("option", "signal"),
    [
        ("", "SIGTERM"),
        ("--signal=USR1@15", "SIGUSR1"),
        ("--signal=B:USR1@15", "SIGUSR1"),
        ("--signal=TERM@15", "SIGTERM"),
    ],
)
def test_workers_can_save_before_the_time_limit(cluster: Cluster, option: str, signal: str) -> None:
    """Slurm looks every 30 s, and sends a signal up to 30 s too early: here 15 to 45 s after the workers began."""
    job = cluster.submit(batch(f"exec {SRUN} {RUN} {WORKER}", options=f"--nodes=2 --time=60 {option}"))
    job.wait_for("started", 2)
    job.end_in(60)
    job.wait_for(f"saved after {signal}", 2, timeout=200)
    job.wait_until_over()
    assert "second signal" not in job.output


@pytest.mark.long
def test_a_preempted_job_saves_and_goes_on_counting_when_it_is_requeued(cluster: Cluster) -> None:
    job = cluster.submit(rendered(cluster, "--nnodes=4", "--requeue"))
    job.wait_for(r"rank=\d/4 run=\S+ restarts=0 started", 4)
    urgent = cluster.submit(batch("true"), "--partition=urgent", "--nodes=4", "--exclusive")
    job.wait_for("restarts=0 saved after SIGTERM", 4)
    assert urgent.wait_until_over() == "COMPLETED"
    job.release()
    job.wait_for(rf"rank=\d/4 run={job.number}\.0 restarts=1 started", 4)
    job.cancel()


@pytest.mark.long
def test_a_rendered_job_with_drain_and_requeue_goes_on_after_its_time_limit(cluster: Cluster) -> None:
    job = cluster.submit(rendered(cluster, "--nnodes=2", "--cpus=2", "--time=60", "--drain=15", "--requeue"))
    job.wait_for("restarts=0 started", 2)
    job.end_in(60)
    job.wait_for("restarts=0 saved after SIGTERM", 2, timeout=200)
    job.release()
    job.wait_for("restarts=1 started", 2)
    job.cancel()


@pytest.mark.long
def test_training_state_goes_on_after_a_requeue(cluster: Cluster) -> None:
    losses, checkpoints = cluster.folder / "losses", cluster.folder / "checkpoints"
    flags = f"--checkpoint-dir={checkpoints} --checkpoint-interval=0.001"
    job = cluster.submit(
        batch(
            f"export LOSSES={losses} STEPS=40",
            '[ "${SLURM_RESTART_COUNT:-0}" != 0 ] || export HOLDS=20:2',
            f"exec {SRUN} {RUN} {flags} {STATE}",
            options="--nodes=2 --requeue --open-mode=append",
        )
    )
    held = [Path(f"{losses}.held{rank}-20") for rank in range(2)]
    wait_until(lambda: all(map(Path.exists, held)) or None, why=lambda: job.output)
    wait_until(lambda: any((checkpoints / "state").glob("commit-*")) or None, why=lambda: job.output)
    cluster.run("scontrol", "requeue", str(job.number))
    job.release()
    assert job.wait_until_over(timeout=240) == "COMPLETED", job.output
    for rank in range(2):
        lines = Path(f"{losses}.{rank}").read_text().splitlines()
        assert lines[0] == "# started at 0"
        restored = re.fullmatch(r"# restored at (\d+)", next(line for line in lines[1:] if line.startswith("#")))
        assert restored is not None
        assert 0 < int(restored[1]) <= 20
        assert lines[-1].startswith("40 ")


@needs_cgroup
@pytest.mark.long
@pytest.mark.parametrize("option", ["", "--signal=B:USR1@15", "--signal=TERM@15"])
def test_the_time_limit_is_a_planned_end_with_a_commit(cgroup_cluster: Cluster, tmp_path: Path, option: str) -> None:
    """The final commit is the only checkpoint; the next job continues with the next step."""
    losses = tmp_path / "losses"
    flags = f"--checkpoint-dir={tmp_path / 'checkpoints'} --checkpoint-interval=1h"
    lines = f"export LOSSES={losses} STEPS=100000000 OMP_NUM_THREADS=1", f"exec {SRUN} {RUN} {flags} {STATE}"
    job = cgroup_cluster.submit(batch(*lines, options=f"--nodes=2 --time=60 {option}"))
    files = [Path(f"{losses}.{rank}") for rank in range(2)]
    wait_until(lambda: all(file.exists() and "\n9 " in file.read_text() for file in files) or None)
    job.end_in(60)
    job.wait_until_over(timeout=200)
    assert "all ranks have commit" in job.output and "is saved path=" in job.output, job.output
    last = {file.read_text().splitlines()[-1].split()[0] for file in files}
    assert len(last) == 1
    following = cgroup_cluster.submit(batch(*lines, options="--nodes=2"))
    restored = f"\n# restored at {last.pop()}\n"
    wait_until(lambda: all(restored in file.read_text() for file in files) or None, why=lambda: following.output)
    following.cancel()
