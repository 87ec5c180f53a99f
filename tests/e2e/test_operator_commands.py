"""`ripstop status | events | logs | stacks | metrics | restart | drain | scale | stop`, on real jobs."""

import io
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from ripstop.api.local_jobs import JobRecord, Registration
from ripstop.cli import main
from ripstop.system.socket_directory import socket_directory
from tests.certificates import Authority
from tests.e2e.etcd import cluster, needs_etcd
from tests.e2e.harness import SCRIPTS, Agent, Job, free_port, spied, wait_until

CHATTY = SCRIPTS / "chatty.py"
TOKEN = "the job's own"


def command(job: Job, *argv: str, **env: str) -> tuple[int, str, str]:
    """Run a command in the job's environment, in this process: exit code, stdout, stderr."""
    out, err, before = io.StringIO(), io.StringIO(), dict(os.environ)
    os.environ.clear()
    os.environ.update(job.env, **env)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = main(argv)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return code, out.getvalue(), err.getvalue()


def output_of(job: Job, *argv: str, **env: str) -> str:
    code, out, err = command(job, *argv, **env)
    assert (code, err) == (0, "")
    return out


def error_of(job: Job, *argv: str, code: int = 1, **env: str) -> str:
    """The error of a command: one line, which begins with the command's name."""
    found, out, err = command(job, *argv, **env)
    assert (found, out) == (code, ""), err
    (line,) = err.splitlines()
    return line.removeprefix(f"ripstop {argv[0]}: error: ")


def status(job: Job, *argv: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output_of(job, "status", "--json", *argv))
    return found


