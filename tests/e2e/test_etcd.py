"""Jobs whose coordinator etcd elects, with faults of nodes and of etcd."""

import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.etcd import Member, certificates, cluster, encode, endpoints, needs_etcd
from tests.e2e.harness import TRAIN, Agent, Job, free_port, hurried, wait_until
from tests.e2e.test_nodes import finish, kill, tree
from tests.e2e.test_operator_commands import error_of

pytestmark = needs_etcd

KEY = "/ripstop/e2e/coordinator"
OUTCOME = "/ripstop/e2e/outcome"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(
        tmp_path, TRAIN_STEPS="100000", RIPSTOP_TOKEN="s3cret", XDG_RUNTIME_DIR=str(tmp_path), TMPDIR=str(tmp_path)
    ) as job:
        yield job


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Member]:
    with cluster(1, tmp_path) as (member,):
        yield member


def node(job: Job, where: str, *flags: str, nnodes: str = "2:3", env: dict[str, str] | None = None) -> Agent:
    return job.run(
        f"--nnodes={nnodes}",
        "--rdzv-backend=etcd",
        f"--rdzv-endpoint={where}",
        "--rdzv-id=e2e",
        *hurried(flags or ("--rdzv-conf=lease=1",), nnodes),
        str(TRAIN),
        env=env,
    )


def host(agents: list[Agent]) -> Agent:
    """The first agent that was elected."""
    return wait_until(lambda: next((agent for agent in agents if "elected: " in agent.err), None))


def without(agents: list[Agent], victim: Agent) -> list[Agent]:
    return [agent for agent in agents if agent is not victim]


@pytest.mark.long
def test_a_job_through_etcd_leaves_only_its_leased_outcome(job: Job, etcd: Member) -> None:
    agents = [node(job, etcd.endpoint, nnodes="3", env={"TRAIN_STEPS": "20"}) for _ in range(3)]
    assert [agent.wait() for agent in agents] == [0, 0, 0]
    assert {h["rank"] for h in job.worker_events(event="done", world=3)} == {0, 1, 2}
    assert sum("elected: " in agent.err for agent in agents) == 1
    assert list(etcd.keys()) == [OUTCOME]
    (lease,) = {kv["lease"] for kv in (etcd.ask("kv/range", {"key": encode(OUTCOME)}) or {})["kvs"]}
    assert int((etcd.ask("lease/timetolive", {"ID": lease}) or {})["TTL"]) <= 15
    late = node(job, etcd.endpoint, nnodes="3")
    assert late.wait() == 2
    assert "job 'e2e' has ended: succeeded; choose another --rdzv-id" in late.err


@pytest.mark.long
@pytest.mark.parametrize("taken", [False, True])
def test_the_leader_listens_at_the_requested_port_if_it_is_free(job: Job, etcd: Member, taken: bool) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as other:
        if not taken:
            other.close()
        conf = f"--rdzv-conf=lease=1,coordinator_port={port}"
        agent = node(job, etcd.endpoint, conf, nnodes="1:2", env={"TRAIN_STEPS": "2"})
        assert agent.wait() == 0
    assert (f"job=e2e is at 127.0.0.1:{port}\n" in agent.err) is not taken
    assert ("the port is in use" in agent.err) is taken


def test_training_continues_when_the_node_of_the_coordinator_or_rank_0_dies(job: Job, etcd: Member) -> None:
    agents = [node(job, etcd.endpoint, nnodes="1:3") for _ in range(3)]
    job.steps(3)
    for world in (2, 1):
        victim = host(agents) if world == 2 else next(a for a in agents if f"ranks=0-0 world={world + 1}" in a.err)
        before = time.time()
        kill(victim)
        agents.remove(victim)
        step = job.steps(world, after=before)
        assert step["restart"] == 0
    assert any("elected: " in agent.err for agent in agents)
    finish(job, *agents)


