"""Agents in containers: termination messages, probes, `--linger`, and the environment of other operators."""

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Job, free_port, wait_until

WAIT = "import time\nprint('here', flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as job:
        yield job


def script(job: Job, text: str) -> str:
    path = job.folder / "script.py"
    path.write_text(text)
    return str(path)


def termination_message(job: Job) -> dict[str, object]:
    found: dict[str, object] = json.loads((job.folder / "termination-log").read_text())
    return found


@pytest.mark.parametrize(
    ("text", "code", "outcome"), [("", 0, "succeeded"), ("raise RuntimeError('no data')", 1, "failed")]
)
def test_the_termination_log_has_the_jobs_outcome(job: Job, text: str, code: int, outcome: str) -> None:
    env = {"RIPSTOP_TERMINATION_LOG": str(job.folder / "termination-log")}
    assert job.run("--standalone", script(job, text), env=env).wait() == code
    found = termination_message(job)
    assert (found["outcome"], found["rounds"], found["restarts"]) == (outcome, 1, 0)
    assert ("no data" in str(found.get("culprit"))) == bool(code)


def test_the_termination_log_of_a_terminated_agent_has_the_outcome_left(job: Job) -> None:
    env = {"RIPSTOP_TERMINATION_LOG": str(job.folder / "termination-log")}
    agent = job.run("--standalone", script(job, WAIT), env=env)
    wait_until(lambda: True if "here" in agent.out else None)
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 143
    assert termination_message(job) == {"outcome": "left", "why": "SIGTERM"}


def test_a_termination_log_that_cannot_be_written_does_not_change_the_exit_code(job: Job) -> None:
    env = {"RIPSTOP_TERMINATION_LOG": "/no/such/folder/file"}
    agent = job.run("--standalone", script(job, ""), env=env)
    assert agent.wait() == 0
    assert "RIPSTOP_TERMINATION_LOG=/no/such/folder/file: cannot be written" in agent.err


def probe(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=120) as response:
            return response.status, response.read().decode().strip()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode().strip()
    except OSError:
        return 0, ""


def test_probes_are_answered_and_a_node_without_a_coordinator_is_not_ready(job: Job) -> None:
    port = free_port()
    waiting = job.node("--rdzv-conf=is_host=0", f"--probe-port={port}", script=Path(script(job, WAIT)))
    wait_until(lambda: True if probe(port, "/livez") == (200, "ok") else None)
    wait_until(lambda: True if probe(port, "/readyz")[1].startswith("the node has no coordinator") else None)
    first = job.node("--rdzv-conf=is_host=1", script=Path(script(job, WAIT)))
    wait_until(lambda: True if probe(port, "/readyz") == (200, "ok") else None)
    for agent in (waiting, first):
        agent.signal(signal.SIGTERM)
        assert agent.wait() == 143


def test_a_probe_port_in_use_is_an_error_before_anything_starts(job: Job) -> None:
    first = job.run("--standalone", "--local-addr=127.0.0.1", f"--probe-port={job.port}", script(job, WAIT))
    wait_until(lambda: True if "here" in first.out else None)
    second = job.run("--standalone", "--local-addr=127.0.0.1", f"--probe-port={job.port}", script(job, WAIT))
    assert second.wait() == 2
    assert "choose a free one" in second.err
    assert "here" not in second.out
    first.signal(signal.SIGTERM)
    assert first.wait() == 143


def test_a_lingering_agent_waits_for_a_signal_and_keeps_its_exit_code(job: Job) -> None:
    agent = job.run("--standalone", "--linger", script(job, "raise SystemExit(3)"))
    agent.wait_for_log("the job is over; waiting for a signal to exit")
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 1


def test_an_agent_that_found_no_coordinator_does_not_linger(job: Job) -> None:
    agent = job.node("--linger", "--rdzv-conf=is_host=0,join_timeout=0.5", script=Path(script(job, "")))
    assert agent.wait() == 1


# environments of other operators --------------------------------------------------------------------------------------


def environment(kind: str, port: int, index: int) -> dict[str, str]:
    if kind == "PyTorchJob with an elasticPolicy":
        return {
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
            "PET_NNODES": "1:2",
            "PET_NPROC_PER_NODE": "1",
            "PET_MAX_RESTARTS": "3",
            "PET_RDZV_CONF": "last_call_timeout=60",
            "PYTHONUNBUFFERED": "1",
        }
    return {  # PyTorchJob without one, and TrainJob
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
        "PET_NNODES": "2",
        "PET_NODE_RANK": str(index),
        "PET_NPROC_PER_NODE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "RANK": str(index),
    }


@pytest.mark.parametrize("kind", ["PyTorchJob with an elasticPolicy", "TrainJob"])
def test_a_kubeflow_pod_needs_no_flags(job: Job, kind: str) -> None:
    path = script(job, "import os\nprint(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    agents = [job.run(path, env=environment(kind, job.port, index)) for index in range(2)]
    assert [agent.wait() for agent in agents] == [0, 0]
    assert {agent.out for agent in agents} == {"0 of 2\n", "1 of 2\n"}
