"""One agent's connection, at the coordinator or a candidate: the handshake, then messages in both directions.

It is a protocol of asyncio that reads WebSocket frames itself (`websocket_frames.py`), because a coordinator may have
10,000 of them: no task, no queue and no timer belongs to a connection, and a heartbeat is neither decoded nor an event.
Rules:

1.  An agent may only answer the challenge, until it has proven the job's secret (`agent_authentication.py`).
2.  A heartbeat that asks for an answer (a Ping) is answered at once, unless a message to the agent is still queued.
3.  No write waits.  An agent that does not read is disconnected when too much is queued for it.  An agent whose
    connection is closing has `FLUSH_TIMEOUT_S` seconds to read the rest.
4.  An invalid frame ends only its connection.
"""

import asyncio
from collections.abc import Callable

from ripstop.model.errors import ProtocolError
from ripstop.protocol.codec import decode, encode
from ripstop.protocol.limits import MAX_NAME
from ripstop.protocol.messages import FROM_AGENT, FromCoordinator, Heartbeat, Join, Message, Rejected
from ripstop.transport.agent_authentication import AgentAuthentication
from ripstop.transport.agent_host import AgentHost, AgentSession
from ripstop.transport.agent_request import agent_request_upgrade_response
from ripstop.transport.rejection_log import RejectionLog
from ripstop.transport.websocket import CLOSE_CODE_RETURNING, FLUSH_TIMEOUT_S, MAX_BACKLOG_BYTES
from ripstop.transport.websocket_frames import (
    AGENT_HEARTBEAT_SIZE,
    MASKED,
    PING_START,
    PONG_START,
    FrameReader,
    Opcode,
    close_frame,
    pong_frame,
    text_frame,
)

MAX_CONTROL_FRAMES = 256  # in one read: heartbeats that have waited while this process was paused


class AgentConnection(asyncio.BufferedProtocol):
    """A connection whose request has passed pre-authentication.  `buffer` may be shared by all connections."""

    def __init__(
        self,
        transport: asyncio.Transport,
        host: str,
        agent_host: AgentHost,
        authentication: AgentAuthentication,
        rejections: RejectionLog,
        buffer: memoryview,
        on_authenticated: Callable[[asyncio.BaseTransport], None],
        on_closed: Callable[["AgentConnection", asyncio.BaseTransport], None],
    ) -> None:
        self._transport = transport
        self._host = host
        self._agent_host = agent_host
        self._authentication = authentication
        self._rejections = rejections
        self._buffer = buffer
        self._on_authenticated = on_authenticated
        self._on_closed = on_closed
        self._frames = FrameReader()
        self._challenge = authentication.new_challenge()
        self._session: AgentSession | None = None  # from the proof to the end of the connection
        self._flush_timer: asyncio.TimerHandle | None = None  # while the connection closes

    def start(self, key: str, received: bytes) -> None:
        """Answer the request, which has this `Sec-WebSocket-Key`; `received` is what followed it."""
        self._transport.write(agent_request_upgrade_response(key) + text_frame(encode(self._challenge)))
        if received:
            self._on_data(received)

    def put(self, message: FromCoordinator) -> None:
        """Send a message; ignored after `finish`."""
        if self._flush_timer is None and not self._transport.is_closing():
            self._send(message)
            if self._transport.get_write_buffer_size() > MAX_BACKLOG_BYTES:
                self._transport.abort()

    def finish(self) -> None:
        """Send what is queued, and close the connection after `FLUSH_TIMEOUT_S` seconds at most."""
        if self._flush_timer is None:
            self._transport.write(close_frame())
            self._flush_timer = asyncio.get_running_loop().call_later(FLUSH_TIMEOUT_S, self._transport.abort)

    # callbacks of the transport ---------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = self._buffer
        start = data[0]
        is_heartbeat = nbytes == AGENT_HEARTBEAT_SIZE and data[1] == MASKED and start in (PING_START, PONG_START)
        if is_heartbeat and not self._frames.is_within_frame:
            self._on_heartbeat(wants_answer=start == PING_START)
        else:
            self._on_data(bytes(data[:nbytes]))

    def eof_received(self) -> None:
        self._detach(closed_by_node=True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._detach(closed_by_node=isinstance(exc, ConnectionResetError))
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self._on_closed(self, self._transport)

    # what the agent sends ---------------------------------------------------------------------------------------------

    def _on_data(self, data: bytes) -> None:
        try:
            controls = 0
            for opcode, payload in self._frames.feed(data):
                controls += opcode is not Opcode.TEXT
                if controls > MAX_CONTROL_FRAMES:
                    raise ProtocolError(f"an agent sends at most {MAX_CONTROL_FRAMES} heartbeats at once")
                self._on_frame(opcode, payload)
        except ProtocolError as error:
            self._rejections.log(self._host, str(error), kind="protocol")
            self._frames = FrameReader()
            self.finish()
            self._transport.pause_reading()

    def _on_frame(self, opcode: Opcode, payload: bytes) -> None:
        match opcode:
            case Opcode.CLOSE:
                self._detach(returning=int.from_bytes(payload[:2], "big") == CLOSE_CODE_RETURNING)
                self.finish()
                self._transport.close()
            case _ if self._flush_timer is not None:
                pass  # the connection is closing
            case Opcode.PING:
                self._on_heartbeat(wants_answer=True, payload=payload)
            case Opcode.PONG:
                self._on_heartbeat(wants_answer=False)
            case Opcode.BINARY:
                raise ProtocolError("a message is text, received a binary frame")
            case Opcode.TEXT:
                self._on_text(_agent_connection_text(payload))

    def _on_heartbeat(self, *, wants_answer: bool, payload: bytes = b"") -> None:
        if self._session is not None:
            self._session.renew()
        # a peer that does not read gets no more
        if wants_answer and self._flush_timer is None and not self._transport.get_write_buffer_size():
            self._transport.write(pong_frame(payload))

    def _on_text(self, text: str) -> None:
        if self._session is None:
            self._on_hello(text)
            return
        match message := decode(text, FROM_AGENT):
            case Heartbeat(wants_answer):
                self._on_heartbeat(wants_answer=wants_answer)
            case Join(node=joining) if joining.id != self._session.node:
                node = self._session.node
                raise ProtocolError(f"node {node} must join with its own id, not {joining.id[:MAX_NAME]!r}")
            case _:
                self._session.receive(message)

    def _on_hello(self, text: str) -> None:
        try:
            answer = self._authentication.answer(text, self._challenge, self._host)
        except ProtocolError as error:
            self._send(Rejected(str(error)))
            raise
        match answer:
            case Rejected():
                self._send(answer)
                self.finish()
            case node, welcome:
                self._on_authenticated(self._transport)
                self._send(welcome)
                self._session = self._agent_host.attach(node, send=self.put, close=self.finish)

    def _send(self, message: Message) -> None:
        self._transport.write(text_frame(encode(message)))

    def _detach(self, *, returning: bool = False, closed_by_node: bool = False) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.detach(returning=returning, closed_by_node=closed_by_node)


def _agent_connection_text(payload: bytes) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a message is UTF-8, this is not: {error.reason}") from None
