"""The agent's side of the zygote: starts it, learns what it could preload, has it fork workers, replaces it.

All workers are born here, whichever way they start.  `zygote.py` has the other side and the rules of a birth.

A job waits for its zygote first of all, so this module is quick to import: asyncio is loaded late, by the methods that
need it, when the zygote is already on its way.
"""

# Pathlib costs more than this module.
# ruff: noqa: PTH100, PTH110, PTH118, PTH120

from __future__ import annotations

import marshal
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from ripstop.model.config import Binding, Entrypoint, Executable, Function, Module, Script, StartMethod
from ripstop.model.errors import StartError
from ripstop.workers import processes

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path

_HOME = os.path.dirname(os.path.abspath(__file__))
_HOOK = os.path.join(_HOME, "zygote", "hook")
_CALL = os.path.join(_HOME, "zygote", "call_function.py")
_CHANNEL = "RIPSTOP_ZYGOTE"
_ROOM, _ROOM_SIZE = "RIPSTOP_ROOM", 2048  # bytes that workers have for variables of their own: `zygote.py` shows them
_PATIENCE = 60.0  # seconds for a warm zygote to fork: a deadline for a machine in trouble, not a pace


class Warm(Struct, frozen=True):
    """What the zygote is: how it will start workers, what it has imported, why not as asked (or empty)."""

    start: StartMethod
    preloaded: tuple[str, ...]
    why: str
    seconds: float


class ServeStore(Struct, frozen=True):
    """Instead of an entrypoint: serve the round's store on this listening socket."""

    fd: int
    host: str
    port: int


class ProcessSpec(Struct, frozen=True):
    """One process to start: its complete environment, what it runs, files for its output (None: the agent's), where it
    is to run (None: anywhere), where a forked one writes its stacks at which signal (None: nowhere), and the socket at
    which one with torch tells its collectives ("": nowhere)."""

    env: Mapping[str, str]
    entry: Entrypoint | ServeStore
    stdout: Path | None = None
    stderr: Path | None = None
    binding: Binding | None = None
    stacks: tuple[int, Path] | None = None
    recorder: str = ""


class Starter(Protocol):
    """Whoever starts workers: the agent needs no more of it than this."""

    async def warm(self) -> Warm:
        """Waits until workers can be born."""

    async def spawn(self, births: Sequence[ProcessSpec]) -> list[int]:
        """Starts these processes, each to lead a session of its own; their pids come in order, claimed."""

    def close(self) -> None:
        """Ends what was kept for the sake of starting."""


