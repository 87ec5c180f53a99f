"""The agent's side of checkpoints on disk: it starts a saver process for a commit (`train/saver.py` is the process).

Rules
1.  A saver starts when all workers of this node have asked for the same commit.  It receives copies of the buffers'
    descriptors, never the agent's own.
2.  One saver at a time for each State.  A commit that is due meanwhile is skipped, with a warning.
3.  A saver that fails or dies costs this checkpoint only; the next one is tried at the next interval.
4.  The agent waits for savers when it ends, at most `shutdown` seconds.
5.  The final commit of a round, before a node leaves, is not skipped: it is saved after the one that is being saved.
"""

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ripstop.model.config import Checkpoints
from ripstop.model.errors import StartError, UsageError
from ripstop.workers.processes import Children, ProcessExit
from ripstop.workers.spawner import MAX_SAVED_BUFFERS, ProcessSpec, SaveState, WorkerSpawner

log = logging.getLogger("ripstop.workers")

MAX_REPLY_BYTES = 65536


def prepare_saver_directory(directory: Path) -> None:
    """Before anything starts: UsageError if checkpoints cannot be written to this directory."""
    from tempfile import TemporaryFile

    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(
            f"--checkpoint-dir={directory}: cannot be written to: {error.strerror}; name another directory"
        ) from error


@dataclass(slots=True)
class SaverProcess:
    """One commit of this node's ranks, from the first worker's request until its saver has ended."""

    name: str
    commit: tuple[int, int]  # round and number
    world_size: int
    buffers: dict[int, tuple[int, int]] = field(default_factory=dict)  # rank → slot, descriptor
    is_started: bool = False
    is_late: bool = False  # the next commit was due before it was saved
    pid: int = 0
    began: float = 0.0
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, buffers: Mapping[int, tuple[int, int]]) -> bool:
        """Keep duplicates of these ranks' descriptors; False if the agent has none left."""
        try:
            for rank, (slot, fd) in buffers.items():
                self.buffers[rank] = slot, os.dup(fd)
        except OSError as error:
            why = f"the agent cannot keep its buffers: {error.strerror}; raise `ulimit -n`"
            _warn_saver_process_saved_nothing(self.name, self.commit, why)
            return False
        return True

    def close(self) -> None:
        for _, fd in self.buffers.values():
            os.close(fd)
        self.buffers.clear()


