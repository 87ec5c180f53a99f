"""The agent's side of the zygote: start it, receive the preload result, request workers, replace it when it dies.

All workers start here, whatever the start method.  `zygote/process.py` is the other side and has the rules.

A job waits for its zygote first, so this module is quick to import: asyncio is imported late, while the zygote already
starts.
"""

# Pathlib costs more than this module.
# ruff: noqa: PTH100, PTH110, PTH118, PTH120

from __future__ import annotations

import marshal
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from ripstop.model.config import Binding, Entrypoint, Executable, Module, Script, StartMethod
from ripstop.model.errors import StartError
from ripstop.workers.processes import Children, process_start_error
from ripstop.workers.zygote import channel

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path

_ZYGOTE_DIRECTORY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "zygote")
_HOOK = os.path.join(_ZYGOTE_DIRECTORY, "hook")
_PADDING_BYTES = 2048  # space for variables that only the workers have: `zygote/title.py` shows them
MAX_CHANGES = 5  # of files while workers wait
_FORK_TIMEOUT_S = 60.0  # for a ready zygote; only an overloaded machine takes longer
_MAX_PLANS = 5  # a script needs one or two
MAX_SAVED_BUFFERS = 250  # the kernel passes at most 253 descriptors at once
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class PreloadResult(Struct, frozen=True):
    """How workers will start, what the zygote has imported, and why not as requested ("": as requested).

    `left_out` are the packages of the script's imports that the workers import themselves, and why.
    """

    start: StartMethod
    preloaded: tuple[str, ...]
    fallback_reason: str
    seconds: float
    left_out: Mapping[str, str] = {}


class ServeStore(Struct, frozen=True):
    """Instead of an entrypoint: serve the round's store on this listening socket."""

    fd: int
    host: str
    port: int


class WaitAsStandby(Struct, frozen=True):
    """Instead of an entrypoint: warm up as this local rank, report on this socket, and wait there for a request.

    With `shadowed`, run the script of this worker before, up to its function with `train.elastic`.
    """

    fd: int
    local_rank: int
    warm_up: str  # the user's function; "": none
    with_gpu: bool
    shadowed: ProcessSpec | None = None


class SaveState(Struct, frozen=True):
    """Instead of an entrypoint: save the commit in these buffers; the first descriptor takes the reply."""

    fds: tuple[int, ...]
    settings: str  # JSON


class ProcessSpec(Struct, frozen=True):
    """One process to start."""

    env: Mapping[str, str]  # complete
    entry: Entrypoint | ServeStore | WaitAsStandby | SaveState
    stdout: Path | None = None  # None: the agent's
    stderr: Path | None = None
    binding: Binding | None = None
    stacks: tuple[int, Path] | None = None  # a forked worker writes its stacks to this file at this signal
    recorder: str = ""  # a forked worker with torch serves its flight recorders on this socket
    local_rank: int | None = None  # of a worker
    exit_signal: int = 0  # a forked worker exits at this signal, with its number as exit code; 0: none


class WorkerSpawner(Protocol):
    """Starts workers for the agent."""

    @property
    def children(self) -> Children:
        """Where started processes are claimed."""

    async def wait_ready(self) -> PreloadResult:
        """Wait until workers can be started."""

    async def spawn(self, specs: Sequence[ProcessSpec]) -> list[int]:
        """Start these processes, each as the leader of its own session; return their pids in order, claimed."""

    def close(self) -> None:
        """End the processes that were kept only to start others."""


