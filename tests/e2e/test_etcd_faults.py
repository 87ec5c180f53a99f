"""Faults in a cluster of three etcd members and a job of three nodes: training continues, no restart is charged.

These tests record the pauses in docs/etcd.md: `pytest -m '' --junitxml=FILE` on this file.
"""

import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.e2e.etcd import Member, cluster, endpoints, needs_etcd
from tests.e2e.harness import Agent, Job, wait_until
from tests.e2e.test_etcd import host, kill, node, without
from tests.e2e.test_nodes import finish

pytestmark = [needs_etcd, pytest.mark.long]

Record = Callable[[str, object], None]

DEFAULTS = "--rdzv-conf=lease=3"
MAX_PAUSE_S = 20.0  # twice the pause on an idle machine


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, TRAIN_STEPS="100000", RIPSTOP_TOKEN="s3cret") as job:
        yield job


@pytest.fixture
def members(tmp_path: Path) -> Iterator[list[Member]]:
    with cluster(3, tmp_path) as members:
        yield members


def start_three_nodes(job: Job, members: list[Member], nnodes: str) -> list[Agent]:
    """Nodes that train together; the first hosts the coordinator and rank 0."""
    agents: list[Agent] = []
    for _ in range(3):
        agents.append(node(job, endpoints(members), DEFAULTS, nnodes=nnodes))
        host(agents[:1])
    job.steps(3)
    agents[0].wait_for_log("ranks=0-0 world=3")
    return agents


def leader(members: list[Member]) -> Member:
    return wait_until(lambda: next((member for member in members if member.leads), None))


def others(members: list[Member], one: Member) -> list[Member]:
    return [member for member in members if member is not one]


def longest_pause(job: Job, since: float) -> float:
    """The longest time without a step of rank 0, in seconds."""
    times = [since, *(h["t"] for h in job.worker_events(event="step", rank=0) if h["t"] > since)]
    return float(max(later - earlier for earlier, later in pairwise(times)))


def a_follower_dies(members: list[Member]) -> None:
    others(members, leader(members))[0].kill()


def the_leader_dies(members: list[Member]) -> None:
    leader(members).kill()


def the_leader_is_the_first_endpoint_and_freezes(members: list[Member]) -> None:
    members[0].lead(members)
    members[0].signal(signal.SIGSTOP)


@pytest.mark.parametrize("fault", [a_follower_dies, the_leader_dies, the_leader_is_the_first_endpoint_and_freezes])
def test_training_continues_when_one_member_of_three_is_lost(
    fault: Callable[[list[Member]], None], job: Job, members: list[Member], record_property: Record
) -> None:
    agents = start_three_nodes(job, members, "3")
    began = time.time()
    fault(members)
    job.steps(3, after=began + 8)  # longer than any lease
    record_property("pause", longest_pause(job, began))
    assert longest_pause(job, began) < 2
    assert len(job.worker_events(event="start")) == 3
    assert not any("steps down" in agent.err for agent in agents)
    finish(job, *agents)


@pytest.mark.parametrize("signum", [signal.SIGSTOP, signal.SIGKILL], ids=["frozen", "dead"])
def test_training_continues_when_two_of_three_members_are_lost_and_return(
    signum: int, job: Job, members: list[Member], record_property: Record
) -> None:
    agents = start_three_nodes(job, members, "2:4")
    lost = members[:2]
    began = time.time()
    for member in lost:
        member.signal(signum)
    agents[0].wait_for_log("steps down: its lease was not renewed in time")
    newcomer = node(job, endpoints(members), DEFAULTS, nnodes="2:4")
    newcomer.wait_for_log(f"etcd cannot be reached, trying again: .*{members[2].endpoint} without a leader; check")
    job.steps(3, after=time.time())
    record_property("pause", longest_pause(job, began))
    assert longest_pause(job, began) < 2
    assert len(job.worker_events(event="start")) == 3
    for member in lost:
        member.resume()
    step = job.steps(4, after=began)
    assert step["restart"] == 0
    finish(job, *agents, newcomer)


@pytest.mark.parametrize("with_etcds_leader", [False, True], ids=["alone", "with etcd's leader"])
def test_training_continues_when_the_node_of_the_coordinator_and_rank_0_dies(
    with_etcds_leader: bool, job: Job, members: list[Member], record_property: Record
) -> None:
    agents = start_three_nodes(job, members, "2:3")
    began = time.time()
    last = job.worker_events(event="step")[-1]["step"]
    if with_etcds_leader:
        leader(members).kill()
    kill(agents[0])
    step = job.steps(2, after=began)
    assert step["restart"] == 0 and step["step"] >= last, "no restart is charged, no step is lost"
    record_property("pause", longest_pause(job, began))
    assert longest_pause(job, began) < MAX_PAUSE_S
    finish(job, *agents[1:])


def test_training_continues_when_the_node_of_rank_0_dies(
    job: Job, members: list[Member], record_property: Record
) -> None:
    agents = start_three_nodes(job, members, "1:3")
    kill(agents[0])
    job.steps(2)
    left = agents[1:]
    coordinators = host(left)
    rank_0 = next(agent for agent in left if "ranks=0-0 world=2" in agent.err)
    if rank_0 is coordinators:
        coordinators.signal(signal.SIGSTOP)  # until the other is elected
        (other,) = without(left, coordinators)
        other.wait_for_log("elected: ")
        coordinators.signal(signal.SIGCONT)
        job.steps(2, after=time.time())
    began = time.time()
    kill(rank_0)
    step = job.steps(1, after=began)
    assert step["restart"] == 0
    record_property("pause", longest_pause(job, began))
    finish(job, *without(left, rank_0))
