"""Real worker processes for tests, started by a real zygote and ended with the test."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ripstop.model.config import Entrypoint, Script, StartMethod
from ripstop.system import linux
from ripstop.workers.group import Exit, Group
from ripstop.workers.processes import Children
from ripstop.workers.spawner import PreloadResult, ProcessSpec, Spawner

DEADLINE = 120.0


@contextmanager
def new_spawner(
    entry: Entrypoint,
    env: Mapping[str, str],
    start: StartMethod = StartMethod.ZYGOTE,
    preload: tuple[str, ...] | None = (),
) -> Iterator[Spawner]:
    """A spawner with its own children, in the running event loop."""
    spawner = Spawner(Children().open(), entry, env, start, preload)
    try:
        yield spawner
    finally:
        spawner.close()
        spawner.children.close()


@dataclass
class Outcome:
    """How a group of workers ended."""

    exits: list[Exit]
    out: list[str]
    err: list[str]
    ready: PreloadResult


@dataclass
class Stage:
    """Writes scripts and runs them as workers."""

    directory: Path
    env: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    def script(self, text: str, name: str = "script.py") -> Path:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def run(
        self,
        entry: Entrypoint | Path,
        *,
        workers: int = 1,
        start: StartMethod = StartMethod.ZYGOTE,
        preload: tuple[str, ...] | None = (),
        env: dict[str, str] | None = None,
        meanwhile: Callable[[Group], None] = lambda group: None,
    ) -> Outcome:
        """Run workers to their end; their output goes to files, as with `--redirects`."""
        if isinstance(entry, Path):
            entry = Script(str(entry))
        return asyncio.run(self._run(entry, workers, start, preload, {**self.env, **(env or {})}, meanwhile))

    async def _run(
        self,
        entry: Entrypoint,
        workers: int,
        start: StartMethod,
        preload: tuple[str, ...] | None,
        env: dict[str, str],
        meanwhile: Callable[[Group], None],
    ) -> Outcome:
        files = [(self.directory / f"{rank}.out", self.directory / f"{rank}.err") for rank in range(workers)]
        specs = [ProcessSpec({**env, "RANK": str(rank)}, entry, *files[rank]) for rank in range(workers)]
        exits: list[Exit] = []
        done = asyncio.Event()

        def on_exit(end: Exit) -> None:
            exits.append(end)
            if len(exits) == workers:
                done.set()

        with new_spawner(entry, env, start, preload) as spawner:
            group = Group(spawner.children, spawner, specs, on_exit)
            async with asyncio.timeout(DEADLINE):
                try:
                    await group.start()
                    meanwhile(group)
                    await done.wait()
                finally:
                    await group.stop(0)
            ready = await spawner.wait_ready()
        exits.sort(key=lambda end: end.local_rank)
        return Outcome(exits, [out.read_text() for out, _ in files], [err.read_text() for _, err in files], ready)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    linux.become_subreaper()  # as in an agent: workers are its own children
    before = set(_children())
    yield Stage(tmp_path)
    left = [pid for pid in _children() if pid not in before]
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # an event loop's watcher was faster
            os.waitpid(pid, 0)
    assert not left, f"the test left processes behind: {left}"


def _children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
