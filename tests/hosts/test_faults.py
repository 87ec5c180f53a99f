"""Faults of the network and of hosts, with a coordinator on the first host and with one that etcd elects.

With etcd, three of the hosts have a member of it, so what happens to a host happens to etcd too.  In all tests: who is
left trains on, nobody is charged, who comes back joins the others, and no stale round disturbs the one that runs.
"""

import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.harness import Agent, Job, WorkerEvent
from tests.hosts.network import Cluster, Host, etcd, hosts, needs_hosts, needs_loss, part, rejoin
from tests.hosts.test_hosts import LEASE, finish, now

pytestmark = [needs_hosts, pytest.mark.long]

Backends = pytest.mark.parametrize("four", ["c10d", "etcd"], indirect=True)
Etcd = pytest.mark.parametrize("four", ["etcd"], indirect=True)


@pytest.fixture
def four(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        machines = stack.enter_context(hosts(4, tmp_path))
        elector = ""
        if request.param == "etcd":
            if shutil.which("etcd") is None:
                pytest.skip("no etcd here: apt install etcd-server")
            elector = stack.enter_context(etcd(machines[:3], tmp_path))
        yield Cluster(stack.enter_context(Job(tmp_path, TRAIN_STEPS="100000")), machines, elector)


def start(cluster: Cluster, lease: float = LEASE) -> list[Agent]:
    """A node on every host, the first's with the coordinator and rank 0."""
    agents: list[Agent] = []
    for host in cluster.hosts:
        agents.append(cluster.node(host, nnodes="2:4", lease=lease))
        agents[0].wait_for_log(rf"joined from {host.address} ")
    assert cluster.ranks(4)["host1"] == 0
    return agents


def steps(cluster: Cluster, since: float) -> list[WorkerEvent]:
    return [h for h in cluster.job.worker_events(event="step") if h["t"] > since]


def all_went_well(cluster: Cluster, since: float, witness: Host) -> None:
    """No restart was charged, and the remaining nodes changed rounds only for the loss and for the return."""
    assert {h["restart"] for h in steps(cluster, since)} == {0}
    worlds = [h["world"] for h in steps(cluster, since) if h["host"] == f"host{witness.number}"]
    changed = [world for world, before in zip(worlds, [4, *worlds], strict=False) if world != before]
    assert changed[-1] == 4 and changed[:-1] == sorted(changed[:-1]), changed


@Backends
def test_a_host_that_freezes_past_its_lease_and_comes_back_disturbs_nobody(four: Cluster) -> None:
    agents = start(four)
    frozen = four.hosts[0 if four.elected else 1]
    cut = now(four)
    frozen.signal(signal.SIGSTOP)
    assert f"host{frozen.number}" not in four.ranks(3, after=cut)
    frozen.signal(signal.SIGCONT)
    four.job.steps(4, after=now(four))
    all_went_well(four, cut, four.hosts[2])
    finish(*agents)


@Backends
def test_a_coordinator_that_is_cut_off_from_half_of_the_nodes_goes_on_with_the_other_half(four: Cluster) -> None:
    agents = start(four)
    cut = now(four)
    here, there = four.hosts[:2], four.hosts[2:]
    part(here, there)
    assert four.ranks(2, after=cut).keys() == {"host1", "host2"}
    for agent in agents[2:]:
        agent.wait_for_log("coordinator lost")
    later = now(four)
    four.job.steps(2, after=later + LEASE)
    assert {h["host"] for h in steps(four, later)} == {"host1", "host2"}, "there are two jobs"
    rejoin(here, there)
    four.job.steps(4, after=later)
    all_went_well(four, cut, four.hosts[0])
    finish(*agents)


@Etcd
def test_a_coordinators_host_that_is_cut_off_is_replaced_and_comes_back(four: Cluster) -> None:
    agents = start(four)
    cut = now(four)
    first = four.hosts[0]
    first.cut()
    assert four.ranks(3, after=cut).keys() == {"host2", "host3", "host4"}
    agents[0].wait_for_log("steps down: its lease was not renewed in time")
    first.heal()
    four.job.steps(4, after=now(four))
    all_went_well(four, cut, four.hosts[1])
    finish(*agents)


@Etcd
def test_a_coordinators_host_that_hears_and_is_not_heard_is_replaced_and_comes_back(four: Cluster) -> None:
    agents = start(four)
    cut = now(four)
    first, *others = four.hosts
    for other in others:
        first.speaks_past(other)
    assert four.ranks(3, after=cut).keys() == {"host2", "host3", "host4"}
    for other in others:
        first.knows(other)
    four.job.steps(4, after=now(four))
    all_went_well(four, cut, four.hosts[1])
    finish(*agents)


@needs_loss
@Backends
def test_a_host_that_loses_30_percent_of_what_arrives_slows_the_others_down_and_costs_nothing(four: Cluster) -> None:
    agents = start(four, lease=3.0)
    before = now(four)
    bad = four.hosts[0 if four.elected else 1]
    bad.loses(0.3)
    four.job.wait_for(event="step", rank=0, count=8, after=before, timeout=90)
    bad.loses(0)
    four.job.steps(4, after=now(four))
    assert {h["restart"] for h in steps(four, before)} == {0}
    finish(*agents)
