"""The configuration from the flags of `ripstop run`."""

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from ripstop.cli.commands.run import configure_run
from ripstop.cli.options.flags import ParsedArguments
from ripstop.cli.options.rendezvous import RendezvousOptions, rendezvous_options_with_ranking
from ripstop.diagnostics.timer_pipe import Pipe
from ripstop.model.config import (
    Backend,
    Budget,
    Checkpoints,
    Etcd,
    Executable,
    HealthLimits,
    LogFormat,
    LogLevel,
    Module,
    OutputStreams,
    OwnLog,
    QuarantineLimits,
    RunConfig,
    Script,
    StartMethod,
    StreamMap,
    Timing,
)
from ripstop.model.errors import UsageError
from ripstop.model.round import Address

Read = Callable[..., RunConfig]
TOKEN = {"RIPSTOP_TOKEN": "s"}
C10D = "--rdzv-backend=c10d --rdzv-endpoint=node0"


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Reads a command line in a directory that holds train.py."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)

    def read(arguments: str, environ: dict[str, str] | None = None) -> RunConfig:
        return configure_run(arguments.split(), environ or {})

    return read


def test_a_script_alone_is_one_worker_on_one_node_that_is_never_restarted(read: Read) -> None:
    config = read("train.py")
    alone = HealthLimits(min_disk=0)
    assert config == RunConfig(entry=Script("train.py"), run_id=config.run_id, health=alone, token=config.token)
    assert config.backend is Backend.LOCAL
    assert config.budget.max_restarts == 0


def test_every_local_job_has_a_name_and_a_secret_of_its_own(read: Read) -> None:
    one, other = read("--standalone train.py"), read("--standalone train.py")
    assert one.run_id != other.run_id
    assert one.token
    assert one.token != other.token


