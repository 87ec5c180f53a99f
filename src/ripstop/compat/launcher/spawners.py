"""Starts the workers of a launch: commands through the zygote, functions with Python's multiprocessing.

A function needs what multiprocessing offers: closures with `fork`, functions of `__main__` with `spawn`, queues and
locks as arguments with every method.  So the launching process starts functions, not the zygote.  The engine watches,
stops and reaps them as it does all others; `multiprocessing/function_worker.py` runs in them.

Rules for functions: (1) a worker leads its own session and dies with the launcher; (2) a forked worker keeps the
descriptors that the program had, and none of the engine's; (3) a return value travels in a file, complete or not at
all, so its size does not matter; (4) a function or an argument that cannot be pickled is an error before anything
starts.
"""

import asyncio
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import context, get_context, process, reduction
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ripstop.compat.multiprocessing.function_worker import (
    Inherited,
    Task,
    run_function_worker,
    set_up_function_worker,
    start_function_worker,
)
from ripstop.compat.multiprocessing.numa_binding import Bind
from ripstop.compat.utils import macros
from ripstop.model.config import Executable, Module, RunConfig, Script, StartMethod
from ripstop.model.errors import StartError
from ripstop.system import linux
from ripstop.workers.environment import shared_environment
from ripstop.workers.processes import Children
from ripstop.workers.spawner import PreloadResult, ProcessSpec, ServeStore, Spawner, wait_for_spawned_pids
from ripstop.workers.zygote.store_process import run_store_process

METHODS = ("spawn", "fork", "forkserver")


class LauncherCommandSpawner(Spawner):
    """Replaces `${local_rank}` in each worker's arguments."""

    def __init__(self, children: Children, config: RunConfig, environ: Mapping[str, str]) -> None:
        super().__init__(
            children, config.entry, shared_environment(environ, config.slots), config.start, config.preload
        )
        self.has_started = False
        self._ranks: dict[int, int] = {}  # of the last round, by local rank

    def request(self, spec: ProcessSpec) -> dict[str, Any]:
        if spec.local_rank is None:
            return super().request(spec)
        self._ranks[spec.local_rank] = int(spec.env["RANK"])
        self.has_started = True
        return super().request(replace(spec, entry=_launcher_spawner_entry_for_rank(spec.entry, spec.local_rank)))

    def returned(self) -> dict[int, Any]:
        """A command returns nothing."""
        return dict.fromkeys(self._ranks.values())


def _launcher_spawner_entry_for_rank(entry: Any, local_rank: int) -> Any:
    match entry:
        case Executable(argv):
            return Executable(tuple(macros.substitute(argv, str(local_rank))))
        case Script(args=args) | Module(args=args):
            return replace(entry, args=tuple(macros.substitute(args, str(local_rank))))
    return entry


