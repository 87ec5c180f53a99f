"""The agent's memory for state, served from a thread, and this process as its worker."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ripstop.model.config import Checkpoints
from ripstop.train import saver
from ripstop.workers.saver_process import SaverProcess, SaverProcesses
from ripstop.workers.state_memory import StateMemory, WorkerIdentity

Result = TypeVar("Result")
RUN_ID = "test"


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


class SaverInAThread(SaverProcesses):
    """Saves without a process of its own; end-to-end tests have the process."""

    def __init__(self, directory: Path) -> None:
        config = Checkpoints(directory, interval=1e-9)
        tasks: set[Any] = set()
        super().__init__(config, RUN_ID, None, {}, None, lambda task: tasks.add(asyncio.ensure_future(task)))  # type: ignore[arg-type]
        self.results: list[dict[str, Any]] = []

    async def _start(self, save: SaverProcess) -> None:
        ranks = sorted(save.buffers)
        settings = {
            "directory": str(self.config.directory), "keep": 2, "run_id": RUN_ID, "name": save.name, "ranks": ranks,
            "round": save.commit[0], "number": save.commit[1], "world_size": save.world_size,
        }  # fmt: skip
        fds = [os.dup(save.buffers[rank][1]) for rank in ranks]
        try:
            self.results.append(await asyncio.to_thread(saver.save, settings, fds))
        except Exception as error:
            self.results.append({"problem": repr(error)})
        self._forget(save)

    def is_busy(self) -> bool:
        return any(save.is_started for save in list(self._saves.values()))


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setenv("RIPSTOP_SOCKET", str(tmp_path / "agent"))
    agent = Agent(str(tmp_path / "agent"))
    try:
        yield agent
    finally:
        agent.close()