class Spawner:
    """Starts workers through a zygote, and replaces the zygote when it dies.

    Made before there is an event loop: the zygote preloads while the rest of the agent starts.  `env` is the workers'
    environment without the variables that differ between ranks; libraries read it when they are imported.
    """

    def __init__(
        self,
        children: Children,
        entry: Entrypoint,
        env: Mapping[str, str],
        start: StartMethod,
        preload: tuple[str, ...] | None = None,
    ) -> None:
        self.children = children
        self._entry = entry
        self._env = env
        self._preload = preload
        self._plan: dict[str, Any] | None = None  # `zygote/preload.py`: what a zygote leaves to its successor
        self._plans = 0  # how many zygotes in a row have left one
        self._fallback_reason = "" if start is StartMethod.EXEC else _why_spawner_cannot_fork(env)
        self._start = StartMethod.EXEC if self._fallback_reason else start
        self._lock: asyncio.Lock | None = None
        self._ready: PreloadResult | None = None
        self._pid = 0
        self.generation = 0  # the number of zygotes so far
        self._last_death = ""
        self._has_changed = False  # the last zygote ended because a file that it had imported has changed
        self._preparing: asyncio.Task[PreloadResult] | None = None
        self._launch()

    async def wait_ready(self) -> PreloadResult:
        """Wait until workers can be started.  A caller may be cancelled without effect on the others."""
        import asyncio

        if self._preparing is None or self._preparing.done():
            self._preparing = asyncio.ensure_future(self._prepare())
        return await asyncio.shield(self._preparing)

    async def _prepare(self) -> PreloadResult:
        async with self._exclusive():
            return await self._receive_result()

    def _exclusive(self) -> asyncio.Lock:
        """One exchange with the zygote at a time."""
        if self._lock is None:
            import asyncio

            self._lock = asyncio.Lock()
        return self._lock

    async def spawn(self, specs: Sequence[ProcessSpec]) -> list[int]:
        """Start these processes; they are this process's children, claimed, and their pids come in order.

        May be cancelled until the zygote is ready.  From then on the processes start, and a cancelled call ends them
        before it raises.
        """
        deaths = changes = 0
        while deaths < 2 and changes < MAX_CHANGES:
            await self.wait_ready()
            self._has_changed = False
            if (pids := await wait_for_spawned_pids(self.children, self._spawn(specs))) is not None:
                return pids
            deaths += not self._has_changed
            changes += self._has_changed
        if changes == MAX_CHANGES:
            raise StartError(
                f"no worker can be started: files of preloaded modules have changed {changes} times in a row; "
                "use --preload=none, or modules on a file system that keeps its files."
            )
        raise StartError(f"no worker can be started: the zygote {self._last_death} twice; see the kernel's log.")

    def close(self) -> None:
        """End the zygote.  Workers live on, but if the agent is killed, their subprocesses are not ended any more."""
        if self._pid:
            self._socket.close()
            os.kill(self._pid, signal.SIGKILL)
            self._reap()

    # the zygote's process -------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        """Start a zygote, without waiting for it."""
        ours, theirs = socket.socketpair()
        with theirs:
            env = dict(self._env)
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [_HOOK, env.get("PYTHONPATH")]))
            env[channel.CHANNEL_FD_VARIABLE] = str(theirs.fileno())
            env[channel.PADDING_VARIABLE] = "-" * _PADDING_BYTES
            os.set_inheritable(theirs.fileno(), True)
            try:
                self._pid = os.posix_spawn(
                    sys.executable, self._argv(), env, setsid=True, setsigmask=(), setsigdef=_IGNORED_BY_PYTHON
                )
            except OSError as error:
                ours.close()
                raise process_start_error("workers", error) from error
        self.children.claim(self._pid)
        self.generation += 1
        self._socket = ours
        self._ready = None
        settings = {
            "agent": os.getpid(),
            "forks": self._start is StartMethod.ZYGOTE,
            "preload": self._preload,
            "plan": self._plan,
            "entry": zygote_key(self._entry),
        }
        ours.sendall(channel.encode_channel_message(settings))
        ours.setblocking(False)

    def _argv(self) -> list[str]:
        """The zygote's command line is the workers' own, so that Python runs the script in them."""
        if self._start is StartMethod.EXEC or isinstance(self._entry, Executable):
            return [sys.executable, "-u", "-c", "pass"]
        return spawn_command_line(self._entry)

    async def _receive_result(self) -> PreloadResult:
        if not self._pid:
            self._launch()
        seconds = 0.0
        while self._ready is None:
            match await receive_from_spawned(self._socket):
                case None if self._start is StartMethod.ZYGOTE and self._preload is None and not self._plans:
                    self._reap()  # an import of the script's has ended it
                    self._try_again({"careful": True})
                case None:
                    self._fall_back(f"the zygote {self._reap()} while it was preloading")
                case {"unfit": str(why)}:
                    self._reap()
                    self._fall_back(why)
                case {"again": plan, "seconds": spent}:
                    seconds += spent
                    self._reap()
                    self._try_again(plan)
                case {"preloaded": preloaded, "left_out": left_out, "seconds": spent}:
                    seconds += spent
                    self._ready = PreloadResult(self._start, preloaded, self._fallback_reason, seconds, left_out)
        self._plan, self._plans = None, 0
        return self._ready

    def _try_again(self, plan: dict[str, Any]) -> None:
        """Start another zygote, with the plan that the last one has left."""
        self._socket.close()
        self._plan = plan
        self._plans += 1
        if self._plans > _MAX_PLANS:
            self._fall_back("the script's imports are unfit in a different way each time")
        else:
            self._launch()

    def _fall_back(self, why: str) -> None:
        """After a failed preload: execute workers instead of forking them."""
        self._socket.close()
        if self._start is StartMethod.EXEC:
            raise StartError(f"no worker can be started: {why}; check that `{sys.executable} -c pass` works.")
        self._start = StartMethod.EXEC
        self._fallback_reason = why
        self._launch()

    def _reap(self) -> str:
        """Wait for the zygote's end; return how it ended, as a text."""
        exitcode, signum, _ = self.children.reap(self._pid)
        self._pid, self._ready = 0, None
        return f"exited with code {exitcode}" if signum is None else f"died of {signal.Signals(signum).name}"

    # starting processes ---------------------------------------------------------------------------------------------

    async def _spawn(self, specs: Sequence[ProcessSpec]) -> list[int] | None:
        """None if the zygote has died since it was ready; then none of these processes runs."""
        async with self._exclusive():
            if self._ready is None:
                return None  # another request has found it dead
            with self.children.starting():
                pids = await self._exchange(specs)
            if pids is None:
                self._last_death = self._reap()
                self._socket.close()
            return pids

    async def _exchange(self, specs: Sequence[ProcessSpec]) -> list[int] | None:
        """One exchange with the zygote; None if it is dead, and these processes with it."""
        import asyncio

        fds = [fd for spec in specs for fd in _spawner_entry_descriptors(spec.entry)]
        pids: list[int] = []
        try:
            async with asyncio.timeout(_FORK_TIMEOUT_S):
                await send_to_spawned(self._socket, [self.request(spec) for spec in specs], fds)
                match await receive_from_spawned(self._socket):
                    case None:
                        return None
                    case {"changed": path}:
                        import logging  # late, as asyncio

                        log = logging.getLogger("ripstop.workers")
                        log.info("preload: %s has changed; a new zygote imports it", path)
                        self._has_changed = True
                        return None
                    case {"error": str(why)}:
                        raise StartError(f"no worker can be started: {why}; check the limits on processes and files.")
                    case {"pids": forked}:
                        pids = forked
                for pid in pids:
                    self.children.claim(pid)
                await send_to_spawned(self._socket, "go")
                if await receive_from_spawned(self._socket) is not None:
                    return pids
        except TimeoutError:
            os.kill(self._pid, signal.SIGKILL)
        except (BrokenPipeError, ConnectionResetError):
            pass
        self.children.kill(pids)  # it is unknown whether the zygote has let them go
        return None

    def request(self, spec: ProcessSpec) -> dict[str, Any]:
        """This process as a message for the zygote or a standby."""
        request: dict[str, Any] = {
            "env": dict(spec.env),
            "stdout": spec.stdout and os.fspath(spec.stdout),
            "stderr": spec.stderr and os.fspath(spec.stderr),
            "cpus": spec.binding and spec.binding.cpus,
            "memory": _spawn_memory_policy(spec.binding),
            "stacks": spec.stacks and (int(spec.stacks[0]), os.fspath(spec.stacks[1])),
            "recorder": spec.recorder,
            "exit_signal": int(spec.exit_signal),
        }
        key = zygote_key(self._entry)
        match spec.entry:
            case ServeStore(host=host, port=port):
                return request | {"what": "store", "host": host, "port": port}
            case WaitAsStandby(_, local_rank, warm_up, with_gpu, shadowed):
                standby = {"local_rank": local_rank, "warm_up": warm_up, "with_gpu": with_gpu}
                return request | {"what": "standby", **standby, "shadowed": shadowed and self.request(shadowed)}
            case SaveState(settings=settings):
                return request | {"what": "save", "settings": settings}
            case entry if self._start is StartMethod.ZYGOTE and zygote_key(entry) == key != ("command", ""):
                zygote_args = len(_spawner_entry_args(self._entry))
                return request | {"what": "run", "args": _spawner_entry_args(entry), "zygote_args": zygote_args}
            case entry:
                return request | {"what": "exec", "argv": spawn_command_line(entry)}


