"""Whole jobs whose agents and coordinator authenticate each other with certificates."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ripstop.model.config import Tls
from tests.certificates import Authority
from tests.e2e.etcd import cluster, needs_etcd
from tests.e2e.harness import Agent, Job


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, TRAIN_STEPS="100000", RIPSTOP_TOKEN="s3cret") as job:
        yield job


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return _authority(tmp_path / "authority")


def _authority(folder: Path) -> Authority:
    folder.mkdir()
    return Authority(folder)


def conf(tls: Tls) -> str:
    files = {"tls_cert": tls.cert, "tls_key": tls.key, "tls_ca": tls.ca}
    return "--rdzv-conf=" + ",".join(f"{key}={path}" for key, path in files.items() if path)


def train(job: Job, tls: Tls, *flags: str) -> Agent:
    env = {"TRAIN_FAULT": "raise:1:5:0", "TRAIN_STEPS": "20"}
    return job.node("--max-restarts=1", conf(tls), *flags, nnodes="2", env=env)


def test_nodes_train_over_tls_and_recover_from_a_crash(job: Job, authority: Authority) -> None:
    agents = [train(job, authority.node(name)) for name in ("a", "b")]
    assert [agent.wait() for agent in agents] == [0, 0], job.describe()
    assert {(h["rank"], h["restart"]) for h in job.worker_events(event="done")} == {(0, 1), (1, 1)}


def test_a_node_without_a_certificate_or_with_a_foreign_one_is_rejected(
    job: Job, authority: Authority, tmp_path: Path
) -> None:
    first = job.node(conf(authority.node("a")), nnodes="1:2")
    job.steps(1)
    foreign = _authority(tmp_path / "foreign").node("c")
    both = tmp_path / "both.pem"  # the agent trusts its own authority and the job's
    both.write_text(f"{authority.ca.read_text()}{Path(str(foreign.ca)).read_text()}")
    for tls in (Tls(ca=authority.ca), Tls(foreign.cert, foreign.key, both)):
        rejected = job.node(conf(tls), nnodes="1:2")
        assert rejected.wait() == 2
        assert "give this node a certificate" in rejected.err
    assert len(job.worker_events(event="start")) == 1
    first.signal(15)
    assert first.wait() == 143


@needs_etcd
@pytest.mark.long
def test_a_coordinator_that_etcd_elects_uses_its_certificate(job: Job, authority: Authority, tmp_path: Path) -> None:
    with cluster(1, tmp_path) as (member,):
        rendezvous = ("--rdzv-backend=etcd", f"--rdzv-endpoint={member.endpoint}")
        agents = [train(job, authority.node(name), *rendezvous) for name in ("a", "b")]
        assert [agent.wait() for agent in agents] == [0, 0], job.describe()
    assert {(h["rank"], h["restart"]) for h in job.worker_events(event="done")} == {(0, 1), (1, 1)}


@pytest.mark.long
def test_nodes_elect_another_coordinator_over_tls_when_the_first_is_killed(job: Job, authority: Authority) -> None:
    """Each node has a certificate for its own address only."""
    hosts = [f"127.0.0.{number}" for number in (1, 2, 3)]
    endpoint = ",".join(f"{host}:{job.port}" for host in hosts)
    agents = []
    for host in hosts:
        tls = conf(authority.node(host, names=f"IP:{host}"))
        agents.append(job.node(tls, nnodes="2:3", endpoint=endpoint, env={"TRAIN_STEPS": "100000"}))
        agents[-1].wait_for_log("ripstop=")  # it listens: the next one takes the next address
    job.steps(3)
    (first,) = (agent for agent in agents if "elected: " in agent.err)
    others = [agent for agent in agents if agent is not first]
    killed = time.time()
    first.signal(signal.SIGKILL)
    step = job.steps(2, after=killed)
    print(f"a step {step['t'] - killed:.2f} s after the coordinator was killed")
    assert step["restart"] == 0
    assert sum("elected: " in agent.err for agent in others) == 1
    for agent in others:
        agent.signal(signal.SIGTERM)
    assert [agent.wait() for agent in others] == [143, 143]
