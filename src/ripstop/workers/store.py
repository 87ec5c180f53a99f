"""The port of a round's store: bound before the round starts, and given to the store's process.

The agent binds the port before it announces it, so that no other process can take it in between.  The store itself,
torch's TCPStore in its own process, starts at the first connection: a job without store clients has no store process.
Clients that connect before the store runs wait in the listening socket's queue.  If workers can go on in place, the
next round's store starts before the round (`prepare`).  Until the round begins, the agent keeps the listening socket
too: if the store dies meanwhile, another one starts at the first connection.

The agent also reserves the next port, for a server inside rank 0: JAX starts one (`ripstop.jax`).  All workers know
this port without a message.  The reserving socket is bound with SO_REUSEPORT and never listens.  So a server of this
user that sets SO_REUSEPORT, as gRPC does, can bind the port and gets all its connections.  No other program can.
With a port that the user has fixed, the next one is reserved only if it is free.
"""

import asyncio
import errno
import logging
import os
import signal
import socket
from collections.abc import Mapping

from ripstop.model.errors import StartError
from ripstop.system.network import bind_socket
from ripstop.workers.processes import Children, ProcessExit
from ripstop.workers.spawner import ProcessSpec, ServeStore, WorkerSpawner

log = logging.getLogger("ripstop.workers")

_PAIR_ATTEMPTS = 20  # to find two adjacent free ports
_BACKLOG = 4096  # all workers may connect before the store runs; the kernel has its own limit


class RoundStore:
    """A round's store, on a bound, listening port; `port` 0 selects a free one."""

    def __init__(self, host: str, port: int = 0) -> None:
        self._host = host
        self._socket: socket.socket | None
        self._socket, self._reserved = _open_round_store_sockets(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._start: asyncio.Task[None] | None = None
        self._watched: asyncio.AbstractEventLoop | None = None
        self._pid: int | None = None
        self._is_serving = False  # the round has begun
        self._closing = False
        self._has_ended = asyncio.Event()
        self._has_ended.set()

    def prepare(self, spawner: WorkerSpawner, env: Mapping[str, str], children: Children) -> None:
        """Start the store process before the round."""
        if self._socket is not None and self._start is None and not self._closing:
            self._start = asyncio.ensure_future(self._hand_over(spawner, env, children))

    def serve(self, spawner: WorkerSpawner, env: Mapping[str, str], children: Children) -> None:
        """The round begins: start the store process at the first connection, unless it is prepared."""
        if self._socket is None or self._is_serving:
            return
        self._is_serving = True
        if self._start is not None and not self._start.done():
            return  # `_hand_over` closes the socket
        if self._pid is not None:
            self._close_socket()
            return
        self._watched = asyncio.get_running_loop()
        self._watched.add_reader(self._socket.fileno(), self._connected, spawner, env, children)

    def _connected(self, spawner: WorkerSpawner, env: Mapping[str, str], children: Children) -> None:
        self._unwatch()
        self._start = asyncio.ensure_future(self._hand_over(spawner, env, children))

    async def _hand_over(self, spawner: WorkerSpawner, env: Mapping[str, str], children: Children) -> None:
        assert self._socket is not None
        spec = ProcessSpec(env, ServeStore(self._socket.fileno(), self._host, self.port))
        try:
            (pid,) = await spawner.spawn([spec])
            children.watch(pid, self._ended)
            self._pid = pid
            self._has_ended.clear()
        except StartError as error:
            log.error("store port=%d has no process: %s", self.port, error)
        finally:
            if self._is_serving:
                self._close_socket()  # only the store keeps a copy: when it dies, the kernel refuses clients

    def _ended(self, end: ProcessExit) -> None:
        if self._is_serving and not self._closing:
            how = f"signal {end.signal}" if end.signal else f"exit code {end.exitcode}"
            log.warning("store port=%d pid=%d died: %s; workers that need it will fail", self.port, end.pid, how)
        self._pid = None
        self._has_ended.set()

    async def close(self) -> None:
        """End the store and free the port."""
        self._closing = True
        self._unwatch()
        if self._start is not None and not self._start.done():
            self._start.cancel()
            await asyncio.wait([self._start])
        if self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)
        await self._has_ended.wait()
        self._close_socket()
        if self._reserved is not None:
            self._reserved.close()

    def _unwatch(self) -> None:
        if self._watched is not None and self._socket is not None:
            self._watched.remove_reader(self._socket.fileno())

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _open_round_store_sockets(host: str, port: int) -> tuple[socket.socket, socket.socket | None]:
    """A listening socket, and one that reserves the next port."""
    for _ in range(1 if port else _PAIR_ATTEMPTS):
        listener = _listen_for_store(host, port)
        if (reserved := _reserve_port_next_to_store(listener)) is not None or port:
            return listener, reserved
        listener.close()
    return _listen_for_store(host, port), None


def _reserve_port_next_to_store(listener: socket.socket) -> socket.socket | None:
    address, port, *rest = listener.getsockname()
    try:
        reserved = socket.socket(listener.family, socket.SOCK_STREAM)
    except OSError:  # no descriptor is left
        return None
    try:
        for option in (socket.SO_REUSEPORT, socket.SO_REUSEADDR):  # a server of the script with either one can use it
            reserved.setsockopt(socket.SOL_SOCKET, option, 1)
        reserved.bind((address, port + 1, *rest))
    except (OSError, OverflowError):  # the port is taken, or above 65535
        reserved.close()
        return None
    return reserved


def _listen_for_store(host: str, port: int) -> socket.socket:
    """A listening socket on `host`; on all interfaces if `host` is not a local address (address translation)."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise StartError(
            f"the job's store must listen on an address of this machine, and {host!r} cannot be resolved: "
            f"{error.strerror}; set one with --local-addr or --master-addr."
        ) from error
    try:
        return bind_socket(family, address, _BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            everywhere = "::" if family == socket.AF_INET6 else "0.0.0.0"
            log.warning(
                "store host=%s is not a local address, so it listens on all interfaces; set --local-addr for one", host
            )
            return _listen_for_store(everywhere, port)
        raise StartError(
            f"the job's store cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}; "
            "choose another port with --master-port, or omit it for a free one."
        ) from error