class LauncherFunctionSpawner:
    """Starts functions; `args` are by local rank.  `returned` reads the values of the last round's workers."""

    def __init__(
        self,
        children: Children,
        function: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        method: str,
        results: Path,
        environ: Mapping[str, str],
        inherited: Inherited,
    ) -> None:
        self.children = children
        self._function = function
        self._args = args
        self._method = method
        self._context: Any = get_context(method)
        self._results = results
        self._files: dict[int, Path] = {}
        self.has_started = False
        self._rounds = 0
        self._inherited = inherited if method == "fork" else None
        self._stores: Spawner | None = None
        if method == "fork":
            return
        self._check_pickles()
        # The store needs torch.  Workers that import torch take as long as this does; a fork has it already.
        preload = ("torch",) if "torch" in sys.modules else ()
        self._stores = Spawner(children, Executable(()), environ, StartMethod.ZYGOTE, preload)

    def _check_pickles(self) -> None:
        """Raise now the error that multiprocessing would raise when the first worker starts (rule 4)."""
        context.set_spawning_popen(_SpawnerPopen())  # type: ignore[arg-type]  # queues and locks need it to be pickled
        try:
            for what, thing in (("the function", self._function), ("an argument of the function", self._args)):
                try:
                    with Path(os.devnull).open("wb") as null:
                        reduction.ForkingPickler(null).dump(thing)
                except Exception as error:
                    name = str(getattr(thing, "__qualname__", thing))[:200]
                    raise pickle.PicklingError(
                        f"{what} {name} must be sent to new processes, and cannot be pickled: {error}; "
                        "use a function at the top of a module, or start_method='fork'."
                    ) from error
        finally:
            context.set_spawning_popen(None)

    async def wait_ready(self) -> PreloadResult:
        return PreloadResult(StartMethod.EXEC, (), f"a function, started by multiprocessing's {self._method}", 0.0)

    async def spawn(self, specs: Sequence[ProcessSpec]) -> list[int]:
        if self._stores is not None and isinstance(specs[0].entry, ServeStore):
            return await self._stores.spawn(specs)
        if self._method == "fork":
            return self._start(specs)
        # In a thread, because sending a large argument waits until the new interpreter runs.
        start = asyncio.get_running_loop().run_in_executor(None, self._start, specs)
        return await wait_for_spawned_pids(self.children, start) or []

    def close(self) -> None:
        if self._stores is not None:
            self._stores.close()

    def returned(self) -> dict[int, Any]:
        """Return values by global rank."""
        values: dict[int, Any] = {}
        for rank, path in self._files.items():
            try:
                values[rank] = pickle.loads(path.read_bytes())
            except FileNotFoundError:
                raise RuntimeError(
                    f"the function of rank {rank} ended its process (exit code 0) and did not return; let it return."
                ) from None
            except Exception as error:
                raise ValueError(
                    f"what rank {rank} returned cannot be read here: {error}; return plain data, or classes that the "
                    "launching program can import."
                ) from error
        return values

    def _start(self, specs: Sequence[ProcessSpec]) -> list[int]:
        pids: list[int] = []
        files: dict[int, Path] = {}
        self._rounds += 1
        try:
            for local_rank, spec in enumerate(specs):
                match spec.entry:
                    case ServeStore(fd=fd, host=host, port=port):
                        pids.append(
                            self._start_process(_serve_launcher_spawner_store, (host, port, fd, self._inherited))
                        )
                    case _:
                        rank = int(spec.env["RANK"])
                        files[rank] = self._results / f"{self._rounds}.{rank}"
                        pids.append(
                            self._start_process(run_function_worker, (self._task(spec, local_rank, files[rank]),))
                        )
        except Exception as error:
            self.children.kill(pids)
            raise StartError(f"no worker can be started: {type(error).__name__}: {error}; see its cause.") from error
        if files:
            self._files, self.has_started = files, True
        return pids

    def _task(self, spec: ProcessSpec, local_rank: int, result: Path) -> Task:
        return Task(
            function=self._function,
            args=self._args[local_rank],
            env=spec.env,
            stdout=str(spec.stdout or ""),
            stderr=str(spec.stderr or ""),
            result=os.fspath(result),
            bind=Bind(spec.binding, linux.linux_memory_policy_syscall()) if spec.binding else None,
            parent=None if self._method == "forkserver" else os.getpid(),
            inherited=self._inherited,
        )

    def _start_process(self, target: Callable[..., None], args: tuple[Any, ...]) -> int:
        worker = start_function_worker(self._context, target, args, self._inherited)
        process._children.discard(worker)  # type: ignore[attr-defined]  # the engine reaps it, not multiprocessing
        self.children.claim(
            worker.pid, (lambda: _reap_launched_worker(worker)) if self._method == "forkserver" else None
        )
        return int(worker.pid)


class _SpawnerPopen:
    """The part of a starting process that pickling uses."""

    def duplicate_for_child(self, fd: int) -> int:
        return fd

    DupFd = duplicate_for_child


def _reap_launched_worker(worker: Any) -> int:
    worker.join()
    return int(worker.exitcode)


def _serve_launcher_spawner_store(host: str, port: int, fd: int, inherited: Inherited | None) -> None:
    set_up_function_worker(os.getppid(), inherited, keep=fd)
    run_store_process(host, port, fd)
