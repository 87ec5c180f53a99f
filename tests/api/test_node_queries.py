"""Many nodes are asked the same."""

import asyncio

import pytest

from ripstop.api import node_queries
from ripstop.api.node_queries import ask_all
from ripstop.model.errors import QueryFailed


def test_each_node_has_its_answer_or_the_reason_why_there_is_none() -> None:
    async def ask(node: str) -> str:
        if node == "b":
            raise QueryFailed("it is busy")
        if node == "c":
            await asyncio.sleep(60)
        return f"{node} says"

    found = asyncio.run(ask_all(["a", "b", "c"], ask, 0.05))
    assert [(node, str(answer)) for node, answer in found.items()] == [
        ("a", "a says"),
        ("b", "it is busy"),
        ("c", "node c did not answer in 0.05 s; ask again"),
    ]
    assert asyncio.run(ask_all([], ask, 0.05)) == {}


def test_so_many_nodes_are_asked_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_queries, "NODES_AT_ONCE", 3)
    asked = most = 0

    async def ask(node: str) -> None:
        nonlocal asked, most
        asked += 1
        most = max(most, asked)
        await asyncio.sleep(0)
        asked -= 1

    assert len(asyncio.run(ask_all(map(str, range(20)), ask, 20.0))) == 20
    assert most == 3
