"""`/metrics` of a coordinator, at its real port."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from msgspec import to_builtins

from ripstop.coordinator import metrics_collector
from ripstop.model.round import Address
from ripstop.model.usage import NodeSample, RankSample
from ripstop.protocol import secret
from ripstop.protocol.messages import Query, Reply
from ripstop.transport import api_authorization

SAMPLE = NodeSample(100.0, 1, 0.5, 1, (RankSample(0, 1.5, 4096, 1, 1, 10),))


async def get(address: Address, **headers: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{address}/metrics", headers=headers) as response,
    ):
        return response.status, await response.text()


class Replies:
    """An agent that replies to every query."""

    def __init__(self, link: Any, agent: Any, body: str) -> None:
        self._link, self._agent, self._body = link, agent, body
        self.count = 0

    async def run(self) -> None:
        while True:
            await self._agent.until(lambda agent: sum(isinstance(m, Query) for m in agent.messages) > self.count)
            query = [m for m in self._agent.messages if isinstance(m, Query)][self.count]
            self.count += 1
            self._link.send(Reply(query.number, self._body))


@asynccontextmanager
async def joined(harness: Any, address: Address, node: str, body: str | None) -> Any:
    """A node that is part of the job; without a body it never replies."""
    async with harness.linking(address, node=node, token="") as (link, agent):
        await agent.until(lambda a: a.count("linked") == 1)
        link.send(harness.join(node, nodes=2))
        replies = Replies(link, agent, body or "")
        task = asyncio.create_task(replies.run()) if body else None
        try:
            yield replies
        finally:
            if task:
                task.cancel()


async def members(coordinator: Any, count: int) -> None:
    """Waits until the job has this many nodes."""
    news = asyncio.Event()
    end = coordinator.journal.subscribe(lambda _: news.set(), news.set)
    while len(coordinator.status().nodes) < count:
        news.clear()
        await news.wait()
    end()


def run(scenario: Any) -> None:
    async def limited() -> None:
        async with asyncio.timeout(120):
            await scenario

    asyncio.run(limited())


def test_a_node_that_does_not_reply_is_shown_as_down(harness: Any) -> None:
    async def scenario() -> None:
        async with (
            harness.serving(nodes=2, token="") as (coordinator, address),
            joined(harness, address, "a", json.dumps(to_builtins(SAMPLE))),
            joined(harness, address, "b", None),
        ):
            await members(coordinator, 2)
            status, text = await get(address)
            assert status == 200
            assert 'ripstop_node_up{host="127.0.0.1",node="a"} 1.0' in text
            assert 'ripstop_node_up{host="127.0.0.1",node="b"} 0.0' in text
            assert 'ripstop_worker_memory_bytes{node="a",rank="0"} 4096.0' in text
            assert "ripstop_nodes_joined_total 2.0" in text

    run(scenario())


def test_a_node_with_an_invalid_reply_is_shown_as_down(harness: Any) -> None:
    async def scenario() -> None:
        invalid = to_builtins(SAMPLE) | {"ranks": [{"rank": "a lot"}]}
        async with (
            harness.serving(nodes=2, token="") as (coordinator, address),
            joined(harness, address, "a", json.dumps(invalid)),
        ):
            await members(coordinator, 1)
            _, text = await get(address)
            assert 'ripstop_node_up{host="127.0.0.1",node="a"} 0.0' in text

    run(scenario())


def test_requests_at_the_same_time_or_soon_after_share_a_page(harness: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(metrics_collector, "CACHE_S", 1000.0)

    async def scenario() -> None:
        async with (
            harness.serving(nodes=2, token="") as (coordinator, address),
            joined(harness, address, "a", json.dumps(to_builtins(SAMPLE))) as replies,
        ):
            await members(coordinator, 1)
            pages = await asyncio.gather(*(get(address) for _ in range(5)))
            pages.append(await get(address))
            assert len(set(pages)) == 1
            assert replies.count == 1

    run(scenario())


def test_metrics_of_a_job_with_a_secret_need_the_api_token(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving(token="s3cret") as (_, address):
            for wrong in ({}, {"Authorization": "Bearer guess"}, {"Authorization": "Bearer s3cret"}):
                assert (await get(address, **wrong))[0] == 401
            status, text = await get(address, Authorization=f"Bearer {secret.api_token_from_secret('s3cret', 'job')}")
            assert status == 200 and 'ripstop_job_info{run_id="job"} 1.0' in text

    run(scenario())


@pytest.mark.parametrize("host", ["evil.example", "evil.example:29400", "127.0.0.1.evil.example", "localhost.evil"])
def test_a_request_with_a_foreign_host_name_is_rejected(harness: Any, host: str) -> None:
    async def scenario() -> None:
        async with harness.serving(token="") as (_, address):
            status, text = await get(address, Host=host)
            assert status == 403 and "is not a name of this coordinator; use its IP address" in text
            assert "run_id" not in text

    run(scenario())


NAMES = ["127.0.0.1:29400", "10.1.2.3", "[::1]:29400", "localhost", "LOCALHOST.:29400", "head.example:29400"]


@pytest.mark.parametrize("host", [*NAMES, socket.gethostname(), socket.getfqdn()])
def test_a_request_with_any_name_of_the_coordinator_is_accepted(harness: Any, host: str) -> None:
    async def scenario() -> None:
        async with harness.serving(token="", name="Head.example") as (_, address):
            assert (await get(address, Host=host))[0] == 200

    run(scenario())


def test_a_host_name_that_cannot_be_looked_up_is_rejected_and_looked_up_again_later(
    harness: Any, monkeypatch: Any
) -> None:
    names = iter([UnicodeError("label too long"), OSError("no server"), "Full.Example"])

    def look_up() -> str:
        found = next(names)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(socket, "getfqdn", look_up)

    async def scenario() -> None:
        async with harness.serving(token="") as (_, address):
            assert [(await get(address, Host="full.example"))[0] for _ in range(4)] == [403, 403, 200, 200]

    run(scenario())


def test_a_slow_dns_server_delays_neither_the_reply_for_long_nor_the_end(harness: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(api_authorization, "FULL_NAME_TIMEOUT_S", 0.1)
    answered = threading.Event()
    monkeypatch.setattr(socket, "getfqdn", lambda: "full.example" if answered.wait(120) else "")

    async def scenario() -> None:
        async with harness.serving(token="") as (_, address):
            assert [(await get(address, Host="full.example"))[0] for _ in range(2)] == [403, 403]

    began = time.monotonic()
    try:
        run(scenario())
        assert time.monotonic() - began < 60.0
    finally:
        answered.set()


def test_a_request_with_the_token_may_use_any_host_name(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving(token="s3cret") as (_, address):
            token = secret.api_token_from_secret("s3cret", "job")
            assert (await get(address, Host="a.service", Authorization=f"Bearer {token}"))[0] == 200

    run(scenario())


def test_prometheus_client_is_not_imported_before_the_first_request() -> None:
    code = "import sys, ripstop.transport.server; print(sorted({'prometheus_client'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"
