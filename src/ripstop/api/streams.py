"""The API's streams: a job's events, and a worker's output.

Rules: (1) the job never waits for a reader: each stream keeps a position, and a reader that is too slow is
disconnected; (2) the number of open streams of each kind is limited; (3) a query that waits at a node is never
abandoned before its reply; (4) when the job ends, everything received is handed to the kernel before a stream ends, so
a reader loses nothing, unless it has read nothing for `FINAL_WRITE_TIMEOUT_S`; (5) a stream also ends when its
coordinator stops, so a reader looks for the next coordinator.
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
from ripstop.model.event_json import to_dict
from ripstop.model.events import EventRecord, WorkersStarted
from ripstop.telemetry.journal import MAX_RECORDS, Journal

MAX_STREAMS = 64  # open at a time, of one kind
WRITE_TIMEOUT_S = 30.0  # for a reader to accept more
FINAL_WRITE_TIMEOUT_S = 1.0  # the same when the job ends
EVENTS_PER_WRITE = 50
KEEPALIVE_INTERVAL_S = 15.0  # of a stream of events
LOG_WAIT_S = 5.0  # how long a node waits for new output before it replies
RETRY_DELAY_S = 0.5  # after a failed query, unless workers start earlier

LogChunk = dict[str, Any]  # an agent's reply to the query `log`


class StreamKind(Enum):
    """The content of a stream, and its media type."""

    EVENTS = "text/event-stream"
    LOGS = "text/plain"


class OpenStreams:
    """The open streams of one API."""

    def __init__(self) -> None:
        self._open: Counter[StreamKind] = Counter()
        self._wakeups: set[asyncio.Event] = set()
        self._writes: dict[asyncio.Timeout, float] = {}  # and their start times
        self._ending = False

    def end(self) -> None:
        """Let all streams write what is left, and end."""
        self._ending = True
        for wakeup in self._wakeups:
            wakeup.set()
        for timeout, since in self._writes.items():
            if not timeout.expired():
                timeout.reschedule(since + FINAL_WRITE_TIMEOUT_S)

    async def send(
        self, request: web.Request, kind: StreamKind, chunks: AsyncGenerator[str, None]
    ) -> web.StreamResponse:
        """Write the chunks.  At an empty chunk it only checks whether the reader is still connected."""
        if self._open[kind] >= MAX_STREAMS:
            raise RequestRefused(503, f"all {MAX_STREAMS} streams of {kind.name.lower()} are in use; close one of them")
        response = web.StreamResponse(
            headers={"Cache-Control": "no-store", "Content-Type": f"{kind.value}; charset=utf-8"}
        )
        response.force_close()
        self._open[kind] += 1
        try:
            await response.prepare(request)
            if request.transport is not None:
                request.transport.set_write_buffer_limits(0)  # rule 4: a write returns when the kernel has the data
            async for chunk in chunks:
                if request.transport is None:
                    break  # the reader has disconnected
                if chunk:
                    await self._write(response.write(chunk.encode("utf-8", "replace")))
            await self._write(response.write_eof())
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()  # rule 1
        except ConnectionError:
            pass  # the reader has disconnected
        finally:
            self._open[kind] -= 1
            await chunks.aclose()
        return response

    async def _write(self, write: Awaitable[None]) -> None:
        since = asyncio.get_running_loop().time()
        limit = FINAL_WRITE_TIMEOUT_S if self._ending else WRITE_TIMEOUT_S
        async with asyncio.timeout_at(since + limit) as timeout:
            self._writes[timeout] = since
            try:
                await write
            finally:
                del self._writes[timeout]

    async def events(self, journal: Journal, last: int) -> AsyncGenerator[str, None]:
        """The events after the number `last`, past and new."""
        yield ": events of the job\n\n"
        if last > journal.count:
            last = 0  # a number of an earlier coordinator
        with self._wakeup(journal, lambda _: True) as wakeup:
            while True:
                wakeup.clear()
                ending = self._ending or journal.is_closed
                found = journal.since(last)
                for batch in (found[i : i + EVENTS_PER_WRITE] for i in range(0, len(found), EVENTS_PER_WRITE)):
                    last = batch[-1][0]
                    yield "".join(_api_stream_event_text(number, entry) for number, entry in batch)
                    if journal.count - last > MAX_RECORDS:
                        return  # rule 1
                if ending:
                    return
                if not await _wait_for_api_stream_wakeup(wakeup, KEEPALIVE_INTERVAL_S):
                    yield ": keepalive\n\n"

    async def log(
        self, journal: Journal, rank: int, chunk: LogChunk, next_chunk: Callable[[LogChunk, float], Awaitable[LogChunk]]
    ) -> AsyncGenerator[str, None]:
        """A rank's log from this chunk on, through all later rounds.

        `next_chunk` reads the chunk after another; its node waits up to the given seconds for new output.
        """
        with self._wakeup(journal, lambda entry: _wakes_log_stream(entry, rank)) as workers_started:
            failed = False  # the last query
            while True:
                yield chunk["text"]
                if chunk["end"]:  # of the round's log
                    await _wait_for_api_stream_wakeup(workers_started, LOG_WAIT_S)
                if self._ending or journal.is_closed:
                    return
                workers_started.clear()
                try:
                    chunk = await next_chunk(chunk, 0.0 if chunk["text"] or failed else LOG_WAIT_S)
                    failed = False
                except (RequestRefused, QueryFailed):  # between two rounds, or the node is busy
                    chunk, failed = chunk | {"text": "", "end": False}, True
                    await _wait_for_api_stream_wakeup(workers_started, RETRY_DELAY_S)

    @contextmanager
    def _wakeup(self, journal: Journal, matters: Callable[[EventRecord], bool]) -> Iterator[asyncio.Event]:
        """An event that is set by every entry that matters, and at the end of the journal or of all streams."""
        wakeup = asyncio.Event()
        unsubscribe = journal.subscribe(lambda entry: wakeup.set() if matters(entry) else None, wakeup.set)
        self._wakeups.add(wakeup)
        try:
            yield wakeup
        finally:
            self._wakeups.discard(wakeup)
            unsubscribe()


def _api_stream_event_text(number: int, entry: EventRecord) -> str:
    return f"id: {number}\ndata: {json.dumps({'number': number} | to_dict(entry))}\n\n"


def _wakes_log_stream(entry: EventRecord, rank: int) -> bool:
    """Whether a worker of this rank was started: it has a new log, perhaps on another node."""
    event = entry.event
    return isinstance(event, WorkersStarted) and event.first_rank <= rank < event.first_rank + len(event.pids)


async def _wait_for_api_stream_wakeup(wakeup: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            return await wakeup.wait()
    except TimeoutError:
        return False
