"""The agent's memory for state, served from a thread, and this process as its worker."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ripstop.workers.state_memory import StateMemory, WorkerIdentity

Result = TypeVar("Result")


class Agent:
    """Serves any process as rank `rank` of `world_size`, in round `round`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.round = 1
        self.rank = 0
        self.world_size = 1
        self.is_known = True
        self.memory: StateMemory
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()

    async def _open(self) -> None:
        self.memory = StateMemory(self.path, self._identify)
        self.memory.listen()

    def _identify(self, pid: int) -> WorkerIdentity | None:
        ranks = range(self.rank, self.rank + 1)
        return WorkerIdentity(self.round, self.rank, self.world_size, ranks) if self.is_known else None

    def call(self, function: Callable[..., Result], *args: Any) -> Result:
        """Call a method of the memory in its thread."""

        async def call() -> Result:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    def close(self) -> None:
        async def close() -> None:
            self.memory.close()

        asyncio.run_coroutine_threadsafe(close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setenv("RIPSTOP_SOCKET", str(tmp_path / "agent"))
    agent = Agent(str(tmp_path / "agent"))
    try:
        yield agent
    finally:
        agent.close()
