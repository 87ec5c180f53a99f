"""The agreement of ranks on the last commit of a round, in all orders in which they can learn of it."""

import socket
import threading
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest

from ripstop.train import interruption
from ripstop.train.agent_memory import AgentMemory
from ripstop.train.last_commit import LastCommit
from ripstop.train.rank_store import RankStore


class Values(dict[str, Any]):
    """A store; reading a value that is not there would block."""

    def publish(self, topic: str, value: Any) -> None:
        self[topic] = value

    def has(self, topics: list[str]) -> bool:
        return all(topic in self for topic in topics)

    def get(self, topic: str) -> Any:  # type: ignore[override]
        return self[topic]


@pytest.mark.parametrize("learned", list(product(range(1, 5), repeat=3)))
def test_all_ranks_make_the_same_last_commit(learned: tuple[int, ...]) -> None:
    """Each rank learns of it at another call.  Between two calls is a collective, so no rank is a call ahead."""
    values = cast(RankStore, Values())
    ranks = [LastCommit(values, rank, 3, 1) for rank in range(3)]
    last: dict[int, int] = {}
    for call in range(1, 12):
        order = (0, 1, 2) if call % 2 else (2, 1, 0)
        for rank in order:
            if call >= learned[rank] and ranks[rank].is_now(call):
                last.setdefault(rank, call)
        if last:
            break
    assert last == dict.fromkeys(range(3), last[0]) and last[0] <= max(learned) + 2


@pytest.mark.parametrize("is_told_before", [False, True])
def test_the_next_round_interrupts_the_wait_after_the_last_commit(tmp_path: Path, is_told_before: bool) -> None:
    path = str(tmp_path / "agent")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with listener:
        listener.bind(path)
        listener.listen()
        memory = AgentMemory(path)
        agent, _ = listener.accept()
        with agent:
            agent.send(b'{"held": [], "ending": true}')
            assert memory.is_last_commit_due("state")
            agent.send(b"{}")  # the reply to "last"
            interruption.enter()
            thread = threading.Timer(0.0 if is_told_before else 0.2, interruption.interrupt)
            thread.start()
            if is_told_before:
                thread.join()
            try:
                with pytest.raises(interruption.Interrupted):
                    memory.wait_for_end("state", 3, is_replicated=True)
            finally:
                thread.join()
                interruption.enter()  # forgets the interruption
                interruption.leave()
