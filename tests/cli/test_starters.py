"""The configuration of a node that Slurm, mpirun or AWS Batch has started."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ripstop.cli import main
from ripstop.cli.commands.run import configure_run
from ripstop.cli.dry_run import describe_dry_run
from ripstop.model.config import STOP_SIGNALS, Backend, RunConfig, UserKey
from ripstop.model.errors import UsageError
from ripstop.model.round import Address, RankBy
from ripstop.starters.user_key import job_secret_from_user_key
from tests.starters.variables import AWS_BATCH, BATCH_SCRIPT, OPEN_MPI, srun

Read = Callable[..., RunConfig]
KEY = Path("/home/ann/.config/ripstop/key")
TOKEN = {"RIPSTOP_TOKEN": "s"}


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Reads a command line in a directory that holds train.py."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    return lambda arguments, environ: configure_run(arguments.split(), environ)


# Slurm ----------------------------------------------------------------------------------------------------------------


def test_in_a_step_of_srun_no_flag_is_needed(read: Read) -> None:
    config = read("train.py", srun(1))
    assert config.backend is Backend.COORDINATOR
    assert (config.run_id, config.min_nodes, config.max_nodes) == ("1234.0", 4, 4)
    assert (config.endpoint, config.is_host) == (Address("n1", 24_936), False)
    assert (config.rank_by, config.node_number) == (RankBy.SLOT, 1)
    assert config.signals == (*STOP_SIGNALS, "SIGUSR1", "SIGUSR2")
    assert (config.token, config.user_key) == ("", UserKey(KEY, "slurm lab 1234.0 0", is_creator=False))
    assert config.notes == ()


def test_the_first_node_hosts_the_coordinator_and_creates_the_key(read: Read) -> None:
    config = read("train.py", srun(0))
    assert config.is_host
    assert config.user_key is not None
    assert config.user_key.is_creator


def test_the_backend_can_be_named(read: Read) -> None:
    assert read("--rdzv-backend=slurm train.py", srun(1)) == read("train.py", srun(1))
    with pytest.raises(UsageError, match="SLURM_JOB_ID is not set"):
        read("--rdzv-backend=slurm train.py", {})


def test_a_secret_that_the_user_sets_is_used(read: Read) -> None:
    config = read("train.py", srun(1, **TOKEN))
    assert (config.token, config.user_key) == ("s", None)


def test_flags_override_what_slurm_says(read: Read) -> None:
    line = "--rdzv-id=mine --nproc-per-node=3 --signals-to-handle=SIGTERM --rdzv-conf=rank_by=join,lease=9 train.py"
    config = read(line, srun(1))
    assert (config.run_id, config.slots, config.signals) == ("mine", 3, ("SIGTERM",))
    assert (config.rank_by, config.timing.lease, config.is_host) == (RankBy.JOIN, 9, False)
    endpoint = read("--rdzv-backend=slurm --rdzv-endpoint=head:5000 train.py", srun(0))
    assert (endpoint.endpoint, endpoint.is_host) == (Address("head", 5000), True)


@pytest.mark.parametrize(
    ("flag", "nodes"),
    [("--nnodes=4", (4, 4)), ("--nnodes=2:4", (2, 4)), ("--nnodes=2:9", (2, 4)), ("--nnodes=1:4", (1, 4))],
)
def test_nnodes_is_a_range_around_the_nodes_of_the_step(read: Read, flag: str, nodes: tuple[int, int]) -> None:
    config = read(f"{flag} train.py", srun(1))
    assert (config.min_nodes, config.max_nodes) == nodes
    assert bool(config.notes) == (flag == "--nnodes=2:9")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--nnodes=5", "--nnodes=5: Slurm has started ripstop on 4 nodes; write --nnodes=4, or start it"),
        ("--nnodes=2:3", "--nnodes=2:3: Slurm has started ripstop on 4 nodes"),
        ("--nnodes=1", "; write --standalone for a job of its own on each node"),
        ("--rdzv-backend=slurm --node-rank=3", "Slurm says that this is node 1; leave it out"),
        ("--rdzv-conf=is_host=1", "with Slurm, node 0 hosts the coordinator, and this is node 1; leave it out"),
    ],
)
def test_flags_that_contradict_slurm_are_an_error(read: Read, flags: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(f"{flags} train.py", srun(1))


@pytest.mark.parametrize(
    "flags",
    [
        "--standalone",
        "--rdzv-backend=c10d",
        "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=h",
        "--master-addr=h",
        "--nnodes=2 --master-addr=h --node-rank=1",
    ],
)
def test_a_flag_about_the_rendezvous_means_that_slurm_is_not_asked(read: Read, flags: str) -> None:
    config = read(f"{flags} train.py", srun(1, **TOKEN))
    assert config.run_id != "1234.0"
    assert config.endpoint in (None, Address("h", 29400), Address("h", 29500))


def test_a_worker_of_a_job_is_no_node_of_the_step(read: Read) -> None:
    config = read("train.py", srun(1, TORCHELASTIC_RUN_ID="1234.0"))
    assert config.backend is Backend.LOCAL
    assert config.run_id != "1234.0"


def test_a_step_of_one_node_needs_no_port_and_no_key(read: Read) -> None:
    config = read("train.py", srun(0, "n1", 1, HOME=""))
    assert (config.backend, config.endpoint, config.user_key) == (Backend.LOCAL, None, None)
    assert config.run_id == "1234.0"
    assert config.token


def test_a_batch_script_without_srun_runs_one_node_and_says_so(read: Read) -> None:
    config = read("train.py", BATCH_SCRIPT)
    assert config.backend is Backend.LOCAL
    assert config.notes == (
        "SLURM_JOB_ID=1234 has 4 nodes, but srun did not start this process: only this node is used; "
        "write srun --ntasks-per-node=1 ripstop run … for all",
    )
    assert read("--standalone train.py", BATCH_SCRIPT).notes == ()
    with pytest.raises(UsageError, match=r"--nnodes=2:4: srun did not start this process, .*; write srun --ntasks"):
        read("--nnodes=2:4 train.py", BATCH_SCRIPT)


@pytest.mark.parametrize(
    ("variables", "slots"),
    [
        ({}, 1),
        ({"SLURM_GPUS_ON_NODE": "8"}, 8),
        ({"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 3),
    ],
)
def test_each_gpu_of_the_step_gets_a_worker(
    read: Read, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], slots: int
) -> None:
    monkeypatch.setattr("ripstop.system.gpus.installed_gpu_count", lambda: None)
    assert read("train.py", srun(1, **variables)).slots == slots


def test_a_requeued_job_goes_on_counting_restarts(read: Read) -> None:
    environ = srun(1, SLURM_RESTART_COUNT="2")
    config = read("train.py", environ)
    assert config.earlier_restarts == 2
    assert "TORCHELASTIC_RESTART_COUNT=2" in describe_dry_run(config, environ)


def test_a_dry_run_neither_reads_nor_creates_the_key(read: Read, tmp_path: Path) -> None:
    environ = srun(0, HOME=str(tmp_path))
    assert "key" in describe_dry_run(read("train.py", environ), environ)
    assert [file.name for file in tmp_path.iterdir()] == ["train.py"]


def test_without_a_home_directory_the_job_has_no_secret(read: Read) -> None:
    with pytest.raises(UsageError, match=r"HOME is not set: .*; set HOME, or RIPSTOP_TOKEN"):
        read("train.py", srun(1, HOME=""))
    with pytest.raises(UsageError, match="HOME=ann: not an absolute path; correct it, or set RIPSTOP_TOKEN"):
        read("train.py", srun(1, HOME="ann"))
    assert read("train.py", srun(1, HOME="", **TOKEN)).token == "s"


@pytest.mark.parametrize(
    ("flags", "changed", "words"),
    [
        ("", {"SLURM_NNODES": "2"}, "SLURM_NNODES=2: SLURM_STEP_NODELIST=n[1-4] has 4 nodes"),
        ("", {"SLURM_JOB_ID": ""}, "SLURM_JOB_ID is not set, although SLURM_STEP_ID is"),
        ("--nnodes=5", {}, "--nnodes=5: Slurm has started ripstop on 4 nodes"),
        ("", {"SLURM_STEP_NODELIST": "n[1-4"}, "SLURM_STEP_NODELIST=n[1-4: not a node list"),
        ("", {"SLURM_STEP_TASKS_PER_NODE": "2(x4)"}, "2 tasks on one node; ripstop needs one"),
        ("", {"SLURM_NODEID": "0"}, "No such file or directory; correct this, or set"),  # the home directory
        ("", {}, "did not appear within 0.5 s, although the job's first node creates it"),
    ],
)
def test_a_mistake_in_a_step_of_srun_is_one_line_and_exit_code_2(
    flags: str,
    changed: dict[str, str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RIPSTOP_TOKEN", raising=False)
    monkeypatch.setattr("ripstop.launch.job_secret_from_user_key", partial(job_secret_from_user_key, timeout=0.5))
    for name, value in srun(1, HOME=f"{tmp_path}/not-mounted", **changed).items():
        monkeypatch.setenv(name, value)
    assert main(["run", *flags.split(), "train.py"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[ripstop] ")]  # the log
    assert len(lines) == 1
    assert lines[0].startswith("ripstop run: error: ")
    assert words in lines[0]


@pytest.mark.parametrize("slurm", [BATCH_SCRIPT, srun(0, "n[2-4]", 3)])
def test_mpirun_in_a_slurm_job_is_ambiguous(read: Read, slurm: dict[str, str]) -> None:
    with pytest.raises(
        UsageError, match="mpirun in a Slurm job; write srun instead of mpirun, or add --rdzv-backend=mpi"
    ):
        read("train.py", {**slurm, **OPEN_MPI})


# other starters -------------------------------------------------------------------------------------------------------


def test_mpirun_gives_nodes_and_names_and_the_user_the_endpoint(read: Read) -> None:
    config = read("--rdzv-backend=mpi --rdzv-endpoint=node0 train.py", OPEN_MPI)
    assert (config.run_id, config.min_nodes, config.max_nodes) == ("3061383169", 4, 4)
    assert (config.endpoint, config.is_host) == (Address("node0", 29400), False)
    assert (config.rank_by, config.node_number) == (RankBy.SLOT, 2)
    assert config.user_key == UserKey(KEY, "mpi 3061383169", is_creator=False)
    assert config.signals == STOP_SIGNALS
    with pytest.raises(UsageError, match="with MPI, node 0 hosts the coordinator; write its address alone"):
        read("--rdzv-backend=mpi --rdzv-endpoint=node0,node1,node2 train.py", OPEN_MPI)
    with pytest.raises(UsageError, match="MPI does not say where node 0 is; write --rdzv-endpoint=HOST"):
        read("--rdzv-backend=mpi train.py", OPEN_MPI)


def test_aws_batch_gives_all_but_the_secret(read: Read) -> None:
    config = read("--rdzv-backend=aws-batch --nnodes=2:3 train.py", {**AWS_BATCH, **TOKEN})
    assert (config.run_id, config.min_nodes, config.max_nodes) == ("6c2a5e00-aaaa-bbbb-cccc-0123456789ab", 2, 3)
    assert (config.endpoint, config.is_host) == (Address("10.0.0.7", 29400), False)
    assert (config.node_number, config.user_key) == (2, None)
    without = read("--rdzv-backend=aws-batch train.py", AWS_BATCH)
    assert "anyone who can reach 10.0.0.7:29400 can join" in without.notes[0]


def test_only_slurm_is_recognized_without_a_flag(read: Read) -> None:
    for environ in (OPEN_MPI, AWS_BATCH):
        assert read("train.py", environ).backend is Backend.LOCAL


def test_an_elastic_pytorchjob_of_kubeflow_needs_no_flags(read: Read) -> None:
    kubeflow = {
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "job-worker-0:23456",
        "PET_RDZV_ID": "job",
        "PET_NPROC_PER_NODE": "2",
        "PET_NNODES": "2:4",
        "PET_MAX_RESTARTS": "3",
    }
    config = read("train.py", {**kubeflow, **TOKEN})
    assert (config.run_id, config.min_nodes, config.max_nodes, config.slots) == ("job", 2, 4, 2)
    assert (config.endpoint, config.budget.max_restarts) == (Address("job-worker-0", 23456), 3)


def test_a_fixed_pytorchjob_of_kubeflow_needs_no_flags(read: Read) -> None:
    kubeflow = {
        "PET_NNODES": "3",
        "PET_NODE_RANK": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "job-master-0",
        "PET_MASTER_PORT": "23456",
        "MASTER_ADDR": "job-master-0",
        "MASTER_PORT": "23456",
        "WORLD_SIZE": "3",
        "RANK": "2",
    }
    config = read("train.py", {**kubeflow, **TOKEN})
    assert (config.backend, config.node_rank, config.max_nodes) == (Backend.STATIC, 2, 3)
    assert config.endpoint == Address("job-master-0", 23456)


def test_an_indexed_job_or_a_jobset_gives_a_nodes_number(read: Read) -> None:
    line = "--nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=train-workers-0-0.train --rdzv-conf=rank_by=slot train.py"
    config = read(line, {"JOB_COMPLETION_INDEX": "3", **TOKEN})
    assert config.node_number == 3


def test_volcanos_variables_fit_the_static_backend(read: Read) -> None:
    """The line of docs/starters.md, with the variables of Volcano's pytorch plugin."""
    volcano = {"MASTER_ADDR": "job-master-0.job", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "1"}
    line = "--nnodes=$WORLD_SIZE --node-rank=$RANK --master-addr=$MASTER_ADDR --master-port=$MASTER_PORT train.py"
    for name, value in volcano.items():
        line = line.replace(f"${name}", value)
    config = read(line, {**volcano, **TOKEN})
    assert (config.backend, config.node_rank, config.max_nodes) == (Backend.STATIC, 1, 3)