# messages -------------------------------------------------------------------------------------------------------------


async def send_to_spawned(channel_socket: socket.socket, message: Any, fds: Sequence[int] = ()) -> None:
    from asyncio import get_running_loop

    frame = channel.encode_channel_message(message)
    if fds:  # sent with the length, for which an idle channel always has room
        socket.send_fds(channel_socket, [frame[: channel.LENGTH_BYTES]], fds)
        frame = frame[channel.LENGTH_BYTES :]
    await get_running_loop().sock_sendall(channel_socket, frame)


async def receive_from_spawned(channel_socket: socket.socket) -> Any:
    """The next message of the zygote or a standby; None if it has ended."""
    head = await _read_spawner_bytes(channel_socket, channel.LENGTH_BYTES)
    body = await _read_spawner_bytes(channel_socket, int.from_bytes(head, "big")) if head else b""
    return marshal.loads(body) if body else None


async def _read_spawner_bytes(channel_socket: socket.socket, size: int) -> bytes:
    from asyncio import get_running_loop

    data = b""
    while len(data) < size:
        try:
            part = await get_running_loop().sock_recv(channel_socket, size - len(data))
        except ConnectionResetError:
            part = b""
        if not part:
            return b""
        data += part
    return data


async def wait_for_spawned_pids(children: Children, start: Awaitable[list[int] | None]) -> list[int] | None:
    """Wait for the pids of a start that cannot be interrupted; a cancelled call kills the processes, then raises."""
    import asyncio

    task = asyncio.ensure_future(start)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):  # a second cancellation does not make it faster
                await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None:
            children.kill(task.result() or [])
        raise


