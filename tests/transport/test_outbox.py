"""The send queue of a peer that does not read."""

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import WSMessage

from ripstop.protocol.codec import decode
from ripstop.protocol.messages import FROM_AGENT, Events, Reply
from ripstop.transport.websocket import MAX_BACKLOG_BYTES, MAX_REPLY_BACKLOG_BYTES, WebSocketOutbox


class Peer:
    """A WebSocket whose other end reads at once."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    async def receive(self) -> WSMessage:
        raise NotImplementedError

    async def send_str(self, data: str) -> None:
        self._write(data)

    async def pong(self) -> None:
        raise NotImplementedError

    async def close(self) -> bool:
        return True


def backlog(messages: list[Any]) -> tuple[list[Any], bool]:
    """The messages of a peer that reads only after all were queued, and whether it was disconnected before."""

    async def scenario() -> tuple[list[Any], bool]:
        written: list[Any] = []
        cut = asyncio.Event()

        outbox = WebSocketOutbox(Peer(lambda text: written.append(decode(text, FROM_AGENT))), cut.set)
        for message in messages:
            outbox.put(message)
        outbox.finish()
        await outbox.run()
        return written, cut.is_set()

    return asyncio.run(scenario())


def test_too_many_replies_become_errors_and_do_not_cost_the_connection() -> None:
    replies = [Reply(number, body="x" * 100_000) for number in range(64)]
    written, cut = backlog([*replies, Events(("an event",))])
    assert not cut
    assert [message.number for message in written[:-1]] == list(range(64))
    assert written[:2] == replies[:2]
    assert sum(len(message.body) for message in written[:-1]) < MAX_REPLY_BACKLOG_BYTES
    assert {message.error for message in written[2:-1]} == {"too many replies of this node are queued; ask again later"}
    assert written[-1] == Events(("an event",))


def test_replies_are_queued_again_after_some_were_written() -> None:
    async def scenario() -> None:
        written: list[str] = []
        has_written = asyncio.Event()

        def write(text: str) -> None:
            written.append(text)
            has_written.set()

        outbox = WebSocketOutbox(Peer(write), lambda: None)
        running = asyncio.create_task(outbox.run())
        for number in range(8):
            outbox.put(Reply(number, body="x" * 200_000))
            await asyncio.wait_for(has_written.wait(), 120)
            has_written.clear()
        outbox.finish()
        await running
        assert all(len(text) > 200_000 for text in written)

    asyncio.run(scenario())


def test_a_peer_that_does_not_read_events_is_disconnected() -> None:
    messages = [Events(("x" * 100_000,))] * (MAX_BACKLOG_BYTES // 100_000 + 1)
    assert backlog(messages)[1]
    assert not backlog([Events(("x",))] * 10)[1]
