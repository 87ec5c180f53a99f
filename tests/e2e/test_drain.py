"""Nodes leave with notice: the others continue from a commit of all ranks, and repeat no step."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest

from tests.e2e.harness import SCRIPTS, Agent, Job, wait_until
from tests.e2e.test_operator_commands import output_of, status
from tests.e2e.test_stragglers import job_events

DRAIN = SCRIPTS / "drain.py"
ELASTIC = SCRIPTS / "drain_elastic.py"
FULL = "--rdzv-conf=last_call_timeout=120"  # the first round has all nodes


class Worker(NamedTuple):
    """One worker of a rank: where it began, and its last step."""

    world: int
    restored: int
    last: int


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    env = {"STEPS_LOG": str(tmp_path / "steps"), "RIPSTOP_TOKEN": "secret"}
    with Job(tmp_path, XDG_RUNTIME_DIR=str(tmp_path), TMPDIR=str(tmp_path), **env) as job:
        yield job


def workers_of(job: Job, rank: int = 0) -> list[Worker]:
    found: dict[str, Worker] = {}
    path = job.folder / f"steps.{rank}"
    for line in path.read_text().rpartition("\n")[0].splitlines() if path.exists() else ():
        pid, world, *rest = line.split()
        step = int(rest[-1])
        began = found[pid].restored if pid in found else step
        found[pid] = Worker(int(world), began, step)
    return list(found.values())


def until_world(job: Job, world: int, steps: int = 5) -> Worker:
    """Wait until the newest worker of rank 0 is in a round of this size, and has made some steps."""

    def found() -> Worker | None:
        workers = workers_of(job)
        is_there = bool(workers) and workers[-1].world == world and workers[-1].last >= workers[-1].restored + steps
        return workers[-1] if is_there else None

    return wait_until(found, why=job.describe)


def start(job: Job, count: int, *flags: str, nnodes: str = "2:3") -> list[Agent]:
    first = job.node(*flags, nnodes=nnodes, script=DRAIN)
    first.wait_for_log("joined from")
    return [first, *(job.node(*flags, nnodes=nnodes, script=DRAIN) for _ in range(count - 1))]


def lost_steps(job: Job) -> list[int]:
    """The steps of rank 0 that were repeated after each departure."""
    workers = workers_of(job)
    return [before.last - after.restored for before, after in pairwise(workers) if before.world > after.world]


def leave_and_return(job: Job, leaver: Agent, on_left: Callable[[], None]) -> Agent:
    leaver.signal(signal.SIGTERM)
    until_world(job, 2, steps=1)
    on_left()
    assert leaver.wait() == 128 + signal.SIGTERM
    until_world(job, 2)
    new = job.node(nnodes="2:3", script=DRAIN)
    until_world(job, 3)
    return new


def test_a_node_that_gets_sigterm_leaves_after_a_commit_of_all_ranks(job: Job) -> None:
    agents = start(job, 3)
    until_world(job, 3)
    agents[2].signal(signal.SIGTERM)
    assert agents[2].wait() == 128 + signal.SIGTERM
    until_world(job, 2)
    (ended,) = job_events(job, "round_ended")
    (lost,) = lost_steps(job)
    assert (lost, ended["cause"]) == (0, "node_left"), job.describe()
    assert f"all ranks have commit {workers_of(job)[-2].last}" in ended["why"]
    assert job_events(job, "budget_charged") == []


def saved_in(job: Job) -> tuple[str, ...]:
    """Flags: the only checkpoint is the final commit."""
    return f"--checkpoint-dir={job.folder / 'checkpoints'}", "--checkpoint-interval=1h"


def test_all_states_of_the_only_node_are_on_disk_after_sigterm_and_a_new_job_repeats_no_step(job: Job) -> None:
    """The script checks that both States are of the same step."""
    job.env |= {"EMA": "1", "EVERY": "1000000"}
    command = "--standalone", "--nproc-per-node=2", *saved_in(job), str(DRAIN)
    agent = job.run(*command)
    until_world(job, 2)
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 128 + signal.SIGTERM, agent.err
    before = workers_of(job)[-1]
    assert re.search(r"state 'ema': commit \d+ is saved", agent.err), agent.err
    new = job.run(*command)
    wait_until(lambda: len(workers_of(job)) == 2 or None, why=job.describe)
    assert workers_of(job)[-1].restored == before.last > 0
    new.signal(signal.SIGINT)  # no notice
    assert new.wait() == 128 + signal.SIGINT


@pytest.mark.parametrize("nnodes", ["2", pytest.param("1:2", marks=pytest.mark.long)])
def test_when_all_nodes_get_sigterm_their_final_commit_is_on_disk(job: Job, nnodes: str) -> None:
    """The state differs between the ranks, so that every node writes its part."""
    job.env |= {"OWN": "1"}
    agents = start(job, 2, FULL, *saved_in(job), nnodes=nnodes)
    until_world(job, 2)
    for agent in agents:
        agent.signal(signal.SIGTERM)
    assert [agent.wait() for agent in agents] == 2 * [128 + signal.SIGTERM]
    before = workers_of(job)[-1]
    assert before.world == 2 and job_events(job, "budget_charged") == job_events(job, "worker_failed") == []
    start(job, 2, *saved_in(job), nnodes="2")
    for rank in range(2):
        wait_until(lambda rank=rank: len(workers_of(job, rank)) == 2 or None, why=job.describe)  # type: ignore[misc]
        assert workers_of(job, rank)[-1].restored == before.last > 0, job.describe()


def test_a_job_that_waits_for_a_replacement_keeps_the_final_commit_in_memory(job: Job) -> None:
    """The first node also keeps the part of the state that only the other rank has."""
    job.env |= {"OWN": "1", "EVERY": "1000000"}
    first, second = start(job, 2, nnodes="2")
    until_world(job, 2)
    second.signal(signal.SIGTERM)
    assert second.wait() == 128 + signal.SIGTERM
    first.wait_for_log("1 of 2 nodes are ready, waiting for more")
    before = [workers_of(job, rank)[-1] for rank in range(2)]
    job.node(nnodes="2", script=DRAIN)
    for rank in range(2):
        wait_until(lambda rank=rank: len(workers_of(job, rank)) == 2 or None, why=job.describe)  # type: ignore[misc]
        assert workers_of(job, rank)[-1].restored == before[rank].last > 0, job.describe()
    assert job_events(job, "budget_charged") == job_events(job, "worker_failed") == []


def test_without_a_directory_the_only_node_leaves_at_once_and_says_why(job: Job) -> None:
    agent = job.run("--standalone", str(DRAIN))
    until_world(job, 1)
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 128 + signal.SIGTERM
    assert len(re.findall("no final commit: .* without --checkpoint-dir it cannot be kept", agent.err)) == 1, agent.err


def test_a_worker_goes_on_in_place_after_the_final_commit_and_repeats_no_step(job: Job) -> None:
    """All workers wait after the final commit; the next round wakes the survivor, in the same process."""
    flags = "--inprocess-timeout=60", "--drain-timeout=120", FULL  # a busy machine is slow

    def lines() -> list[list[str]]:
        path = job.folder / "steps.0"
        return [line.split() for line in path.read_text().rpartition("\n")[0].splitlines()] if path.exists() else []

    def until_steps(world: str, count: int) -> None:
        wait_until(lambda: sum(line[1] == world for line in lines()) > count or None, why=job.describe)

    first = job.node(*flags, nnodes="1:2", script=ELASTIC)
    first.wait_for_log("joined from")
    second = job.node(*flags, nnodes="1:2", script=ELASTIC)
    until_steps("2", 5)
    second.signal(signal.SIGTERM)
    assert second.wait() == 128 + signal.SIGTERM
    before = len(lines())
    until_steps("1", sum(line[1] == "1" for line in lines()) + 5)
    assert len(lines()) > before and len({pid for pid, *_ in lines()}) == 1, job.describe()
    assert "workers kept in place in the last recovery: 1" in " ".join(output_of(job, "status").split())
    steps = [int(rest[-1]) for _, _, *rest in lines() if "restored" not in rest]
    assert steps == [*range(1, len(steps) + 1)]
    ended = job_events(job, "round_ended")[-1]
    assert ended["cause"] == "node_left" and "all ranks have commit" in ended["why"]
    assert job_events(job, "budget_charged") == job_events(job, "worker_failed") == []


class MetadataServer(BaseHTTPRequestHandler):
    """Answers 404 until there is a notice."""

    answers: ClassVar[list[int]] = []
    has_notice = False

    def do_GET(self) -> None:
        self.answers.append(200 if self.has_notice else 404)
        self.send_response(self.answers[-1])
        self.end_headers()
        self.wfile.write(b"TRUE")

    def log_message(self, *_: object) -> None:
        pass


def test_nodes_leave_after_a_commit_when_a_file_appears_or_a_url_answers(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = job.folder / "preempted"
    monkeypatch.setattr(MetadataServer, "answers", [])
    with HTTPServer(("127.0.0.1", 0), MetadataServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/preempted"
        (first,) = start(job, 1, FULL, nnodes="1:3")
        by_file, by_url = (
            job.node(f"--preemption-notice={source}", nnodes="1:3", script=DRAIN) for source in (file, url)
        )
        until_world(job, 3)
        file.touch()
        assert by_file.wait() == 128 + signal.SIGTERM
        until_world(job, 2)
        assert set(MetadataServer.answers) == {404}
        monkeypatch.setattr(MetadataServer, "has_notice", True)
        assert by_url.wait() == 128 + signal.SIGTERM
        until_world(job, 1)
        server.shutdown()
    assert MetadataServer.answers.count(200) == 1
    assert lost_steps(job) == [0, 0] and job_events(job, "budget_charged") == [], job.describe()
    first.wait_for_log(f"leaves: preemption notice in {re.escape(url)}; all ranks have commit")


def test_nothing_is_charged_if_the_survivors_have_no_commit_to_restore(job: Job) -> None:
    """The leaving node has the only copy of its state: new workers start from the beginning."""
    job.env |= {"OWN": "1"}
    flags = "--inprocess-timeout=60", "--replicate=off", FULL
    first = job.node(*flags, nnodes="1:2", script=ELASTIC)
    first.wait_for_log("joined from")
    second = job.node(*flags, nnodes="1:2", script=ELASTIC)
    until_world(job, 2)
    second.signal(signal.SIGTERM)
    assert second.wait() == 128 + signal.SIGTERM
    until_world(job, 1)
    assert job_events(job, "round_ended")[-1]["cause"] == "state_lost", job.describe()
    assert job_events(job, "budget_charged") == job_events(job, "worker_failed") == [], job.describe()
    before, after = workers_of(job)
    assert after.restored == 0 < before.last


@pytest.mark.long
def test_ranks_that_commit_rarely_make_one_more_commit(job: Job) -> None:
    job.env |= {"EVERY": "1000000"}
    agents = start(job, 3)
    until_world(job, 3)
    agents[2].signal(signal.SIGTERM)
    agents[2].wait()
    assert until_world(job, 2).restored >= 5 and lost_steps(job) == [0]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_step_is_lost_in_many_departures(job: Job) -> None:
    """Twelve, or $DEPARTURES; prints how long each took from the signal to the next step of the others."""
    count = int(os.environ.get("DEPARTURES", "12"))
    leaver = start(job, 3)[2]
    until_world(job, 3)
    for number in range(1, count + 1):
        began = time.monotonic()
        leaver = leave_and_return(job, leaver, lambda: print(f"{number} {time.monotonic() - began:.2f} s"))  # noqa: B023
    assert lost_steps(job) == [0] * count
    assert job_events(job, "budget_charged") == job_events(job, "worker_failed") == []


@pytest.mark.long
def test_the_state_of_a_drained_node_goes_to_the_spare(job: Job) -> None:
    job.env |= {"OWN": "1"}
    start(job, 3, "--rdzv-conf=target=2")
    until_world(job, 2)
    wait_until(lambda: any(n["state"] == "spare" for n in status(job)["nodes"]) or None, why=job.describe)
    name = next(n["name"] for n in status(job)["nodes"] if n["first_rank"] == 1)
    output_of(job, "drain", name)
    wait_until(lambda: len(workers_of(job)) == 2 or None, why=job.describe)
    until_world(job, 2)
    before, after = workers_of(job)
    assert before.last == after.restored > 0
    assert workers_of(job, rank=1)[-1].restored == after.restored
    assert job_events(job, "worker_failed") == []


@pytest.mark.long
def test_a_deadline_that_is_too_short_falls_back_to_the_newest_commit_and_says_so(job: Job) -> None:
    job.env |= {"STEP_S": "1"}
    agents = start(job, 3, "--drain-timeout=0.3")
    until_world(job, 3, steps=5)  # the state is known to be equal on all ranks
    agents[2].signal(signal.SIGTERM)
    agents[2].wait_for_log(r"W no common commit of all ranks within 0\.3 s: leaving without it")
    assert agents[2].wait() == 128 + signal.SIGTERM
    assert until_world(job, 2, steps=0).restored >= 1
