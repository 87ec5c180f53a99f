"""The agreement of ranks on the final commit of a round, in all orders in which they can learn of it."""

import socket
import threading
import weakref
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest

from ripstop.commit_memory import CommitHeader, CommitId
from ripstop.train import final_commit, interruption
from ripstop.train.agent_memory import AgentMemory
from ripstop.train.final_commit import FinalCommit
from ripstop.train.rank_store import RankStore


class Values(dict[str, Any]):
    """A store; reading a value that is not there would block."""

    def publish(self, topic: str, value: Any) -> None:
        self[topic] = value

    def has(self, topics: list[str]) -> bool:
        return all(topic in self for topic in topics)

    def get(self, topic: str) -> Any:  # type: ignore[override]
        return self[topic]


class Memory:
    """The agent of one rank: it tells its worker from some call on that the round ends."""

    def __init__(self, tells_at: int = 1) -> None:
        self.call = 0
        self.tells_at = tells_at
        self.made: list[tuple[str, int]] = []
        self.waits = False

    def is_final_commit_due(self, name: str) -> bool:
        return self.call >= self.tells_at

    def final_commit_made(self, name: str, id: CommitId, slot: int, *, is_replicated: bool) -> None:
        self.made.append((name, id.number))

    def wait_for_end(self) -> None:
        self.waits = True


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[weakref.WeakValueDictionary[str, FinalCommit]]:
    """The States of each rank: in a job, these are three processes."""
    found = [weakref.WeakValueDictionary[str, FinalCommit]() for _ in range(3)]
    monkeypatch.setattr(final_commit, "_states", found[0])
    return found


def part(name: str, memory: Memory, store: RankStore, rank: int = 0, world_size: int = 1) -> FinalCommit:
    return FinalCommit(name, 1, store, cast(AgentMemory, memory), rank, world_size, 1)


@pytest.mark.parametrize("learned", list(product(range(1, 5), repeat=3)))
def test_all_ranks_make_the_same_final_commit(
    learned: tuple[int, ...],
    states: list[weakref.WeakValueDictionary[str, FinalCommit]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank learns of it at another call.  Between two calls is a collective, so no rank is a call ahead."""
    values = cast(RankStore, Values())
    memories = [Memory(tells_at) for tells_at in learned]
    ranks = [part("state", memories[rank], values, rank, 3) for rank in range(3)]
    last: dict[int, int] = {}
    for call in range(1, 12):
        for rank in (0, 1, 2) if call % 2 else (2, 1, 0):
            monkeypatch.setattr(final_commit, "_states", states[rank])
            memories[rank].call = call
            if ranks[rank].is_now():
                last.setdefault(rank, call)
        if last:
            break
    assert last == dict.fromkeys(range(3), last[0]) and last[0] <= max(learned) + 2


def commit(state: FinalCommit, number: int) -> None:
    if state.is_now():
        state.made(CommitHeader(0, CommitId(1, number), 0, 1, 0, 0, 0, 0), slot=0)


@pytest.mark.usefixtures("states")
def test_all_states_of_a_worker_commit_after_the_same_step() -> None:
    """The agent's message comes between the commits of two States."""
    values, memory = cast(RankStore, Values()), Memory()
    ema, model = part("ema", memory, values), part("model", memory, values)
    for step in range(1, 5):
        commit(ema, step)
        memory.call = step
        commit(model, step)
        assert memory.waits == (step == 3)
        if memory.waits:
            break
    assert memory.made == [("ema", 3), ("model", 3)]


@pytest.mark.usefixtures("states")
def test_a_state_that_the_script_does_not_commit_delays_the_end_by_one_step_at_most() -> None:
    values, memory = cast(RankStore, Values()), Memory()
    model, rare = part("model", memory, values), part("rare", memory, values)
    commit(model, 1)
    commit(rare, 1)
    memory.call = 1
    for step in range(2, 5):
        assert not memory.waits
        commit(model, step)
    assert memory.waits and memory.made == [("model", 4)]


@pytest.mark.parametrize("is_told_before", [False, True])
def test_the_next_round_interrupts_the_wait_after_the_final_commit(tmp_path: Path, is_told_before: bool) -> None:
    path = str(tmp_path / "agent")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with listener:
        listener.bind(path)
        listener.listen()
        memory = AgentMemory(path)
        agent, _ = listener.accept()
        with agent:
            agent.send(b'{"held": [], "ending": true}')
            assert memory.is_final_commit_due("state")
            agent.send(b"{}")  # the reply to "waits"
            interruption.enter_interruptible()
            thread = threading.Timer(0.0 if is_told_before else 0.2, interruption.interrupt)
            thread.start()
            if is_told_before:
                thread.join()
            try:
                with pytest.raises(interruption.Interrupted):
                    memory.wait_for_end()
            finally:
                thread.join()
                interruption.enter_interruptible()  # forgets the interruption
                interruption.leave_interruptible()
