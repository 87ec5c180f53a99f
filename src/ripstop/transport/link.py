"""The agent's connection to its coordinator: the interface, and the link within one process.

`websocket_link.py` is the link over the network.  Rules for both:

1.  Callbacks come from the event loop, never from within a call by the agent.
2.  `on_connected` comes first, and again after every `on_disconnected`.  Messages come only between the two.
3.  A message sent while disconnected is dropped.  The `Join` after `on_connected` carries the agent's whole state.
4.  `on_rejected` is final.  There are no callbacks after `close()`.
"""

import asyncio
from typing import Protocol

from ripstop.coordinator.driver import Coordinator, CoordinatorDriverSession
from ripstop.protocol.messages import FromAgent, FromCoordinator, Rejected


class Listener(Protocol):
    """The callbacks of an agent."""

    def on_connected(self) -> None:
        """The coordinator is connected and has proven the job's secret."""

    def on_message(self, message: FromCoordinator) -> None:
        """The coordinator sent a message."""

    def on_disconnected(self, why: str) -> None:
        """The connection is lost; the link reconnects."""

    def on_rejected(self, why: str) -> None:
        """The coordinator rejects this node, and a retry does not help."""


class Link(Protocol):
    """A connection to the coordinator that reconnects by itself."""

    @property
    def local_host(self) -> str | None:
        """This node's address on the route to the coordinator, once known; None within one process."""

    @property
    def skew(self) -> float | None:
        """Seconds that this node's clock is ahead of the coordinator's; None within one process, or if unknown."""

    @property
    def disconnect_reason(self) -> str:
        """Why there is no connection, since when, and the number of tries; empty while connected."""

    def open(self, listener: Listener) -> None:
        """Start to connect; call once, in the event loop."""

    def send(self, message: FromAgent) -> None:
        """Queue a message; messages keep their order."""

    def drop(self) -> None:
        """Break the connection to another process, as a network fault does; the link reconnects."""

    async def close(self) -> None:
        """Write the queued messages within a short time limit, and disconnect."""


class InProcessLink:
    """The link of the agent whose process hosts the coordinator; create it inside a running event loop.

    It has no sockets and no codec.  Each message is passed on in a later turn of the event loop, so neither side is
    called from within its own call.  The link ends only when the coordinator or the agent closes it.
    """

    local_host: str | None = None
    skew: float | None = None

    def __init__(self, coordinator: Coordinator, node: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._coordinator = coordinator
        self._node = node
        self._listener: Listener | None = None
        self._session: CoordinatorDriverSession | None = None
        self._disconnect_reason = "the link to the coordinator in this process is not open yet"

    @property
    def disconnect_reason(self) -> str:
        return "" if self._session else self._disconnect_reason

    def open(self, listener: Listener) -> None:
        self._listener = listener
        self._loop.call_soon(self._attach)

    def send(self, message: FromAgent) -> None:
        self._loop.call_soon(self._to_coordinator, message)

    def drop(self) -> None:
        """There is no connection to another process."""

    async def close(self) -> None:
        self._listener = None
        turn = self._loop.create_future()
        self._loop.call_soon(turn.set_result, None)  # after all queued messages
        await turn
        if self._session is not None:
            self._session.detach()
            self._end("closed by the agent")

    def _attach(self) -> None:
        if self._listener is None:
            return  # closed before it opened
        self._session = self._coordinator.attach(
            self._node,
            send=lambda message: self._loop.call_soon(self._to_agent, message),
            close=lambda: self._loop.call_soon(self._end, "closed by the coordinator"),
        )
        self._listener.on_connected()

    def _to_coordinator(self, message: FromAgent) -> None:
        if self._session is not None:
            self._session.receive(message)

    def _to_agent(self, message: FromCoordinator) -> None:
        match message:
            case Rejected(why):
                listener, self._listener = self._listener, None
                if listener is not None:
                    listener.on_rejected(why)
            case _ if self._listener is not None:
                self._listener.on_message(message)

    def _end(self, why: str) -> None:
        self._session = None
        self._disconnect_reason = f"the link to the coordinator in this process was {why}"
        if self._listener is not None:
            self._listener.on_disconnected(self._disconnect_reason)
