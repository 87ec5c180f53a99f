"""A driver whose surroundings break: its coordinator is the test, everything else is real."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ripstop.agent import queries
from ripstop.agent.driver import QUESTIONS, Driver
from ripstop.agent.machine import InspectWorkers
from ripstop.logs.directory import LogDirectory
from ripstop.model.config import HealthLimits, Logs, RunConfig, Script, StartMethod
from ripstop.model.round import Node
from ripstop.protocol.codec import encode
from ripstop.protocol.messages import FromAgent, Inspected, Query, Reply
from ripstop.transport.link import Listener
from ripstop.workers.spawner import ProcessSpec, Warm

DEADLINE = 20.0


class Coordinator:
    """A link that sends as the network does, and keeps what was sent."""

    local_host = None
    skew = None
    trouble = ""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[FromAgent] = asyncio.Queue()

    def open(self, listener: Listener) -> None:
        asyncio.get_running_loop().call_soon(listener.on_connected)

    def send(self, message: FromAgent) -> None:
        encode(message)
        self.heard.put_nowait(message)

    async def close(self) -> None:
        pass

    async def hear(self, kind: type[FromAgent]) -> Any:
        while not isinstance(message := await self.heard.get(), kind):
            pass
        return message


class NoWorkers:
    """A starter of whom nothing is asked."""

    async def warm(self) -> Warm:
        return Warm(StartMethod.EXEC, (), "", 0.0)

    async def spawn(self, births: list[ProcessSpec]) -> list[int]:
        raise AssertionError("no round was assigned")

    def close(self) -> None:
        pass


def with_agent(
    folder: Path,
    scenario: Callable[[Driver, Coordinator], Coroutine[Any, Any, None]],
    health: HealthLimits | None = None,
) -> None:
    """An agent, until the scenario is over; whatever ends it before is raised."""

    async def run() -> None:
        config = RunConfig(Script("none.py"), "test", health=health or HealthLimits(), signals=())
        coordinator = Coordinator()
        directory = LogDirectory(Logs(folder / "logs"), "test")
        environ = {"TMPDIR": str(folder), "CUDA_VISIBLE_DEVICES": ""}
        driver = Driver(config, Node("a", "here", 1), NoWorkers(), coordinator, directory, environ)
        agent = asyncio.create_task(driver.run())
        scene = asyncio.create_task(scenario(driver, coordinator))
        try:
            await asyncio.wait([agent, scene], timeout=DEADLINE, return_when=asyncio.FIRST_COMPLETED)
            assert scene.done() or agent.done(), "nothing happens"
            assert not agent.done(), agent.exception()
            scene.result()
        finally:
            for task in (scene, agent):
                task.cancel()
            await asyncio.wait([scene, agent])

    asyncio.run(run())


def test_a_look_at_its_health_that_breaks_does_not_end_an_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = 0

    async def scenario(driver: Driver, coordinator: Coordinator) -> None:
        enough = asyncio.Event()

        async def broken(skew: float | None) -> None:
            nonlocal looks
            looks += 1
            if looks == 3:
                enough.set()
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(driver._checkup, "look", broken)
        await enough.wait()

    with caplog.at_level(logging.WARNING):
        with_agent(tmp_path, scenario, HealthLimits(interval=0.01))
    assert len([line for line in caplog.messages if "Too many open files" in line]) == 1


def test_an_answer_too_large_for_a_message_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def quotes(workers: object, details: object) -> dict[str, Any]:
        return {"said": '"' * 70_000}  # four characters each, in the message

    monkeypatch.setitem(queries.QUESTIONS, "quotes", quotes)

    async def scenario(driver: Driver, coordinator: Coordinator) -> None:
        driver.on_message(Query(7, "quotes"))
        answer = await coordinator.hear(Reply)
        assert answer.number == 7 and "ask for less" in answer.error
        driver.on_message(Query(8, "ä" * 100_000))
        assert "cannot answer" in (await coordinator.hear(Reply)).error

    with_agent(tmp_path, scenario)


def test_more_questions_than_an_agent_has_hands_for_are_answered_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(driver: Driver, coordinator: Coordinator) -> None:
        go = asyncio.Event()

        async def patient(workers: object, details: object) -> dict[str, Any]:
            await go.wait()
            return {}

        monkeypatch.setitem(queries.QUESTIONS, "patient", patient)
        for number in range(QUESTIONS + 1):
            driver.on_message(Query(number, "patient"))
        answer = await coordinator.hear(Reply)
        assert answer.number == QUESTIONS and "busy" in answer.error
        go.set()
        assert {(await coordinator.hear(Reply)).error for _ in range(QUESTIONS)} == {""}

    with_agent(tmp_path, scenario)


def test_workers_who_cannot_be_looked_at_do_not_end_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuses() -> None:
        raise OSError(24, "Too many open files")

    async def scenario(driver: Driver, coordinator: Coordinator) -> None:
        watch = SimpleNamespace(inspect=refuses, close=lambda: None)
        running = SimpleNamespace(place=SimpleNamespace(round=3), watch=watch, group=None)
        monkeypatch.setattr(driver, "_running", running)
        driver._execute(InspectWorkers(3))
        assert await coordinator.hear(Inspected) == Inspected(3)

    with_agent(tmp_path, scenario)