class Spawner:
    """A zygote and its succession.

    Made before there is an event loop: the zygote warms up while the agent is still putting itself together.  `env` is
    the workers' environment without what differs between ranks; libraries read it when they are imported.
    """

    def __init__(
        self, entry: Entrypoint, env: Mapping[str, str], start: StartMethod, preload: tuple[str, ...] | None = None
    ) -> None:
        self._entry = entry
        self._env = env
        self._preload = preload
        self._why = "" if start is StartMethod.EXEC else _why_not_fork(env)
        self._start = StartMethod.EXEC if self._why else start
        self._lock: asyncio.Lock | None = None
        self._warm: Warm | None = None
        self._pid = 0
        self._death = ""  # how the last zygote ended
        self._warming: asyncio.Task[Warm] | None = None
        self._launch()

    async def warm(self) -> Warm:
        """Waits until workers can be born.  Who gives up waiting disturbs nobody."""
        import asyncio

        if self._warming is None or self._warming.done():
            self._warming = asyncio.ensure_future(self._warm_up())
        return await asyncio.shield(self._warming)

    async def _warm_up(self) -> Warm:
        async with self._exchange():
            return await self._warmed()

    def _exchange(self) -> asyncio.Lock:
        """One conversation with the zygote at a time."""
        if self._lock is None:
            import asyncio

            self._lock = asyncio.Lock()
        return self._lock

    async def spawn(self, births: Sequence[ProcessSpec]) -> list[int]:
        """Starts these processes; they are this process's children, claimed, and their pids come in order.

        May be cancelled until the zygote is warm; from then on the births happen, and cancelling waits for them.
        """
        for _ in range(2):
            await self.warm()
            if (pids := await self._uninterrupted(births)) is not None:
                return pids
        raise StartError(f"no worker can be started: the zygote {self._death} twice; see the kernel's log.")

    async def _uninterrupted(self, births: Sequence[ProcessSpec]) -> list[int] | None:
        """A birth that was begun is finished, also for a caller who no longer wants it."""
        import asyncio

        task = asyncio.ensure_future(self._spawn(births))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            while not task.done():
                with suppress(asyncio.CancelledError):  # who is impatient cancels twice; it still takes this long
                    await asyncio.wait([task])
            if not task.cancelled() and task.exception() is None:
                _kill(task.result() or [])
            raise

    def close(self) -> None:
        """Ends the zygote.  Workers live on, but what they leave behind is no longer buried if the agent is killed."""
        if self._pid:
            self._socket.close()
            os.kill(self._pid, signal.SIGKILL)
            self._reap()

    # the zygote's life ----------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        """Starts a zygote, without waiting for it."""
        ours, theirs = socket.socketpair()
        with theirs:
            env = dict(self._env)
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [_HOOK, env.get("PYTHONPATH")]))
            env[_CHANNEL] = str(theirs.fileno())
            env[_ROOM] = "-" * _ROOM_SIZE
            os.set_inheritable(theirs.fileno(), True)
            try:
                self._pid = os.posix_spawn(
                    sys.executable, self._argv(), env, setsid=True, setsigmask=(), setsigdef=_IGNORED_BY_PYTHON
                )
            except OSError as error:
                ours.close()
                raise processes.cannot_start("workers", error) from error
        processes.claim(self._pid)
        self._socket = ours
        self._warm = None
        orders = {
            "agent": os.getpid(),
            "forks": self._start is StartMethod.ZYGOTE,
            "preload": self._preload,
            "entry": _kind(self._entry),
        }
        ours.sendall(_frame(orders))
        ours.setblocking(False)

    def _argv(self) -> list[str]:
        """The command line of the zygote is the workers' own: that is how they come to run the script."""
        if self._start is StartMethod.EXEC or isinstance(self._entry, Executable):
            return [sys.executable, "-u", "-c", "pass"]
        return command_line(self._entry)

    async def _warmed(self) -> Warm:
        if not self._pid:
            self._launch()
        while self._warm is None:
            message = await self._receive()
            match message:
                case None:
                    self._replace(f"the zygote {self._reap()} while it was preloading")
                case {"unfit": str(why)}:
                    self._reap()
                    self._replace(why)
                case {"preloaded": preloaded, "seconds": seconds}:
                    self._warm = Warm(self._start, preloaded, self._why, seconds)
        return self._warm

    def _replace(self, why: str) -> None:
        """After a failed preload: workers are started the plain way."""
        self._socket.close()
        if self._start is StartMethod.EXEC:
            raise StartError(f"no worker can be started: {why}; see that `{sys.executable} -c pass` works.")
        self._start = StartMethod.EXEC
        self._why = why
        self._launch()

    def _reap(self) -> str:
        """Waits for the zygote's end; how it ended, in words."""
        exitcode, signum, _ = processes.reap(self._pid)
        self._pid, self._warm = 0, None
        return f"exited with code {exitcode}" if signum is None else f"died of {signal.Signals(signum).name}"

    # births ---------------------------------------------------------------------------------------------------------

    async def _spawn(self, births: Sequence[ProcessSpec]) -> list[int] | None:
        """None if the zygote has died since it was warm; nothing of this request came to life then."""
        async with self._exchange():
            if self._warm is None:
                return None  # another request has seen it die
            with processes.births_expected():
                pids = await self._ask(births)
            if pids is None:
                self._death = self._reap()
                self._socket.close()
            return pids

    async def _ask(self, births: Sequence[ProcessSpec]) -> list[int] | None:
        """One exchange with the zygote; None if it is dead, and these births with it."""
        import asyncio

        fds = [birth.entry.fd for birth in births if isinstance(birth.entry, ServeStore)]
        pids: list[int] = []
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._send([self._order(birth) for birth in births], fds)
                answer = await self._receive()
                match answer:
                    case None:
                        return None
                    case {"error": str(why)}:
                        raise StartError(f"no worker can be started: {why}; see the limits on processes and files.")
                    case {"pids": born}:
                        pids = born
                for pid in pids:
                    processes.claim(pid)
                await self._send("go", ())
                if await self._receive() is not None:
                    return pids
        except TimeoutError:
            os.kill(self._pid, signal.SIGKILL)
        except (BrokenPipeError, ConnectionResetError):
            pass
        _kill(pids)  # whether the zygote still passed the word to go cannot be known
        return None

    def _order(self, birth: ProcessSpec) -> dict[str, Any]:
        """This birth in the zygote's words."""
        order: dict[str, Any] = {
            "env": dict(birth.env),
            "stdout": birth.stdout and os.fspath(birth.stdout),
            "stderr": birth.stderr and os.fspath(birth.stderr),
            "cpus": birth.binding and birth.binding.cpus,
            "memory": _memory(birth.binding),
            "stacks": birth.stacks and (int(birth.stacks[0]), os.fspath(birth.stacks[1])),
            "recorder": birth.recorder,
        }
        match birth.entry:
            case ServeStore(host=host, port=port):
                return order | {"what": "store", "host": host, "port": port}
            case entry if self._start is StartMethod.ZYGOTE and _kind(entry) == _kind(self._entry) != ("command", ""):
                return order | {"what": "run", "args": _args(entry), "given": len(_args(self._entry))}
            case entry:
                return order | {"what": "exec", "argv": command_line(entry)}

    async def _send(self, message: Any, fds: Sequence[int]) -> None:
        from asyncio import get_running_loop

        frame = _frame(message)
        if fds:  # they travel with the first bytes, for which an idle channel always has room
            socket.send_fds(self._socket, [frame[:4]], fds)
            frame = frame[4:]
        await get_running_loop().sock_sendall(self._socket, frame)

    async def _receive(self) -> Any:
        """The zygote's next message; None if it is gone."""
        head = await self._read(4)
        body = await self._read(int.from_bytes(head, "big")) if head else b""
        return marshal.loads(body) if body else None

    async def _read(self, size: int) -> bytes:
        from asyncio import get_running_loop

        data = b""
        while len(data) < size:
            try:
                part = await get_running_loop().sock_recv(self._socket, size - len(data))
            except ConnectionResetError:
                part = b""
            if not part:
                return b""
            data += part
        return data


