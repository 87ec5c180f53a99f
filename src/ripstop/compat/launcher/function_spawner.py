"""Workers that are functions of the program that launches them, started with its own multiprocessing contexts.

A function needs what multiprocessing gives: closures with `fork`, functions of `__main__` with `spawn`, queues and
locks as arguments with all of them.  So such workers are not the zygote's; they are started here, inside the launching
process, and from then on are watched, stopped and buried like all others.

Rules: (1) a worker leads a session of its own and dies with the launcher; (2) a forked worker keeps the descriptors
that the program had, and none of ours; (3) a return value travels in a file, whole or not at all, so that its size
does not matter; (4) what cannot be pickled is said before anything is started, or by the worker that tried to
return it.
"""

import asyncio
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import context, get_context, process, reduction
from pathlib import Path
from typing import Any

from msgspec import Struct

from ripstop.compat.multiprocessing.function_process import (
    cannot_be_sent,
    die_with_parent_process,
    drop_handlers,
    is_success,
    lead_a_session,
)
from ripstop.compat.multiprocessing.numa_binding import Bind
from ripstop.compat.multiprocessing.redirects import send
from ripstop.model.config import Function, StartMethod
from ripstop.model.errors import StartError
from ripstop.system import linux
from ripstop.workers.processes import Children
from ripstop.workers.spawner import PreloadResult, ProcessSpec, ServeStore, Spawner
from ripstop.workers.zygote.store_process import serve

METHODS = ("spawn", "fork", "forkserver")


class Inherited(Struct, frozen=True):
    """What a fork of the program has: descriptors that are the program's, and signals whose handlers are ours."""

    descriptors: frozenset[int]
    signals: tuple[signal.Signals, ...]


class Call(Struct, frozen=True):
    """What one worker does: sent to it, or inherited by it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    env: Mapping[str, str]
    stdout: str | None
    stderr: str | None
    result: str
    bind: Bind | None
    launcher: int | None  # its pid, where that is the worker's parent
    inherited: Inherited | None  # where it is a fork


class FunctionSpawner:
    """Starts functions.

    `args` are by local rank; `returned` gives what the workers of the last round returned.
    """

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
        self.started = False  # any worker
        self._rounds = 0
        self._inherited = inherited if method == "fork" else None
        self._stores: Spawner | None = None
        if method == "fork":
            return
        check_pickles(function, args)
        # The store is torch's.  Workers that import torch take as long as this does; a fork has it already.
        preload = ("torch",) if "torch" in sys.modules else ()
        self._stores = Spawner(children, Function(results, results), environ, StartMethod.ZYGOTE, preload)

    async def wait_ready(self) -> PreloadResult:
        return PreloadResult(StartMethod.EXEC, (), f"a function, started by multiprocessing's {self._method}", 0.0)

    async def spawn(self, births: Sequence[ProcessSpec]) -> list[int]:
        if self._stores is not None and isinstance(births[0].entry, ServeStore):
            return await self._stores.spawn(births)
        if self._method == "fork":
            return self._start(births)
        # in a thread: a large argument is handed over only when the new interpreter is up
        task = asyncio.get_running_loop().run_in_executor(None, self._start, births)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            while not task.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([task])
            if task.exception() is None:
                self.children.kill(task.result())
            raise

    def close(self) -> None:
        if self._stores is not None:
            self._stores.close()

    def returned(self) -> dict[int, Any]:
        """By global rank."""
        values: dict[int, Any] = {}
        for rank, path in self._files.items():
            try:
                with path.open("rb") as file:
                    values[rank] = pickle.load(file)
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

    def _start(self, births: Sequence[ProcessSpec]) -> list[int]:
        pids: list[int] = []
        files: dict[int, Path] = {}
        target: Callable[..., None]
        args: tuple[Any, ...]
        self._rounds += 1
        try:
            for local_rank, birth in enumerate(births):
                match birth.entry:
                    case ServeStore(fd=fd, host=host, port=port):
                        target, args = _serve, (host, port, fd, self._inherited)
                    case _:
                        rank = int(birth.env["RANK"])
                        files[rank] = self._results / f"{self._rounds}.{rank}"
                        target, args = work, (self._call(birth, local_rank, files[rank]),)
                pids.append(self._fork(target, args))
        except Exception as error:
            self.children.kill(pids)
            raise StartError(f"no worker can be started: {type(error).__name__}: {error}; see its cause.") from error
        if files:
            self._files, self.started = files, True
        return pids

    def _call(self, birth: ProcessSpec, local_rank: int, result: Path) -> Call:
        return Call(
            self._function,
            self._args[local_rank],
            birth.env,
            str(birth.stdout) if birth.stdout else None,
            str(birth.stderr) if birth.stderr else None,
            os.fspath(result),
            Bind(birth.binding, linux.memory_policy_call()) if birth.binding else None,
            None if self._method == "forkserver" else os.getpid(),
            self._inherited,
        )

    def _fork(self, target: Callable[..., None], args: tuple[Any, ...]) -> int:
        worker = self._context.Process(target=target, args=args)
        with _signals_blocked(self._method == "fork"):
            worker.start()
        process._children.discard(worker)  # type: ignore[attr-defined]  # ours to reap, not multiprocessing's
        self.children.claim(worker.pid, (lambda: _ending(worker)) if self._method == "forkserver" else None)
        return int(worker.pid)


def check_pickles(function: Callable[..., Any], args: Sequence[tuple[Any, ...]]) -> None:
    """Say now what multiprocessing would say when the first worker is started."""
    context.set_spawning_popen(_Popen())  # type: ignore[arg-type]  # queues and locks are pickled only within it
    try:
        for what, thing in (("the function", function), ("an argument of the function", args)):
            try:
                reduction.ForkingPickler(_Nowhere()).dump(thing)
            except Exception as error:
                raise pickle.PicklingError(
                    f"{what} {_named(thing)} must be sent to new processes, and cannot be pickled: {error}; "
                    "use a function at the top of a module, or start_method='fork'."
                ) from error
    finally:
        context.set_spawning_popen(None)


class _Popen:
    """What pickling asks of a process that is being started."""

    def duplicate_for_child(self, fd: int) -> int:
        return fd

    DupFd = duplicate_for_child


class _Nowhere:
    def write(self, data: bytes) -> int:
        return len(data)


def _named(thing: object) -> str:
    return str(getattr(thing, "__qualname__", thing))[:200]


def _ending(worker: Any) -> int:
    worker.join()
    return int(worker.exitcode)


def descriptors() -> frozenset[int]:
    """Those that this process has open."""
    return frozenset(int(entry.name) for entry in Path("/proc/self/fd").iterdir())


@contextmanager
def _signals_blocked(wanted: bool) -> Iterator[None]:
    """A signal that came right after the fork would be taken by the launcher's handlers in the worker."""
    if not wanted:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# in the worker --------------------------------------------------------------------------------------------------------