@pytest.mark.long
def test_a_terminated_leader_hands_over_at_once(job: Job, etcd: Member) -> None:
    agents = [node(job, etcd.endpoint, "--rdzv-conf=lease=1") for _ in range(3)]
    job.steps(3)
    victim = host(agents)
    before = time.time()
    victim.signal(signal.SIGTERM)
    assert victim.wait() == 143
    step = job.steps(2, after=before)
    assert step["restart"] == 0
    finish(job, *without(agents, victim))


def test_a_frozen_leader_steps_down_when_it_resumes_and_rejoins_as_a_node(job: Job, etcd: Member) -> None:
    agents = [node(job, etcd.endpoint) for _ in range(3)]
    job.steps(3)
    frozen = host(agents)
    before = time.time()
    for pid in tree(frozen.pid):
        os.kill(pid, signal.SIGSTOP)
    job.steps(2, after=before)
    for pid in reversed(tree(frozen.pid)):
        os.kill(pid, signal.SIGCONT)
    frozen.wait_for_log("steps down")
    step = job.steps(3, after=time.time())
    assert step["restart"] == 0
    finish(job, *agents)


@pytest.mark.long
def test_training_continues_when_the_leader_of_etcd_dies(job: Job, tmp_path: Path) -> None:
    with cluster(3, tmp_path) as members:
        agents = [node(job, endpoints(members), "--rdzv-conf=lease=3", nnodes="2") for _ in range(2)]
        job.steps(2)
        starts = len(job.worker_events(event="start"))
        leader = next(member for member in members if member.leads)
        leader.kill()
        left = [member for member in members if member is not leader]
        wait_until(lambda: any(member.leads for member in left) or None)
        job.steps(2, after=time.time() + 4)
        assert len(job.worker_events(event="start")) == starts
        finish(job, *agents)


def test_training_continues_while_etcd_is_unreachable(job: Job, etcd: Member) -> None:
    agents = [node(job, etcd.endpoint, nnodes="2") for _ in range(2)]
    job.steps(2)
    starts = len(job.worker_events(event="start"))
    leader = host(agents)
    etcd.signal(signal.SIGSTOP)
    leader.wait_for_log("steps down: its lease was not renewed in time")
    assert "coordinator is not in this process now" in error_of(job, "stop")
    job.steps(2, after=time.time())
    etcd.signal(signal.SIGCONT)
    for agent in agents:
        agent.wait_for_log("coordinator found again")
    assert len(job.worker_events(event="start")) == starts
    finish(job, *agents)


def test_an_unreachable_etcd_is_reported_within_seconds(job: Job) -> None:
    ports = free_port(), free_port()
    where = f"127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}"
    agent = node(job, where, "--rdzv-conf=join_timeout=3")
    agent.wait_for_log(
        rf"etcd cannot be reached, trying again: 127.0.0.1:{ports[0]}: connection refused; 127.0.0.1:{ports[1]}"
    )
    assert agent.wait() == 1
    assert "no coordinator for 3 s (etcd cannot be reached: 127.0.0.1:" in agent.err


@pytest.mark.long
def test_etcd_authentication_is_required_checked_and_used(job: Job, etcd: Member) -> None:
    for path, body in (
        ("auth/user/add", {"name": "root", "password": "right"}),
        ("auth/role/add", {"name": "root"}),
        ("auth/user/grant", {"user": "root", "role": "root"}),
        ("auth/enable", {}),
    ):
        assert etcd.ask(path, body) is not None
    anonymous = node(job, etcd.endpoint, nnodes="1")
    assert anonymous.wait() == 2
    assert "set RIPSTOP_ETCD_USER and RIPSTOP_ETCD_PASSWORD" in anonymous.err
    user = {"RIPSTOP_ETCD_USER": "root", "TRAIN_STEPS": "3"}
    wrong = node(job, etcd.endpoint, nnodes="1", env={**user, "RIPSTOP_ETCD_PASSWORD": "wrong"})
    assert wrong.wait() == 2
    assert "authentication failed, invalid user ID or password; check RIPSTOP_ETCD_USER" in wrong.err
    right = node(job, etcd.endpoint, nnodes="1", env={**user, "RIPSTOP_ETCD_PASSWORD": "right"})
    assert right.wait() == 0


