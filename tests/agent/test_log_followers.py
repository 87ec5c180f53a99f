"""Who is waited for at the end of an agent, and for how long."""

import asyncio
from collections.abc import Callable

import pytest

from ripstop.agent import log_followers
from ripstop.agent.log_followers import LogFollowers

LONG = 60.0
DEADLINE = 20.0


def parting(before: Callable[[LogFollowers], None], meanwhile: Callable[[LogFollowers], None] | None = None) -> bool:
    """Whether somebody was waited for; nobody is beyond the deadline of a test."""

    async def scenario() -> bool:
        found = LogFollowers()
        before(found)
        task = asyncio.create_task(found.part(LONG))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waited = not task.done()
        if meanwhile is not None:
            meanwhile(found)
        async with asyncio.timeout(DEADLINE):
            await task
        return waited

    return asyncio.run(scenario())


def test_nobody_is_waited_for_who_is_not_there_or_has_had_the_end() -> None:
    def had_the_end(found: LogFollowers) -> None:
        found.ask("a")
        found.answer("a", last=False)
        found.ask("a")
        found.answer("a", last=True)

    assert not parting(lambda _: None)
    assert not parting(had_the_end)


def test_who_is_being_answered_is_waited_for_until_it_has_the_end() -> None:
    def half(found: LogFollowers) -> None:
        for name in ("a", "b"):
            found.ask(name)
            found.answer(name, last=False)
            found.ask(name)

    def rest(found: LogFollowers) -> None:
        for name in ("a", "b"):
            found.answer(name, last=False)
            found.ask(name)
            found.answer(name, last=True)

    assert parting(half, rest)


def test_who_does_not_ask_again_is_waited_for_briefly_and_once_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_followers, "PATIENCE", 0.05)

    def silent(found: LogFollowers) -> None:
        found.ask("a")
        found.answer("a", last=False)

    async def long_ago() -> bool:
        found = LogFollowers()
        silent(found)
        await found.part(LONG)
        task = asyncio.create_task(found.part(LONG))
        await asyncio.sleep(0)
        return task.done()

    assert parting(silent)
    assert asyncio.run(long_ago())


def test_there_is_a_time_after_which_nobody_is_waited_for() -> None:
    async def scenario() -> None:
        found = LogFollowers()
        found.ask("a")
        async with asyncio.timeout(DEADLINE):
            await found.part(0.05)

    asyncio.run(scenario())