def work(call: Call) -> None:
    """The worker's life; an exception ends it as Python would end a script."""
    from ripstop.compat.multiprocessing.errors import record

    _stand_alone(call.launcher, call.inherited, keep=-1)
    os.environ.clear()
    os.environ.update(call.env)

    def run() -> None:
        for std, path in (("stdout", call.stdout), ("stderr", call.stderr)):
            if path is not None:
                send(std, path)
        if call.bind is not None:
            call.bind()
        try:
            value = call.function(*call.args)
        except SystemExit as end:
            if not is_success(end):
                raise
            value = None
        try:
            _save(value, call.result)
        except OSError as error:
            raise OSError(error.errno, f"the return value cannot be written: {error.strerror}", call.result) from error
        except Exception as error:
            raise cannot_be_sent(value, error) from error

    record(run)()


def _serve(host: str, port: int, fd: int, inherited: Inherited | None) -> None:
    _stand_alone(os.getppid(), inherited, keep=fd)
    serve(host, port, fd)


def _stand_alone(launcher: int | None, inherited: Inherited | None, keep: int) -> None:
    """Be a process of one's own: session, signals, descriptors, and an end when the launcher ends."""
    lead_a_session()
    if inherited is not None:
        signal.set_wakeup_fd(-1)
        drop_handlers(inherited.signals)
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in descriptors():
            if fd not in inherited.descriptors and fd not in (keep, nothing):
                with suppress(OSError):
                    os.dup2(nothing, fd, inheritable=False)  # the number stays taken: our objects still name it
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if launcher is None:
        die_with_parent_process()  # the fork server, whose child it is, lives longer than the launcher
        return
    linux.parent_death_signal(signal.SIGKILL)()
    if os.getppid() != launcher:
        os._exit(1)


def _save(value: Any, path: str) -> None:
    part = Path(f"{path}.part")
    with part.open("wb") as file:
        pickle.dump(value, file, pickle.HIGHEST_PROTOCOL)
    part.replace(path)