def test_a_local_job_keeps_the_name_it_was_given(read: Read) -> None:
    assert read("--standalone --rdzv-id=mine train.py").run_id == "mine"
    assert read("--rdzv-id=mine train.py").run_id == "mine"


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ("--nnodes=3 --rdzv-backend=c10d --rdzv-endpoint=h", "min_nodes", 3),
        ("--nnodes=1:4 --rdzv-backend=c10d --rdzv-endpoint=h", "max_nodes", 4),
        ("--nproc-per-node=8", "slots", 8),
        ("--nproc-per-node 8", "slots", 8),
        ("--nproc_per_node=8", "slots", 8),
        ("--nproc=8", "slots", 8),
        ("--nproc-per-node=2 --nproc-per-node=3", "slots", 3),
        ("--role=trainer", "role", "trainer"),
        ("--local-addr=10.0.0.7", "local_addr", "10.0.0.7"),
        ("--local_addr=[fd00::7]", "local_addr", "fd00::7"),
        (f"{C10D}:1234", "endpoint", Address("node0", 1234)),
        (C10D, "endpoint", Address("node0", 29400)),
        ("--rdzv-backend=c10d --rdzv-endpoint=[::1]:99", "endpoint", Address("::1", 99)),
        ("--rdzv-backend=c10d --rdzv-endpoint=[::1]", "endpoint", Address("::1", 29400)),
        ("--rdzv-backend=c10d --rdzv-endpoint=fd00::7", "endpoint", Address("fd00::7", 29400)),
        (C10D, "run_id", "none"),
        (f"{C10D} --rdzv-id=job7", "run_id", "job7"),
        (C10D, "is_host", None),
        (f"{C10D} --rdzv-conf=is_host=1", "is_host", True),
        (f"{C10D} --rdzv-conf is_host=false", "is_host", False),
        ("--max-restarts=3", "budget", Budget(3)),
        ("--max-restarts=3 --restart-window=1h --restart-backoff=5", "budget", Budget(3, 3600.0, 5.0)),
        ("--shutdown-timeout=5", "timing", Timing(shutdown=5.0)),
        ("--rdzv-conf=join_timeout=60,last_call_timeout=0", "timing", Timing(join=60.0, last_call=0.0)),
        ("--rdzv-conf=timeout=60", "timing", Timing(join=60.0)),
        ("--rdzv-conf=timeout=900,join_timeout=60", "timing", Timing(join=60.0)),
        ("--rdzv-conf=lease=1.5,coordinator_timeout=2m", "timing", Timing(lease=1.5, coordinator=120.0)),
        ("--rdzv-conf=keep_alive_interval=2,keep_alive_max_attempt=4", "timing", Timing(lease=8.0)),
        ("--rdzv-conf=keep_alive_interval=2", "timing", Timing(lease=6.0)),
        ("", "replicates", True),
        ("--replicate=off", "replicates", False),
        (f"{C10D} --nnodes=2 --replicate-bandwidth=2G", "replication_bandwidth", 2 << 30),
        (f"{C10D} --nnodes=2 --replicate-bandwidth=512M/s", "replication_bandwidth", 512 << 20),
        (C10D, "health", HealthLimits((), 30.0, 32 << 20, 60.0)),
        ("", "health", HealthLimits(min_disk=0)),
        (f"{C10D} --health-check=true --health-interval=1m", "health", HealthLimits(("true",), interval=60.0)),
        ("--rdzv-conf=min_disk=1.5GiB,max_clock_skew=0", "health", HealthLimits(min_disk=3 << 29, max_skew=0.0)),
        ("--rdzv-conf=min_disk=512M", "health", HealthLimits(min_disk=512 << 20)),
        ("--rdzv-conf=min_disk=0", "health", HealthLimits(min_disk=0)),
        ("", "checkpoints", None),
        ("--checkpoint-dir=/shared/run", "checkpoints", Checkpoints(Path("/shared/run"), 600.0, 2)),
        ("--checkpoint-dir=/c --checkpoint-interval=90s", "checkpoints", Checkpoints(Path("/c"), 90.0)),
        ("", "quarantine", QuarantineLimits(3, 600.0, 600.0)),
        ("--rdzv-conf=quarantine_failures=0", "quarantine", QuarantineLimits(failures=0)),
        (
            "--rdzv-conf=quarantine_failures=5,quarantine_window=1h,quarantine_cooldown=2h",
            "quarantine",
            QuarantineLimits(5, 3600.0, 7200.0),
        ),
        ("--start-method=exec", "start", StartMethod.EXEC),
        ("--start-method=spawn", "start", StartMethod.EXEC),
        ("--start-method=fork", "start", StartMethod.ZYGOTE),
        ("--start-method=forkserver", "start", StartMethod.ZYGOTE),
        ("--preload=torch,torch.nn", "preload", ("torch", "torch.nn")),
        ("--preload=none", "preload", ()),
        ("--event-log-handler=null", "event_handler", ""),
        ("--event-log-handler=dynamic_rendezvous", "event_handler", ""),
        ("--event-log-handler=console", "event_handler", "console"),
        ("--signals-to-handle=SIGTERM,SIGUSR1", "signals", ("SIGTERM", "SIGUSR1")),
        ("--signals-to-handle=SIGUSR2,SIGUSR2", "signals", ("SIGUSR2",)),
        ("--virtual-local-rank", "virtual_local_rank", True),
        ("", "own_log", OwnLog(LogLevel.INFO, LogFormat.TEXT, live=True)),
        ("-q", "own_log", OwnLog(LogLevel.WARNING, live=False)),
        ("--quiet --log-level=error", "own_log", OwnLog(LogLevel.ERROR, live=False)),
        ("--log-level=DEBUG --log-format=json", "own_log", OwnLog(LogLevel.DEBUG, LogFormat.JSON)),
    ],
)
def test_a_flag_sets_its_field(read: Read, arguments: str, field: str, value: object) -> None:
    assert getattr(read(f"{arguments} train.py", TOKEN), field) == value


@pytest.mark.parametrize(
    ("arguments", "entry"),
    [
        ("train.py --lr 0.1 --nnodes 7", Script("train.py", ("--lr", "0.1", "--nnodes", "7"))),
        ("-m pkg.train -x", Module("pkg.train", ("-x",))),
        ("--module pkg.train", Module("pkg.train")),
        ("--no-python echo hi", Executable(("echo", "hi"))),
        ("--run-path train.py -x", Script("train.py", ("-x",))),
        ("--run-path --no-python -m train.py", Script("train.py")),
    ],
)
def test_flags_select_the_entrypoint(read: Read, arguments: str, entry: object) -> None:
    assert read(arguments).entry == entry


def test_another_python_than_ours_runs_the_script_as_a_program(read: Read) -> None:
    config = read("-m pkg.train -x", {"PYTHON_EXEC": "/bin/sh"})
    assert config.entry == Executable(("/bin/sh", "-u", "-m", "pkg.train", "-x"))
    assert config.start is StartMethod.EXEC


