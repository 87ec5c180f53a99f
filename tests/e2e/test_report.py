"""The reports of real jobs name the true cause."""

import json
import re
import signal
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import SCRIPTS, TRAIN, Agent, Job, wait_until

REPORTED = Path(__file__).parents[1] / "report" / "train.py"
TORCH = "--preload=torch,torch.distributed"


@pytest.fixture
def job(tmp_path: Path):
    with Job(tmp_path, STATE=str(tmp_path / "state")) as job:
        yield job


def run_directory(job: Job) -> Path:
    (directory,) = job.logs.iterdir()
    return directory


def written(job: Job) -> tuple[dict[str, Any], str]:
    """The report that was written at the end: its JSON, and the text of its page."""
    directory = run_directory(job)
    page = re.sub(r"<style>.*?</style>|<[^>]+>", " ", (directory / "job-report.html").read_text(), flags=re.DOTALL)
    return json.loads((directory / "job-report.json").read_text()), " ".join(unescape(page).split())


def ripstop(job: Job, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ripstop", *argv]
    return subprocess.run(command, env=job.env, capture_output=True, text=True, timeout=120, check=False)


def last_line(agent: Agent) -> str:
    return agent.err.rstrip().splitlines()[-1]


def test_a_crash_on_three_nodes_names_the_exception_and_folds_its_victims(job: Job) -> None:
    env = {"FAULTS": "raise:1:30", "STEPS": "1000", "STEP_S": "0.01"}
    first = job.node("--rdzv-conf=is_host=1", TORCH, nnodes="3", script=REPORTED, env=env)
    others = [job.node("--rdzv-conf=is_host=0", TORCH, nnodes="3", script=REPORTED, env=env) for _ in range(2)]
    assert [agent.wait() for agent in (first, *others)] == [1, 1, 1], job.describe()
    assert last_line(first) == f"job report: {run_directory(job) / 'job-report.html'}"
    assert not [agent for agent in others if "job report" in agent.err]
    report, page = written(job)
    summary, incident = report["summary"], report["incidents"][-1]
    assert (summary["result"], summary["nodes"], summary["world_size"]) == ("failed", 3, 3)
    assert "shard-00030.tar: checksum mismatch" in summary["cause"]
    assert incident["is_end"] and incident["root"]["rank"] == 1
    assert "in load_batch" in incident["root"]["traceback"]
    assert {victim["rank"] for victim in incident["victims"]} <= {0, 2}
    assert report["versions"] and report["programs"] == [str(REPORTED)]
    for text in (summary["cause"], "raise ValueError", "not restarted; 0 of 0 restarts are used", "✕ failed"):
        assert text in page, text


@pytest.mark.long
def test_a_hang_names_the_rank_that_the_others_wait_for_with_its_stack(job: Job) -> None:
    env = {"FAULTS": "hang:1:20", "STEPS": "40", "STEP_S": "0.01"}
    agent = job.run("--standalone", "--nproc-per-node=2", "--hang-timeout=5", TORCH, str(REPORTED), env=env)
    assert agent.wait() == 0, job.describe()
    report, page = written(job)
    (incident,) = report["incidents"]
    assert (incident["cause"], incident["root"]["rank"], incident["root"]["is_hang"]) == ("infrastructure", 1, True)
    assert "rank 1 is in read_shard" in incident["title"] and "read_shard" in incident["root"]["traceback"]
    assert "all_reduce" in incident["root"]["collectives"]
    assert incident["downtime"] > 5  # the time without a heartbeat is part of it
    assert 0 < report["summary"]["goodput"] < 1
    assert report["summary"]["result"] == "succeeded" and "rank 1 is in read_shard" in page and "Stack" in page


@pytest.mark.long
def test_a_preempted_job_names_the_signal_and_the_node(job: Job) -> None:
    env = {"STEPS": "100000", "STEP_S": "0.01"}
    flags = ("--shutdown-timeout=2", TORCH)
    first = job.node("--rdzv-conf=is_host=1", *flags, nnodes="1:2", script=REPORTED, env=env)
    first.wait_for_log("joined")  # so that it has rank 0
    second = job.node("--rdzv-conf=is_host=0", *flags, nnodes="1:2", script=REPORTED, env=env)
    first.wait_for_log("ranks=0-0 world=2")
    wait_until(lambda: (job.folder / "state").exists() or None)
    second.signal(signal.SIGTERM)
    assert second.wait() == 128 + signal.SIGTERM
    first.wait_for_log(r"round=\d+ ranks=0-0 world=1")
    first.signal(signal.SIGTERM)
    assert first.wait() == 128 + signal.SIGTERM
    report, page = written(job)
    assert report["summary"]["result"] == "interrupted"
    assert re.fullmatch(r"node \S+ left: SIGTERM", report["summary"]["cause"])
    causes = [incident["cause"] for incident in report["incidents"]]
    assert causes == ["node_left", "node_left"]
    nodes = {node["name"]: node["why_gone"] for node in report["nodes"]}
    assert set(nodes.values()) == {"left: SIGTERM"}
    assert "▲ interrupted" in page and "left: SIGTERM" in page


def test_a_killed_job_has_a_report_that_says_so(job: Job) -> None:
    agent = job.run("--standalone", "--nproc-per-node=2", str(TRAIN), env={"TRAIN_STEPS": "100000"})
    job.steps(2)
    agent.signal(signal.SIGKILL)
    agent.wait()
    directory = run_directory(job)
    assert not (directory / "job-report.html").exists()
    run = ripstop(job, "report", str(job.logs))
    assert run.returncode == 0, run.stderr
    assert run.stderr.strip() == f"report: {directory / 'job-report.html'}"
    assert "unfinished" in run.stdout
    report = json.loads(ripstop(job, "report", str(directory), "--json").stdout)
    assert report["summary"]["result"] == "unfinished" and "was killed" in report["summary"]["why"]
    assert (report["summary"]["world_size"], len(report["rounds"]), report["incidents"]) == (2, 1, [])
    assert "… no end recorded" in unescape(re.sub("<[^>]+>", "", (directory / "job-report.html").read_text()))


@pytest.mark.long
def test_a_killed_coordinator_is_the_cause_when_agents_outlive_it(job: Job) -> None:
    flags = ("--rdzv-conf=is_host=0,coordinator_timeout=8", TORCH)
    env = {"STEPS": "100000", "STEP_S": "0.01"}
    first = job.node("--rdzv-conf=is_host=1", TORCH, nnodes="2", script=REPORTED, env=env)
    second = job.node(*flags, nnodes="2", script=REPORTED, env=env)
    second.wait_for_log(r"round=1 ranks")
    wait_until(lambda: (job.folder / "state").exists() or None)
    first.signal(signal.SIGKILL)
    assert second.wait() == 1
    report = json.loads(ripstop(job, "report", str(run_directory(job)), "--json").stdout)
    assert report["summary"]["result"] == "unfinished"
    assert re.match(
        r"the process of the coordinator was killed, and node \S+ ended without it: ", report["summary"]["why"]
    )
    assert report["incidents"][-1]["root"]["rank"] in (0, 1)  # the worker that lost its peer


def test_a_crash_that_the_job_survives_and_a_success_are_in_the_report(job: Job) -> None:
    env = {"FAULTS": "raise:1:39", "STEPS": "60", "STEP_S": "0.05"}  # 19 steps after a checkpoint
    flags = ("--standalone", "--nproc-per-node=2", "--max-restarts=1", TORCH)
    agent = job.run(*flags, str(REPORTED), "--api-key=hunter2", env=env)
    assert agent.wait() == 0, job.describe()
    report, page = written(job)
    assert report["summary"]["result"] == "succeeded" and report["summary"]["restarts"] == 1
    assert report["time"]["repeated_steps"] > 0 and report["summary"]["last_step"] > 39
    assert {loss["cause"] for loss in report["time"]["losses"]} == {"application", "start-up"}
    assert "--api-key=***" in page
    for file in run_directory(job).glob("*"):
        assert file.is_dir() or "hunter2" not in file.read_text(), file


def test_the_report_of_a_running_job_and_a_comparison(job: Job) -> None:
    env = {"STATE": str(job.folder / "count"), "CRASH_AT": "20", "REPORT": "1", "XDG_RUNTIME_DIR": str(job.folder)}
    job.env |= env
    flags = ("--standalone", "--rdzv-id=counting", "--nproc-per-node=2", "--max-restarts=1")
    agent = job.run(*flags, str(SCRIPTS / "counting.py"))
    agent.wait_for_log(r"round=2 ranks")
    run = ripstop(job, "report", "--job=counting", "--output", str(job.folder / "now.html"))
    assert run.returncode == 0, run.stderr
    page = (job.folder / "now.html").read_text()
    assert "no end recorded" in page and "rank 1 on 127.0.0.1 exited with code 7" in page
    agent.signal(signal.SIGTERM)
    agent.wait()
    directory = str(run_directory(job))
    table = ripstop(job, "compare", directory, directory)
    assert table.returncode == 0 and re.search(r"(?m)^goodput +\d+\.\d% +\d+\.\d%$", table.stdout), table
    figures = json.loads(ripstop(job, "compare", directory, directory, "--json").stdout)
    assert {"goodput", "step time", "recovery, median", "downtime"} <= {figure["name"] for figure in figures}
    assert all(figure["a"] == figure["b"] for figure in figures)


def test_a_report_that_cannot_be_written_is_one_warning(job: Job) -> None:
    script = job.folder / "block.py"
    script.write_text("import os, pathlib\npathlib.Path(os.environ['BLOCK']).mkdir()\n")
    block = {"BLOCK": str(job.logs / "j" / "job-report.html")}
    agent = job.run("--standalone", "--rdzv-id=j", str(script), env=block)
    assert agent.wait() == 0
    (warning,) = [line for line in agent.err.splitlines() if "warning" in line]
    assert "the report of the job was not written: Is a directory" in warning
    assert f"ripstop report {job.logs / 'j'}" in warning


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (
            ("/nowhere/logs",),
            "/nowhere/logs: no such file or directory; give LOG_DIR/RUN_ID of a run, or an event file",
        ),
        (("empty",), "empty: has no events; give a directory LOG_DIR/RUN_ID, or an events.jsonl"),
        (("other",), "other: has 2 lines that are no events of ripstop; give a directory"),
        (("directory",), "directory: has no event files; give LOG_DIR/RUN_ID of a run, or an event file"),
        (("runs",), "runs: has several runs (x, y); give one of them, such as runs/y"),
        (
            ("empty", "--endpoint=h"),
            "--endpoint: a report of files needs no running job; remove --endpoint, or the file",
        ),
        (("runs/x", "--output=directory"), "--output=directory: is a directory; give a file"),
        (("runs/x", "y"), "y: unexpected argument"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(tmp_path: Path, argv: tuple[str, ...], error: str) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "other").write_text("hello\n{}\n")
    (tmp_path / "directory").mkdir()
    line = '{"v":1,"seq":1,"at":1.5,"node":"","kind":"node_joined","name":"a","host":"h","slots":1}\n'
    for name in ("x", "y"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "events.jsonl").write_text(line)
    command = [sys.executable, "-m", "ripstop", "report", *argv]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith(f"ripstop report: error: {error}") and run.stderr.count("\n") == 1
