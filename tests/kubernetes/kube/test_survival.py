"""Operators that die in the middle of things, that are two, and that lose their connections.

Whatever happens to them, a job ends with one pod for each slot, and pods that ran have not been touched.
"""

import asyncio
import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.kubernetes.kube.lab import Operators, Place, eventually, needs_a_cluster

needs_a_cluster()


class Lives:
    """Keeps an operator running that dies ever again, until something holds."""

    def __init__(self, operators: Operators, place: Place, *, last: int) -> None:
        self._operators, self._place, self._last = operators, place, last
        self._operator: subprocess.Popen[bytes] | None = None
        self.deaths = 0

    def until(self, holds: Any, seconds: float = 120.0) -> None:
        def look() -> bool:
            if self._operator is None or self._operator.poll() is not None:
                if self._operator is not None:
                    assert self._operator.returncode == -9, self._operators.log.read_text()
                    self.deaths += 1
                self._operator = self._operators.start(self._place.name, last=self._last)
            return bool(holds())

        eventually(look, seconds)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("last", [1, 2])
def test_an_operator_killed_after_every_change_loses_and_doubles_nothing(
    place: Place, operators: Operators, last: int
) -> None:
    lives = Lives(operators, place, last=last)
    place.submit(replicas=None, maxReplicas=3, disruptionBudget=True)
    lives.until(lambda: set(place.uids()) == {"train-0", "train-1", "train-2"})
    born = place.uids()
    place.start(*born)
    lives.until(lambda: place.phase() == "Running")
    place.end("train-1", 137)
    lives.until(lambda: place.uids().get("train-1") not in (None, born["train-1"]))
    place.start("train-1")
    lives.until(lambda: place.job()["status"]["readyReplicas"] == 3)
    place.scale(2)
    lives.until(lambda: set(place.uids()) == {"train-0", "train-1"})
    assert place.uids()["train-0"] == born["train-0"]
    assert place.job()["status"]["replaced"] == 1
    place.change(ttlSecondsAfterFinished=0)
    place.end("train-0", 0, json.dumps({"outcome": "succeeded"}))
    lives.until(place.forgotten)
    assert lives.deaths > 10 / last


def test_two_operators_do_no_harm(place: Place, operators: Operators) -> None:
    both = [operators.start(place.name), operators.start(place.name)]
    names = [f"job{n}" for n in range(5)]
    for name in names:
        place.submit(name, replicas=3)
    born = {name: place.there(*(f"{name}-{slot}" for slot in range(3)), job=name) for name in names}
    for name in names:
        place.start(*born[name])
        place.end(f"{name}-2", 137)
    for name in names:
        eventually(lambda name=name: place.uids(name).get(f"{name}-2") not in (None, born[name][f"{name}-2"]))
        assert place.job(name)["status"]["replaced"] == 1
        place.scale(1, name)
    for name in names:
        assert place.there(f"{name}-0", job=name) == {f"{name}-0": born[name][f"{name}-0"]}
    assert [operator.poll() for operator in both] == [None, None]


def test_an_operator_killed_at_any_moment_is_followed_by_the_next(place: Place, operators: Operators) -> None:
    """Ten jobs grow and shrink; five operators die meanwhile, whenever it happens."""
    names = [f"job{n}" for n in range(10)]
    for name in names:
        place.submit(name, replicas=1)
    for n in range(5):
        operator = operators.start(place.name)
        before = operators.log.stat().st_size
        eventually(lambda before=before: operators.log.stat().st_size > before)
        for name in names:
            place.scale(1 + (n + 1) % 4, name)
        time.sleep(0.03 * n)  # not for luck: another moment each time
        operator.kill()
        operator.wait()
    for name in names:
        place.scale(3, name)
    operators.start(place.name)
    for name in names:
        place.there(*(f"{name}-{slot}" for slot in range(3)), job=name)


class Line:
    """The way to the API server, which can be cut."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._cut = False
        self.connections = 0
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        serving = asyncio.start_server(self._relay, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(serving, self._loop).result()
        self.port: int = self._server.sockets[0].getsockname()[1]

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._cut:
            writer.transport.abort()
            return
        self.connections += 1
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._writers |= {writer, far_writer}
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))
        for end in (writer, far_writer):
            end.transport.abort()
            self._writers.discard(end)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.transport.abort()

    def cut(self) -> None:
        self._cut = True
        self._loop.call_soon_threadsafe(self._abort)

    def _abort(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _end(self) -> None:
        self._server.close()
        relays = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*relays, return_exceptions=True)

    def heal(self) -> None:
        self._cut = False

    def close(self) -> None:
        self.cut()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def line(admin: dict[str, Any]) -> Iterator[Line]:
    server = urlsplit(admin["clusters"][0]["cluster"]["server"])
    assert server.hostname is not None
    line = Line(server.hostname, server.port or 443)
    try:
        yield line
    finally:
        line.close()


def test_changes_during_a_lost_connection_are_found_afterwards(
    place: Place, operators: Operators, line: Line, tmp_path: Path
) -> None:
    config = json.loads(operators.config.read_text())
    config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{line.port}"
    through = tmp_path / "through.json"
    through.write_text(json.dumps(config))
    operator = operators.start(place.name, config=through)
    place.submit()
    born = place.there("train-0", "train-1")
    place.start("train-0", "train-1")
    eventually(lambda: place.phase() == "Running")
    for n, size in enumerate((4, 3)):
        line.cut()
        before = line.connections
        place.scale(size)
        place.end(f"train-{2 - n}" if n else "train-1", 137)
        place.submit(f"other{n}")
        line.heal()
        eventually(lambda before=before: line.connections > before)
        place.there(*(f"train-{slot}" for slot in range(size)))
        place.there(f"other{n}-0", f"other{n}-1", job=f"other{n}")
    assert place.uids()["train-0"] == born["train-0"]
    assert operator.poll() is None
