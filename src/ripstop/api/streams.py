"""The answers of the API that go on: events, and what a worker writes.

Rules: (1) nobody waits for a reader: its place is a number or an offset, and one that is too slow is cut off; (2) of
each kind so many are open, so that neither uses up what the other needs; (3) a question that waits at a node is left
there until it is answered; (4) when the job is over, all that was answered is written, and with the kernel, before a
stream ends: a reader loses nothing, unless it has taken nothing for `STUCK` seconds.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from aiohttp import web

from ripstop.api.job_interface import RequestRefused
from ripstop.model.errors import QueryFailed
from ripstop.model.events import EventRecord, WorkersStarted, to_dict
from ripstop.telemetry.journal import MAX_RECORDS, Journal

MAX_STREAMS = 64  # of one kind, at a time
SLOW = 30.0  # seconds a reader may take to make room for more
STUCK = 1.0  # and when the job is over
HEARTBEAT = 15.0  # seconds between signs of life in a stream of events
WAIT = 5.0  # seconds a node waits for a log to grow before it says that it has not
PAUSE = 0.5  # seconds until a node that could not answer is asked again, if no workers are started before

LogChunk = dict[str, Any]  # of a log: as an agent answers


class Kind(Enum):
    """What is in a stream, and as what it is sent."""

    EVENTS = "text/event-stream"
    LOGS = "text/plain"


class EventStreams:
    """The open ones of one API."""

    def __init__(self) -> None:
        self._open: Counter[Kind] = Counter()
        self._listening: set[asyncio.Event] = set()
        self._writing: dict[asyncio.Timeout, float] = {}  # since when
        self._over = False

    def end(self) -> None:
        """They are to say what is left, and end."""
        self._over = True
        for news in self._listening:
            news.set()
        for patience, since in self._writing.items():
            if not patience.expired():
                patience.reschedule(since + STUCK)

    async def send(self, request: web.Request, kind: Kind, pieces: AsyncGenerator[str, None]) -> web.StreamResponse:
        """An empty piece is a moment to see whether anybody listens."""
        if self._open[kind] >= MAX_STREAMS:
            raise RequestRefused(
                503, f"{MAX_STREAMS} streams of {kind.name.lower()} are open, as many as may be; close one of them"
            )
        response = web.StreamResponse(
            headers={"Cache-Control": "no-store", "Content-Type": f"{kind.value}; charset=utf-8"}
        )
        response.force_close()
        self._open[kind] += 1
        try:
            await response.prepare(request)
            if request.transport is not None:
                request.transport.set_write_buffer_limits(0)  # rule 4: what was written is not with us any more
            async for piece in pieces:
                if request.transport is None:
                    break  # it has left
                if piece:
                    await self._write(response.write(piece.encode("utf-8", "replace")))
            await self._write(response.write_eof())
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()  # rule 1
        except ConnectionError:
            pass  # it has left
        finally:
            self._open[kind] -= 1
            await pieces.aclose()
        return response

    async def _write(self, writing: Awaitable[None]) -> None:
        since = asyncio.get_running_loop().time()
        async with asyncio.timeout_at(since + (STUCK if self._over else SLOW)) as patience:
            self._writing[patience] = since
            try:
                await writing
            finally:
                del self._writing[patience]

    async def events(self, journal: Journal, last: int) -> AsyncGenerator[str, None]:
        """What came after the event of this number, and what comes."""
        yield ": events of the job\n\n"
        if last > journal.count:
            last = 0  # of another coordinator's numbers
        with self._news(journal, lambda _: True) as news:
            while True:
                news.clear()
                over = self._over
                for number, entry in journal.since(last):
                    last = number
                    yield f"id: {number}\ndata: {json.dumps({'number': number} | to_dict(entry))}\n\n"
                    if journal.count - number > MAX_RECORDS:
                        return  # rule 1
                if over:
                    return
                if not await _comes(news, HEARTBEAT):
                    yield ": still here\n\n"

    async def log(
        self, journal: Journal, rank: int, piece: LogChunk, after: Callable[[LogChunk, float], Awaitable[LogChunk]]
    ) -> AsyncGenerator[str, None]:
        """A rank's log from this piece on, through all rounds to come.

        `after` has the next piece, for which its node waits so many seconds.
        """
        with self._news(journal, lambda entry: _starts(entry, rank)) as started:
            again = False  # what was asked for could not be had
            while True:
                yield piece["text"]
                if piece["end"]:  # of its round
                    await _comes(started, WAIT)
                if self._over:
                    return
                started.clear()
                try:
                    piece = await after(piece, 0.0 if piece["text"] or again else WAIT)
                    again = False
                except (RequestRefused, QueryFailed):  # between two rounds, or there is too much to answer
                    piece, again = piece | {"text": "", "end": False}, True
                    await _comes(started, PAUSE)

    @contextmanager
    def _news(self, journal: Journal, matters: Callable[[EventRecord], bool]) -> Iterator[asyncio.Event]:
        """Set by every entry that matters, and by the end."""
        news = asyncio.Event()
        unsubscribe = journal.subscribe(lambda entry: news.set() if matters(entry) else None)
        self._listening.add(news)
        try:
            yield news
        finally:
            self._listening.discard(news)
            unsubscribe()


def _starts(entry: EventRecord, rank: int) -> bool:
    """Whether a worker of this rank was started: it writes to another file, perhaps on another node."""
    event = entry.event
    return isinstance(event, WorkersStarted) and event.first_rank <= rank < event.first_rank + len(event.pids)


async def _comes(news: asyncio.Event, patience: float) -> bool:
    try:
        async with asyncio.timeout(patience):
            return await news.wait()
    except TimeoutError:
        return False
