"""The agent's memory for state: what it keeps, for whom, and what it rejects."""

import array
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ripstop.train import agent_memory
from ripstop.train.agent_memory import AgentError, AgentMemory
from ripstop.workers.state_memory import MAX_NAMES, MAX_SLOTS
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
    kept = AgentMemory(agent.path + "-state").get("state")
    assert (kept.round, kept.rank, kept.world_size, list(kept.descriptors)) == (2, 0, 1, [1])
    assert os.pread(kept.descriptors[1], 7, 0) == b"content"
    os.close(kept.descriptors[1])


def test_a_new_buffer_replaces_the_old_one_of_its_slot_and_nothing_leaks(
    agent: Agent, client: AgentMemory, buffer: int
) -> None:
    client.keep("state", 0, buffer)
    before = open_files()
    for _ in range(10):
        client.keep("state", 0, buffer)
    assert open_files() == before


@pytest.mark.parametrize("kind", ["file", "pipe", "unsealed", "none", "two"])
def test_only_one_sealed_memfd_is_a_buffer(client: AgentMemory, buffer: int, kind: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    fds = {"file": [file], "pipe": [reader], "unsealed": [unsealed], "none": [], "two": [buffer, buffer]}
    before = open_files()
    with pytest.raises(AgentError, match="must be one memfd with a sealed size"):
        client._ask({"keep": "state", "slot": 0}, fds[kind])
    assert open_files() == before
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
        assert open_files() == before


def test_the_end_of_the_agent_frees_everything(tmp_path: Path, buffer: int) -> None:
    before = open_files()
    agent = Agent(str(tmp_path / "agent"))
    client = AgentMemory(agent.path + "-state")
    client.keep("state", 0, buffer)
    agent.close()
    client._socket.close()
    assert open_files() == before
    assert not (tmp_path / "agent-state").exists()


def test_a_removed_socket_is_created_again_for_the_next_round(agent: Agent) -> None:
    Path(agent.path + "-state").unlink()
    agent._loop.call_soon_threadsafe(agent.memory.listen)
    path = Path(agent.path + "-state")
    while not path.exists():
        pass
    AgentMemory(str(path)).get("state")
