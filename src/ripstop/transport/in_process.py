"""The link of the agent whose process hosts the coordinator.

It has no sockets and no codec.  Each message is passed on in a later turn of the event loop, so neither side is called
from within its own call.  The link ends only when the coordinator or the agent closes it.
"""

import asyncio

from ripstop.coordinator.coordinator import Coordinator, Session
from ripstop.protocol.messages import FromAgent, FromCoordinator, Rejected
from ripstop.transport.link import Listener


class InProcessLink:
    """A `Link` within one process; create it inside a running event loop."""

    def __init__(self, coordinator: Coordinator, node: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._coordinator = coordinator
        self._node = node
        self._listener: Listener | None = None
        self._session: Session | None = None
        self._disconnect_reason = "the link to the coordinator in this process is not open yet"

    @property
    def local_host(self) -> str | None:
        return None

    @property
    def skew(self) -> float | None:
        return None

    @property
    def disconnect_reason(self) -> str:
        return "" if self._session else self._disconnect_reason

    def open(self, listener: Listener) -> None:
        self._listener = listener
        self._loop.call_soon(self._attach)

    def send(self, message: FromAgent) -> None:
        self._loop.call_soon(self._to_coordinator, message)

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
        self._session = self._coordinator.attach(self._node, send=self._to_agent_soon, close=self._end_soon)
        self._listener.on_connected()

    def _to_agent_soon(self, message: FromCoordinator) -> None:
        self._loop.call_soon(self._to_agent, message)

    def _end_soon(self) -> None:
        self._loop.call_soon(self._end, "closed by the coordinator")

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
