"""The agent's end of its WebSocket connection: reading a frame, and a bounded send queue.  Constants of both ends.

Rules:

1.  No write waits without a deadline.  A peer that does not read is disconnected when its queue is full.  A peer whose
    connection is closing has `FLUSH_TIMEOUT_S` seconds to read the rest.
2.  Replies to operators never cost a node its connection.  They have a limit of their own, and a reply above it is
    replaced by an error.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from aiohttp import ClientError, WSMessage, WSMsgType

from ripstop.model.errors import ProtocolError
from ripstop.protocol.codec import MAX_FRAME_BYTES, encode
from ripstop.protocol.messages import Heartbeat, Message, Reply

AGENT_PATH = "/agent"
PREAUTH_HEADER = "Ripstop-Preauth"  # an agent's request carries its `Hello` here; see `agent_authentication.py`
HANDSHAKE_TIMEOUT_S = 5.0  # from the connection to the end of authentication
FLUSH_TIMEOUT_S = 1.0  # for a peer to read the rest before its connection closes
MAX_BACKLOG_BYTES = 4 * MAX_FRAME_BYTES  # queued for one peer
MAX_REPLY_BACKLOG_BYTES = MAX_BACKLOG_BYTES // 4  # the part of it that replies may take
CLOSE_CODE_RETURNING = 4000  # from an agent that is alive and will reconnect: it has received nothing for too long


class WebSocket(Protocol):
    """aiohttp's client side."""

    async def receive(self) -> WSMessage: ...

    async def send_str(self, data: str) -> None: ...

    async def ping(self) -> None: ...

    async def pong(self) -> None: ...

    async def close(self) -> bool: ...


async def receive_from_websocket(ws: WebSocket) -> str | None:
    """The next message; empty for a heartbeat, None when the connection has ended."""
    frame: Any = await ws.receive()
    match frame.type:
        case WSMsgType.TEXT:
            return str(frame.data)
        case WSMsgType.PING | WSMsgType.PONG:
            return ""
        case WSMsgType.BINARY:
            raise ProtocolError("a message is text, received a binary frame")
        case WSMsgType.ERROR:
            raise ProtocolError(f"not a WebSocket message of at most {MAX_FRAME_BYTES} bytes: {frame.data}")
        case _:
            return None


class WebSocketOutbox:
    """The messages queued for one peer, in order and bounded."""

    def __init__(self, ws: WebSocket, abort: Callable[[], None]) -> None:
        self._ws = ws
        self.abort = abort
        self._queue: deque[tuple[str | Heartbeat, bool]] = deque()  # a text or a heartbeat; whether it is a reply
        self._bytes = 0
        self._reply_bytes = 0
        self._wake = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None

    def put(self, message: Message) -> None:
        """Queue a message; ignored after `finish`."""
        if self._deadline is not None:
            return
        if isinstance(message, Heartbeat):
            self._queue.append((message, False))
            self._wake.set()
            return
        text = encode(message)
        if is_reply := isinstance(message, Reply):
            if self._reply_bytes + len(text) > MAX_REPLY_BACKLOG_BYTES:
                text = encode(Reply(message.number, error="too many replies of this node are queued; ask again later"))
            self._reply_bytes += len(text)
        self._bytes += len(text)
        if self._bytes > MAX_BACKLOG_BYTES:
            self.abort()
            return
        self._queue.append((text, is_reply))
        self._wake.set()

    def finish(self) -> None:
        """Accept no more messages.  `run` returns when all are written, after `FLUSH_TIMEOUT_S` seconds at most."""
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(FLUSH_TIMEOUT_S, self.abort)
            self._wake.set()

    async def run(self) -> None:
        """Write until finished, or until the connection is lost; then close it."""
        try:
            while self._deadline is None or self._queue:
                await self._wake.wait()
                self._wake.clear()
                while self._queue:
                    match self._queue.popleft():
                        case Heartbeat(wants_answer), _:
                            await (self._ws.ping() if wants_answer else self._ws.pong())
                        case str(text), is_reply:
                            await self._ws.send_str(text)
                            self._bytes -= len(text)
                            self._reply_bytes -= len(text) if is_reply else 0
        except (ConnectionError, ClientError):
            pass  # the reading side gets the same error and handles it
        finally:
            if self._deadline is not None:
                self._deadline.cancel()
        await self._ws.close()