def test_streams_are_chosen_for_all_workers_or_by_local_rank(read: Read) -> None:
    logs = read("--nproc-per-node=2 --log-dir=logs -r 3 -t1:2,0:1 train.py").logs
    assert logs.directory == Path("logs")
    assert logs.redirects == StreamMap(OutputStreams.ALL)
    assert [logs.tee.of(rank) for rank in (0, 1, 2)] == [OutputStreams.OUT, OutputStreams.ERR, OutputStreams.NONE]


def test_a_filter_selects_the_workers_on_the_console(read: Read) -> None:
    assert read("--nproc-per-node=4 --local-ranks-filter=0,2 train.py").logs.shown == {0, 2}
    assert read("train.py").logs.shown is None


def test_filters_are_separated_by_commas_and_a_doubled_comma_is_a_comma(read: Read) -> None:
    logs = read("-t3 --duplicate-stdout-filters=apple,a,,b --duplicate_stderr_filters x train.py").logs
    assert logs.stdout_filters == ("apple", "a,b")
    assert logs.stderr_filters == ("x",)


def test_torchs_variable_sets_the_prefix_of_lines(read: Read) -> None:
    environ = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}]:"}
    assert read("-t3 train.py", environ).logs.prefix == "[${rank}]:"


# rendezvous -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    ["", "--standalone", "--nnodes=1", "--rdzv-backend=c10d", "--rdzv-backend=c10d --rdzv-endpoint=localhost:0"],
)
def test_a_node_without_a_usable_endpoint_is_a_single_node(read: Read, arguments: str) -> None:
    config = read(f"{arguments} train.py")
    assert (config.backend, config.endpoint, config.store_port) == (Backend.LOCAL, None, 0)


def test_an_endpoint_makes_a_single_node_a_job_that_spares_can_join(read: Read) -> None:
    assert read(f"{C10D} train.py").backend is Backend.COORDINATOR


@pytest.mark.parametrize("arguments", ["--master-port=4321", "--rdzv-endpoint=127.0.0.1:4321"])
def test_a_single_static_node_has_its_store_at_the_given_port(read: Read, arguments: str) -> None:
    config = read(f"{arguments} train.py")
    assert (config.backend, config.store_port) == (Backend.LOCAL, 4321)


def test_a_single_static_node_is_at_the_master_address(read: Read) -> None:
    config = read("--master-addr=10.0.0.7 train.py")
    assert (config.local_addr, config.store_port) == ("10.0.0.7", 0)


@pytest.mark.parametrize("where", ["--master-addr=a --master-port=99", "--rdzv-endpoint=a:99"])
@pytest.mark.parametrize("rank", [0, 1])
def test_static_nodes_meet_at_the_master_and_node_0_is_the_host(read: Read, where: str, rank: int) -> None:
    config = read(f"--nnodes=2 --node-rank={rank} {where} train.py")
    assert config.backend is Backend.STATIC
    assert config.endpoint == Address("a", 99)
    assert (config.min_nodes, config.max_nodes) == (2, 2)
    assert (config.node_rank, config.is_host) == (rank, rank == 0)


def test_the_master_port_is_torchs_unless_given(read: Read) -> None:
    assert read("--nnodes=2 --node-rank=0 --master-addr=a train.py").endpoint == Address("a", 29500)


@pytest.mark.parametrize(
    ("arguments", "environ", "number", "label"),
    [
        ("rank_by=join", {}, None, ""),
        ("rank_by=address", {"SLURM_NODEID": "3"}, None, ""),
        ("rank_by=slot", {"SLURM_NODEID": "3"}, 3, ""),
        ("rank_by=slot", {"JOB_COMPLETION_INDEX": "0"}, 0, ""),
        ("rank_by=slot --node-rank=1", {"SLURM_NODEID": "3"}, 1, ""),
        ("rank_by=label --node-label=rack7", {}, None, "rack7"),
        ("rank_by=label", {"PET_NODE_LABEL": "rack7"}, None, "rack7"),
    ],
)
def test_a_node_has_its_key_for_the_rank_order(
    read: Read, arguments: str, environ: dict[str, str], number: int | None, label: str
) -> None:
    config = read(f"{C10D} --nnodes=2:4 --rdzv-conf={arguments} train.py", {**TOKEN, **environ})
    assert config.rank_by == arguments.split()[0].removeprefix("rank_by=")
    assert (config.node_number, config.node_label) == (number, label)
    assert config.notes == ()