def until_running(job: Job, round: int = 1, *argv: str) -> dict[str, Any]:
    def running() -> dict[str, Any] | None:
        code, out, _ = command(job, "status", "--json", *argv)
        found = json.loads(out) if code == 0 else {"phase": "", "round": 0}
        return found if found["phase"] == "running" and found["round"] >= round else None

    return wait_until(running, why=job.describe)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, XDG_RUNTIME_DIR=str(tmp_path), TMPDIR=str(tmp_path)) as job:
        yield job


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job on one node, without a port, that writes output as long as the tests last."""
    folder = tmp_path_factory.mktemp("alone")
    with Job(folder, XDG_RUNTIME_DIR=str(folder), TMPDIR=str(folder)) as job:
        env = {"REPORT": "1"}
        job.run("--standalone", "--nproc-per-node=2", "--rdzv-id=alone", "--tee=3", str(CHATTY), env=env)
        until_running(job)
        yield job


# one node -------------------------------------------------------------------------------------------------------------


def test_status_shows_the_state_of_the_job(alone: Job) -> None:
    command = alone.ripstop("status")
    assert command.wait() == 0
    text = command.out
    assert text.startswith("job alone: running for ")
    assert "world size 2, restarts 0 of 0, nodes 1:1" in text
    assert " running  0-1    default" in text
    assert status(alone, "--job=alone")["nodes"][0]["state"] == "running"


def test_status_has_the_pids_of_the_workers_and_proc_their_ranks(alone: Job) -> None:
    def shown(pid: int) -> tuple[dict[str, str], list[str]]:
        environ = Path(f"/proc/{pid}/environ").read_text().rstrip("\0").split("\0")
        return dict(line.partition("=")[::2] for line in environ), Path(f"/proc/{pid}/cmdline").read_text().split("\0")

    pids = wait_until(lambda: status(alone)["nodes"][0]["pids"] or None, why=alone.describe)
    assert len(pids) == 2
    for rank, pid in enumerate(pids):
        env, words = shown(pid)
        assert {name: env[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")} == {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"
        }  # fmt: skip
        assert str(CHATTY) in words


def test_status_has_the_current_goodput_of_workers_that_report_steps(alone: Job) -> None:
    def above(share: float) -> float | None:
        found = status(alone)["goodput"]
        return found if found is not None and found > share else None

    first = wait_until(lambda: above(0.0), why=alone.describe)
    assert wait_until(lambda: above(first), why=alone.describe) < 1.0  # it has started long ago, and nothing is lost
    assert re.search(r"nodes 1:1, goodput \d+%\n", output_of(alone, "status"))


def maps(agent: Agent, name: str) -> bool:
    return name in Path(f"/proc/{agent.pid}/maps").read_text()


def test_logs_show_one_rank_or_all_of_them(alone: Job) -> None:
    wait_until(lambda: output_of(alone, "logs", "--tail=3", "--stream=stdout").count("[1]") == 3 or None)
    lines = output_of(alone, "logs", "1", "--tail=3", "--stream=stdout").splitlines()
    assert len(lines) == 3
    assert all(line.startswith("out 1 ") for line in lines)
    everybody = output_of(alone, "logs", "--tail=2").splitlines()
    assert {line.split(" ")[1] for line in everybody} == {"out", "err"}
    assert {line[:3] for line in everybody} == {"[0]", "[1]"}
    (piece,) = json.loads(output_of(alone, "logs", "0", "--stream=stderr", "--tail=1", "--json"))
    assert (piece["rank"], piece["stream"], piece["text"][:6]) == (0, "stderr", "err 0 ")


def test_stacks_show_where_workers_are(alone: Job) -> None:
    assert output_of(alone, "stacks", "1").startswith("rank 1 on ")
    shown = "chatty.py" if spied() else "source=kernel"  # py-spy may take too long
    wait_until(lambda: shown in output_of(alone, "stacks", "1") or None, why=alone.describe)
    assert {stack["rank"] for stack in json.loads(output_of(alone, "stacks", "--json"))["stacks"]} == {0, 1}


def test_metrics_are_available_without_a_port(alone: Job) -> None:
    assert re.search(r"^ripstop_round 1\.0$", output_of(alone, "metrics"), re.MULTILINE)
    usage = re.compile(r"^ripstop_worker_memory_bytes{", re.MULTILINE)  # missing if the node takes too long
    wait_until(lambda: len(usage.findall(output_of(alone, "metrics"))) == 2 or None, why=alone.describe)
    assert "ripstop_round" in json.loads(output_of(alone, "metrics", "--json"))["metrics"]


def test_events_are_printed_as_text_and_as_json(alone: Job) -> None:
    assert "coordinator: round=1 nodes=1 world=2" in output_of(alone, "events")
    events = [json.loads(line) for line in output_of(alone, "events", "--json").splitlines()]
    assert [event["number"] for event in events] == list(range(1, len(events) + 1))
    assert output_of(alone, "events", f"--since={len(events)}") == ""


def test_a_rejected_command_prints_one_line(alone: Job) -> None:
    assert error_of(alone, "logs", "2") == "there is no rank 2: the job has ranks 0 to 1"
    assert error_of(alone, "scale", "2").startswith("the job runs on 1 to 1 nodes, not on 2; ")
    node = status(alone)["nodes"][0]["name"]
    assert error_of(alone, "drain", node).startswith("the job needs 1 nodes, and without ")
    assert error_of(alone, "drain", "nobody").startswith("no node nobody is part of the job")
    assert error_of(alone, "status", "--job=other").startswith("no job 'other' on this machine: its jobs are alone; ")
    assert status(alone)["round"] == 1


def test_a_wrong_command_line_is_rejected(alone: Job) -> None:
    assert error_of(alone, "scale", "many", code=2).startswith("N=many: not a whole number")
    assert error_of(alone, "scale", code=2) == "N, the number of nodes, is missing; write ripstop scale N"
    assert error_of(alone, "status", "alone", code=2).startswith("alone: unexpected argument")
    assert error_of(alone, "logs", "--stream=both", code=2).startswith("--stream=both: unknown stream")
    assert error_of(alone, "stop", "--wy=x", code=2).startswith("--wy=x: unknown flag; did you mean --why?")


def test_a_restart_is_applied_and_logs_are_followed_through_it(job: Job) -> None:
    agent = job.run("--standalone", "--nproc-per-node=1", "--tee=3", str(CHATTY))
    until_running(job)
    following = job.ripstop("logs", "0", "-f", "--stream=stdout", "--tail=1")
    first = wait_until(lambda: following.out.split("\n")[0] or None, why=lambda: following.err)
    assert output_of(job, "restart") == "replacing round 1\n"
    until_running(job, 2)

    def second() -> str | None:
        pids = {line.split(" ")[2] for line in following.out.splitlines() if line.count(" ") == 3}
        return next(iter(pids - {first.split(" ")[2]}), None)

    pid = wait_until(second, why=job.describe)
    lines = following.out.rpartition("\n")[0].splitlines()  # the last one may be cut
    numbers = [int(line.split(" ")[3]) for line in lines if line.split(" ")[2] == pid]
    assert numbers == list(range(len(numbers)))  # from its first line on
    assert wait_until(lambda: status(job)["nodes"][0]["pids"] or None, why=job.describe) == [int(pid)]
    events = job.ripstop("events", "-f")
    wait_until(lambda: events.out or None, why=lambda: events.err)
    assert output_of(job, "stop", "--why=enough") == "stopping the job\n"
    assert agent.wait() == 1
    assert "stopped by user" in agent.err
    assert ": enough" in agent.err
    assert (following.wait(), events.wait()) == (0, 0)
    assert "coordinator: closed: stopped: " in events.out
    journal = next(job.logs.glob("*/job-events.jsonl")).read_text()
    assert f'"kind":"operator_action","action":"restart","by":"user {os.getuid()}"' in journal
    assert list(socket_directory(job.env).iterdir()) == []


LAST_LINES = [f"{number} {'x' * 50}" for number in range(20_000)] + ["the last word \u20ac"]


def go(job: Job, how: str) -> None:
    """Let `final_output.py` write its output and end."""
    path = Path(job.env["GO"])
    path.with_suffix(".new").write_text(how)
    path.with_suffix(".new").rename(path)


@pytest.mark.parametrize(("how", "code"), [("fail", 1), ("stop", 1), ("signal", 143)])
def test_a_followed_log_is_complete_when_the_job_ends(tmp_path: Path, how: str, code: int) -> None:
    with Job(tmp_path, XDG_RUNTIME_DIR=str(tmp_path), TMPDIR=str(tmp_path), GO=str(tmp_path / "go")) as job:
        agent = job.run("--standalone", "--redirects=1", str(SCRIPTS / "final_output.py"))
        until_running(job)
        following = job.ripstop("logs", "0", "-f", "--stream=stdout")
        wait_until(lambda: following.out or None, why=lambda: following.err)
        go(job, "stop" if how == "signal" else how)
        if how == "stop":
            output_of(job, "stop")
        elif how == "signal":
            agent.signal(signal.SIGTERM)
        assert (agent.wait(), following.wait()) == (code, 0), following.err
        assert following.out.splitlines() == ["ready", *LAST_LINES]


def test_followed_logs_of_several_nodes_are_complete_when_the_job_ends(tmp_path: Path) -> None:
    with Job(tmp_path, XDG_RUNTIME_DIR=str(tmp_path), TMPDIR=str(tmp_path), GO=str(tmp_path / "go")) as job:
        nodes = [job.node("--redirects=1", nnodes="2", script=SCRIPTS / "final_output.py") for _ in range(2)]
        until_running(job, 1, "--job=e2e")
        following = job.ripstop("logs", "-f", "--stream=stdout", "--job=e2e")
        wait_until(lambda: True if following.out.count("ready") == 2 else None, why=lambda: following.err)
        go(job, "succeed")
        assert ([node.wait() for node in nodes], following.wait()) == ([0, 0], 0), following.err
        lines = following.out.splitlines()
        for rank in ("[0]", "[1]"):
            assert [line[4:] for line in lines if line.startswith(rank)] == ["ready", *LAST_LINES]


def test_the_http_library_is_loaded_at_the_first_request_and_console_output_is_not_available(job: Job) -> None:
    agent = job.run("--standalone", str(CHATTY))
    agent.wait_for_log("round=1")
    assert not maps(agent, "_http_parser")
    until_running(job)
    assert maps(agent, "_http_parser")
    assert error_of(job, "logs", "0", "--stream=stdout") == (
        "rank 0's stdout goes only to its node's console; start the job with --tee=3 or --redirects=3"
    )
    text = wait_until(lambda: output_of(job, "logs", "0", "--tail=1") or None, why=job.describe)
    assert text.startswith("err 0 ")


# which job ------------------------------------------------------------------------------------------------------------


def test_no_job_several_jobs_and_dead_ones(job: Job) -> None:
    assert error_of(job, "status").startswith("no job runs on this machine: this user has no jobs here; ")
    agents = [job.run("--standalone", "--rdzv-id=one", str(CHATTY))]
    agents.append(job.run("--standalone", "--rdzv-id=two", str(CHATTY), env={"XDG_RUNTIME_DIR": ""}))  # a scheduler's
    for name in ("one", "two"):
        assert until_running(job, 1, f"--job={name}")["run_id"] == name
    error = error_of(job, "status", code=2)
    assert error in (
        "several jobs run on this machine: one, two; choose one with --job=NAME",
        "several jobs run on this machine: two, one; choose one with --job=NAME",
    )
    agents[0].signal(signal.SIGKILL)
    agents[0].wait()
    assert status(job)["run_id"] == "two"
    assert [path for path in socket_directory(job.env).iterdir() if path.suffix] == []


@pytest.mark.parametrize("asked_before", [False, True])
def test_a_socket_that_was_removed_with_its_directory_is_recreated(job: Job, asked_before: bool) -> None:
    agent = job.run("--standalone", str(CHATTY))
    agent.wait_for_log("round=1 ")
    if asked_before:
        until_running(job)
    shutil.rmtree(socket_directory(job.env))
    agent.wait_for_log("were recreated")
    until_running(job)
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 128 + signal.SIGTERM
    assert list(socket_directory(job.env).iterdir()) == []


def test_a_job_that_does_not_reply_is_unreachable(job: Job) -> None:
    kept = Registration(socket_directory(job.env), "a")
    kept.write(JobRecord("job", "node", os.getpid(), 1.0, socket="a.sock"))
    assert error_of(job, "status").endswith("no such file or directory; check that it runs, and its address")
    kept.close()
    port = free_port()
    assert error_of(job, "stop", f"--endpoint=127.0.0.1:{port}") == (
        f"cannot reach job none at 127.0.0.1:{port}: connection refused; check that it runs, and its address"
    )


def test_a_job_runs_without_a_socket_if_it_cannot_have_one(job: Job) -> None:
    socket_directory(job.env).chmod(0o755)
    agent = job.run("--standalone", "--no-python", "true")
    assert agent.wait() == 0
    assert "commands on this machine cannot reach the job: " in agent.err


# several nodes --------------------------------------------------------------------------------------------------------


def test_commands_work_on_any_node_and_a_drained_one_leaves(job: Job, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    flags = {"nnodes": "1:2", "script": CHATTY}
    secret = {"RIPSTOP_TOKEN": TOKEN}
    first = job.node(**flags, env=secret)
    first.wait_for_log("ranks=0-0")
    following = job.ripstop("logs", "-f", "--stream=stderr")
    wait_until(lambda: "[0] err 0 " in following.out or None, why=lambda: following.err)
    second = job.node(**flags, env=secret | {"XDG_RUNTIME_DIR": str(other)})  # as if on another machine
    second.wait_for_log("ranks=1-1")
    first_line = re.compile(r"^\[1\] err 1 \d+ 0\n", re.MULTILINE)
    wait_until(lambda: first_line.search(following.out), why=lambda: f"{following.err}{following.out[-2000:]}")
    elsewhere = {"XDG_RUNTIME_DIR": str(other)}
    assert json.loads(output_of(job, "status", "--json", **elsewhere))["world_size"] == 2

    at = ("--job=e2e", f"--endpoint=127.0.0.1:{job.port}")
    assert "world size 2" in output_of(job, "status", *at, **secret)
    assert error_of(job, "stop", *at, RIPSTOP_TOKEN="guess").startswith("the token is not this job's; ")
    assert error_of(job, "stop", *at[1:], **secret).startswith("the token is not this job's; ")
    assert error_of(job, "stop", *at).startswith("this job requires its API token; ")
    assert error_of(job, "scale", "3", *at, **secret).startswith("the job runs on 1 to 2 nodes, not on 3; ")

    name = next(node["name"] for node in status(job)["nodes"] if str(second.pid) in node["name"])
    assert output_of(job, "drain", name[:-1], **elsewhere) == f"draining node {name}\n"
    assert second.wait() == 0
    until_running(job, 2)
    assert output_of(job, "scale", "1") == "scaling to 1 nodes; 1 are in the round\n"
    assert error_of(job, "drain", status(job)["nodes"][0]["name"]).startswith("the job needs 1 nodes")
    output_of(job, "stop")
    assert first.wait() == 1
    assert (following.wait(), following.err) == (0, "")


def test_a_job_on_one_node_without_a_secret_is_controlled_with_a_certificate(job: Job, tmp_path: Path) -> None:
    (folder := tmp_path / "authority").mkdir()
    tls = Authority(folder).node()
    port = free_port()
    conf = f"--rdzv-conf=tls_cert={tls.cert},tls_key={tls.key},tls_ca={tls.ca}"
    job.run("--standalone", f"--api=127.0.0.1:{port}", "--rdzv-id=a", conf, str(CHATTY))
    until_running(job)
    assert "running" in output_of(job, "status", "--job=a", f"--endpoint=127.0.0.1:{port}", conf)


def test_a_job_on_one_node_is_controlled_over_tls(job: Job, tmp_path: Path) -> None:
    (folder := tmp_path / "authority").mkdir()
    tls = Authority(folder).node()
    port = free_port()
    conf = f"--rdzv-conf=tls_cert={tls.cert},tls_key={tls.key},tls_ca={tls.ca}"
    agent = job.run(
        "--standalone", f"--api=127.0.0.1:{port}", "--rdzv-id=a", conf, str(CHATTY), env={"RIPSTOP_TOKEN": TOKEN}
    )
    until_running(job)
    at = ("--job=a", f"--endpoint=127.0.0.1:{port}")
    assert "running" in output_of(job, "status", *at, conf, RIPSTOP_TOKEN=TOKEN)
    assert "ripstop_round" in output_of(job, "metrics", *at, conf, RIPSTOP_TOKEN=TOKEN)
    assert "requires TLS" in error_of(job, "status", *at, RIPSTOP_TOKEN=TOKEN)
    output_of(job, "stop", *at, conf, RIPSTOP_TOKEN=TOKEN)
    assert agent.wait() == 1


@pytest.mark.long
@needs_etcd
def test_commands_work_on_the_machine_of_the_elected_coordinator(job: Job, tmp_path: Path) -> None:
    places = [tmp_path / "one", tmp_path / "two"]
    with cluster(1, tmp_path) as (etcd,):
        conf = "--rdzv-conf=lease=1,last_call_timeout=2"
        flags = ["--nnodes=1:2", "--rdzv-backend=etcd", f"--rdzv-endpoint={etcd.endpoint}", conf]
        agents = []
        for place in places:
            place.mkdir()
            agents.append(job.run(*flags, "--rdzv-id=e2e", str(CHATTY), env={"XDG_RUNTIME_DIR": str(place)}))
            agents[-1].wait_for_log("ranks=")
        host = next(index for index, agent in enumerate(agents) if "elected: " in agent.err)
        here, there = ({"XDG_RUNTIME_DIR": str(places[index])} for index in (host, 1 - host))
        wait_until(lambda: True if "world size 2" in output_of(job, "status", **here) else None, why=job.describe)
        assert error_of(job, "status", **there).startswith(
            "a job without a secret cannot be operated over the network; "
        )
        agents[host].signal(signal.SIGKILL)
        wait_until(lambda: True if command(job, "status", **there)[0] == 0 else None, why=job.describe)
        output_of(job, "stop", **there)
        assert agents[1 - host].wait() == 1
