"""The agent's side of replication: when the replicator starts, and what the agent does with its messages."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from ripstop.commit_memory import CommitId, create_memory
from ripstop.model.config import Backend, RunConfig, Script
from ripstop.model.round import Address, Place
from ripstop.replication.supervisor import Supervisor
from ripstop.workers.processes import Children
from ripstop.workers.state_memory import StateMemory


@asynccontextmanager
async def supervisor(folder: Path) -> AsyncIterator[tuple[Supervisor, StateMemory]]:
    config = RunConfig(Script("none.py"), "job", max_nodes=2, backend=Backend.COORDINATOR, token="secret")
    memory = StateMemory(str(folder / "agent"), lambda pid: None)
    children = Children().open()
    found = Supervisor(config, "n0", memory, children, lambda report: None)
    assert found.port("127.0.0.1")
    try:
        yield found, memory
    finally:
        await found.close()
        memory.close()
        children.close()


def place(round: int, partner: Address | None) -> Place:
    return Place(round, 0, 2, 0, 2, 1, 0, 2, Address("127.0.0.1", 1), 0, partner)


PARTNER = Address("127.0.0.1", 9)


def test_the_replicator_starts_in_the_first_round_with_a_partner_if_there_are_buffers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervisor(tmp_path) as (found, memory):
            found.start_round(place(1, None))
            assert memory._keep(0, "state", 0, [create_memory(4096)]) == ""
            assert found._pid is None
            found.start_round(place(2, PARTNER))  # its workers go on with the buffer that they have
            assert found._pid is not None
            os.kill(found._pid, 0)

    asyncio.run(scenario())


def test_without_buffers_no_replicator_starts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervisor(tmp_path) as (found, _):
            found.start_round(place(1, None))
            found.start_round(place(2, PARTNER))
            assert found._pid is None

    asyncio.run(scenario())


def test_a_round_without_a_partner_keeps_no_commit_for_a_set(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervisor(tmp_path) as (found, memory):
            found.start_round(place(1, PARTNER))
            memory.hold("state", [CommitId(1, 5)], None)
            found.start_round(place(2, PARTNER))
            assert memory.held("state") == [CommitId(1, 5)]
            found.start_round(place(3, None))
            assert memory.held("state") == []

    asyncio.run(scenario())


def test_a_copy_whose_descriptor_did_not_arrive_is_declined(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervisor(tmp_path) as (found, memory):
            found.start_round(place(1, PARTNER))
            found._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            found._channel.setblocking(False)
            copy = {"rank": 1, "state": "state", "round": 1, "number": 7}
            with theirs:
                for fds in ([], [os.memfd_create("copy")]):
                    socket.send_fds(theirs, [json.dumps({"copy": copy}).encode()], fds)
                    found._on_readable(found._channel)
                    assert json.loads(theirs.recv(4096)) == {"kept": bool(fds)}
                    for fd in fds:
                        os.close(fd)
            assert [each[0] for each in memory.buffers(range(2))] == [1]
            found._channel.close()
            found._channel = None

    asyncio.run(scenario())
