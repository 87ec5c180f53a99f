"""The coordinator's host fails in a job whose nodes elect the coordinator: three addresses, three or four hosts.

In all tests the others train on, at the ranks they had, nobody is charged, and a host that comes back joins them.
Times are from the fault to the first step that all remaining ranks have completed.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Agent, Job, wait_until
from tests.hosts.network import Cluster, Host, hosts, needs_hosts, needs_loss
from tests.hosts.test_hosts import finish

pytestmark = needs_hosts

LEASE = 2.0
KILLED_S = 2.0  # from a killed coordinator to the next step
SILENT_S = LEASE + 1.5  # from a silent one
LOADED_S = 60.0  # the machine of the tests may be slow: the times above are printed, and this is required


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Cluster]:
    with hosts(3, tmp_path) as machines, Job(tmp_path, TRAIN_STEPS="100000", RIPSTOP_TOKEN="s3cret") as job:
        yield Cluster(job, machines, successors=3)


@pytest.fixture
def four(tmp_path: Path) -> Iterator[Cluster]:
    with hosts(4, tmp_path) as machines, Job(tmp_path, TRAIN_STEPS="100000", RIPSTOP_TOKEN="s3cret") as job:
        yield Cluster(job, machines, successors=3)


class Running:
    """A job of three nodes, and its coordinator's host."""

    def __init__(self, cluster: Cluster, nnodes: str = "2:3", lease: float = LEASE) -> None:
        self.cluster = cluster
        self.agents = [cluster.node(host, nnodes=nnodes, lease=lease) for host in cluster.hosts]
        self.before = cluster.ranks(len(cluster.hosts))
        (number,) = (n for n, agent in enumerate(self.agents) if elections(agent))
        self.coordinator: Host = cluster.hosts[number]
        self.agent = self.agents[number]
        self.others = [agent for agent in self.agents if agent is not self.agent]

    def recovers(self, since: float, what: str, goal: float, record: pytest.FixtureRequest) -> None:
        """The others train on without the coordinator's host, and keep their ranks."""
        step = self.cluster.job.steps(2, after=since)
        took = step["t"] - since
        print(f"{record.node.name}: {what}: a step after {took:.2f} s, goal {goal:g} s")
        after = self.cluster.ranks(2, after=since)
        lost = f"host{self.coordinator.number}"
        assert lost not in after
        kept = {host: rank for host, rank in self.before.items() if host != lost and rank < 2}
        assert kept.items() <= after.items(), "a rank moved"
        assert step["restart"] == 0
        assert sum(map(elections, self.others)) == 1
        assert took < goal + LOADED_S

    def is_complete_again(self, since: float) -> None:
        self.cluster.job.steps(3, after=since)
        restarts = {h["restart"] for h in self.cluster.job.worker_events(event="step") if h["t"] > since}
        assert restarts == {0}


def elections(agent: Agent) -> int:
    return len(re.findall(r"elected: the coordinator of job=", agent.err))


def test_a_killed_coordinators_host_has_a_successor(three: Cluster, request: pytest.FixtureRequest) -> None:
    job = Running(three)
    killed = time.time()
    job.coordinator.signal(signal.SIGKILL)
    job.recovers(killed, "killed", KILLED_S, request)
    again = three.node(job.coordinator, nnodes="2:3", lease=LEASE)  # the address is no longer the coordinator's
    job.is_complete_again(time.time())
    assert not elections(again)
    finish(*job.others, again)


@pytest.mark.long
def test_a_coordinators_host_that_loses_its_power_has_a_successor(
    three: Cluster, request: pytest.FixtureRequest
) -> None:
    job = Running(three)
    died = time.time()
    three.die(job.coordinator)
    job.recovers(died, "power off", SILENT_S, request)
    finish(*job.others)


