"""Several agents on one machine: nodes that fail, join, leave or wait as spares, and coordinators that fail."""

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, Agent, Job


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, TRAIN_STEPS="100000") as job:
        yield job


def finish(job: Job, *agents: Agent) -> None:
    """End a job that has no end of its own, and check that its agents leave cleanly."""
    for agent in reversed(agents):
        agent.signal(signal.SIGTERM)
    assert [agent.wait() for agent in agents] == [143] * len(agents)


def two_nodes(job: Job, *flags: str, nnodes: str) -> tuple[Agent, Agent]:
    """Two nodes that train together; the first one hosts the coordinator."""
    first = job.node(*flags, nnodes=nnodes)
    first.wait_for_log("joined")
    second = job.node(*flags, nnodes=nnodes)
    job.steps(2)
    return first, second


def tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for parent in found:
        with suppress(OSError):  # it has just ended
            for task in Path(f"/proc/{parent}/task").glob("*/children"):
                found += map(int, task.read_text().split())
    return found


def kill(agent: Agent) -> None:
    """Kill the whole node at once."""
    for pid in tree(agent.pid):
        with suppress(ProcessLookupError):  # it may exit because its parent has
            os.kill(pid, signal.SIGKILL)
    agent.wait()


def test_nodes_join_and_finish_together(job: Job) -> None:
    agents = [job.node(nnodes="3", env={"TRAIN_STEPS": "20"}) for _ in range(3)]
    assert [a.wait() for a in agents] == [0, 0, 0]
    assert {h["rank"] for h in job.worker_events(event="done", world=3)} == {0, 1, 2}


def test_nodes_that_start_seconds_apart_train_together_from_the_first_round(job: Job) -> None:
    first = job.node(nnodes="1:2", env={"TRAIN_STEPS": "20"}, hurry=False)
    first.wait_for_log(r"1 of 2 nodes are ready; the first round waits 30 s for more .*last_call_timeout=SECONDS")
    time.sleep(3)  # as users do
    second = job.node(nnodes="1:2", env={"TRAIN_STEPS": "20"}, hurry=False)
    assert [first.wait(), second.wait()] == [0, 0]
    assert sorted(h["rank"] for h in job.worker_events(event="done")) == [0, 1]
    assert {h["world"] for h in job.worker_events()} == {2}
    assert "round=2" not in first.err


@pytest.mark.long
@pytest.mark.parametrize(("status", "code"), [(0, 0), (3, 1)])
def test_a_node_that_ran_no_worker_warns_about_it(job: Job, tmp_path: Path, status: int, code: int) -> None:
    script, go = tmp_path / "brief.py", tmp_path / "go"
    script.write_text(
        f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)\nraise SystemExit({status})"
    )
    secret = {"RIPSTOP_TOKEN": "shared"}  # without one, a job of one node makes its own
    first = job.node(nnodes="1", script=script, env=secret)
    first.wait_for_log("ranks=0-0")
    spare = job.node(nnodes="1", script=script, env=secret)
    spare.wait_for_log("spare")
    go.touch()
    assert [first.wait(), spare.wait()] == [code, code]
    warning = r" W job=e2e ended \(all workers exited 0\) before this node got a place: this node ran no worker"
    assert [bool(re.search(warning, agent.err)) for agent in (first, spare)] == [False, status == 0]
    assert ("exited with code 3" in spare.err) is (status == 3), spare.err


def test_a_lost_node_costs_no_restart_and_the_others_continue(job: Job) -> None:
    agents = [job.node(nnodes="2:3") for _ in range(3)]
    job.steps(3)
    victim = next(a for a in agents if "joined" not in a.err)  # not the one that is the coordinator
    before = job.worker_events()[-1]["t"]
    kill(victim)
    step = job.steps(2, after=before)
    assert step["restart"] == 0
    finish(job, *(a for a in agents if a is not victim))


