"""Sends a job's spans to a collector: OTLP over HTTP, from where the job's coordinator is.

Rules: (1) nobody waits for a collector: spans wait for it, so many and no more, and at the end a second; (2) whatever
it does or answers is said once, and again when it takes spans; the job goes on; (3) what it may take later is sent
again, after growing pauses, and what it refuses is not; (4) nothing is loaded or sent amid a recovery: the first span
of several waits for the others.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from msgspec import Struct

from ripstop.model.config import Tracing
from ripstop.model.events import EventRecord
from ripstop.model.text import one_line
from ripstop.telemetry import otlp
from ripstop.telemetry.spans import Context, Span, Spans

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger("ripstop.tracing")  # not the rendezvous's, which is silent in a job of one node

TOGETHER = 1.0  # seconds that a span waits for others
WAITING = 16_384  # spans
BATCH = 512  # spans in one request
PATIENCE = 10.0  # seconds for one request
PAUSES = (1.0, 60.0)  # seconds before a request is tried again: at first, and at most
GOODBYE = 1.0  # seconds for what is not sent yet when the job is over
LATER = (429, 502, 503, 504)  # answers after which the same request may succeed
READ = 16_384  # bytes of an answer
SHOWN = 200  # characters of what is said about trouble


class _Answer(Struct, frozen=True):
    """What became of a request: `why` is empty when it was taken; whether to try it again, and after how long."""

    why: str = ""
    again: bool = False
    pause: float = 0.0


class SpanSender:
    """To be made inside a running event loop; `add` is a sink for the entries of a job's journal."""

    def __init__(self, settings: Tracing, run_id: str) -> None:
        parent = Context(*settings.parent) if settings.parent else None
        self._settings = settings
        self._spans: Spans | None = Spans(run_id, os.urandom(16), parent)
        self._where = urlsplit(settings.url)._replace(query="").geturl()  # keys may be in there
        self._waiting: deque[Span] = deque()
        self._dropped = 0
        self._troubled = False
        self._hurry = asyncio.Event()
        self._http: aiohttp.ClientSession | None = None
        self._sending: asyncio.Task[None] | None = None

    def add(self, entry: EventRecord) -> None:
        """Something happened."""
        self._take(lambda spans: spans.on(entry))

    async def close(self) -> None:
        """Waits, briefly, for what is not sent yet."""
        self._hurry.set()
        self._take(lambda spans: spans.end())
        if (sending := self._sending) is not None:
            await self._prepare()  # takes as long as it takes; the second is the collector's
            await asyncio.wait([sending], timeout=GOODBYE)
            sending.cancel()
            await asyncio.wait([sending])
        if self._http is not None:
            await self._http.close()
        if lost := len(self._waiting) + self._dropped:
            log.warning("%d spans of the job's traces were not sent to %s", lost, self._where)

    def _take(self, over: Callable[[Spans], list[Span]]) -> None:
        """What is over is sent, soon.  A defect in here is the trace's end, not the job's."""
        if self._spans is None:
            return
        try:
            spans = over(self._spans)
        except Exception:
            self._spans = None
            log.exception("the job goes on without traces")
            return
        room = WAITING - len(self._waiting)
        self._waiting.extend(spans[:room])
        self._dropped += len(spans[room:])
        if self._waiting and self._sending is None:
            self._sending = asyncio.create_task(self._send(), name="ripstop-spans")

    async def _send(self) -> None:
        await self._rest(TOGETHER)
        await self._prepare()
        pause = PAUSES[0]
        while self._waiting and self._spans is not None:
            batch = list(islice(self._waiting, BATCH))
            answer = await self._post(batch)
            if answer.why:
                self._complain(answer.why)
            elif self._troubled:
                self._troubled = False
                log.info("spans are sent to %s again", self._where)
            if not answer.again:
                for _ in batch:
                    self._waiting.popleft()
                pause = PAUSES[0]
            elif self._hurry.is_set():
                return  # there is no later
            else:
                await self._rest(max(pause, answer.pause))
                pause = min(2 * pause, PAUSES[1])
        self._sending = None

    async def _prepare(self) -> None:
        """Load what sending takes, out of the loop's way; where that fails, there are no traces."""
        try:
            await asyncio.to_thread(_load)
        except Exception as defect:  # no thread is left, or no file
            self._spans = None
            log.warning("the job goes on without traces: %r", defect)

    async def _post(self, batch: list[Span]) -> _Answer:
        """Rule 2: whatever is wrong with a collector, or with the way to it, is an answer."""
        import aiohttp

        try:
            http = await self._client()
            body = otlp.request(batch, dict(self._settings.resource))
            async with http.post(self._settings.url, data=body, allow_redirects=False) as response:
                said = await response.content.read(READ)
                if 200 <= response.status < 300:
                    return _Answer(otlp.complaint(said))
                why = f"HTTP status {response.status} {response.reason or ''}: {otlp.complaint(said)}"
                again = response.status in LATER
                return _Answer(why.rstrip(": "), again, _seconds(response.headers.get("Retry-After", "")))
        except TimeoutError:
            return _Answer(f"no answer in {PATIENCE:g} s", again=True)
        except (aiohttp.ClientConnectionError, OSError) as error:
            return _Answer(str(error) or type(error).__name__, again=True)
        except Exception as error:
            return _Answer(f"{type(error).__name__}: {error}")

    async def _client(self) -> "aiohttp.ClientSession":
        if self._http is None:
            import ssl

            import aiohttp

            from ripstop.transport.resolver import Resolver

            trusted = await asyncio.to_thread(ssl.create_default_context, cafile=self._settings.ca)
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(resolver=Resolver(), ssl=trusted, force_close=True),
                timeout=aiohttp.ClientTimeout(total=PATIENCE),
                headers={"Content-Type": "application/json", **dict(self._settings.headers)},
                trust_env=True,
            )
        return self._http

    async def _rest(self, seconds: float) -> None:
        """Until it is time, or the job is over."""
        try:
            async with asyncio.timeout(seconds):
                await self._hurry.wait()
        except TimeoutError:
            pass

    def _complain(self, why: str) -> None:
        if not self._troubled:
            self._troubled = True
            log.warning("spans cannot be sent to %s: %s; the job goes on", self._where, one_line(why)[:SHOWN])


def _load() -> None:
    """What takes its time to be imported, in a thread."""
    import aiohttp  # noqa: F401

    import ripstop.transport.resolver  # noqa: F401


def _seconds(text: str) -> float:
    """Of a `Retry-After`; a date is as good as nothing."""
    return min(float(text), PAUSES[1]) if text.isascii() and text.isdigit() and len(text) < 9 else 0.0
