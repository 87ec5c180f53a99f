"""Real jobs send notifications to a real server."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, Job, free_port, wait_until
from tests.notifications.server import webhook_server

CRASH = "import os\nif os.environ['RANK'] == '1': raise ValueError('bad shard, HF_TOKEN=hf_abc <!channel>')\n"


@pytest.fixture
def job(tmp_path: Path):
    with Job(tmp_path) as job:
        yield job


def test_a_job_that_fails_announces_its_last_restart_and_the_root_cause(job: Job) -> None:
    script = job.folder / "crash.py"
    script.write_text(CRASH)
    with webhook_server() as received:
        url = f"{received.url}/services/S3CRET"
        flags = ("--standalone", "--nproc-per-node=2", "--max-restarts=1", "--rdzv-id=job7", f"--notify-url={url}")
        agent = job.run(*flags, str(script))
        assert agent.wait() == 1
    assert [message["event"] for message in received.messages] == ["restart_budget_low", "job_failed"]
    failed = received.messages[-1]
    assert failed["job"] == "job7"
    assert failed["why"] == "rank 1 on 127.0.0.1: ValueError: bad shard, HF_TOKEN=*** <!channel>"
    assert "failed after" in failed["text"] and "&lt;!channel&gt;" in failed["text"]
    assert "S3CRET" not in agent.err
    for file in (job.logs / "job7").glob("*"):
        assert file.is_dir() or "S3CRET" not in file.read_text(), file


def test_only_the_coordinators_node_sends_and_the_workers_do_not_see_the_address(job: Job) -> None:
    script = job.folder / "environment.py"
    script.write_text("import os\nprint('seen' if 'PET_NOTIFY_URL' in os.environ else 'hidden')\n")
    with webhook_server() as received:
        agents = [job.node(nnodes="2", script=script, env={"PET_NOTIFY_URL": received.url}) for _ in range(2)]
        assert [agent.wait() for agent in agents] == [0, 0], job.describe()
    assert [message["event"] for message in received.messages] == ["job_finished"]
    assert [agent.out.strip() for agent in agents] == ["hidden", "hidden"]


def test_a_server_that_is_dead_or_does_not_reply_changes_no_result(job: Job) -> None:
    script = job.folder / "ok.py"
    script.write_text("")
    with webhook_server(0) as silent:
        for url in (silent.url, f"http://127.0.0.1:{free_port()}"):
            agent = job.run("--standalone", f"--notify-url={url}", str(script))
            assert agent.wait() == 0
            assert re.search(r"1 notifications were not sent to 127.0.0.1:\d+", agent.err)


def test_an_interrupted_job_announces_it(job: Job) -> None:
    with webhook_server() as received:
        env = {"CRASH_AT": "0", "STATE": str(job.folder / "state")}
        flags = ("--standalone", f"--notify-url={received.url}")
        agent = job.run(*flags, str(SCRIPTS / "counting.py"), env=env)
        agent.wait_for_log("round=1 ranks")
        agent.signal(signal.SIGTERM)
        assert agent.wait() == 128 + signal.SIGTERM
        wait_until(lambda: received.messages or None)
    assert [message["event"] for message in received.messages] == ["job_interrupted"]


@pytest.mark.parametrize(
    "url",
    [
        "hooks.example/S3CRET", "ftp://h/S3CRET", "file:///etc/S3CRET", "https:///S3CRET", "http://h:99999/S3CRET",
        "https://me:S3CRET@h/x", "http://h/S3CRET x", "http://h/S3CRET\r\nHost: x", "http://h/S3CRET#x",
        "http://[::1/S3CRET", "http://h/S3CRETé", f"http://h/{'S3CRET' * 400}", "http://h:0/S3CRET",
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", [("run", __file__), ("coordinator", "--rdzv-endpoint=127.0.0.1:1")])
def test_a_wrong_address_is_one_line_that_does_not_show_it(url: str, command: tuple[str, ...]) -> None:
    name, argument = command
    argv = [sys.executable, "-m", "ripstop", name, f"--notify-url={url}", argument]
    run = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith(f"ripstop {name}: error: --notify-url") and run.stderr.count("\n") == 1
    assert "S3CRET" not in run.stderr


def test_a_status_can_be_pasted_into_a_chat(job: Job) -> None:
    job.env["XDG_RUNTIME_DIR"] = str(job.folder)
    env = {"CRASH_AT": "0", "STATE": str(job.folder / "state")}
    agent = job.run("--standalone", "--nproc-per-node=2", "--rdzv-id=a_b|c*", str(SCRIPTS / "counting.py"), env=env)
    agent.wait_for_log("round=1 ranks")
    status = [sys.executable, "-m", "ripstop", "status", "--markdown", "--job=a_b|c*"]
    run = subprocess.run(status, env=job.env, capture_output=True, text=True, timeout=120, check=True)
    lines = run.stdout.splitlines()
    assert lines[0] == r"**ripstop job a\_b\|c\***"
    assert "- world size 2" in lines and "- reason: first round" in lines
    table = lines[lines.index("| NODE | HOST | STATE | RANKS | ROLE |") :]
    assert table[1] == "| --- | --- | --- | --- | --- |"
    assert re.fullmatch(r"\| \S+ \| 127.0.0.1 \| running \| 0-1 \| default \|", table[2])
    both = subprocess.run([*status, "--json"], env=job.env, capture_output=True, text=True, timeout=120, check=False)
    assert both.returncode == 2 and "only one format" in both.stderr
    agent.signal(signal.SIGTERM)
    agent.wait()