def spawn_command_line(entry: Entrypoint) -> list[str]:
    """The command that executes this entrypoint."""
    match entry:
        case Script(path=path, args=args):
            return [sys.executable, "-u", path, *args]
        case Module(name=name, args=args):
            return [sys.executable, "-u", "-m", name, *args]
        case Executable(argv=argv):
            return list(argv)


def zygote_key(entry: Entrypoint) -> tuple[str, str]:
    """One zygote can run all entrypoints with this key; their arguments may differ."""
    match entry:
        case Script(path=path):
            return "script", path
        case Module(name=name):
            return "module", name
        case Executable():
            return "command", ""


def _spawner_entry_descriptors(entry: Entrypoint | ServeStore | WaitAsStandby | SaveState) -> tuple[int, ...]:
    """What the process receives; only one process of a request may have any."""
    match entry:
        case ServeStore(fd=fd) | WaitAsStandby(fd=fd):
            return (fd,)
        case SaveState(fds=fds):
            return fds
    return ()


def _spawner_entry_args(entry: Entrypoint) -> list[str]:
    match entry:
        case Script(args=args) | Module(args=args):
            return list(args)
        case Executable():
            return []


def _spawn_memory_policy(binding: Binding | None) -> tuple[int, int] | None:
    """The system call and the NUMA node of a worker's memory policy, if it has one."""
    if binding is None or binding.memory is None:
        return None
    from ripstop.system.linux import linux_memory_policy_syscall

    call = linux_memory_policy_syscall()
    return None if call is None else (call, binding.memory)


def _why_spawner_cannot_fork(env: Mapping[str, str]) -> str:
    """Return why a zygote would not find our sitecustomize first, and so would run the script itself.

    Only a directory that a .pth file puts before PYTHONPATH can hold another one.  It is in our own sys.path too, since
    the interpreter is the same.
    """
    library = os.path.dirname(os.__file__)
    given = env.get("PYTHONPATH", "").split(os.pathsep)
    for directory in sys.path[1:]:
        if directory == library:
            break
        other = os.path.join(directory, "sitecustomize.py")
        if directory not in given and os.path.exists(other):
            return f"{other} comes before ours"
    return ""