def number_of(machine: str, notes: list[str]) -> int | None:
    args, rdzv = ParsedArguments({}, {}, ()), RendezvousOptions(Backend.COORDINATOR)
    return rendezvous_options_with_ranking(args, {"rank_by": "slot"}, rdzv, {}, machine, notes).node_number


@pytest.mark.parametrize(("machine", "number"), [("trainer-3", 3), ("a-b-017.cluster.local", 17)])
def test_a_number_from_the_host_name_is_noted(machine: str, number: int) -> None:
    notes: list[str] = []
    assert number_of(machine, notes) == number
    assert f"number is {number}, from its host name {machine}" in notes[0]


@pytest.mark.parametrize("machine", ["trainer", "trainer7", "job-7fb9-x2", "-", "x-1234567890"])
def test_a_node_without_a_number_cannot_be_ranked_by_it(machine: str) -> None:
    with pytest.raises(UsageError, match=f"this node has no number .* name {machine} does not end .*--node-rank=N"):
        number_of(machine, [])


# flags without effect -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        ("--checkpoint-interval=5m", "--checkpoint-interval has no effect without --checkpoint-dir"),
        ("--standalone --rdzv-endpoint=h:1", "--rdzv-endpoint has no effect with --standalone"),
        ("--standalone --rdzv-backend=c10d", "--rdzv-backend has no effect with --standalone"),
        ("--standalone --master-port=1", "--master-port has no effect with --standalone"),
        ("--replicate-bandwidth=1G", "--replicate-bandwidth has no effect in a job of one node: nothing is copied"),
        (
            f"{C10D} --nnodes=2 --replicate=off --replicate-bandwidth=1G",
            "--replicate-bandwidth has no effect with --replicate=off: nothing is copied",
        ),
        ("--standalone --node-rank=1", "--node-rank has no effect with --standalone"),
        (f"{C10D} --master-addr=a", "--master-addr has no effect with --rdzv-backend=c10d"),
        ("--rdzv-endpoint=h:1 --master-addr=a", "--master-addr has no effect with --rdzv-endpoint"),
        ("--nnodes=2 --node-rank=1 --master-port=1", "using 127.0.0.1"),
        ("--nnodes=2 --node-rank=1 --master-addr=a --rdzv-conf=is_host=1", "is_host has no effect with static"),
        ("--rdzv-conf=is_host=1", "is_host has no effect on a single node"),
        (f"{C10D} --api=127.0.0.1", "--api has no effect on a job of several nodes"),
        ("--rdzv-conf=rank_by=label", "rank_by has no effect on a single node"),
        ("--nnodes=2 --node-rank=1 --master-addr=a --rdzv-conf=rank_by=slot", "rank_by has no effect with static"),
        ("--rdzv-conf=target=1", "target has no effect on a single node"),
        ("--nnodes=2 --node-rank=1 --master-addr=a --rdzv-conf=target=2", "target has no effect with static"),
        (f"{C10D} --node-label=rack7", "--node-label has no effect without --rdzv-conf rank_by=label"),
        ("--rdzv-conf=close_timeout=5", "close_timeout has no effect"),
        ("--rdzv-conf=read_timeout=5", "read_timeout has no effect"),
        ("--rdzv-conf=store_type=file", "store_type has no effect"),
        ("--rdzv-conf=rank=0", "rank has no effect"),
        ("--rdzv-conf=cacert=a.pem", "cacert has no effect without --rdzv-backend=etcd"),
        ("--rdzv-conf=timeout=9,join_timeout=6", "timeout=9 has no effect beside join_timeout=6"),
        ("--rdzv-conf=leese=1", "--rdzv-conf: there is no leese, so it has no effect; did you mean lease?"),
        ("--rdzv-conf=color=blue", "--rdzv-conf: there is no color, so it has no effect"),
        ("--monitor-interval=1", "--monitor-interval has no effect: worker exits"),
        ("--restart-window=1h", "--restart-window has no effect without --max-restarts"),
        ("--start-method=exec --preload=torch", "--preload has no effect"),
        ("--start-method=zygote --no-python", "--start-method has no effect: train.py is not"),
        ("--run-path --no-python", "--no-python has no effect with --run-path"),
        ("--tee=2 --duplicate-stdout-filters=a", "--duplicate-stdout-filters has no effect without --tee=1"),
        ("--tee=1 --duplicate-stderr-filters=a", "--duplicate-stderr-filters has no effect without --tee=2"),
        ("--nproc-per-node=2", "OMP_NUM_THREADS is not set: using 1 for each of the 2 workers"),
    ],
)
def test_a_flag_without_effect_is_noted(read: Read, tmp_path: Path, arguments: str, note: str) -> None:
    (tmp_path / "train.py").chmod(0o755)
    config = read(f"{arguments} train.py", {**TOKEN, "PATH": str(tmp_path)})
    assert note in " | ".join(config.notes)


