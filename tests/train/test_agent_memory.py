"""The agent's memory for state: what it keeps, for whom, and what it rejects."""

import array
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ripstop.commit_memory import CommitId
from ripstop.protocol.messages import FinalCommit
from ripstop.train import agent_memory
from ripstop.train.agent_memory import AgentError, AgentMemory, Identity
from ripstop.train.interruption import Interrupted
from ripstop.workers.state_memory import FIRST_COPY_SLOT, MAX_NAMES, MAX_RANKS, MAX_SLOTS, WorkerIdentity
from tests.e2e.harness import wait_until
from tests.train.conftest import Agent

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.fixture
def client(agent: Agent) -> AgentMemory:
    client = AgentMemory(agent.path + "-state")
    client.get("state")  # the agent has accepted the connection
    return client


@pytest.fixture
def buffer() -> Iterator[int]:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    yield fd
    os.close(fd)


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_kept_buffer_is_the_same_memory_for_the_next_worker(agent: Agent, client: AgentMemory, buffer: int) -> None:
    client.keep("state", 1, buffer)
    os.pwrite(buffer, b"content", 0)
    agent.round = 2
    client = AgentMemory(agent.path + "-state")
    assert client.identity() == Identity(round=2, rank=0, world_size=1)
    kept = client.get("state")
    assert list(kept) == [(0, 1)]
    assert os.pread(kept[0, 1], 7, 0) == b"content"
    os.close(kept[0, 1])


def test_messages_of_a_worker_of_an_old_round_change_nothing(agent: Agent, client: AgentMemory, buffer: int) -> None:
    client.identity()
    agent.round, agent.rank = 2, 1  # it goes on in place, under another rank
    with pytest.raises(Interrupted, match="round 1 is over"):
        client.keep("state", 0, buffer)
    assert AgentMemory(agent.path + "-state").get("state") == {}


def test_a_worker_gets_the_buffers_of_all_ranks_and_frees_those_of_ranks_elsewhere(
    agent: Agent, client: AgentMemory, buffer: int
) -> None:
    for rank in range(4):
        agent.rank = rank
        client.keep("state", 0, buffer)
        client.keep("other", 0, buffer)
    kept = client.get("state")
    assert list(kept) == [(rank, 0) for rank in range(4)]
    client.drop_others("state")
    left = client.get("state")
    assert list(left) == [(3, 0)]
    others = client.get("other")
    assert len(others) == 4
    for fd in (*kept.values(), *left.values(), *others.values()):
        os.close(fd)


def test_the_number_of_ranks_is_bounded(agent: Agent, client: AgentMemory, buffer: int) -> None:
    for agent.rank in range(MAX_RANKS):
        client.keep("state", 0, buffer)
    kept = client.get("state")
    assert list(kept) == [(rank, 0) for rank in range(MAX_RANKS)]
    for fd in kept.values():
        os.close(fd)
    agent.rank = MAX_RANKS
    with pytest.raises(AgentError, match=f"the buffers of {MAX_RANKS} ranks"):
        client.keep("state", 0, buffer)


def test_a_new_buffer_replaces_the_old_one_of_its_slot_and_nothing_leaks(
    agent: Agent, client: AgentMemory, buffer: int
) -> None:
    client.keep("state", 0, buffer)
    before = open_files()
    for _ in range(10):
        client.keep("state", 0, buffer)
    wait_until(lambda: open_files() <= before or None)