def test_a_foreign_key_is_reported_and_not_changed(job: Job, etcd: Member) -> None:
    etcd.put(KEY, "not ours")
    agent = node(job, etcd.endpoint, nnodes="1")
    assert agent.wait() == 2
    assert f"etcd's key {KEY} cannot be used: it was not written by ripstop: found 'not ours'" in agent.err
    assert etcd.keys() == {KEY: "not ours"}


@pytest.mark.long
def test_a_forged_outcome_ends_no_node(job: Job, etcd: Member) -> None:
    agent = node(job, etcd.endpoint, nnodes="1")
    job.steps(1)
    etcd.put(OUTCOME, '0000\n{"v": 1}')
    job.steps(1, after=time.time())
    newcomer = node(job, etcd.endpoint, nnodes="1")
    assert newcomer.wait() == 2
    assert f"etcd's key {OUTCOME} cannot be used: it does not prove the job's secret" in newcomer.err
    finish(job, agent)


def test_a_server_that_is_not_etcd_is_reported(job: Job, etcd: Member) -> None:
    peer = etcd.peer.removeprefix("http://")
    agent = node(job, peer, nnodes="1")
    assert agent.wait() == 2
    assert f"{peer} answers HTTP 404, so it is not an etcd with a v3 API" in agent.err


@pytest.mark.long
def test_a_deleted_key_causes_an_election(job: Job, etcd: Member) -> None:
    agents = [node(job, etcd.endpoint, nnodes="2") for _ in range(2)]
    job.steps(2)
    starts = len(job.worker_events(event="start"))
    leader = host(agents)
    etcd.ask("kv/deleterange", {"key": encode(KEY)})
    leader.wait_for_log(r"steps down: (its key was deleted from etcd|node \S+ was elected)")  # as quick as the other is
    for agent in agents:
        agent.wait_for_log("coordinator found again")
    job.steps(2, after=time.time())
    assert len(job.worker_events(event="start")) == starts
    finish(job, *agents)


@pytest.mark.long
def test_a_node_that_was_frozen_at_the_end_learns_the_outcome(job: Job, etcd: Member) -> None:
    flags = "--rdzv-conf=lease=1,last_call_timeout=60"  # the first round has both
    agents = [node(job, etcd.endpoint, flags, nnodes="1:2", env={"TRAIN_STEPS": "150"}) for _ in range(2)]
    job.steps(2)
    leader = host(agents)
    (away,) = without(agents, leader)
    for pid in tree(away.pid):
        os.kill(pid, signal.SIGSTOP)
    assert leader.wait() == 0
    for pid in reversed(tree(away.pid)):
        os.kill(pid, signal.SIGCONT)
    assert away.wait() == 0
    assert "elected: " not in away.err


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is needed to create certificates")
def test_etcd_with_tls_accepts_nodes_with_a_certificate(job: Job, tmp_path: Path) -> None:
    tls = certificates(tmp_path / "tls")
    flags = ("--client-cert-auth", f"--trusted-ca-file={tls}/ca.crt")
    pair = (f"--cert-file={tls}/server.crt", f"--key-file={tls}/server.key")
    with cluster(1, tmp_path, *flags, *pair, scheme="https") as (member,):
        known = f"--rdzv-conf=cacert={tls}/ca.crt,cert={tls}/client.crt,key={tls}/client.key"
        assert node(job, member.endpoint, known, nnodes="1", env={"TRAIN_STEPS": "3"}).wait() == 0
        for conf, code, error in (
            ("protocol=http,join_timeout=3", 1, "closed the connection .*requires TLS, use --rdzv-conf=protocol=https"),
            ("protocol=https", 2, "is not trusted"),
            (f"cacert={tls}/ca.crt,join_timeout=3", 1, "etcd cannot be reached: .*certificate"),
        ):
            agent = node(job, member.endpoint, f"--rdzv-conf={conf}", nnodes="1")
            assert agent.wait() == code
            assert re.search(error, agent.err), agent.err