def test_a_plain_command_line_has_no_notes(read: Read) -> None:
    assert read("--standalone --nproc-per-node=2 --max-restarts=3 train.py", {"OMP_NUM_THREADS": "4"}).notes == ()


@pytest.mark.parametrize(
    ("environ", "arguments", "note"),
    [
        ({"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "x"}, "", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE has no effect"),
        ({"PYTHON_EXEC": "sh"}, "--run-path", "PYTHON_EXEC has no effect with --run-path"),
        ({"PYTHON_EXEC": "sh"}, "--no-python", "PYTHON_EXEC has no effect with --no-python"),
    ],
)
def test_a_variable_without_effect_is_noted(
    read: Read, tmp_path: Path, environ: dict[str, str], arguments: str, note: str
) -> None:
    (tmp_path / "train.py").chmod(0o755)
    assert note in " | ".join(read(f"{arguments} train.py", {**environ, "PATH": str(tmp_path)}).notes)


# variables ----------------------------------------------------------------------------------------------------------


def test_variables_stand_in_for_flags_and_flags_win(read: Read) -> None:
    environ = {
        **TOKEN,
        "PET_NNODES": "2:3",
        "PET_NPROC_PER_NODE": "4",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "node0:99",
        "PET_MAX_RESTARTS": "5",
        "PET_REDIRECTS": "3",
    }
    config = read("--max-restarts=1 train.py", environ)
    assert (config.min_nodes, config.max_nodes, config.slots) == (2, 3, 4)
    assert config.endpoint == Address("node0", 99)
    assert config.budget.max_restarts == 1
    assert config.logs.redirects == StreamMap(OutputStreams.ALL)


@pytest.mark.parametrize(("value", "is_module"), [("1", True), ("0", False), ("", False)])
def test_a_switch_is_set_by_a_variable_that_is_true(read: Read, value: str, is_module: bool) -> None:
    assert isinstance(read("train.py", {"PET_MODULE": value}).entry, Module) == is_module


def test_an_empty_variable_counts_as_not_set(read: Read) -> None:
    assert read("train.py", {"PET_NNODES": "", "PET_RDZV_ENDPOINT": ""}).max_nodes == 1


def test_the_shutdown_time_has_torchs_own_variable(read: Read) -> None:
    environ = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}
    assert read("train.py", environ).timing.shutdown == 7.0
    assert read("--shutdown-timeout=8 train.py", environ).timing.shutdown == 8.0


# the secret ---------------------------------------------------------------------------------------------------------


