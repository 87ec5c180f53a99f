"""Sends notifications to a webhook, from a thread of its own.

Rules: (1) the job never waits for the webhook: the queue is bounded, and at the end of the job there are
`FLUSH_TIMEOUT_S` for what is left; (2) a message is sent again after an error of the network, 429 and 5xx, with a
growing delay, `MAX_ATTEMPTS` times; (3) a redirect is an error: the address is a secret and is sent to nobody else;
(4) a problem is logged once, and once more when a message is accepted again; log lines name the host only.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from ripstop import __version__
from ripstop.model.events import EventRecord
from ripstop.notifications.content import Notification, NotificationContentWriter
from ripstop.system.blocking_calls import run_in_daemon_thread

if TYPE_CHECKING:
    from urllib.request import OpenerDirector

log = logging.getLogger("ripstop.notifications")

MAX_QUEUED = 64
MAX_ATTEMPTS = 6
FIRST_DELAY_S = 1.0  # doubled with each attempt
MAX_DELAY_S = 30.0
CLOSING_DELAY_S = 0.5  # while the job's process waits to end
REQUEST_TIMEOUT_S = 10.0  # of one operation on the socket
FLUSH_TIMEOUT_S = 3.0
MAX_REPLY_BYTES = 64 * 1024
RETRIED_STATUS = (408, 425, 429)


class Webhook:
    """Must be made inside a running event loop.  `add` is a sink for the records of the job's journal."""

    def __init__(self, url: str, run_id: str) -> None:
        self._url = url
        self._host = url.split("/")[2].rpartition("@")[2]
        self._notifications = NotificationContentWriter(run_id)
        self._queue: deque[Notification] = deque()
        self._pending = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost = 0
        self._problem_logged = False

    def add(self, record: EventRecord) -> None:
        """A defect in a message must not end the job."""
        try:
            message = self._notifications.on(record)
        except Exception:
            log.exception("a notification could not be made")
            return
        if message is None:
            return
        if len(self._queue) >= MAX_QUEUED:
            self._lost += 1
            return
        self._queue.append(message)
        self._pending.set()
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="ripstop-notify", daemon=True)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError as error:  # no more threads available
                self._report(f"no thread: {error}")

    async def close(self) -> None:
        """Wait at most FLUSH_TIMEOUT_S for the last messages."""
        self._closing.set()
        self._pending.set()
        if self._thread is not None:
            with suppress(TimeoutError, RuntimeError):
                await run_in_daemon_thread(self._thread.join, FLUSH_TIMEOUT_S)
        if lost := self._lost + len(self._queue):
            log.warning("%d notifications were not sent to %s", lost, self._host)

    # the thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        send = _webhook_sender(self._url)
        while True:
            self._pending.wait()
            self._pending.clear()
            while self._queue:
                is_delivered = self._deliver(send, self._queue[0])
                self._queue.popleft()
                self._lost += not is_delivered
            if self._closing.is_set():
                return

    def _deliver(self, send: "Callable[[bytes], WebhookReply]", message: Notification) -> bool:
        body = msgspec.json.encode(message)
        delay = FIRST_DELAY_S
        for attempt in range(1, MAX_ATTEMPTS + 1):
            reply = send(body)
            if reply.is_accepted:
                if self._problem_logged:
                    self._problem_logged = False
                    log.info("%s accepts notifications again", self._host)
                return True
            self._report(reply.problem)
            if not reply.is_temporary or attempt == MAX_ATTEMPTS:
                return False
            if self._closing.is_set():
                time.sleep(CLOSING_DELAY_S)
            else:
                self._closing.wait(max(delay, min(reply.retry_after, MAX_DELAY_S)))
            delay = min(2 * delay, MAX_DELAY_S)
        return False

    def _report(self, problem: str) -> None:
        if not self._problem_logged:
            self._problem_logged = True
            log.warning("a notification was not accepted by %s: %s; the job continues", self._host, problem)


class WebhookReply(msgspec.Struct, frozen=True):
    """The result of one request; `problem` is empty if the message was accepted."""

    problem: str = ""
    is_temporary: bool = False
    retry_after: float = 0.0

    @property
    def is_accepted(self) -> bool:
        return not self.problem


def _webhook_sender(url: str) -> Callable[[bytes], WebhookReply]:
    """A function that sends one body; it raises nothing.  The standard library's proxies and certificates apply."""
    import http.client  # only if there is a message
    import urllib.error
    import urllib.request

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None:
            return None

    opener: OpenerDirector = urllib.request.build_opener(NoRedirect)
    headers = {"Content-Type": "application/json", "User-Agent": f"ripstop/{__version__}"}

    def send(body: bytes) -> WebhookReply:
        request = urllib.request.Request(url, body, headers, method="POST")
        try:
            with opener.open(request, timeout=REQUEST_TIMEOUT_S) as response:
                response.read(MAX_REPLY_BYTES)
            return WebhookReply()
        except urllib.error.HTTPError as error:
            with error:
                wait = error.headers.get("Retry-After", "")
            is_temporary = error.code >= 500 or error.code in RETRIED_STATUS
            return WebhookReply(f"HTTP {error.code}", is_temporary, float(wait) if wait.isdecimal() else 0.0)
        except urllib.error.URLError as error:
            return WebhookReply(f"{getattr(error.reason, 'strerror', None) or error.reason}", is_temporary=True)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return WebhookReply(f"{getattr(error, 'strerror', None) or type(error).__name__}", is_temporary=True)

    return send