_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def command_line(entry: Entrypoint) -> list[str]:
    """What runs this entrypoint the plain way."""
    match entry:
        case Script(path=path, args=args):
            return [sys.executable, "-u", path, *args]
        case Module(name=name, args=args):
            return [sys.executable, "-u", "-m", name, *args]
        case Function():
            return [sys.executable, "-u", _CALL, *_args(entry)]
        case Executable(argv=argv):
            return list(argv)


def _kind(entry: Entrypoint) -> tuple[str, str]:
    """What two entrypoints must share to be run by one zygote; their arguments may differ."""
    match entry:
        case Script(path=path):
            return "script", path
        case Module(name=name):
            return "module", name
        case Function():
            return "function", ""
        case Executable():
            return "command", ""


def _args(entry: Entrypoint) -> list[str]:
    match entry:
        case Script(args=args) | Module(args=args):
            return list(args)
        case Function(call=call, result=result):
            return [os.fspath(call), os.fspath(result)]
        case Executable():
            return []


def _memory(binding: Binding | None) -> tuple[int, int] | None:
    """The system call and the NUMA node of a worker's memory policy, if it is to have one."""
    if binding is None or binding.memory is None:
        return None
    from ripstop.system.linux import memory_policy_call

    call = memory_policy_call()
    return None if call is None else (call, binding.memory)


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        processes.reap(pid)


def _frame(message: Any) -> bytes:
    data = marshal.dumps(message)
    return len(data).to_bytes(4, "big") + data


def _why_not_fork(env: Mapping[str, str]) -> str:
    """A reason not to start a zygote that would run the script if our hook were not found first.

    Only a directory that a .pth file puts before PYTHONPATH could hold another sitecustomize.  It would show in our own
    sys.path, since it is the same interpreter.
    """
    library = os.path.dirname(os.__file__)
    given = env.get("PYTHONPATH", "").split(os.pathsep)
    for directory in sys.path[1:]:
        if directory == library:
            break
        rival = os.path.join(directory, "sitecustomize.py")
        if directory not in given and os.path.exists(rival):
            return f"{rival} comes before ours"
    return ""