@pytest.mark.parametrize("kind", ["file", "pipe", "unsealed", "none", "two"])
def test_only_one_sealed_memfd_is_a_buffer(client: AgentMemory, buffer: int, kind: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    fds = {"file": [file], "pipe": [reader], "unsealed": [unsealed], "none": [], "two": [buffer, buffer]}
    before = open_files()
    with pytest.raises(AgentError, match="must be one memfd with a sealed size"):
        client._ask({"keep": "state", "slot": 0}, fds[kind])
    wait_until(lambda: open_files() <= before or None)
    for fd in (reader, writer, unsealed, file):
        os.close(fd)


@pytest.mark.parametrize("slot", [-1, MAX_SLOTS, "0", None])
def test_an_invalid_slot_is_rejected(client: AgentMemory, buffer: int, slot: object) -> None:
    with pytest.raises(AgentError, match="the request is invalid"):
        client._ask({"keep": "state", "slot": slot}, [buffer])


def test_the_number_of_names_is_bounded(client: AgentMemory, buffer: int) -> None:
    for number in range(MAX_NAMES):
        client.keep(str(number), 0, buffer)
    with pytest.raises(AgentError, match=f"may have {MAX_NAMES} States"):
        client.keep("one more", 0, buffer)


def test_a_process_that_is_no_worker_of_the_round_gets_nothing(
    agent: Agent, client: AgentMemory, buffer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.keep("state", 0, buffer)
    agent.is_known = False
    monkeypatch.setattr(agent_memory, "START_TIMEOUT_S", 0.05)
    with pytest.raises(AgentError, match="no worker of the current round"):
        client.get("state")


@pytest.mark.parametrize("data", [b"x", b"[]", b"\xff", b"[" * 4000, b"x" * 5000, b'{"get": 1}'])
def test_an_invalid_request_is_answered_and_the_connection_stays(agent: Agent, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.connect(agent.path + "-state")
        for _ in range(2):
            raw.send(data)
            assert json.loads(raw.recv(4096)) == {"error": "the request is invalid"}


def test_more_descriptors_than_a_request_may_have_do_not_leak(agent: Agent, buffer: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.connect(agent.path + "-state")
        raw.send(b"{}")
        raw.recv(4096)
        before = open_files()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [buffer] * 100))]
        raw.sendmsg([b'{"keep": "state", "slot": 0}'], rights)
        assert "error" in json.loads(raw.recv(4096))
        wait_until(lambda: open_files() <= before or None)


def test_the_end_of_the_agent_frees_everything(tmp_path: Path, buffer: int) -> None:
    before = open_files()
    agent = Agent(str(tmp_path / "agent"))
    client = AgentMemory(agent.path + "-state")
    client.keep("state", 0, buffer)
    agent.close()
    client._socket.close()
    wait_until(lambda: open_files() <= before or None)
    assert not (tmp_path / "agent-state").exists()


def test_a_removed_socket_is_created_again_for_the_next_round(agent: Agent) -> None:
    Path(agent.path + "-state").unlink()
    agent._loop.call_soon_threadsafe(agent.memory.listen)
    path = Path(agent.path + "-state")
    while not path.exists():
        pass
    AgentMemory(str(path)).get("state")


# copies on other nodes ------------------------------------------------------------------------------------------------


def test_a_worker_learns_which_commits_it_must_not_overwrite(agent: Agent, client: AgentMemory, buffer: int) -> None:
    assert client.held("state") == set()
    agent.call(agent.memory.hold, "state", [CommitId(1, 5)], None)
    agent.call(agent.memory.hold, "other", [CommitId(1, 9)], None)
    client.keep("state", 0, buffer)  # a reply is not mistaken for a change, nor a change for a reply
    assert client.held("state") == {CommitId(1, 5)}
    agent.call(agent.memory.hold, "state", [CommitId(1, 5), CommitId(1, 8)], CommitId(1, 5))
    assert client.held("state") == {CommitId(1, 5), CommitId(1, 8)}
    assert AgentMemory(agent.path + "-state").held("state") == {CommitId(1, 5), CommitId(1, 8)}


def test_copies_are_given_to_workers_and_freed_when_a_newer_set_is_complete(agent: Agent, client: AgentMemory) -> None:
    before = open_files()
    for number in (5, 8, 8):
        assert agent.call(agent.memory.keep_copy, 3, "state", CommitId(1, number), os.memfd_create("copy"))
    kept = client.get("state")
    assert [rank for rank, _ in kept] == [3, 3]
    for fd in kept.values():
        os.close(fd)
    agent.call(agent.memory.hold, "state", [CommitId(1, 5), CommitId(1, 8)], None)
    assert open_files() == before + 2, "nothing is freed before a set is complete"
    agent.call(agent.memory.hold, "state", [CommitId(1, 8), CommitId(1, 9)], CommitId(1, 8))
    wait_until(lambda: open_files() == before + 1 or None)
    agent.call(agent.memory.hold, "state", [CommitId(2, 1)], CommitId(2, 1))
    wait_until(lambda: open_files() == before or None)
    assert client.get("state") == {}


def test_the_number_of_copies_is_bounded(agent: Agent) -> None:
    before = open_files()
    kept = [
        agent.call(agent.memory.keep_copy, 3, "state", CommitId(1, number), os.memfd_create("copy"))
        for number in range(20)
    ]
    assert kept == [True] * (MAX_SLOTS - FIRST_COPY_SLOT) + [False] * (20 - MAX_SLOTS + FIRST_COPY_SLOT)
    assert open_files() == before + MAX_SLOTS - FIRST_COPY_SLOT


def test_buffers_of_ranks_elsewhere_stay_until_the_round_has_a_complete_set(
    agent: Agent, client: AgentMemory, buffer: int
) -> None:
    client.keep("state", 0, buffer)
    agent.call(agent.memory.hold, "state", [CommitId(1, 5)], CommitId(1, 5))
    agent.round, agent.rank = 2, 1
    client.keep("state", 0, buffer)
    client.drop_others("state")
    agent.call(agent.memory.hold, "state", [CommitId(1, 5), CommitId(2, 7)], CommitId(1, 5))
    assert agent.memory._ranks("state") == [0, 1], "the set of round 1 is the only complete one"
    agent.call(agent.memory.hold, "state", [CommitId(2, 7), CommitId(2, 9)], CommitId(2, 7))
    assert agent.memory._ranks("state") == [1]


def test_copies_of_a_set_that_never_became_complete_are_freed(agent: Agent, client: AgentMemory) -> None:
    for number in (5, 9):
        assert agent.call(agent.memory.keep_copy, 3, "state", CommitId(1, number), os.memfd_create("copy"))
    agent.call(agent.memory.hold, "state", [CommitId(1, 5)], None)
    assert len(agent.memory._copies) == 2
    agent.call(agent.memory.hold, "state", [CommitId(1, 8)], None)  # some node has missed 5
    assert list(agent.memory._copies.values()) == [CommitId(1, 9)], "newer ones may be of the next set"


def test_without_sets_the_next_drop_frees_copies_too(agent: Agent, client: AgentMemory, buffer: int) -> None:
    client.keep("state", 0, buffer)
    agent.call(agent.memory.keep_copy, 3, "state", CommitId(1, 5), os.memfd_create("copy"))
    agent.call(agent.memory.hold, "state", [CommitId(1, 5)], CommitId(1, 5))
    client.drop_others("state")
    assert agent.memory._ranks("state") == [0, 3], "a complete set is kept"
    agent.call(agent.memory.forget_sets)
    assert AgentMemory(agent.path + "-state").held("state") == set()
    assert agent.memory._ranks("state") == [0, 3]
    client.drop_others("state")
    assert agent.memory._ranks("state") == [0]


LAST = {"last": "state", "commit": [1, 7], "slot": 0, "replicated": True}


@pytest.mark.parametrize(
    "wrong", [{"last": "x" * 65}, {"commit": [1, 2**48 + 1]}, {"commit": [1, -1]}, {"commit": [2**48 + 1, 7]}]
)
def test_an_invalid_final_commit_is_rejected(client: AgentMemory, wrong: dict[str, object]) -> None:
    with pytest.raises(AgentError, match="the request is invalid"):
        client._ask({**LAST, **wrong}, [])


def test_final_commits_are_reported_once(agent: Agent, client: AgentMemory) -> None:
    reports: list[tuple[object, ...]] = []
    agent.memory.on_final_commits = lambda *made: reports.append(made)
    client._ask(LAST, [])
    for _ in range(2):
        client._ask({"waits": None}, [])
    assert reports == [(1, (FinalCommit("state", 7, needs_copies=False),), "")]


def test_ranks_of_a_node_with_different_final_commits_have_none_in_common(agent: Agent, client: AgentMemory) -> None:
    reports: list[tuple[object, ...]] = []
    agent.memory.on_final_commits = lambda *made: reports.append(made)
    agent.memory._identify = lambda pid: WorkerIdentity(1, agent.rank, 2, range(2))
    for agent.rank in range(2):
        client._ask({**LAST, "commit": [1, 7 + agent.rank]}, [])
        client._ask({"waits": None}, [])
    assert reports == [(1, (), "the ranks of a node have different commits of state 'state'")]


def test_the_number_of_held_states_is_bounded_and_those_without_a_buffer_give_way(
    agent: Agent, client: AgentMemory, buffer: int
) -> None:
    for number in range(MAX_NAMES):
        agent.call(agent.memory.hold, f"unknown {number}", [CommitId(1, 1)], None)
    for number in range(MAX_NAMES):
        client.keep(f"state {number}", 0, buffer)
        agent.call(agent.memory.hold, f"state {number}", [CommitId(1, 2)], None)
    agent.call(agent.memory.hold, "one more", [CommitId(1, 3)], None)
    assert set(agent.memory._held) == {f"state {number}" for number in range(MAX_NAMES)}


def test_a_worker_that_the_agent_does_not_stop_says_so(
    agent: Agent, client: AgentMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[tuple[int, str]] = []
    agent.memory.on_state_lost = lambda round, why: lost.append((round, why))
    monkeypatch.setattr(agent_memory, "REPLY_TIMEOUT_S", 0.1)
    with pytest.raises(AgentError, match=r"the agent did not stop this worker within 0\.1 s"):
        client.wait_for_replacement("state")
    assert lost == [(1, "rank 0 has no commit of state 'state' to restore")]