@pytest.mark.long
def test_the_workers_of_a_killed_agent_exit_and_the_job_continues(job: Job) -> None:
    first, second = two_nodes(job, nnodes="1:2")
    before = job.worker_events()[-1]["t"]
    second.signal(signal.SIGKILL)
    second.wait()
    job.steps(1, after=before)
    finish(job, first)


def test_a_new_node_is_admitted_and_every_node_gets_a_rank(job: Job) -> None:
    first = job.node(nnodes="1:2")
    job.steps(1)
    second = job.node(nnodes="1:2")
    step = job.steps(2)
    assert step["restart"] == 0
    finish(job, first, second)


def test_a_spare_takes_the_rank_of_a_lost_node(job: Job) -> None:
    host = job.node(nnodes="2")
    host.wait_for_log("joined")
    victim = job.node(nnodes="2")
    job.steps(2)
    spare = job.node(nnodes="2")
    spare.wait_for_log("spare")
    rank = re.search(r"ranks=(\d)", victim.err)[1]
    kill(victim)
    spare.wait_for_log(f"ranks={rank}-{rank} world=2")
    job.steps(2, after=time.time())
    finish(job, host, spare)


@pytest.mark.long
def test_ranks_follow_labels_and_a_denied_rank_request_is_logged(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "label.py"
    script.write_text("import os\nprint('label', os.environ['PET_NODE_LABEL'], 'rank', os.environ['RANK'])\n")

    def node(label: str, *flags: str) -> Agent:
        flags = ("--rdzv-conf=rank_by=label", *flags)
        return job.node(*flags, nnodes="3", script=script, env={"PET_NODE_LABEL": label})

    first = node("rack10")
    first.wait_for_log("joined")
    agents = [first, node("rack11", "--node-rank=0"), node("rack9", "--node-rank=0")]
    assert [agent.wait() for agent in agents] == [0, 0, 0]
    ranks = dict(re.findall(r"label (\w+) rank (\d)", "".join(agent.out for agent in agents)))
    assert ranks == {"rack9": "0", "rack10": "1", "rack11": "2"}
    assert re.search(r"round=1 node=\S+ has node rank 2, not the requested 0: node \S+ requested it", first.err)


def test_with_ranks_by_address_the_coordinators_node_has_a_numeric_address(job: Job) -> None:
    agent = job.node("--rdzv-conf=rank_by=address", endpoint=f"localhost:{job.port}")
    agent.wait_for_log(r"joined from 127\.0\.0\.1 ")
    finish(job, agent)


@pytest.mark.long
def test_a_terminated_node_leaves_and_the_job_continues_without_it(job: Job) -> None:
    first, second = two_nodes(job, nnodes="1:2")
    before = job.worker_events()[-1]["t"]
    second.signal(signal.SIGTERM)
    assert second.wait() == 143
    step = job.steps(1, after=before)
    assert step["restart"] == 0
    finish(job, first)


@pytest.mark.long
def test_a_job_below_its_minimum_waits_for_a_replacement(job: Job) -> None:
    first, second = two_nodes(job, nnodes="2")
    second.signal(signal.SIGKILL)
    second.wait()
    first.wait_for_log("1 of (at least )?2 nodes are ready, waiting for more")
    before = time.time()
    third = job.node(nnodes="2")
    job.steps(2, after=before)
    finish(job, first, third)


def test_a_failure_on_one_node_restarts_all_nodes_and_is_charged_once(job: Job) -> None:
    agents = [
        job.node("--max-restarts=3", nnodes="2", env={"TRAIN_FAULT": "raise:1:5:0", "TRAIN_STEPS": "20"})
        for _ in range(2)
    ]
    assert [a.wait() for a in agents] == [0, 0]
    assert {h["restart"] for h in job.worker_events(event="done")} == {1}


def test_every_node_prints_the_same_root_cause(job: Job) -> None:
    agents = [job.node(nnodes="2", env={"TRAIN_FAULT": "segv:1:5"}) for _ in range(2)]
    assert [a.wait() for a in agents] == [1, 1]
    for agent in agents:
        assert "root cause: rank 1" in agent.err
        assert "SIGSEGV" in agent.err


def test_a_node_that_finishes_early_waits_for_the_others(job: Job) -> None:
    script = SCRIPTS / "uneven.py"
    agents = [job.node(nnodes="2", script=script) for _ in range(2)]
    job.wait_for(event="early")
    done = [a for a in agents if a.process.poll() is not None]
    assert not done
    (job.folder / "go").touch()
    assert [a.wait() for a in agents] == [0, 0]


@pytest.mark.long
def test_an_agent_suspended_past_its_lease_is_lost_and_joins_again(job: Job) -> None:
    first, second = two_nodes(job, "--rdzv-conf=lease=1", nnodes="1:2")
    before = job.worker_events()[-1]["t"]
    second.signal(signal.SIGSTOP)
    job.steps(1, after=before)
    assert "silent for" in first.err
    second.signal(signal.SIGCONT)
    step = job.steps(2, after=job.worker_events()[-1]["t"])
    assert step["restart"] == 0
    finish(job, first, second)
    of_the_job = _numbers_of_events(job, "job-events.jsonl", second)
    assert of_the_job == _numbers_of_events(job, "events.jsonl", second)[: len(of_the_job)]


def _numbers_of_events(job: Job, file: str, agent: Agent) -> list[int]:
    (path,) = job.logs.glob(f"*/{file}")
    events = map(json.loads, path.read_text().splitlines())
    return sorted(event["seq"] for event in events if f"-{agent.pid}-" in event["node"])


@pytest.mark.long
def test_training_continues_while_a_separate_coordinator_is_killed_and_restarted(job: Job) -> None:
    endpoint = f"127.0.0.1:{job.port}"
    argv = ("coordinator", "--rdzv-id=e2e", f"--rdzv-endpoint={endpoint}", "--nnodes=2")
    coordinator = job.ripstop(*argv)
    end = job.folder / "end"
    script, env = SCRIPTS / "standby.py", {"STANDBY_END": str(end)}
    agents = [job.node("--rdzv-conf=is_host=0", nnodes="2", script=script, env=env) for _ in range(2)]
    job.steps(2)
    pids = {h["pid"] for h in job.worker_events()}
    coordinator.signal(signal.SIGKILL)
    coordinator.wait()
    for agent in agents:
        agent.wait_for_log("coordinator lost")
    job.steps(2, after=job.worker_events()[-1]["t"])
    again = job.ripstop(*argv)
    again.wait_for_log("continues: all 2 nodes have rejoined")
    end.touch()
    assert [a.wait() for a in agents] == [0, 0]
    assert again.wait() == 0
    assert {h["pid"] for h in job.worker_events()} == pids, "a worker was restarted"


def test_the_agent_that_hosts_the_coordinator_can_be_killed_and_restarted(job: Job) -> None:
    first, second = two_nodes(job, nnodes="2")
    first.signal(signal.SIGKILL)
    first.wait()
    second.wait_for_log("coordinator lost")
    before = time.time()
    third = job.node(nnodes="2")
    job.steps(2, after=before)
    finish(job, third, second)


def test_an_agent_with_a_wrong_secret_is_rejected_with_exit_2_and_changes_nothing(job: Job) -> None:
    first = job.node(nnodes="1:2", env={"RIPSTOP_TOKEN": "right"})
    job.steps(1)
    stranger = job.node(nnodes="1:2", env={"RIPSTOP_TOKEN": "wrong"})
    assert stranger.wait() == 2
    assert "RIPSTOP_TOKEN" in stranger.err
    job.steps(1, after=job.worker_events()[-1]["t"])
    assert "round=2" not in first.err
    finish(job, first)


@pytest.mark.long
def test_an_agent_with_another_node_range_is_rejected_with_exit_2(job: Job) -> None:
    first = job.node(nnodes="1:2")
    job.steps(1)
    other = job.node(nnodes="1:4")
    assert other.wait() == 2
    assert "--nnodes=1:2" in other.err
    finish(job, first)


def test_an_agent_of_another_job_is_rejected_with_exit_2(job: Job) -> None:
    first = job.node(nnodes="1:2")
    job.steps(1)
    other = job.run(
        "--nnodes=1:2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{job.port}",
        "--rdzv-id=other",
        str(SCRIPTS / "train.py"),
    )
    assert other.wait() == 2
    assert "is the coordinator of another job, not of 'other'; " in other.err
    assert "e2e" not in other.err  # a stranger does not learn the run id
    finish(job, first)


def test_an_endpoint_that_refuses_connections_is_named_in_the_error(job: Job) -> None:
    agent = job.node("--rdzv-conf=is_host=0,join_timeout=2", nnodes="2")
    assert agent.wait() == 1
    assert f"127.0.0.1:{job.port}" in agent.err
    assert "refused" in agent.err.lower()


def test_garbage_on_the_port_does_not_disturb_the_job(job: Job) -> None:
    first, second = two_nodes(job, nnodes="1:2")
    rubbish = [
        b"\x00" * 4096,
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /agent HTTP/9.9\r\nHost: x\r\n\r\n",
        b"A" * 70000 + b"\r\n",
        b"{}",
    ]
    open_sockets = []
    for data in rubbish * 5:
        s = socket.create_connection(("127.0.0.1", job.port))
        open_sockets.append(s)
        with suppress(OSError):
            s.sendall(data)
    job.steps(2, after=job.worker_events()[-1]["t"])
    for s in open_sockets:
        s.close()
    assert {h["pid"] for h in job.worker_events(event="start", world=2)} == {
        h["pid"] for h in job.worker_events(event="step", world=2)
    }
    finish(job, first, second)


@pytest.mark.long
def test_static_nodes_get_their_configured_ranks(job: Job) -> None:
    flags = ("--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={job.port}")
    agents = [
        job.run(*flags, f"--node-rank={rank}", str(SCRIPTS / "train.py"), env={"TRAIN_STEPS": "5"}) for rank in (1, 0)
    ]
    assert [a.wait() for a in agents] == [0, 0]
    assert "ranks=1-1" in agents[0].err
    assert "ranks=0-0" in agents[1].err


def test_nodes_may_have_different_numbers_of_workers_and_roles(job: Job) -> None:
    common = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{job.port}", "--rdzv-id=e2e", "-r", "3")
    script = str(SCRIPTS / "environment.py")
    big = job.run(*common, "--nproc-per-node=2", "--role=a", script)
    small = job.run(*common, "--nproc-per-node=1", "--role=b", script)
    assert [big.wait(), small.wait()] == [0, 0]
    seen = [json.loads(p.read_text())["env"] for p in job.logs.glob("e2e/round_1/*/stdout.log")]
    assert sorted(e["RANK"] for e in seen) == ["0", "1", "2"]
    assert {e["WORLD_SIZE"] for e in seen} == {"3"}
    assert sorted((e["ROLE_NAME"], e["ROLE_RANK"], e["ROLE_WORLD_SIZE"]) for e in seen) == [
        ("a", "0", "2"),
        ("a", "1", "2"),
        ("b", "0", "1"),
    ]


@pytest.mark.long
def test_a_job_whose_coordinators_node_has_left_succeeds(job: Job) -> None:
    host = job.node(nnodes="1:2", script=SCRIPTS / "graceful.py")
    host.wait_for_log("round=1 ranks=0-0")
    other = job.node(nnodes="1:2", script=SCRIPTS / "uneven.py")
    other.wait_for_log("ranks=1-1 world=2")
    host.signal(signal.SIGTERM)
    assert host.wait() == 143
    other.wait_for_log("ranks=0-0 world=1")
    assert other.wait() == 0
