"""Every mistake is one line on stderr, exit code 2, and nothing is started."""

import socket
from pathlib import Path

import pytest

from ripstop.cli import main

C10D = "--rdzv-backend=c10d --rdzv-endpoint=node0"
ETCD = "--rdzv-backend=etcd --rdzv-endpoint=e0"
TIMERS = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with train.py, and nothing in the environment."""
    (tmp_path / "train.py").touch()
    (tmp_path / "file").touch()
    (tmp_path / "empty").touch()
    monkeypatch.chdir(tmp_path)
    for name in ("PYTHON_EXEC", "RIPSTOP_TOKEN", "RIPSTOP_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def error_of(arguments: str, capsys: pytest.CaptureFixture[str], command: str = "run") -> str:
    assert main([command, *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"ripstop {command}: error: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix(f"ripstop {command}: error: ").strip()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("", "no script; write it after the flags: ripstop run … train.py"),
        ("--standalone", "no script; write it after the flags: ripstop run … train.py"),
        ("--nnodes", "--nnodes needs a value; write --nnodes=N|MIN:MAX"),
        (
            "--standalone --api=127.0.0.1 train.py",
            "--api=127.0.0.1:29480: the API needs the job's secret, and there is none; "
            "set RIPSTOP_TOKEN or RIPSTOP_TOKEN_FILE",
        ),
        (
            "--log-level=loud train.py",
            "--log-level=loud: unknown value; write one of debug, info, warning, error",
        ),
        ("--log-format=xml train.py", "--log-format=xml: unknown value; write one of text, json"),
        ("--quiet=1 train.py", "--quiet=1: --quiet takes no value; write --quiet alone"),
        (
            "--nproc-per-node=2 --standby=3 train.py",
            "--standby=3: above the maximum (2); give 1 to 2, the workers of this node, or auto or off",
        ),
        (
            "--standby=-1 train.py",
            "--standby=-1: below the minimum (0); give 1 to 1, the workers of this node, or auto or off",
        ),
        (
            "--standby=all train.py",
            "--standby=all: not a whole number; give 1 to 1, the workers of this node, or auto or off",
        ),
        (
            "--standby=auto --start-method=exec train.py",
            "--standby=auto: standbys are forked, and --start-method is exec; leave --standby out",
        ),
        (
            "--standby=1 --no-python ls",
            "--standby=1: standbys are forked, and ls is no Python script; leave --standby out",
        ),
        (
            "--standby=1 --standby-warmup=prepare train.py",
            "--standby-warmup=prepare: not a function; write --standby-warmup=package.module:function",
        ),
        (
            "--standby=1 --standby-until=step train.py",
            "--standby-until=step: standbys run until script or elastic; write one of them (script: they wait before "
            "the script; elastic: before its function with @train.elastic)",
        ),
        ("--nnodes --standalone train.py", "--nnodes needs a value; write --nnodes=N|MIN:MAX"),
        ("--nprok-per-node=2 train.py", "--nprok-per-node=2: unknown flag; did you mean --nproc-per-node?"),
        ("--max_restrats 2 train.py", "--max_restrats: unknown flag; did you mean --max-restarts?"),
        ("--xyzzy train.py", "--xyzzy: unknown flag; --help lists the flags"),
        ("-x train.py", "-x: unknown flag; --help lists the flags"),
        (
            "--health-check=nosuchprogram train.py",
            "--health-check=nosuchprogram: no such program: nosuchprogram; give its path, "
            "or write sh -c '…' for a shell command",
        ),
        (
            "--health-check=./file train.py",
            "--health-check=./file: not an executable file: ./file; give its path, "
            "or write sh -c '…' for a shell command",
        ),
        ("--health-check='true train.py", "--health-check='true: no closing quotation; quote it as for a shell"),
        (
            "--health-interval=0 train.py",
            "--health-interval=0: a time is above 0 and finite; give seconds, or 90s, 10m, 1h",
        ),
        (
            "--replicate=always train.py",
            "--replicate=always: must be auto or off; write --replicate=off for no copies",
        ),
        (
            "--replicate-bandwidth=fast train.py",
            "--replicate-bandwidth=fast: not a size; give bytes, or a number with a unit: 512M, 1G",
        ),
        (
            "--checkpoint-dir=/c --checkpoint-interval=0 train.py",
            "--checkpoint-interval=0: a time is above 0 and finite; give seconds, or 90s, 10m, 1h",
        ),
        (
            "--rdzv-conf=min_disk=lots train.py",
            "--rdzv-conf min_disk=lots: not a size; give bytes, or a number with a unit: 512M, 1G",
        ),
        (
            "--rdzv-conf=min_disk=-1G train.py",
            "--rdzv-conf min_disk=-1G: a size is 0 or more, and finite; give bytes, or 512M, 1G",
        ),
        (
            "--rdzv-conf=quarantine_failures=-1 train.py",
            "--rdzv-conf quarantine_failures=-1: below the minimum (0); give a number from 0 to 1000000",
        ),
        ("--standalone=1 train.py", "--standalone=1: --standalone takes no value; write --standalone alone"),
        (
            "--restart=1 train.py",
            "--restart=1: ambiguous: --restart-window or --restart-backoff; write the flag in full",
        ),
        ("-m --no-python train.py", "-m and --no-python: a module needs an interpreter; remove one of them"),
        (
            "--no-python nosuchprogram",
            "--no-python nosuchprogram: no such executable in this directory or on PATH; give its path",
        ),
        (
            "--nproc-per-node=0 train.py",
            "--nproc-per-node=0: below the minimum (1); give a number above 0, or auto, gpu or cpu",
        ),
        (
            "--nproc-per-node=two train.py",
            "--nproc-per-node=two: not a whole number; give a number above 0, or auto, gpu or cpu",
        ),
        (
            "--nproc-per-node=xpu train.py",
            "--nproc-per-node=xpu: ripstop cannot count XPUs in this version; give their number",
        ),
        ("--nnodes=4:2 train.py", "--nnodes=4:2: the minimum (4) is above the maximum (2); write --nnodes=2:4"),
        ("--nnodes=1:2:3 train.py", "--nnodes=1:2:3: neither a number nor a range; write --nnodes=4 or --nnodes=2:4"),
        ("--nnodes=a train.py", "--nnodes=a: not a whole number; write --nnodes=4 or --nnodes=2:4"),
        ("--nnodes=0 train.py", "--nnodes=0: below the minimum (1); write --nnodes=4 or --nnodes=2:4"),
        (
            "--nnodes=2 train.py",
            "--nnodes=2: several nodes need a rendezvous endpoint; write --rdzv-backend=c10d "
            "--rdzv-endpoint=HOST:PORT, or --master-addr=HOST --node-rank=N",
        ),
        (
            "--nnodes=2 --rdzv-backend=c10d train.py",
            "--nnodes=2: several nodes need a rendezvous endpoint; write --rdzv-endpoint=HOST:29400, "
            "the same on all nodes",
        ),
        (
            "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=h:0 train.py",
            "--rdzv-endpoint=h:0: several nodes need a fixed port, not 0; write h:29400",
        ),
        (
            "--nnodes=1:2 --master-addr=a --node-rank=0 train.py",
            "--nnodes=1:2: static has a fixed number of nodes; write --nnodes=2, or --rdzv-backend=c10d",
        ),
        (
            "--nnodes=2 --master-addr=a train.py",
            "--nnodes=2: static needs the rank of each node; write --node-rank=0 on a and --node-rank=N on the others, "
            "or --rdzv-backend=c10d, which assigns ranks",
        ),
        (
            "--nnodes=2 --node-rank=2 --master-addr=a train.py",
            "--node-rank=2: above the maximum (1); the ranks of 2 nodes are 0 to 1",
        ),
        ("--node-rank=1 train.py", "--node-rank=1: above the maximum (0); a single node's is 0"),
        ("--standalone --nnodes=2 train.py", "--nnodes=2: --standalone is for one node; remove one of the two"),
        (
            "--rdzv-backend=etcd train.py",
            "--rdzv-backend=etcd: the address of etcd is missing; write --rdzv-endpoint=HOST:2379, or several "
            "with commas",
        ),
        (f"{ETCD}:0 train.py", "--rdzv-endpoint=e0:0: etcd cannot listen on port 0; write HOST:2379"),
        (
            f"{ETCD},https://e1 --rdzv-conf=protocol=http train.py",
            "--rdzv-endpoint=e0,https://e1: certificates and all endpoints must agree; write protocol=https, or http",
        ),
        (
            f"{ETCD} --rdzv-conf=protocol=grpc train.py",
            "--rdzv-conf protocol=grpc: etcd uses http or https; write one of the two",
        ),
        (
            f"{ETCD} --rdzv-conf=cacert=nosuchfile train.py",
            "--rdzv-conf ca=nosuchfile: cannot be read: No such file or directory; name a PEM file you may read",
        ),
        (
            f"{ETCD} --rdzv-conf=cacert=/dev/zero train.py",
            "--rdzv-conf ca=/dev/zero: cannot be read: it is larger than 1 MiB; name a PEM file you may read",
        ),
        (
            "--rdzv-conf=tls_ca=/dev/zero train.py",
            "--rdzv-conf tls_ca=/dev/zero: cannot be read: it is larger than 1 MiB; name a PEM file you may read",
        ),
        (
            "--config=/dev/zero train.py",
            "--config=/dev/zero: cannot be read: it is larger than 1 MiB; name a TOML file, with lines such as "
            "nnodes = 2",
        ),
        (f"{ETCD} --rdzv-conf=cert=empty train.py", "--rdzv-conf: cert needs key; give both, or neither"),
        (
            f"{ETCD} --rdzv-conf=cert=empty,ssl_cert=empty train.py",
            "--rdzv-conf: ssl_cert is given under two names; keep one of the two",
        ),
        (
            "--rdzv-backend=zeus train.py",
            "--rdzv-backend=zeus: unknown backend; write c10d, etcd, static or slurm, or install the package that "
            "provides it as an entry point torchrun.handlers",
        ),
        (f"{C10D}: train.py", "--rdzv-endpoint=node0:: no port after the colon; write --rdzv-endpoint=node0:29400"),
        (
            f"{C10D}:99999 train.py",
            "--rdzv-endpoint port=99999: above the maximum (65535); give a port from 0 to 65535",
        ),
        (f"{C10D}:http train.py", "--rdzv-endpoint port=http: not a whole number; give a port from 0 to 65535"),
        (
            "--rdzv-backend=c10d --rdzv-endpoint=no/de train.py",
            "--rdzv-endpoint=no/de: not a host name or address; write it like node0, 10.0.0.7 or [fd00::7]",
        ),
        (
            "--local-addr=a,b train.py",
            "--local-addr=a,b: not a host name or address; write it like node0, 10.0.0.7 or [fd00::7]",
        ),
        ("--master-port=0 train.py", "--master-port=0: below the minimum (1); give a port from 1 to 65535"),
        ("--max-restarts=-1 train.py", "--max-restarts=-1: below the minimum (0); give a number from 0 to 1000000"),
        ("--max-restarts -1 train.py", "--max-restarts=-1: below the minimum (0); give a number from 0 to 1000000"),
        (
            "--restart-window=soon train.py",
            "--restart-window=soon: not a time; give seconds, or a number with a unit: 90s, 10m, 1h",
        ),
        (
            "--restart-backoff=-1 train.py",
            "--restart-backoff=-1: a time is 0 or more and finite; give seconds, or 90s, 10m, 1h",
        ),
        (
            "--shutdown-timeout=nan train.py",
            "--shutdown-timeout=nan: a time is 0 or more and finite; give seconds, or 90s, 10m, 1h",
        ),
        (
            "--monitor-interval=x train.py",
            "--monitor-interval=x: not a time; give seconds, or a number with a unit: 90s, 10m, 1h",
        ),
        (
            "--rdzv-conf=lease=0 train.py",
            "--rdzv-conf lease=0: a time is above 0 and finite; give seconds, or 90s, 10m, 1h",
        ),
        (
            "--rdzv-conf=lease train.py",
            "--rdzv-conf=lease: 'lease' is not key=value; write --rdzv-conf=join_timeout=600,lease=3",
        ),
        (
            "--rdzv-conf=lease=1,lease=2 train.py",
            "--rdzv-conf=lease=1,lease=2: lease is given twice; keep one of the two",
        ),
        (
            "--rdzv-conf=lease=1,keep_alive_interval=2 train.py",
            "--rdzv-conf: lease=1 and keep_alive_interval=2 set the same timeout; keep lease",
        ),
        (
            f"{C10D} --nnodes=1:4 --rdzv-conf=target=9 train.py",
            "--rdzv-conf target=9: above the maximum (4); --nnodes allows 1 to 4",
        ),
        (
            "--rdzv-conf=is_host=maybe train.py",
            "--rdzv-conf is_host=maybe: neither true nor false; write --rdzv-conf is_host=1 or --rdzv-conf is_host=0",
        ),
        (
            f"{C10D} --rdzv-conf=rank_by=rack train.py",
            "--rdzv-conf rank_by=rack: ranks cannot be sorted by this; write one of join, address, slot, label",
        ),
        (
            f"{C10D} --rdzv-conf=rank_by=label train.py",
            "--rdzv-conf rank_by=label: this node has no label; add one such as --node-label=rack7",
        ),
        (
            f"{C10D} --rdzv-conf=rank_by=label --node-label=a/b train.py",
            "--node-label=a/b: no spaces, no / [ ] : and no dot at the start; use letters, digits, - and _",
        ),
        (
            "--role=a/b train.py",
            "--role=a/b: no spaces, no / [ ] : and no dot at the start; use letters, digits, - and _",
        ),
        (
            "--rdzv-id=../x train.py",
            "--rdzv-id=../x: no spaces, no / [ ] : and no dot at the start; use letters, digits, - and _",
        ),
        ("--role= train.py", "--role=: has 0 characters; choose a name of 1 to 200"),
        ("--start-method=magic train.py", "--start-method=magic: unknown start method; write zygote or exec"),
        (
            "--preload=a-b train.py",
            "--preload=a-b: 'a-b' is not a module name; write --preload=torch,numpy or --preload=none",
        ),
        ("--log-dir=file train.py", "--log-dir=file: exists and is not a directory; name another"),
        (
            "-r 4 train.py",
            "--redirects=4: '4' is not a choice of streams; write 0 none, 1 stdout, 2 stderr, 3 both, "
            "or LOCAL_RANK:CHOICE pairs such as 0:3,1:2",
        ),
        (
            "-t 0:1, train.py",
            "--tee=0:1,: '' is not a choice of streams; write 0 none, 1 stdout, 2 stderr, 3 both, "
            "or LOCAL_RANK:CHOICE pairs such as 0:3,1:2",
        ),
        ("-r 0:1,0:2 train.py", "--redirects=0:1,0:2: names local rank 0 twice; keep one of the two"),
        ("-r 1:1 train.py", "--redirects=1:1: names local rank 1; this node has 0 to 0; leave it out"),
        (
            "--nproc-per-node=2 --local-ranks-filter=0,2 train.py",
            "--local-ranks-filter=2: above the maximum (1); this node's local ranks are 0 to 1; "
            "write them like --local-ranks-filter=0,1",
        ),
        (
            "--local_ranks_filter=a train.py",
            "--local-ranks-filter=a: not a whole number; this node's local ranks are 0 to 0; "
            "write them like --local-ranks-filter=0,1",
        ),
        (
            "-t3 --duplicate-stdout-filters=a, train.py",
            "--duplicate-stdout-filters=a,: every line contains an empty text; leave it out, or write ,, for a comma",
        ),
        (
            "--numa-binding=near train.py",
            "--numa-binding=near: unknown mode; write node, socket, exclusive, core-complex",
        ),
        (
            "--event-log-handler=x train.py",
            "--event-log-handler=x: unknown handler, and no entry point torchrun.event_handlers has this name; "
            "write null, console",
        ),
        (
            "--signals-to-handle=SIGFOO train.py",
            "--signals-to-handle=SIGFOO: there is no signal 'SIGFOO'; write names like SIGTERM,SIGUSR1",
        ),
        (
            "--signals-to-handle=SIGTERM,SIGKILL train.py",
            "--signals-to-handle=SIGTERM,SIGKILL: SIGKILL cannot ask a process to stop; leave it out",
        ),
    ],
)
def test_a_mistake_is_one_line_with_rule_value_and_remedy(
    arguments: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error_of(arguments, capsys) == line


def test_a_plugin_that_is_not_installed_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    line = error_of("--logs-specs=nosuch train.py", capsys)
    assert line.startswith("--logs-specs=nosuch: no entry point torchrun.logs_specs has this name; ")


def test_a_missing_script_is_named_with_its_directory(capsys: pytest.CaptureFixture[str]) -> None:
    remedy = "give the script's path, -m for a module, or --no-python for an executable"
    assert error_of("nosuch.py --lr 1", capsys) == f"nosuch.py: no such file in {Path.cwd()}; {remedy}"
    assert "no such file" in error_of("n" * 5000, capsys)


@pytest.mark.parametrize(
    ("environ", "arguments", "line"),
    [
        ({"PET_NNODES": "x"}, "train.py", "PET_NNODES=x: not a whole number; write PET_NNODES=4 or PET_NNODES=2:4"),
        (
            {"PET_STANDALONE": "x"},
            "train.py",
            "PET_STANDALONE=x: neither true nor false; write PET_STANDALONE=1 or PET_STANDALONE=0",
        ),
        (
            {"PET_NNODES": "2"},
            "--standalone train.py",
            "PET_NNODES=2: --standalone is for one node; remove one of the two",
        ),
        (
            {"PET_VIRTUAL_LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "3"},
            "--nproc-per-node=2 train.py",
            "PET_VIRTUAL_LOCAL_RANK: each of the 2 workers needs a GPU, and CUDA_VISIBLE_DEVICES=3 has fewer; "
            "add GPUs to it, or leave PET_VIRTUAL_LOCAL_RANK out",
        ),
        (
            {"CUDA_VISIBLE_DEVICES": ""},
            "--numa-binding=node train.py",
            "--numa-binding=node: workers are bound near their GPUs, and no GPU is visible; omit --numa-binding",
        ),
        (
            {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "x"},
            "train.py",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=x: not a time; give seconds, or a number with a unit: 90s, 10m, 1h",
        ),
        (
            {"CUDA_VISIBLE_DEVICES": ""},
            "--nproc-per-node=gpu train.py",
            "--nproc-per-node=gpu: CUDA_VISIBLE_DEVICES= selects no GPU; give a number, or --nproc-per-node=cpu",
        ),
        (
            {"PYTHON_EXEC": "nosuchpython"},
            "train.py",
            "PYTHON_EXEC nosuchpython: no such executable in this directory or on PATH; give its path",
        ),
        (
            {"RIPSTOP_TOKEN": " "},
            "train.py",
            "RIPSTOP_TOKEN is empty; give the job's secret, or unset it to run without one",
        ),
        (
            {"RIPSTOP_TOKEN": "a", "RIPSTOP_TOKEN_FILE": "b"},
            "train.py",
            "RIPSTOP_TOKEN and RIPSTOP_TOKEN_FILE are both set; a job has one secret: unset one of them",
        ),
        (
            {"RIPSTOP_TOKEN_FILE": "nosuchfile"},
            "train.py",
            "RIPSTOP_TOKEN_FILE=nosuchfile: cannot be read: No such file or directory; name a text file you may read",
        ),
        (
            {"RIPSTOP_TOKEN_FILE": "/dev/zero"},
            "train.py",
            "RIPSTOP_TOKEN_FILE=/dev/zero: cannot be read: it is larger than 1 MiB; name a text file you may read",
        ),
        (
            {"RIPSTOP_TOKEN_FILE": "empty"},
            "train.py",
            "RIPSTOP_TOKEN_FILE=empty: is empty; put the job's secret into it",
        ),
        (
            {"RIPSTOP_ETCD_USER": "u"},
            f"{ETCD} train.py",
            "RIPSTOP_ETCD_USER is set and RIPSTOP_ETCD_PASSWORD is not; set both, or neither",
        ),
        (
            TIMERS | {"TORCHELASTIC_TIMER_FILE": "file"},
            "train.py",
            "TORCHELASTIC_TIMER_FILE=file: exists and is not a pipe; choose another path",
        ),
        (
            TIMERS | {"TORCHELASTIC_TIMER_FILE": "/nowhere/pipe"},
            "train.py",
            "TORCHELASTIC_TIMER_FILE=/nowhere/pipe: /nowhere is not a directory; create it, or choose another path",
        ),
    ],
)
def test_a_mistake_in_a_variable_is_named_by_the_variable(
    environ: dict[str, str],
    arguments: str,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert error_of(arguments, capsys) == line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("", "--rdzv-endpoint is missing; write --rdzv-endpoint=HOST[:PORT], the address to listen on"),
        ("--rdzv-endpoint=h train.py", "train.py: a coordinator runs no script; pass it to ripstop run"),
        ("--rdzv-endpoint=h:0", "--rdzv-endpoint=h:0: nodes cannot connect to port 0; write h:29400"),
        ("--rdzv-endpoint=h --nproc-per-node=2", "--nproc-per-node=2: unknown flag; --help lists the flags"),
        (
            "--rdzv-endpoint=h --rdzv-conf=rank_by=rack",
            "--rdzv-conf rank_by=rack: ranks cannot be sorted by this; write one of join, address, slot, label",
        ),
        (
            "--rdzv-endpoint=h --rdzv-conf=is_host=1",
            "--rdzv-conf is_host=1: this command always runs the coordinator; leave is_host out",
        ),
    ],
)
def test_a_coordinators_mistakes_have_the_same_form(
    arguments: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error_of(arguments, capsys, command="coordinator") == line


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("rnu", "ripstop run …; ripstop --help lists the commands"), ("train.py", "ripstop run train.py …")],
)
def test_an_unknown_command_is_rejected_with_a_remedy(
    name: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name]) == 2
    assert capsys.readouterr().err == f"ripstop: error: {name}: unknown command; write {remedy}\n"


def test_an_api_address_in_use_is_rejected_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIPSTOP_TOKEN", "s3cret")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = error_of(f"--standalone --api=127.0.0.1:{port} train.py", capsys)
    assert line.startswith(
        f"this node must listen at 127.0.0.1:{port}, but the port is in use; choose another in --api"
    )