@pytest.mark.long
def test_a_coordinators_host_that_is_cut_off_steps_down_and_comes_back(
    three: Cluster, request: pytest.FixtureRequest
) -> None:
    job = Running(three)
    cut = time.time()
    job.coordinator.cut()
    job.recovers(cut, "cut off", SILENT_S, request)
    job.agent.wait_for_log("steps down: most voters did not renew their promises in time")
    job.coordinator.heal()
    job.is_complete_again(time.time())
    finish(*job.others, job.agent)


@pytest.mark.long
def test_a_coordinators_host_that_freezes_decides_nothing_when_it_thaws(
    three: Cluster, request: pytest.FixtureRequest
) -> None:
    job = Running(three)
    frozen = time.time()
    job.coordinator.signal(signal.SIGSTOP)
    job.recovers(frozen, "frozen", SILENT_S, request)
    job.coordinator.signal(signal.SIGCONT)
    job.agent.wait_for_log("steps down")
    job.is_complete_again(time.time())
    finish(*job.others, job.agent)


@pytest.mark.long
def test_a_coordinators_host_that_hears_and_is_not_heard_has_a_successor(
    three: Cluster, request: pytest.FixtureRequest
) -> None:
    job = Running(three)
    others = [host for host in three.hosts if host is not job.coordinator]
    cut = time.time()
    for other in others:
        job.coordinator.speaks_past(other)
    job.recovers(cut, "one-way", SILENT_S, request)
    for other in others:
        job.coordinator.knows(other)
    job.is_complete_again(time.time())
    finish(*job.others, job.agent)


@needs_loss
@pytest.mark.long
def test_a_coordinators_host_that_loses_30_percent_keeps_the_coordinator_or_has_a_successor(three: Cluster) -> None:
    job = Running(three, lease=3.0)
    before = time.time()
    job.coordinator.loses(0.3)
    three.job.wait_for(event="step", rank=0, count=8, after=before, timeout=90)
    job.coordinator.loses(0)
    job.is_complete_again(time.time())
    finish(*job.others, job.agent)


@pytest.mark.long
def test_workers_go_on_undisturbed_when_a_coordinator_without_workers_is_lost(
    four: Cluster, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    spare, *others = four.hosts
    nodes = [four.node(host, nnodes="2:4", lease=LEASE, conf=",target=3") for host in others]
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "late.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(tmp_path / 'round_1')!r}): time.sleep(0.05)\n"
    )
    late = {"PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path / "modules"), four.job.env.get("PYTHONPATH"))))}
    coordinator = four.node(spare, "--preload=torch,late", nnodes="2:4", lease=LEASE, conf=",target=3", env=late)
    before = four.ranks(3)  # the coordinator's node is not ready before this round
    (tmp_path / "round_1").touch()
    assert "host1" not in before and elections(coordinator)
    workers = len(four.job.worker_events(event="start"))
    coordinator.wait_for_log("spare")
    killed = time.time()
    spare.signal(signal.SIGKILL)
    wait_until(lambda: sum(map(elections, nodes)) or None)
    for agent in nodes:
        agent.wait_for_log("coordinator found again")
    print(f"{request.node.name}: another coordinator after {time.time() - killed:.2f} s")
    assert four.ranks(3, after=time.time()) == before
    assert len(four.job.worker_events(event="start")) == workers, "a worker was restarted"
    finish(*nodes)


@pytest.mark.long
def test_the_coordinator_is_lost_again_and_again_while_nodes_are_left(three: Cluster) -> None:
    job = Running(three, nnodes="2:3")
    agents = dict(zip(three.hosts, job.agents, strict=True))
    coordinator = job.coordinator
    for _ in range(3):
        known = {host: elections(agent) for host, agent in agents.items()}
        killed = time.time()
        coordinator.signal(signal.SIGKILL)
        three.job.steps(2, after=killed)
        agents[coordinator] = three.node(coordinator, nnodes="2:3", lease=LEASE)
        three.job.steps(3, after=time.time())  # two nodes have no majority without both
        (coordinator,) = (h for h, agent in agents.items() if elections(agent) > known[h] and h is not coordinator)
    finish(*agents.values())
