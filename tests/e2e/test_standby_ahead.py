"""Standbys that run the script up to its function with `train.elastic`, in real jobs."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.e2e.harness import SCRIPTS, Agent, Job, alive, wait_until
from tests.e2e.test_elastic import tree
from tests.e2e.test_standby import events, metrics_of, of, standbys, status

SCRIPT = SCRIPTS / "run_ahead.py"
FLAGS = ("--standby=auto", "--standby-until=elastic", "--inprocess-timeout=60")  # a busy machine is slow


class AheadJob(Job):
    """A job whose ranks wait at step 5 until `release`."""

    hold: Path

    def train(self, *flags: str, **env: str) -> Agent:
        return self.run(
            *("--standalone", "--nproc-per-node=2", "--max-restarts=9", "--redirects=3", *flags, str(SCRIPT)), env=env
        )

    def wait_ready(self, times: int = 1) -> list[int]:
        """Wait until standbys were ready so often; the pids of those that wait now."""
        wait_until(lambda: len(events(self, "standbys_ready")) >= times or None, why=self.describe)
        return of(self.agents[0])

    def kill(self, rank: int, restart: int = 0) -> int:
        """Kill the worker of this rank, in its round; its pid."""
        pid: int = self.wait_for(event="step", rank=rank, restart=restart, step=5 if restart == 0 else 6)["pid"]
        os.kill(pid, signal.SIGKILL)
        return pid

    def release(self) -> None:
        self.hold.unlink()

    def finish(self, *agents: Agent) -> None:
        assert [agent.wait() for agent in agents] == [0] * len(agents), self.describe()

    def starts(self) -> list[str | None]:
        """One item for each process that ran the script from its first line: "1" for a standby."""
        return [event["standby"] for event in self.worker_events(event="start")]

    def losses(self, rank: int) -> dict[int, str]:
        """By step; equal each time, if a step was repeated."""
        found: dict[int, str] = {}
        for event in self.worker_events(event="step", rank=rank):
            assert found.setdefault(event["step"], event["loss"]) == event["loss"], event
        return found


@pytest.fixture
def job(tmp_path: Path) -> Iterator[AheadJob]:
    hold = tmp_path / "hold"
    hold.touch()
    with (
        TemporaryDirectory() as sockets,  # a socket's path is short
        AheadJob(tmp_path, HOLD_STEPS="5,6", HOLD_FILE=str(hold), XDG_RUNTIME_DIR=sockets, TMPDIR=sockets) as job,
    ):
        job.hold = hold
        yield job


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, str]]:
    """The losses of each rank in a run without faults and without standbys."""
    with AheadJob(tmp_path_factory.mktemp("right")) as job:
        job.finish(job.train())
        return [job.losses(rank) for rank in (0, 1)]


def test_the_standby_takes_over_and_the_start_up_of_the_script_is_not_repeated(
    job: AheadJob, right: list[dict[int, str]]
) -> None:
    agent = job.train(*FLAGS)
    waiting = job.wait_ready()
    assert len(waiting) == 2
    commands = [Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0") for pid in waiting]
    assert commands == ["ripstop-standby elastic"] * 2
    shown = job.ripstop("status")
    assert shown.wait() == 0 and "2 elastic (" in shown.out
    assert [each["until"] for each in status(job)["nodes"][0]["standbys"]] == ["elastic"] * 2
    assert 'until="elastic"' in wait_until(lambda: page if "standby_memory" in (page := metrics_of(job)) else None)
    job.kill(rank=1)
    taken = job.wait_for(event="enter", rank=1, restart=1)
    assert taken["pid"] in waiting and taken["standby"] is None and taken["set"] == "yes"
    before = job.wait_for(event="enter", rank=1, restart=0)
    assert (taken["nice"], taken["policy"]) == (before["nice"], before["policy"])
    assert taken["error_file"] == before["error_file"].replace("round_1", "round_2")
    job.release()
    job.finish(agent)
    assert [job.losses(rank) for rank in (0, 1)] == right
    workers = [event for event in job.worker_events(event="start") if event["standby"] is None]
    assert sorted(event["rank"] for event in workers) == [0, 1]
    ahead = job.worker_events(event="start", standby="1")
    assert {event["port"] for event in ahead} == {"0"}
    started = events(job, "workers_started")
    assert [(event["standbys"], event["ahead"]) for event in started] == [(0, 0), (1, 1)]
    (own,) = job.logs.rglob("round_2/1/stdout.log")
    assert own.read_text() == "the function of rank 1\n"
    (shadow,) = job.logs.rglob("round_1/standby_1/output.log")
    assert shadow.read_text() == "the start-up of the script\n"
    assert "the start-up" not in agent.out + agent.err


def test_two_faults_in_a_row_are_both_recovered_by_standbys(job: AheadJob, right: list[dict[int, str]]) -> None:
    agent = job.train(*FLAGS)
    waiting = set(job.wait_ready())
    job.kill(rank=1)
    first = job.wait_for(event="enter", rank=1, restart=1)["pid"]
    waiting |= set(job.wait_ready(2))
    os.kill(first, signal.SIGKILL)
    second = job.wait_for(event="enter", rank=1, restart=2)["pid"]
    assert len({first, second} & waiting) == 2
    job.release()
    job.finish(agent)
    assert [job.losses(rank) for rank in (0, 1)] == right
    assert job.starts().count(None) == 2


def test_if_all_workers_restart_all_of_them_are_standbys(job: AheadJob, right: list[dict[int, str]]) -> None:
    agent = job.train("--standby=2", "--standby-until=elastic", "--inprocess-timeout=0")
    waiting = job.wait_ready()
    job.kill(rank=0)
    taken = [job.wait_for(event="enter", rank=rank, restart=1)["pid"] for rank in (0, 1)]
    assert sorted(taken) == waiting
    job.release()
    job.finish(agent)
    assert [job.losses(rank) for rank in (0, 1)] == right
    assert job.starts().count(None) == 2
    assert [event["ahead"] for event in events(job, "workers_started")] == [0, 2]


def test_its_rank_and_the_number_of_ranks_may_have_changed_since_it_was_made(job: AheadJob) -> None:
    flags = (*FLAGS, "--max-restarts=9", "--rdzv-conf=last_call_timeout=60")
    agents = [job.node(*flags, nnodes="2:3", script=SCRIPT) for _ in range(3)]
    made = {job.wait_for(event="start", standby="1", world=3, rank=rank)["pid"]: rank for rank in range(3)}
    wait_until(lambda: len(events(job, "standbys_ready")) >= 3 or None, why=job.describe)
    workers = {rank: job.wait_for(event="step", world=3, rank=rank, step=5)["pid"] for rank in range(3)}
    nodes = {rank: next(agent for agent in agents if pid in tree(agent.pid)) for rank, pid in workers.items()}
    lost = next(rank for rank in (1, 0) if "joined" not in nodes[rank].err)  # not the coordinator's node
    (shadow,) = of(nodes[2])
    assert made[shadow] == 2
    for pid in tree(nodes[lost].pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    nodes[lost].wait()
    entered = job.wait_for(event="enter", world=2, rank=lost, pid=workers[2])
    os.kill(workers[2], signal.SIGKILL)
    taken = job.wait_for(event="enter", world=2, rank=lost, after=entered["t"])
    assert taken["pid"] == shadow
    job.release()
    left = [agent for agent in agents if agent is not nodes[lost]]
    job.finish(*left)
    assert job.starts().count(None) == 3


BAD = {
    "process group": (
        "dist.init_process_group('gloo')",
        "the script makes a process group before it calls a function with @train.elastic; make it in the function",
    ),
    "device mesh": (
        "from torch.distributed.device_mesh import init_device_mesh; init_device_mesh('cpu', (2,))",
        "the script makes a process group before it calls a function with @train.elastic; make it in the function",
    ),
    "restore": (
        "train.State('early', step=0).restore()",
        "the script calls State.restore() before its function with @train.elastic; call it in the function",
    ),
    "exception": ("raise ValueError('no data')", "the script failed: ValueError: no data"),
    "exit": ("sys.exit(0)", "the script exited with code 0 before it called a function with @train.elastic"),
}


USUAL = ("process group", "restore")


@pytest.mark.parametrize(
    "kind", [*USUAL, *(pytest.param(kind, marks=pytest.mark.long) for kind in BAD if kind not in USUAL)]
)
def test_a_script_that_does_not_reach_its_function_is_reported_and_the_job_recovers(job: AheadJob, kind: str) -> None:
    code, message = BAD[kind]
    agent = job.train(*FLAGS, BEFORE=f"import sys; {code}")
    agent.wait_for_log("standby of local_rank=[01]: ")
    waiting = job.wait_ready()
    lines = [line for line in agent.err.splitlines() if "standby of local_rank" in line]
    assert len(lines) == 1 and message in lines[0]
    assert lines[0].endswith("; ripstop replaces this standby with one that waits before the script")
    job.kill(rank=1)
    assert job.wait_for(event="enter", rank=1, restart=1)["pid"] in waiting
    job.release()
    job.finish(agent)
    assert [(event["standbys"], event["ahead"]) for event in events(job, "workers_started")] == [(0, 0), (1, 0)]


def test_a_killed_agent_leaves_no_standby_and_no_child_of_one(job: AheadJob) -> None:
    agent = job.train(*FLAGS, BEFORE="import subprocess; subprocess.Popen(['sleep', '600'])")
    waiting = job.wait_ready()
    below = [pid for standby in waiting for pid in tree(standby) if pid not in waiting]
    assert len(below) == 2
    agent.process.kill()
    agent.wait()
    wait_until(lambda: not set(standbys()) & set(waiting) or None)
    wait_until(lambda: not any(map(alive, below)) or None)
    wait_until(lambda: not job.leftovers() or None)


def test_a_stopped_job_leaves_no_standby_and_no_child_of_one(job: AheadJob) -> None:
    agent = job.train(*FLAGS, BEFORE="import subprocess; subprocess.Popen(['sleep', '600'], process_group=0)")
    waiting = job.wait_ready()
    below = [pid for standby in waiting for pid in tree(standby) if pid not in waiting]
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 143
    assert len(below) == 2 and not any(map(alive, below))
    assert job.leftovers() == []
