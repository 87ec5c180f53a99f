"""Standbys in real jobs: they become the workers of every kind of new round, and are never anything else."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.e2e.harness import SCRIPTS, Agent, Job, wait_until
from tests.e2e.test_soak import AgentResources

SCRIPT = SCRIPTS / "standby.py"
WARM_UP = "--standby-warmup=standby_warmup:prepare"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with (
        TemporaryDirectory() as sockets,  # a socket's path is short
        Job(tmp_path, STANDBY_END=str(tmp_path / "end"), XDG_RUNTIME_DIR=sockets, TMPDIR=sockets) as job,
    ):
        yield job


def run(job: Job, *flags: str, workers: int = 2, env: dict[str, str] | None = None) -> Agent:
    agent = job.run("--standalone", f"--nproc-per-node={workers}", "--max-restarts=9", *flags, str(SCRIPT), env=env)
    job.steps(workers)
    return agent


def finish(job: Job, *agents: Agent) -> None:
    Path(job.env["STANDBY_END"]).touch()
    assert [agent.wait() for agent in agents] == [0] * len(agents), job.describe()


def events(job: Job, kind: str) -> list[dict[str, Any]]:
    """What all agents have recorded so far, in the order of time."""
    lines = [line for path in job.logs.rglob("events.jsonl") for line in path.read_text().splitlines() if line]
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return sorted((event for event in found if event["kind"] == kind), key=lambda event: event["at"])


def wait_ready(job: Job, times: int = 1) -> list[int]:
    """Wait until standbys were ready so often; the pids of those that wait now."""
    wait_until(lambda: True if len(events(job, "standbys_ready")) >= times else None, why=job.describe)
    return standbys()


def standbys(parents: set[int] | None = None) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        state, parent = rest.split()[:2]
        if name == "ripstop-standby" and state != "Z" and (parents is None or int(parent) in parents):
            found.append(int(stat.parent.name))
    return sorted(found)


def of(agent: Agent) -> list[int]:
    return standbys({agent.pid})


def status(job: Job) -> dict[str, Any]:
    asked = job.ripstop("status", "--json")
    assert asked.wait() == 0, asked.err
    found: dict[str, Any] = json.loads(asked.out)
    return found


def metrics_of(job: Job) -> str:
    asked = job.ripstop("metrics")
    assert asked.wait() == 0, asked.err
    return asked.out


def test_after_a_crash_the_standbys_are_the_workers_and_new_ones_are_made(job: Job) -> None:
    agent = run(job, "--standby=auto", WARM_UP)
    for restart in range(1, 4):
        wait_ready(job, restart)
        waiting = of(agent)
        assert len(waiting) == 2
        victim = job.wait_for(event="step", rank=restart % 2, restart=restart - 1)["pid"]
        os.kill(victim, signal.SIGKILL)
        both = [job.wait_for(event="step", rank=rank, restart=restart) for rank in (0, 1)]
        assert sorted(event["pid"] for event in both) == waiting
        assert [event["warmed"] for event in both] == [[0, "0", None], [1, "1", None]]
    finish(job, agent)
    assert [event["standbys"] for event in events(job, "workers_started")] == [0, 2, 2, 2]


def test_a_standby_is_no_rank_in_the_status_and_its_memory_is_shown(job: Job) -> None:
    agent = run(job, "--standby=1")
    wait_ready(job)
    (node,) = wait_until(lambda: nodes if (nodes := status(job)["nodes"])[0]["standbys"] else None)
    assert (node["slots"], len(node["pids"])) == (2, 2) and not set(node["pids"]) & set(of(agent))
    (standby,) = node["standbys"]
    assert standby["local_rank"] == 0 and standby["memory"] > 100_000 and standby["gpu_memory"] == 0
    shown = job.ripstop("status")
    assert shown.wait() == 0 and "STANDBYS" in shown.out and "1 (" in shown.out
    metrics = wait_until(lambda: page if "ripstop_standby_memory_bytes{" in (page := metrics_of(job)) else None)
    labels = f'local_rank="0",node="{node["name"]}",until="script"'
    assert f"ripstop_standby_memory_bytes{{{labels}}}" in metrics
    assert metrics.count("ripstop_worker_memory_bytes{") == 2
    finish(job, agent)


def test_a_killed_agent_leaves_no_standby(job: Job) -> None:
    agent = run(job, "--standby=auto")
    wait_ready(job)
    waiting = of(agent)
    agent.process.kill()
    agent.wait()
    wait_until(lambda: True if not set(standbys()) & set(waiting) else None)
    wait_until(lambda: True if not job.leftovers() else None)


def test_a_stopped_job_leaves_no_standby(job: Job) -> None:
    agent = run(job, "--standby=auto")
    wait_ready(job)
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 143
    assert job.leftovers() == []


def test_with_a_virtual_local_rank_a_standby_sees_only_its_gpu(job: Job) -> None:
    agent = run(job, "--standby=auto", WARM_UP, "--virtual-local-rank", env={"CUDA_VISIBLE_DEVICES": "4,6"})
    wait_ready(job)
    os.kill(job.wait_for(event="step", rank=0)["pid"], signal.SIGKILL)
    both = [job.wait_for(event="step", rank=rank, restart=1) for rank in (0, 1)]
    assert [event["warmed"] for event in both] == [[0, "0", "4"], [1, "0", "6"]]
    assert [(event["local_rank"], event["gpu"]) for event in both] == [("0", "4"), ("0", "6")]
    finish(job, agent)


@pytest.mark.long
def test_after_a_hang_the_standbys_are_the_workers(job: Job) -> None:
    agent = run(job, "--standby=auto", WARM_UP, "--hang-timeout=2")
    wait_ready(job)
    waiting = of(agent)
    os.kill(job.wait_for(event="step", rank=1)["pid"], signal.SIGSTOP)
    both = [job.wait_for(event="step", rank=rank, restart=1) for rank in (0, 1)]
    assert sorted(event["pid"] for event in both) == waiting
    finish(job, agent)


@pytest.mark.long
def test_nodes_that_join_and_leave_use_standbys(job: Job) -> None:
    """A resize: the first node trains alone, with a newcomer, and alone again after a drain."""
    first = job.node("--standby=auto", WARM_UP, nnodes="1:2", script=SCRIPT)
    job.steps(1)
    wait_ready(job)
    alone = of(first)
    second = job.node("--standby=auto", WARM_UP, nnodes="1:2", script=SCRIPT)
    job.steps(2)
    assert {event["pid"] for event in job.worker_events(world=2, rank=0)} == set(alone)
    wait_ready(job, 3)  # the first's, again; the second's
    waiting = of(first)
    after = job.worker_events(world=2)[-1]["t"]
    name = next(node["name"] for node in status(job)["nodes"] if str(second.pid) in node["name"])
    assert job.ripstop("drain", name).wait() == 0
    assert second.wait() == 0
    assert job.wait_for(event="step", world=1, after=after)["pid"] in waiting
    finish(job, first)


def test_a_waiting_standby_that_dies_is_replaced_in_the_next_round(job: Job) -> None:
    agent = run(job, "--standby=1", WARM_UP)
    wait_ready(job)
    (waiting,) = of(agent)
    os.kill(waiting, signal.SIGKILL)
    agent.wait_for_log("standby of local_rank=0: it was killed by SIGKILL .*; workers start without it")
    wait_until(lambda: status(job)["nodes"][0]["standbys"] == [] or None, why=job.describe)
    os.kill(job.wait_for(event="step", rank=0)["pid"], signal.SIGKILL)
    assert job.wait_for(event="step", rank=0, restart=1)["warmed"] is None
    wait_ready(job, 2)
    assert len(of(agent)) == 1
    finish(job, agent)


@pytest.mark.parametrize(
    "times", [pytest.param(5), pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
def test_kill_after_kill_every_worker_was_a_standby_and_nothing_piles_up(job: Job, times: int) -> None:
    agent = job.run("--standalone", "--nproc-per-node=2", f"--max-restarts={times}", "--standby=auto", str(SCRIPT))
    job.steps(2)
    found: dict[int, tuple[AgentResources, int]] = {}
    for restart in range(times + 1):
        wait_ready(job, restart + 1)
        used = found[1][0].wait_for_no_more(agent.pid) if restart == times else AgentResources.by(agent.pid)
        found[restart] = used, len(of(agent))
        if restart < times:
            os.kill(job.wait_for(event="step", rank=restart % 2, restart=restart)["pid"], signal.SIGKILL)
    finish(job, agent)
    assert [event["standbys"] for event in events(job, "workers_started")] == [0, *[2] * times]
    (before, waiting), (after, still) = found[1], found[times]
    assert waiting == still == 2
    assert after.memory - before.memory < 8 << 20


def test_a_warm_up_that_fails_is_logged_once_and_the_job_recovers(job: Job) -> None:
    agent = run(job, "--standby=auto", "--standby-warmup=standby_warmup:missing")
    for restart in range(1, 5):
        job.wait_for(event="step", rank=0, restart=restart - 1)
        failures = min(2 * restart, 6)
        wait_until(lambda: True if len(events(job, "standby_discarded")) == failures else None, why=job.describe)  # noqa: B023
        os.kill(job.wait_for(event="step", rank=0, restart=restart - 1)["pid"], signal.SIGKILL)
    job.wait_for(event="step", rank=1, restart=4)
    finish(job, agent)
    lines = [line for line in agent.err.splitlines() if "AttributeError" in line]
    assert [line.rpartition("; ")[2] for line in lines] == ["workers start without it", "ripstop does not try again"]


def test_a_warm_up_module_that_does_not_exist_is_rejected(job: Job) -> None:
    agent = job.run("--standby=auto", "--standby-warmup=absent_module:prepare", str(SCRIPT))
    assert agent.wait() == 2
    expected = f"there is no module 'absent_module' in {SCRIPTS} or on PYTHONPATH; correct the name"
    assert agent.err == f"ripstop run: error: --standby-warmup=absent_module:prepare: {expected}\n"


@pytest.mark.long
def test_with_an_unfit_zygote_there_are_no_standbys_and_the_log_says_so(job: Job, tmp_path: Path) -> None:
    (tmp_path / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()"
    )
    env = {"PYTHONPATH": str(tmp_path)}
    agent = job.run("--standalone", "--standby=auto", "--preload=threads", str(SCRIPT), env=env)
    agent.wait_for_log("--standby has no effect: workers start with exec, because what was imported left 1 thread")
    job.wait_for(event="step")
    finish(job, agent)


@pytest.mark.long
def test_a_process_group_that_the_warm_up_left_is_destroyed(job: Job, tmp_path: Path) -> None:
    (tmp_path / "leaves_group.py").write_text(
        "import torch.distributed as dist\n"
        "def prepare(rank):\n"
        "    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
    )
    job.env |= {"PYTHONPATH": str(tmp_path), "TRAIN_STEPS": "100000"}
    flags = ("--standby=auto", "--standby-warmup=leaves_group:prepare")
    agent = job.run("--standalone", "--nproc-per-node=2", "--max-restarts=1", *flags, str(SCRIPTS / "train.py"))
    job.steps(2)
    wait_ready(job)
    waiting = of(agent)
    os.kill(job.wait_for(event="step", rank=1)["pid"], signal.SIGKILL)
    after = job.wait_for(event="start", rank=1, restart=1)["t"]
    job.steps(2, after=after)
    assert sorted(event["pid"] for event in job.worker_events(event="start", restart=1)) == waiting
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 143
