"""`ripstop chaos` on real jobs: workers die, agents stop, and the command measures how the job heals."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import SCRIPTS, Agent, Job, alive, wait_until
from tests.e2e.test_operator_commands import error_of, status, until_running

REPORTING = SCRIPTS / "reporting.py"
REFUSAL = "faults are injected only with --allow-chaos, and {} was started without it; add it on every node"
FLAGS = ("--max-restarts=100", "--restart-backoff=0")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, XDG_RUNTIME_DIR=str(tmp_path), TMPDIR=str(tmp_path), RIPSTOP_TOKEN="secret") as job:
        yield job


def start(job: Job, *flags: str, nnodes: str = "2", script: Path = REPORTING) -> tuple[Agent, Agent]:
    """Two nodes with one worker each; the first hosts the coordinator."""
    first = job.node(*FLAGS, *flags, nnodes=nnodes, script=script)
    first.wait_for_log("joined from")
    second = job.node(*FLAGS, *flags, nnodes=nnodes, script=script)
    until_running(job)
    wait_until(lambda: status(job)["world_size"] == 2 or None, why=job.describe)
    return first, second


def plan_file(job: Job, *faults: dict[str, Any], every: str = "0.2s", count: int = 0, heal_within: int = 100) -> Path:
    lines = [f'every = "{every}"', f"count = {count or len(faults)}", f"heal_within = {heal_within}"]
    for fault in faults:
        lines += ["[[fault]]", *(f"{key} = {json.dumps(value)}" for key, value in fault.items())]
    path = job.folder / "plan.toml"
    path.write_text("\n".join(lines))
    return path


def chaos(job: Job, *faults: dict[str, Any], code: int = 0, **plan: Any) -> dict[str, dict[str, Any]]:
    """Run a plan with seed 7; the results by kind."""
    report = job.folder / "report.json"
    command = job.ripstop("chaos", f"--plan={plan_file(job, *faults, **plan)}", "--seed=7", f"--report={report}")
    assert command.wait(300) == code, f"{command.out}{command.err}{job.describe()}"
    content = json.loads(report.read_text())
    assert (content["seed"], content["passed"], len(content["faults"])) == (7, code == 0, len(faults))
    lines = command.out.splitlines()
    assert lines[0] == f"seed 7, {len(faults)} faults" and len(lines) == len(faults) + 2, command.out
    return {result["kind"]: result for result in content["faults"]}


def job_events(job: Job, kind: str) -> list[dict[str, Any]]:
    (file,) = job.logs.glob("*/job-events.jsonl")
    found = [json.loads(line) for line in file.read_text().rpartition("\n")[0].splitlines()]  # the last may be cut
    return [event for event in found if event["kind"] == kind]


@pytest.mark.timeout(600)
def test_a_job_of_two_nodes_heals_from_every_fault_of_a_seeded_plan(job: Job) -> None:
    start(job, "--allow-chaos", "--hang-timeout=20", "--rdzv-conf=lease=20")
    restarting = ("worker-kill", "worker-segv", "worker-exit")
    passing = ("worker-stop", "worker-slow", "disk-fill", "agent-stop")
    lasting = {"worker-stop", "worker-slow", "disk-fill", "agent-stop"}
    kinds = (*restarting, *passing, "connection-drop")
    results = chaos(job, *({"kind": k} | ({"duration": 1} if k in lasting else {}) for k in kinds))
    dropped = results.pop("connection-drop")
    assert dropped["outcome"] == "healed"  # a machine that needs half a second to connect again restarts its workers
    assert {kind: (result["outcome"], result["restarted"]) for kind, result in results.items()} == {
        **dict.fromkeys(restarting, ("healed", True)),
        **dict.fromkeys(passing, ("healed", False)),
    }
    assert {event["fault"] for event in job_events(job, "fault_injected")} == set(kinds)
    assert len(job_events(job, "worker_failed")) == len(restarting)
    assert status(job)["round"] == 1 + len(restarting) + dropped["restarted"]


def test_a_killed_agent_is_healed_by_a_round_without_its_node(job: Job) -> None:
    first, second = start(job, "--allow-chaos", nnodes="1:2")
    results = chaos(job, {"kind": "agent-kill"})
    assert results["agent-kill"]["restarted"]
    assert status(job)["world_size"] == 1
    assert second.wait() == -signal.SIGKILL
    assert first.process.poll() is None


@pytest.mark.long
def test_a_job_that_does_not_heal_is_exit_code_1(job: Job) -> None:
    start(job, "--allow-chaos", "--max-restarts=0")
    results = chaos(job, {"kind": "worker-kill"}, {"kind": "worker-segv"}, code=1)
    assert sorted(result["outcome"] for result in results.values()) == ["not healed", "not injected"]


def test_without_the_flag_nothing_is_injected(job: Job) -> None:
    start(job)
    plan = plan_file(job, {"kind": "worker-kill"})
    assert error_of(job, "chaos", f"--plan={plan}") == REFUSAL.format("the coordinator")
    assert job_events(job, "fault_injected") == []


def test_a_node_that_was_started_without_the_flag_obeys_nobody(job: Job) -> None:
    first = job.node(*FLAGS, "--allow-chaos", nnodes="2", script=REPORTING)
    first.wait_for_log("joined from")
    job.node(*FLAGS, nnodes="2", script=REPORTING)
    nodes = until_running(job)["nodes"]
    (closed,) = [node["name"] for node in nodes if f"-{first.pid}-" not in node["name"]]
    plan = plan_file(job, {"kind": "worker-kill"})
    assert error_of(job, "chaos", f"--plan={plan}") == REFUSAL.format(f"node {closed}")


def test_a_command_without_the_token_is_rejected(job: Job) -> None:
    start(job, "--allow-chaos")
    plan = plan_file(job, {"kind": "worker-kill"})
    endpoint = (f"--endpoint=127.0.0.1:{job.port}", "--job=e2e")
    assert "token" in error_of(job, "chaos", f"--plan={plan}", *endpoint, RIPSTOP_TOKEN="wrong")
    assert job_events(job, "fault_injected") == []


@pytest.mark.long
def test_an_agent_undoes_a_fault_whose_command_was_killed(job: Job) -> None:
    start(job, "--allow-chaos")
    pids = wait_until(lambda: pids_of_all_nodes(job), why=job.describe)
    command = job.ripstop("chaos", f"--plan={plan_file(job, {'kind': 'worker-stop', 'duration': 2})}")
    stopped = wait_until(lambda: next((pid for pid in pids if state(pid) == "T"), None), why=job.describe)
    command.signal(signal.SIGKILL)
    wait_until(lambda: state(stopped) != "T" or None, why=job.describe)
    wait_until(lambda: job_events(job, "fault_ended") or None, why=job.describe)
    assert alive(stopped) and status(job)["round"] == 1


def pids_of_all_nodes(job: Job) -> list[int] | None:
    pids = [pid for node in status(job)["nodes"] for pid in node["pids"]]
    return pids if len(pids) == 2 else None


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.long
def test_a_worker_that_allocates_is_killed_by_the_kernel_in_a_small_cgroup(job: Job) -> None:
    start(job, "--allow-chaos", script=SCRIPTS / "allocating.py")
    results = chaos(job, {"kind": "worker-oom", "duration": 30})
    if results["worker-oom"]["outcome"] == "skipped":
        pytest.skip(results["worker-oom"]["why"])
    assert results["worker-oom"]["restarted"]


def test_the_reply_says_what_this_machine_cannot_do(job: Job) -> None:
    job.run("--standalone", "--allow-chaos", "--start-method=exec", "--nproc-per-node=1", *FLAGS, str(REPORTING))
    until_running(job)
    faults = ({"kind": "worker-exit"}, {"kind": "connection-drop", "node": "coordinator"}, {"kind": "worker-kill"})
    results = chaos(job, *faults)
    assert {kind: result["why"] for kind, result in results.items() if result["outcome"] == "skipped"} == {
        "worker-exit": "only workers that the zygote forked can be made to exit; use worker-kill",
        "connection-drop": "this agent hosts the coordinator, so there is no connection to drop",
    }


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ((), "--plan is missing; write ripstop chaos --plan=FILE; --help shows what is in the file"),
        (("--plan=/none.toml",), "--plan=/none.toml: cannot be read: No such file or directory; name a TOML file"),
        (("--plan=PLAN", "--seed=x"), "--seed=x: not a whole number; give a number from 0 to 2147483647"),
        (("--plan=PLAN", "--report=/no/r.json"), "--report=/no/r.json: /no is not a directory; make it first"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(job: Job, argv: tuple[str, ...], error: str) -> None:
    plan = plan_file(job, {"kind": "worker-kill"})
    argv = tuple(word.replace("PLAN", os.fspath(plan)) for word in argv)
    assert error_of(job, "chaos", *argv, code=2) == error
