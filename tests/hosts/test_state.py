"""Three hosts, each with its own shard of a State: one dies, and its shard comes from its partner over the network."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, Job
from tests.hosts.network import Cluster, hosts, needs_hosts

pytestmark = needs_hosts


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Cluster]:
    with hosts(3, tmp_path) as machines, Job(tmp_path, RIPSTOP_TOKEN="secret", PAUSE_S="0.05") as job:
        yield Cluster(job, machines)


def test_the_shard_of_a_host_that_dies_comes_from_its_partner(three: Cluster) -> None:
    first, second, third = three.hosts
    shards = SCRIPTS / "shards.py"
    agents = [three.node(first, nnodes="3", script=shards)]
    agents[0].wait_for_log(f"joined from {first.address} ")
    agents += [three.node(host, nnodes="3", script=shards) for host in (second, third)]
    copied = int(agents[0].wait_for_log(r"state=state commit=(\d+) has copies on other nodes")[1])
    three.die(third)
    lost_at = max(event["step"] for event in three.job.worker_events(event="step"))
    third.heal()
    three.node(third, nnodes="3", script=shards)
    three.job.wait_for(event="start", count=6)
    starts = three.job.worker_events(event="start")[3:]
    (step,) = {event["step"] for event in starts}
    assert copied <= step <= lost_at + 1
    assert sorted(event["source"] for event in starts) == ["memory", "memory", "peer"]
