"""Queries to many nodes."""

import asyncio

import pytest

from ripstop.api import job_interface
from ripstop.api.job_interface import query_job_nodes
from ripstop.model.errors import QueryFailed


def test_each_node_has_its_reply_or_an_error() -> None:
    async def ask(node: str) -> str:
        if node == "b":
            raise QueryFailed("it is busy")
        if node == "c":
            await asyncio.sleep(60)
        return f"reply of {node}"

    found = asyncio.run(query_job_nodes(["a", "b", "c"], ask, 0.05))
    assert [(node, str(reply)) for node, reply in found.items()] == [
        ("a", "reply of a"),
        ("b", "it is busy"),
        ("c", "node c did not reply in 0.05 s; try again"),
    ]
    assert asyncio.run(query_job_nodes([], ask, 0.05)) == {}


def test_the_number_of_concurrent_nodes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_interface, "MAX_CONCURRENT_NODES", 3)
    running = most = 0

    async def ask(node: str) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    assert len(asyncio.run(query_job_nodes(map(str, range(20)), ask, 20.0))) == 20
    assert most == 3
