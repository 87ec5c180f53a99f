"""Limits on unauthenticated connections: connections that have not proven the job's secret yet.

Rules:

1.  An unauthenticated connection is closed after `HANDSHAKE_TIMEOUT_S` seconds.  A TLS handshake has as many, before.
2.  Their number is limited.  At the limit, accepting waits, and the oldest connection is closed for the next one.
3.  Even then, each connection has `MIN_HANDSHAKE_S` seconds.  So agents that connect at the same time wait in the
    kernel's queue, and do not displace each other.
4.  The limit never takes the file descriptors that the nodes of the job need.
"""

import asyncio
import contextlib
import logging
import resource

from ripstop.transport.rejection_log import RejectionLog
from ripstop.transport.websocket import HANDSHAKE_TIMEOUT_S

MAX_UNAUTHENTICATED = 1024  # connections, besides one for each node; fewer if file descriptors are short
RESERVED_DESCRIPTORS = 512  # for the rest of this process
MIN_HANDSHAKE_S = 0.5

log = logging.getLogger("ripstop.coordinator")

UnauthenticatedConnection = asyncio.BaseTransport | asyncio.Task[None]  # a transport, or the task of its TLS handshake


class UnauthenticatedConnections:
    """The unauthenticated connections of one server, the oldest first."""

    def __init__(self, nodes: int, rejections: RejectionLog) -> None:
        self._limit = _connection_limit(nodes)
        self.rejections = rejections
        self._timers: dict[UnauthenticatedConnection, asyncio.TimerHandle] = {}
        self._has_room = asyncio.Event()

    @property
    def room(self) -> int:
        """How many more connections may be accepted now."""
        return self._limit - len(self._timers)

    def add(self, connection: UnauthenticatedConnection) -> None:
        timer = asyncio.get_running_loop().call_later(HANDSHAKE_TIMEOUT_S, self._on_timeout, connection)
        self._timers[connection] = timer

    def remove(self, connection: UnauthenticatedConnection) -> None:
        """The connection is authenticated or closed; unknown ones are ignored."""
        if timer := self._timers.pop(connection, None):
            timer.cancel()
            self._has_room.set()

    def close_all(self) -> None:
        for connection in list(self._timers):
            self._close(connection)

    async def wait_for_room(self) -> None:
        """Return when one more connection may be accepted (rules 2 and 3)."""
        while len(self._timers) >= self._limit:
            oldest, timer = next(iter(self._timers.items()))
            if _is_limited_connection_closing(oldest):  # over TLS, closing may take long
                self._close(oldest)
                continue
            wait_s = timer.when() - HANDSHAKE_TIMEOUT_S + MIN_HANDSHAKE_S - asyncio.get_running_loop().time()
            if wait_s > 0:
                self._has_room.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._has_room.wait(), wait_s)
                continue
            self.rejections.log(
                host_of_limited_connection(oldest), f"more than {self._limit} unauthenticated connections", kind="limit"
            )
            self._close(oldest)

    def _on_timeout(self, connection: UnauthenticatedConnection) -> None:
        if not _is_limited_connection_closing(connection):
            why = f"no proof of the job's secret in {HANDSHAKE_TIMEOUT_S:g} s"
            self.rejections.log(host_of_limited_connection(connection), why, kind="timeout")
        self._close(connection)

    def _close(self, connection: UnauthenticatedConnection) -> None:
        self.remove(connection)
        if isinstance(connection, asyncio.Task):
            connection.cancel()
        else:
            abort_limited_connection(connection)


def host_of_limited_connection(connection: UnauthenticatedConnection) -> str:
    """The address of the peer; the task of a TLS handshake has it as its name."""
    if isinstance(connection, asyncio.Task):
        return connection.get_name()
    peer = connection.get_extra_info("peername")
    return str(peer[0]) if peer else "unknown"


def abort_limited_connection(transport: asyncio.BaseTransport) -> None:
    assert isinstance(transport, asyncio.Transport)
    transport.abort()


def _is_limited_connection_closing(connection: UnauthenticatedConnection) -> bool:
    return isinstance(connection, asyncio.BaseTransport) and connection.is_closing()


def _connection_limit(nodes: int) -> int:
    """How many unauthenticated connections leave enough descriptors for a job of this size (rule 4).

    Raises the process's limit on descriptors only if the job needs it, because workers inherit that limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * nodes + MAX_UNAUTHENTICATED + RESERVED_DESCRIPTORS
    if soft == resource.RLIM_INFINITY:
        soft = wanted
    if soft < 2 * nodes + RESERVED_DESCRIPTORS:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < nodes + RESERVED_DESCRIPTORS:
        log.warning(
            "a coordinator of %d nodes needs %d open files, its limit is %d; raise the hard limit (ulimit -Hn)",
            *(nodes, nodes + RESERVED_DESCRIPTORS, soft),
        )
    return max(1, min(MAX_UNAUTHENTICATED + nodes, soft - nodes - RESERVED_DESCRIPTORS))
