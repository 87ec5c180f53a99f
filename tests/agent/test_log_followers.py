"""For which log followers an agent waits at its end, and for how long."""

import asyncio
from collections.abc import Callable

import pytest

from ripstop.agent import log_followers
from ripstop.agent.log_followers import LogFollowers

LONG = 60.0
DEADLINE = 120.0


def has_waited(before: Callable[[LogFollowers], None], meanwhile: Callable[[LogFollowers], None] | None = None) -> bool:
    """Whether the agent waited for a follower."""

    async def scenario() -> bool:
        found = LogFollowers()
        before(found)
        task = asyncio.create_task(found.wait(LONG))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waited = not task.done()
        if meanwhile is not None:
            meanwhile(found)
        async with asyncio.timeout(DEADLINE):
            await task
        return waited

    return asyncio.run(scenario())


def test_the_agent_does_not_wait_without_followers_or_after_their_last_piece() -> None:
    def read_to_the_end(found: LogFollowers) -> None:
        found.on_query("a")
        found.on_reply("a", is_last=False)
        found.on_query("a")
        found.on_reply("a", is_last=True)

    assert not has_waited(lambda _: None)
    assert not has_waited(read_to_the_end)


def test_the_agent_waits_for_an_open_query_until_its_client_has_the_last_piece() -> None:
    def half(found: LogFollowers) -> None:
        for name in ("a", "b"):
            found.on_query(name)
            found.on_reply(name, is_last=False)
            found.on_query(name)

    def rest(found: LogFollowers) -> None:
        for name in ("a", "b"):
            found.on_reply(name, is_last=False)
            found.on_query(name)
            found.on_reply(name, is_last=True)

    assert has_waited(half, rest)


def test_the_agent_waits_briefly_and_only_once_for_a_client_that_sends_no_query(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_followers, "NEXT_QUERY_TIMEOUT_S", 0.05)

    def sends_one_query(found: LogFollowers) -> None:
        found.on_query("a")
        found.on_reply("a", is_last=False)

    async def long_ago() -> bool:
        found = LogFollowers()
        sends_one_query(found)
        await found.wait(LONG)
        task = asyncio.create_task(found.wait(LONG))
        await asyncio.sleep(0)
        return task.done()

    assert has_waited(sends_one_query)
    assert asyncio.run(long_ago())


def test_the_wait_for_followers_has_a_timeout() -> None:
    async def scenario() -> None:
        found = LogFollowers()
        found.on_query("a")
        async with asyncio.timeout(DEADLINE):
            await found.wait(0.05)

    asyncio.run(scenario())
