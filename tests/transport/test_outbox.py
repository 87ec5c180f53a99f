"""What waits for a peer that does not read."""

import asyncio
from typing import Any

from ripstop.protocol.codec import decode
from ripstop.protocol.messages import FROM_AGENT, Events, Reply
from ripstop.transport.outbox import MAX_ANSWERS, MAX_BACKLOG, Outbox


def backlog(messages: list[Any]) -> tuple[list[Any], bool]:
    """What a peer gets that begins to read when all was said, and whether it was cut off before."""

    async def scenario() -> tuple[list[Any], bool]:
        taken: list[Any] = []
        cut = asyncio.Event()

        async def write(text: str) -> None:
            taken.append(decode(text, FROM_AGENT))

        outbox = Outbox(write, cut.set)
        for message in messages:
            outbox.put(message)
        outbox.finish()
        await outbox.run()
        return taken, cut.is_set()

    return asyncio.run(scenario())


def test_answers_however_many_never_cost_the_connection_and_one_too_many_is_a_word() -> None:
    answers = [Reply(number, body="x" * 100_000) for number in range(64)]
    taken, cut = backlog([*answers, Events(("what matters",))])
    assert not cut
    assert [message.number for message in taken[:-1]] == list(range(64))
    assert taken[:2] == answers[:2]
    assert sum(len(message.body) for message in taken[:-1]) < MAX_ANSWERS
    assert {message.error for message in taken[2:-1]} == {"this node has too much to answer; ask again later"}
    assert taken[-1] == Events(("what matters",))


def test_there_is_room_for_answers_again_once_some_were_taken() -> None:
    async def scenario() -> None:
        taken: list[str] = []
        news = asyncio.Event()

        async def write(text: str) -> None:
            taken.append(text)
            news.set()

        outbox = Outbox(write, lambda: None)
        running = asyncio.create_task(outbox.run())
        for number in range(8):
            outbox.put(Reply(number, body="x" * 200_000))
            await asyncio.wait_for(news.wait(), 20)
            news.clear()
        outbox.finish()
        await running
        assert all(len(text) > 200_000 for text in taken)

    asyncio.run(scenario())


def test_a_peer_that_does_not_read_what_matters_is_cut_off() -> None:
    told = [Events(("x" * 100_000,))] * (MAX_BACKLOG // 100_000 + 1)
    assert backlog(told)[1]
    assert not backlog([Events(("x",))] * 10)[1]