def test_the_secret_comes_from_a_variable_or_a_file_and_is_not_shown(read: Read, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("hush\n")
    file.chmod(stat.S_IRUSR)
    by_file = read(f"{C10D} train.py", {"RIPSTOP_TOKEN_FILE": str(file)})
    assert by_file.token == read(f"{C10D} train.py", {"RIPSTOP_TOKEN": "hush"}).token == "hush"
    assert by_file.notes == ()
    assert "hush" not in repr(by_file)


def test_a_secret_file_that_everyone_can_read_is_noted(read: Read, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("hush")
    file.chmod(0o644)
    assert read(f"{C10D} train.py", {"RIPSTOP_TOKEN_FILE": str(file)}).notes == (
        f"RIPSTOP_TOKEN_FILE={file}: everyone can read it; chmod 600 {file}",
    )


def test_a_job_without_a_secret_warns(read: Read) -> None:
    config = read(f"{C10D} --nnodes=2 train.py")
    assert config.token == ""
    assert "anyone who can reach node0:29400 can join this job and end it; set the same secret" in config.notes[0]


def test_a_job_of_one_node_has_no_warning_about_a_secret(read: Read) -> None:
    assert read("--nnodes=1 --rdzv-backend=c10d --rdzv-endpoint=node0 train.py").notes == ()


def test_etcd_has_several_endpoints_and_its_own_settings(read: Read, tmp_path: Path) -> None:
    for name in ("ca.pem", "c.pem", "k.pem"):
        (tmp_path / name).touch()
    config = read(
        "--nnodes=2 --rdzv-backend=etcd --rdzv-endpoint=e0,e1:4001,[fd00::1] --local-addr=n0 "
        "--rdzv-conf=cacert=ca.pem,cert=c.pem,key=k.pem,etcd_prefix=/team/jobs/,coordinator_port=7,lease=5 train.py",
        {**TOKEN, "RIPSTOP_ETCD_USER": "u", "RIPSTOP_ETCD_PASSWORD": "hush"},
    )
    assert config.backend is Backend.ETCD
    assert config.etcd == Etcd(
        endpoints=(Address("e0", 2379), Address("e1", 4001), Address("fd00::1", 2379)),
        prefix="/team/jobs",
        tls=True,
        ca=Path("ca.pem"),
        cert=Path("c.pem"),
        key=Path("k.pem"),
        user="u",
        password="hush",
        port=7,
    )
    assert config.timing.lease == 5
    assert config.local_addr == "n0"
    assert config.notes == ()
    assert "hush" not in repr(config)


def test_etcd_v2_means_etcd_and_is_noted(read: Read) -> None:
    config = read("--rdzv-backend=etcd-v2 --rdzv-endpoint=http://e0:2379 --rdzv-conf=is_host=1 train.py", TOKEN)
    assert config.etcd == Etcd(endpoints=(Address("e0", 2379),), prefix="/ripstop")
    assert config.notes == (
        "--rdzv-backend=etcd-v2 means etcd: ripstop uses etcd's v3 API",
        "--rdzv-conf is_host has no effect with --rdzv-backend=etcd-v2: etcd elects the host",
    )


def test_timers_are_off_by_default(read: Read, tmp_path: Path) -> None:
    on, at = "TORCHELASTIC_ENABLE_FILE_TIMER", "TORCHELASTIC_TIMER_FILE"
    assert read("train.py", {at: "pipe"}).timer_pipe is None
    assert read("train.py", {on: "1", at: "pipe"}).timer_pipe == Path.cwd() / "pipe"
    made_up = read("train.py", {on: "1"}).timer_pipe
    assert made_up is not None and made_up.name.startswith("watchdog_timer_")
    config = read("train.py", {on: "yes"})
    assert config.timer_pipe is None
    assert config.notes == (f"{on}=yes has no effect: timers are off; write 1 to enable them",)


def test_a_pipe_in_use_by_another_agent_is_not_used(read: Read, tmp_path: Path) -> None:
    pipe = Pipe(tmp_path / "pipe")
    environ = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": str(tmp_path / "pipe")}
    config = read("train.py", environ)
    assert config.timer_pipe != tmp_path / "pipe" and config.timer_pipe.parent == tmp_path
    assert "another agent uses this pipe; this job uses" in config.notes[0]
    pipe.close()


# several addresses ----------------------------------------------------------------------------------------------------

SEVERAL = "--rdzv-backend=c10d --rdzv-endpoint=node0,node1:99,node2"


def test_several_addresses_are_of_nodes_that_may_become_the_coordinator(read: Read) -> None:
    config = read(f"--nnodes=2:4 {SEVERAL} train.py", TOKEN)
    assert config.successors == (Address("node0", 29400), Address("node1", 99), Address("node2", 29400))
    assert config.endpoint == Address("node0", 29400)
    assert read(f"--nnodes=2:4 {C10D} train.py", TOKEN).successors == ()


def test_two_nodes_have_no_majority_so_the_coordinator_is_always_at_the_first_address(read: Read) -> None:
    config = read(f"--nnodes=1:2 {SEVERAL} train.py", TOKEN)
    assert config.successors == () and config.endpoint == Address("node0", 29400)
    assert any("2 nodes have no majority without one of them" in note for note in config.notes)


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("a,b:0", "fixed ports"),
        (",".join(f"h{i}" for i in range(17)), "at most 16 addresses"),
        ("a,,b", "--rdzv-endpoint"),
    ],
)
def test_addresses_that_nodes_cannot_meet_at_are_rejected(read: Read, endpoint: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read(f"--nnodes=3 --rdzv-backend=c10d --rdzv-endpoint={endpoint} train.py", TOKEN)
