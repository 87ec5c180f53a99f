"""A driver whose environment fails: the test is its coordinator, everything else is real."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ripstop.agent import query_handler, store_ports
from ripstop.agent.driver import AgentDriver
from ripstop.agent.machine_io import InspectWorkers, OpenStorePort
from ripstop.agent.query_handler import MAX_OPEN_QUERIES
from ripstop.logs.directory import LogDirectory
from ripstop.model.config import HealthLimits, Logs, RunConfig, Script, StartMethod
from ripstop.model.errors import StartError
from ripstop.model.round import Node
from ripstop.protocol.codec import encode
from ripstop.protocol.messages import FromAgent, Inspected, Query, Ready, Reply
from ripstop.transport.link import Listener
from ripstop.workers.processes import Children
from ripstop.workers.spawner import PreloadResult, ProcessSpec

DEADLINE = 120.0


class Coordinator:
    """A link that encodes messages as the network does, and keeps them."""

    local_host = None
    skew = None
    trouble = ""

    def __init__(self) -> None:
        self.received: asyncio.Queue[FromAgent] = asyncio.Queue()

    def open(self, listener: Listener) -> None:
        asyncio.get_running_loop().call_soon(listener.on_connected)

    def send(self, message: FromAgent) -> None:
        encode(message)
        self.received.put_nowait(message)

    async def close(self) -> None:
        pass

    async def receive(self, kind: type[FromAgent]) -> Any:
        while not isinstance(message := await self.received.get(), kind):
            pass
        return message


class NoWorkers:
    """A starter that starts no workers."""

    def __init__(self) -> None:
        self.children = Children()

    async def wait_ready(self) -> PreloadResult:
        return PreloadResult(StartMethod.EXEC, (), "", 0.0)

    async def spawn(self, specs: list[ProcessSpec]) -> list[int]:
        raise AssertionError("no round was assigned")

    def close(self) -> None:
        pass


def with_agent(
    folder: Path,
    scenario: Callable[[AgentDriver, Coordinator], Coroutine[Any, Any, None]],
    health: HealthLimits | None = None,
) -> None:
    """Run an agent until the scenario is over; an error that ends the agent earlier is raised."""

    async def run() -> None:
        config = RunConfig(Script("none.py"), "test", health=health or HealthLimits(), signals=())
        coordinator = Coordinator()
        directory = LogDirectory(Logs(folder / "logs"), "test")
        environ = {"TMPDIR": str(folder), "CUDA_VISIBLE_DEVICES": ""}
        driver = AgentDriver(config, Node("a", "127.0.0.1", 1), NoWorkers(), coordinator, directory, environ)
        agent = asyncio.create_task(driver.run())
        scene = asyncio.create_task(scenario(driver, coordinator))
        try:
            await asyncio.wait([agent, scene], timeout=DEADLINE, return_when=asyncio.FIRST_COMPLETED)
            assert scene.done() or agent.done(), "the scenario timed out"
            assert not agent.done(), agent.exception()
            scene.result()
        finally:
            for task in (scene, agent):
                task.cancel()
            await asyncio.wait([scene, agent])

    asyncio.run(run())


def test_a_health_check_that_raises_does_not_end_the_agent_and_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checks = 0

    async def scenario(driver: AgentDriver, coordinator: Coordinator) -> None:
        enough = asyncio.Event()

        async def broken(skew: float | None) -> None:
            nonlocal checks
            checks += 1
            if checks == 3:
                enough.set()
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(driver._health_probe, "read", broken)
        await enough.wait()

    with caplog.at_level(logging.WARNING):
        with_agent(tmp_path, scenario, HealthLimits(interval=0.01))
    assert len([line for line in caplog.messages if "Too many open files" in line]) == 1


def test_a_reply_too_large_for_a_message_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def quotes(workers: object, details: object) -> dict[str, Any]:
        return {"text": '"' * 70_000}  # four characters each, in the message

    monkeypatch.setitem(query_handler.QUERIES, "quotes", quotes)

    async def scenario(driver: AgentDriver, coordinator: Coordinator) -> None:
        driver.on_message(Query(7, "quotes"))
        reply = await coordinator.receive(Reply)
        assert reply.number == 7 and "ask for less" in reply.error
        driver.on_message(Query(8, "ä" * 100_000))
        assert "has no query" in (await coordinator.receive(Reply)).error

    with_agent(tmp_path, scenario)


def test_a_query_beyond_the_limit_gets_an_error_immediately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(driver: AgentDriver, coordinator: Coordinator) -> None:
        go = asyncio.Event()

        async def waiting(workers: object, details: object) -> dict[str, Any]:
            await go.wait()
            return {}

        monkeypatch.setitem(query_handler.QUERIES, "waiting", waiting)
        for number in range(MAX_OPEN_QUERIES + 1):
            driver.on_message(Query(number, "waiting"))
        reply = await coordinator.receive(Reply)
        assert reply.number == MAX_OPEN_QUERIES and "try again later" in reply.error
        go.set()
        assert {(await coordinator.receive(Reply)).error for _ in range(MAX_OPEN_QUERIES)} == {""}

    with_agent(tmp_path, scenario)


def test_workers_that_cannot_be_inspected_do_not_end_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails() -> None:
        raise OSError(24, "Too many open files")

    async def scenario(driver: AgentDriver, coordinator: Coordinator) -> None:
        monitor = SimpleNamespace(inspect=fails, close=lambda: None)
        round = SimpleNamespace(place=SimpleNamespace(round=3), monitor=monitor, group=None)
        monkeypatch.setattr(driver._runner, "_round", round)
        driver._execute(InspectWorkers(3))
        assert await coordinator.receive(Inspected) == Inspected(3)

    with_agent(tmp_path, scenario)


def test_a_store_port_that_cannot_be_opened_is_retried_unless_it_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_ports, "STORE_PORT_RETRY_S", 0.01)

    def fails(host: str, port: int) -> None:
        raise StartError("no port is free")

    async def scenario(driver: AgentDriver, coordinator: Coordinator) -> None:
        await coordinator.receive(Ready)
        with monkeypatch.context() as patch:
            patch.setattr(store_ports, "RoundStore", fails)
            with pytest.raises(StartError):
                driver._execute(OpenStorePort(is_required=True))
            driver._execute(OpenStorePort())
        await coordinator.receive(Ready)

    with_agent(tmp_path, scenario)