class SaverProcesses:
    def __init__(
        self,
        config: Checkpoints,
        run_id: str,
        spawner: WorkerSpawner,
        env: Mapping[str, str],
        children: Children,
        run_task: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self.config = config
        self._run_id = run_id
        self._spawner = spawner
        self._env = env
        self._children = children
        self._run_task = run_task
        self._saves: dict[str, SaverProcess] = {}  # by State
        self._next: dict[str, SaverProcess] = {}  # by State; rule 5
        self._skipped: dict[str, tuple[int, int]] = {}
        self._is_closing = False

    def request(
        self, rank: int, local_ranks: range, world_size: int, name: str, slot: int, commit: tuple[int, int], fd: int
    ) -> bool:
        """A worker asks for its commit to be saved; False if this one is skipped."""
        save = self._saves.get(name)
        if save is not None and save.commit != commit:
            if save.is_started:
                self._skipped[name] = commit
                if not save.is_late:
                    save.is_late = True
                    log.warning(
                        "state %r: commit %d is not saved: the last checkpoint has been written for %.0f s; "
                        "raise --checkpoint-interval", name, commit[1], time.monotonic() - save.began,
                    )  # fmt: skip
                return False
            save.close()  # a worker died before it could ask
            save = None
        if self._skipped.get(name) == commit or self._is_closing or len(local_ranks) > MAX_SAVED_BUFFERS:
            return False
        if save is None:
            save = self._saves[name] = SaverProcess(name, commit, world_size)
        if rank not in save.buffers and not save.add({rank: (slot, fd)}):
            return False
        if set(save.buffers) == set(local_ranks):
            self._begin(save)
        return True

    def save_last(
        self, name: str, commit: tuple[int, int], world_size: int, buffers: Mapping[int, tuple[int, int]]
    ) -> None:
        """Save the final commit of a round; `buffers` are the slot and the descriptor of each rank of this node."""
        running = self._saves.get(name)
        if running is not None and not running.is_started:  # a worker did not ask
            self._forget(running)
            running = None
        if running is not None and running.commit == commit:
            return
        if self._is_closing or len(buffers) > MAX_SAVED_BUFFERS:
            too_many = f"this node has {len(buffers)} workers; a saver can take {MAX_SAVED_BUFFERS}"
            _warn_saver_process_saved_nothing(name, commit, "the agent is ending" if self._is_closing else too_many)
            return
        save = SaverProcess(name, commit, world_size)
        if not save.add(buffers):
            save.close()
        elif running is None:
            self._begin(save)
        else:
            if (older := self._next.pop(name, None)) is not None:
                _warn_saver_process_saved_nothing(name, older.commit, f"commit {commit[1]} takes its place")
                older.close()
            self._next[name] = save

    def _begin(self, save: SaverProcess) -> None:
        self._saves[save.name] = save
        save.is_started, save.began = True, time.monotonic()
        self._run_task(self._start(save))

    def slots_in_use(self, rank: int, name: str) -> list[int]:
        saves = [save for save in (self._saves.get(name), self._next.get(name)) if save and rank in save.buffers]
        slots = [(save.buffers[rank][0], save.is_started) for save in saves]
        return [slot for slot, is_started in slots if slot >= 0 or is_started]  # a rank that never asks blocks no other

    async def _start(self, save: SaverProcess) -> None:
        ranks = sorted(save.buffers)
        settings = {
            "directory": str(self.config.directory), "keep": self.config.keep, "run_id": self._run_id,
            "name": save.name, "round": save.commit[0], "number": save.commit[1], "world_size": save.world_size,
            "ranks": ranks,
        }  # fmt: skip
        try:
            reply, reply_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            self._forget(save)
            why = f"the agent has no descriptor for it: {error.strerror}; raise `ulimit -n`"
            _warn_saver_process_saved_nothing(save.name, save.commit, why)
            return
        try:
            entry = SaveState((reply_end, *(save.buffers[rank][1] for rank in ranks)), json.dumps(settings))
            (save.pid,) = await self._spawner.spawn([ProcessSpec({**self._env, "OMP_NUM_THREADS": "1"}, entry)])
            self._children.watch(save.pid, lambda end: self._ended(save, reply, end))
        except BaseException as error:
            os.close(reply)
            self._forget(save)
            if not isinstance(error, StartError):
                raise
            _warn_saver_process_saved_nothing(save.name, save.commit, str(error))
        finally:
            os.close(reply_end)

    def _ended(self, save: SaverProcess, reply: int, end: ProcessExit) -> None:
        with open(reply, "rb", buffering=0) as file:
            data = file.read(MAX_REPLY_BYTES)
        self._forget(save)
        number = save.commit[1]
        try:
            found = json.loads(data or b"")
        except ValueError:
            how = f"signal {end.signal}" if end.signal else f"exit code {end.exitcode}"
            found = {"problem": f"the saver pid={end.pid} died: {how}"}
        match found:
            case {"problem": problem}:
                _warn_saver_process_saved_nothing(save.name, save.commit, problem)
            case {"path": path, "bytes": size, "seconds": seconds, "opaque": opaque}:
                text = "state %r: commit %d is saved path=%s bytes=%d seconds=%.2f"
                log.info(text, save.name, number, path, size, seconds)
                if opaque:
                    log.info("state %r: plain DCP cannot read %s", save.name, "; ".join(opaque))

    def _forget(self, save: SaverProcess) -> None:
        save.close()
        save.has_ended.set()
        if self._saves.get(save.name) is save:
            del self._saves[save.name]
            if (last := self._next.pop(save.name, None)) is not None:
                self._begin(last)

    async def close(self, shutdown: float) -> None:
        """Let savers finish; then kill them."""
        self._is_closing = True
        for save in [save for save in self._saves.values() if not save.is_started]:
            self._forget(save)
        with suppress(TimeoutError):
            async with asyncio.timeout(shutdown):
                while self._saves:
                    await next(iter(self._saves.values())).has_ended.wait()
        for save in self._next.values():
            _warn_saver_process_saved_nothing(save.name, save.commit, f"{shutdown:.0f} s were not enough")
            save.close()
        self._next.clear()
        running = [save for save in self._saves.values() if save.pid]
        for save in running:  # no await until all are signalled: a pid is theirs until the event loop reaps it
            log.warning("state %r: the saver is killed: %.0f s were not enough", save.name, shutdown)
            os.kill(save.pid, signal.SIGKILL)
        for save in running:
            await save.has_ended.wait()


def _warn_saver_process_saved_nothing(name: str, commit: tuple[int, int], why: str) -> None:
    log.warning("state %r: commit %d is not saved: %s", name, commit[1], why)
