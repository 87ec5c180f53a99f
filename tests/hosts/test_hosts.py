"""Jobs across machines: cables are cut without notice, hosts die, and everybody finds each other again."""

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Agent, Job
from tests.hosts.network import NET, Cluster, Host, hosts, needs_hosts

pytestmark = needs_hosts

LEASE = 2.0  # seconds


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Cluster]:
    with hosts(3, tmp_path) as machines, Job(tmp_path, TRAIN_STEPS="100000") as job:
        yield Cluster(job, machines)


def start(cluster: Cluster, nnodes: str, *machines: Host, **more: Any) -> list[Agent]:
    """The coordinator's node first, so that it is rank 0 and the others have known ranks after it."""
    agents: list[Agent] = []
    for host in machines:
        agents.append(cluster.node(host, nnodes=nnodes, lease=LEASE, **more))
        agents[0].wait_for_log(rf"joined from {host.address} ")
    return agents


def now(cluster: Cluster) -> float:
    """The time of what happened last."""
    return float(cluster.job.worker_events()[-1]["t"])


def finish(*agents: Agent) -> None:
    """End a job that would go on for ever; the coordinator last."""
    for agent in reversed(agents):
        agent.signal(signal.SIGTERM)
    assert [agent.wait() for agent in agents] == [143] * len(agents), "\n---\n".join(agent.err for agent in agents)


def test_hosts_train_together_and_find_their_own_addresses(three: Cluster) -> None:
    agents = [three.node(host, nnodes="3", env={"TRAIN_STEPS": "10"}) for host in three.hosts]
    assert [a.wait() for a in agents] == [0, 0, 0]
    done = three.job.worker_events(event="done", world=3)
    assert {h["host"] for h in done} == {"host1", "host2", "host3"}
    assert {h["rank"] for h in done} == {0, 1, 2}
    (rank_0,) = (h["host"] for h in done if h["rank"] == 0)
    assert {h["master"] for h in done} == {f"{NET}.{rank_0.removeprefix('host')}"}


def test_a_host_that_is_cut_off_is_lost_after_its_lease_and_comes_back_as_a_newcomer(three: Cluster) -> None:
    first, middle, last = three.hosts
    agents = start(three, "2:3", first, middle, last)
    before = three.ranks(3)
    middle.cut()
    cut = now(three)
    without = three.ranks(2, after=cut)
    assert "silent for" in agents[0].err
    agents[1].wait_for_log("coordinator lost: the coordinator sent nothing")
    middle.heal()
    again = three.ranks(3, after=cut)
    assert sorted(before.values()) == [0, 1, 2]
    assert sorted(without.values()) == [0, 1] and "host2" not in without
    assert all(without[host] == rank for host, rank in before.items() if host in without and rank < 2)
    assert again == {**without, "host2": 2}, "who stayed keeps its rank"
    restarts = {h["restart"] for h in three.job.worker_events(event="step") if h["t"] > cut}
    assert restarts == {0}, "the stale round cost a restart"
    steps = [h["world"] for h in three.job.worker_events(event="step") if h["t"] > cut and h["host"] == "host1"]
    worlds = steps[steps.index(2) :]  # a last step of three may have begun before
    assert worlds == sorted(worlds), "the stale round disturbed the one that ran"
    finish(*agents)


def test_a_short_cut_of_the_coordinators_host_goes_unnoticed(three: Cluster) -> None:
    first, second, _ = three.hosts
    agents = [three.node(host, nnodes="2", lease=20.0) for host in (first, second)]
    three.job.steps(2)
    first.cut()
    time.sleep(1.0)  # the length of the cut is what is tested
    last = now(three)
    assert last < time.time() - 0.5, "nothing was cut"
    first.heal()
    three.job.steps(2, after=last)
    assert not any(re.search("lost|silent|reconnect|rejoin|stopping|left", agent.err) for agent in agents)
    assert len(three.job.worker_events(event="start")) == 2
    finish(*agents)


def test_the_others_wait_for_the_coordinators_host_when_it_is_cut_off_for_long(three: Cluster) -> None:
    first, second, third = three.hosts
    agents = start(three, "2:3", first, second, third)
    three.job.steps(3)
    first.cut()
    cut = now(three)
    for agent in agents[1:]:
        agent.wait_for_log("coordinator lost")
    agents[0].wait_for_log("1 of (at least )?2 nodes are ready, waiting for more")
    first.heal()
    step = three.job.steps(3, after=cut)
    assert step["restart"] == 0
    finish(*agents)


def test_in_a_large_job_the_kernel_detects_that_the_coordinators_host_is_cut_off(three: Cluster) -> None:
    """Too few heartbeats are answered for the agents to detect the cut within a few leases."""
    first, second, third = three.hosts
    agents = start(three, "2:1000", first, second, third, last_call=3)
    three.job.steps(3)
    first.cut()
    cut = now(three)
    for agent in agents[1:]:
        agent.wait_for_log("coordinator lost: the connection broke")
    first.heal()
    step = three.job.steps(3, after=cut)
    assert step["restart"] == 0
    finish(*agents)


def test_a_host_that_hears_and_is_not_heard_is_lost_and_comes_back(three: Cluster) -> None:
    first, second, third = three.hosts
    agents = start(three, "2:3", first, second, third)
    three.job.steps(3)
    for other in (first, third):
        second.speaks_past(other)
    cut = now(three)
    step = three.job.steps(2, after=cut)
    assert step["restart"] == 0
    assert "silent for" in agents[0].err
    for other in (first, third):
        second.knows(other)
    three.job.steps(3, after=step["t"])
    finish(*agents)


@pytest.mark.long
def test_a_replacement_of_a_dead_host_takes_the_vacated_rank(three: Cluster) -> None:
    first, second, third = three.hosts
    agents = start(three, "2", first, second)
    before = three.ranks(2)
    three.die(second)
    died = now(three)
    agents[1].wait()
    agents[0].wait_for_log("1 of (at least )?2 nodes are ready, waiting for more")
    replacement = three.node(third, nnodes="2", lease=LEASE)
    after = three.ranks(2, after=died)
    assert after == {"host1": before["host1"], "host3": before["host2"]}
    finish(agents[0], replacement)


@pytest.mark.long
def test_the_coordinators_host_dies_and_is_started_again_under_its_address(three: Cluster) -> None:
    first, second, third = three.hosts
    agents = start(three, "3", first, second, third)
    three.job.steps(3)
    three.die(first)
    died = now(three)
    agents[0].wait()
    for agent in agents[1:]:
        agent.wait_for_log("coordinator lost")
    first.heal()
    again = three.node(first, nnodes="3", lease=LEASE)
    step = three.job.steps(3, after=died)
    assert step["restart"] == 0
    finish(again, *agents[1:])
