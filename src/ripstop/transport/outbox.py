"""What both ends of a connection between an agent and the coordinator have in common.

Nothing here waits without a deadline: a peer that does not read is cut off when too much is waiting for it, and one
that is to be closed has `FLUSH` seconds to take the last words.  Answers to operators are the exception: however many
are wanted, they cost no node its connection, and one too many is answered with a word.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import ClientError, WSMessage, WSMsgType

from ripstop.model.errors import ProtocolError
from ripstop.protocol.codec import MAX_FRAME_BYTES, fit
from ripstop.protocol.messages import Message, Reply

PATH = "/agent"
PREAUTH_HEADER = "Ripstop-Knock"  # the header in which an agent's request says who asks; see `doorstep.py`
HANDSHAKE = 5.0  # seconds from connecting to being known
FLUSH = 1.0  # seconds a closing peer has to take what is left
MAX_BACKLOG = 4 * MAX_FRAME_BYTES  # bytes that may wait for a peer
MAX_ANSWERS = MAX_BACKLOG // 4  # of them, in answers
RETURNING = 4000  # close code of an agent that heard nothing for a lease: it is alive and will be back


class WebSocket(Protocol):
    """Either end of aiohttp's."""

    async def receive(self) -> WSMessage: ...


async def receive(ws: WebSocket) -> str | None:
    """The next frame; None when the connection has ended."""
    frame: Any = await ws.receive()
    match frame.type:
        case WSMsgType.TEXT:
            return str(frame.data)
        case WSMsgType.BINARY:
            raise ProtocolError("a message is text, received a binary frame")
        case WSMsgType.ERROR:
            raise ProtocolError(f"not a WebSocket message of at most {MAX_FRAME_BYTES} bytes: {frame.data}")
        case _:
            return None


class Outbox:
    """What is still to be written to one peer: in order, and bounded."""

    def __init__(self, write: Callable[[str], Awaitable[None]], abort: Callable[[], None]) -> None:
        self._write = write
        self._abort = abort
        self._waiting: deque[tuple[str, bool]] = deque()  # and whether it is an answer
        self._size = 0
        self._answers = 0  # their share of it
        self._wake = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None

    def put(self, message: Message) -> None:
        """Send a message when its turn comes; nothing follows `finish`."""
        if self._deadline is not None:
            return
        text = fit(message)
        if is_answer := isinstance(message, Reply):
            if self._answers + len(text) > MAX_ANSWERS:
                text = fit(Reply(message.number, error="this node has too much to answer; ask again later"))
            self._answers += len(text)
        self._size += len(text)
        if self._size > MAX_BACKLOG:
            self._abort()
            return
        self._waiting.append((text, is_answer))
        self._wake.set()

    def finish(self) -> None:
        """Nothing more is coming: `run` returns once all is written, and in `FLUSH` seconds at most."""
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(FLUSH, self._abort)
            self._wake.set()

    async def run(self) -> None:
        """Write until finished, or until the connection is lost."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._waiting:
                    text, is_answer = self._waiting.popleft()
                    await self._write(text)
                    self._size -= len(text)
                    self._answers -= len(text) if is_answer else 0
                if self._deadline is not None:
                    return
        except (ConnectionError, ClientError):
            return  # the reading side sees it too, and acts on it
        finally:
            if self._deadline is not None:
                self._deadline.cancel()
