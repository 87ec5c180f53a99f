"""The link of the agent in whose process the coordinator lives.

No sockets and no codec: messages are handed over in the event loop, one turn later, so that neither side is ever called
from within its own call.  Such a link cannot break; it ends when the coordinator or the agent ends it.
"""

import asyncio

from ripstop.coordinator.service import Coordinator, Session
from ripstop.protocol.messages import FromAgent, FromCoordinator, Rejected
from ripstop.transport.link import Listener


class InProcessLink:
    """A `Link` within one process; to be made inside a running event loop."""

    def __init__(self, coordinator: Coordinator, node: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._coordinator = coordinator
        self._node = node
        self._listener: Listener | None = None
        self._session: Session | None = None
        self._trouble = "the link to the coordinator in this process is not open yet"

    @property
    def local_host(self) -> str | None:
        return None

    @property
    def skew(self) -> float | None:
        return None

    @property
    def trouble(self) -> str:
        return "" if self._session else self._trouble

    def open(self, listener: Listener) -> None:
        self._listener = listener
        self._loop.call_soon(self._attach)

    def send(self, message: FromAgent) -> None:
        self._loop.call_soon(self._deliver, message)

    async def close(self) -> None:
        self._listener = None
        turn = self._loop.create_future()
        self._loop.call_soon(turn.set_result, None)  # behind all that was sent
        await turn
        if self._session is not None:
            self._session.detach()
            self._end("closed by the agent")

    def _attach(self) -> None:
        if self._listener is None:
            return  # closed before it opened
        self._session = self._coordinator.attach(self._node, send=self._hear_soon, close=self._end_soon)
        self._listener.on_connected()

    def _deliver(self, message: FromAgent) -> None:
        if self._session is not None:
            self._session.receive(message)

    def _hear_soon(self, message: FromCoordinator) -> None:
        self._loop.call_soon(self._hear, message)

    def _end_soon(self) -> None:
        self._loop.call_soon(self._end, "closed by the coordinator")

    def _hear(self, message: FromCoordinator) -> None:
        match message:
            case Rejected(why):
                listener, self._listener = self._listener, None
                if listener is not None:
                    listener.on_refused(why)
            case _ if self._listener is not None:
                self._listener.on_message(message)

    def _end(self, why: str) -> None:
        self._session = None
        self._trouble = f"the link to the coordinator in this process was {why}"
        if self._listener is not None:
            self._listener.on_disconnected(self._trouble)
