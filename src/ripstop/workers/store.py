"""The port of a round's store.

The agent binds it, so the number it announces cannot be taken by another in between.  The store itself, torch's
TCPStore in a process of its own, starts when the first client knocks: a job that never asks for a store has none.
Clients that knock before the store is up wait in the listening socket's queue.
"""

import asyncio
import errno
import logging
import os
import signal
import socket
from collections.abc import Mapping

from ripstop.model.errors import StartError
from ripstop.workers.processes import Children, ProcessExit, reap
from ripstop.workers.spawner import ProcessSpec, ServeStore, Starter

log = logging.getLogger("ripstop.workers")

_BACKLOG = 4096  # a whole job may knock before the store is up; the kernel has its own limit


class StorePort:
    """Bound and listening from the start; `port` 0 takes a free one."""

    def __init__(self, host: str, port: int = 0) -> None:
        self._host = host
        self._socket: socket.socket | None = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._start: asyncio.Task[None] | None = None
        self._watched: asyncio.AbstractEventLoop | None = None
        self._pid: int | None = None
        self._closing = False
        self._gone = asyncio.Event()
        self._gone.set()

    def serve(self, spawner: Starter, env: Mapping[str, str], children: Children) -> None:
        """Starts the store process when the first connection comes."""
        if self._socket is None or self._watched is not None:
            return
        self._watched = asyncio.get_running_loop()
        self._watched.add_reader(self._socket.fileno(), self._knocked, spawner, env, children)

    def _knocked(self, spawner: Starter, env: Mapping[str, str], children: Children) -> None:
        self._unwatch()
        self._start = asyncio.ensure_future(self._hand_over(spawner, env, children))

    async def _hand_over(self, spawner: Starter, env: Mapping[str, str], children: Children) -> None:
        assert self._socket is not None
        birth = ProcessSpec(env, ServeStore(self._socket.fileno(), self._host, self.port))
        try:
            (pid,) = await spawner.spawn([birth])
            self._watch(pid, children)
        except StartError as error:
            log.error("store port=%d has no process: %s", self.port, error)
        finally:
            self._close_socket()  # the store's copy is the only one: when it dies, clients are refused and do not hang

    def _watch(self, pid: int, children: Children) -> None:
        try:
            children.watch(pid, self._ended)
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            reap(pid)
            word = f"a store needs a file descriptor of the agent's: {error.strerror}; raise `ulimit -n`."
            raise StartError(word) from error
        self._pid = pid
        self._gone.clear()

    def _ended(self, end: ProcessExit) -> None:
        if not self._closing:
            how = f"signal {end.signal}" if end.signal else f"exit code {end.exitcode}"
            log.warning("store port=%d pid=%d died: %s; workers that need it will fail", self.port, end.pid, how)
        self._pid = None
        self._gone.set()

    async def close(self) -> None:
        """Ends the store and frees the port."""
        self._closing = True
        self._unwatch()
        if self._start is not None and not self._start.done():
            self._start.cancel()
            await asyncio.wait([self._start])
        if self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)
        await self._gone.wait()
        self._close_socket()

    def _unwatch(self) -> None:
        if self._watched is not None and self._socket is not None:
            self._watched.remove_reader(self._socket.fileno())

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket on `host`; on all interfaces where `host` leads here only by way of a translation."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise StartError(
            f"the job's store must listen on an address of this machine, and {host!r} cannot be resolved: "
            f"{error.strerror}; give one with --local-addr or --master-addr."
        ) from error
    try:
        return _bind(family, address)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            everywhere = "::" if family == socket.AF_INET6 else "0.0.0.0"
            log.warning("store host=%s is no address of this machine, so it listens on all; narrow: --local-addr", host)
            return _listen(everywhere, port)
        raise StartError(
            f"the job's store must listen on {host}:{port}, and it cannot: {os.strerror(error.errno or 0)}; "
            "choose another port with --master-port, or leave it out for a free one."
        ) from error


def _bind(family: int, address: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
