"""Real workers that hang: they are detected, inspected and restarted."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import SCRIPTS, Agent, Job, spied

HANG = SCRIPTS / "hang.py"
TORCH = "--preload=torch,torch.distributed"


@pytest.fixture
def job(tmp_path: Path):
    with Job(tmp_path) as job:
        yield job


def events(job: Job, name: str = "events.jsonl") -> list[dict[str, Any]]:
    lines = [line for path in sorted(job.logs.rglob(name)) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def hang_file(job: Job, rank: int, round: int = 1, what: str = "txt") -> str:
    (path,) = job.logs.glob(f"*/round_{round}/hang/rank_{rank}.{what}")
    return path.read_text()


def logged(agent: Agent, pattern: str) -> bool:
    return re.search(pattern, agent.err) is not None


def assert_recovered(job: Job, *agents: Agent) -> None:
    assert [agent.wait() for agent in agents] == [0] * len(agents), job.describe()
    assert {h["rank"] for h in job.worker_events(event="done", restart=1)} == {0, 1}


def test_the_rank_that_the_others_wait_for_is_named_on_all_nodes_and_the_job_recovers(job: Job) -> None:
    env = {"HANG": "sleep:1", "GLOO": "1", "BEAT": "1"}
    agents = [job.node("--hang-timeout=8", TORCH, nnodes="2", script=HANG, env=env) for _ in range(2)]
    assert_recovered(job, *agents)
    stacks = r"rank 0 waits in all_reduce \(hang.py:\d+\); rank 1 is in load_batch \(hang.py:\d+\)"
    recorded = r"flight recorder: rank 0 is in all_reduce #4, not entered by rank 1 \(last: all_reduce #3\)"
    for agent in agents:
        assert logged(agent, f"stopping: {stacks}; {recorded}; infrastructure restart 1 of 3 in 3600 s")
    if spied():  # native frames
        for rank, frame in ((1, r"\(libc"), (0, "c10d::")):
            assert re.search(rf"{frame}|no native stack: py-spy took more than ", hang_file(job, rank))
    else:
        assert "no native stack: py-spy" in hang_file(job, 1)
    assert "all_reduce #4, 4 Float: scheduled" in hang_file(job, 0)
    assert json.loads(hang_file(job, 1, what="flight.json"))["fr"]["entries"][-1]["collective_seq_id"] == 3
    kinds = [event["kind"] for event in events(job, "job-events.jsonl")]
    assert kinds.index("hang_diagnosed") < kinds.index("workers_stopping")
    (diagnosed,) = [event for event in events(job, "job-events.jsonl") if event["kind"] == "hang_diagnosed"]
    assert diagnosed["suspects"] == [1]


def test_a_worker_without_heartbeats_that_never_ends_is_detected(job: Job) -> None:
    agent = job.run("--standalone", "--nproc-per-node=2", "--hang-timeout=1", str(HANG), env={"HANG": "exit:1"})
    assert_recovered(job, agent)
    assert logged(agent, r"rank=1 pid=\d+ hangs: no output, no CPU time, the same stack for \d+ s, in forget_to_end")
    assert "forget_to_end" in hang_file(job, 1)
    assert not list(job.logs.glob("*/round_1/hang/rank_0.txt"))  # it had ended


def test_a_stopped_worker_is_the_suspect(job: Job) -> None:
    env = {"HANG": "beat", "BEAT": "1"}
    agent = job.run("--standalone", "--nproc-per-node=2", "--hang-timeout=2", str(HANG), env=env)
    stopped = job.wait_for(event="steps", rank=1)["pid"]
    os.kill(stopped, signal.SIGSTOP)
    assert_recovered(job, agent)
    where = r"is in [^;]*" if spied() else "does not show where"  # a stopped process cannot dump its stack
    assert logged(agent, f"rank 1 {where}, stopped by a signal; infrastructure restart 1 of 3")
    assert "state: T (stopped)" in hang_file(job, 1) and ("<module>" in hang_file(job, 1)) == spied()


def test_a_hang_without_budget_ends_the_job_and_the_report_has_the_stack(job: Job) -> None:
    env = {"HANG": "sleep:0", "BEAT": "1"}
    agent = job.run("--standalone", "--hang-timeout=1", "--max-infra-restarts=0", str(HANG), env=env)
    assert agent.wait() == 1
    assert "no infrastructure restart is allowed (--max-infra-restarts=0)" in agent.err
    assert "made no progress for 1 s (no heartbeat)" in agent.err
    (path,) = job.logs.glob("*/report.json")
    cause = json.loads(path.read_text())["root_cause"]
    assert (cause["rank"], cause["hang"]["call"]) == (0, "load_batch")
    assert "load_batch" in cause["traceback"]
    assert Path(cause["hang"]["file"]).read_text().startswith("rank 0, pid ")


def test_workers_with_any_kind_of_progress_do_not_hang(job: Job) -> None:
    script = job.folder / "busy.py"
    script.write_text(
        "import os, time\n"
        "end = time.monotonic() + 4\n"
        "while time.monotonic() < end:\n"
        "    if os.environ['RANK'] == '0':\n"
        "        print('.', flush=True)\n"  # next to no CPU time, and always here
        "        time.sleep(0.2)\n"
    )
    agent = job.run("--standalone", "--nproc-per-node=2", "--hang-timeout=2", str(script))
    assert agent.wait() == 0
    assert "hangs" not in agent.err


def test_progress_is_recorded(job: Job) -> None:
    agent = job.run("--standalone", "--nproc-per-node=2", str(HANG), env={"BEAT": "1"})
    assert agent.wait() == 0
    (first,) = [event for event in events(job) if event["kind"] == "first_step"]
    (steps,) = [event for event in events(job) if event["kind"] == "steps_done"]
    assert first["step"] == 0 and first["seconds"] > 0
    assert (steps["rank"], steps["first"], steps["last"]) == (0, 0, 4)


@pytest.mark.long
def test_an_unmodified_script_that_hangs_in_a_collective_is_restarted(job: Job) -> None:
    env = {"HANG": "sleep:1", "GLOO": "1"}
    agent = job.run("--standalone", "--nproc-per-node=2", "--hang-timeout=4", TORCH, str(HANG), env=env)
    assert_recovered(job, agent)
    assert logged(agent, r"rank 0 waits in all_reduce \(hang.py:\d+\); rank 1 is in load_batch")


@pytest.mark.long
def test_a_rank_that_enters_another_collective_is_the_suspect(job: Job) -> None:
    env = {"HANG": "other:1", "GLOO": "1", "BEAT": "1"}
    agent = job.run("--standalone", "--nproc-per-node=3", "--hang-timeout=3", TORCH, str(HANG), env=env)
    assert agent.wait() == 0
    same = "ranks 0,2 are in all_reduce of 4 Float, rank 1 is in broadcast of 4 Float"
    assert logged(agent, f"flight recorder: #4 is not the same for all: {same}")
    (diagnosed,) = [event for event in events(job, "job-events.jsonl") if event["kind"] == "hang_diagnosed"]
    assert diagnosed["suspects"] == [1]


@pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="there is no GPU of NVIDIA's")
def test_the_recorder_of_nccl_is_read(job: Job) -> None:
    """One rank, whose GPU does not reach the collective that the rank has entered."""
    env = {"HANG": "gpu:0", "NCCL": "1", "BEAT": "1"}
    agent = job.run("--standalone", "--hang-timeout=5", "--max-infra-restarts=0", TORCH, str(HANG), env=env)
    assert agent.wait() == 1
    assert logged(agent, r"flight recorder: rank 0 is in all_reduce #4, and no rank is missing"), hang_file(job, 0)
    assert "all_reduce #3, 4 Float: completed" in hang_file(job, 0)
    entries = json.loads(hang_file(job, 0, what="flight.json"))["nccl"]["entries"]
    assert entries[-1]["profiling_name"] == "nccl:all_reduce"
