"""Sends events to an event handler of the program, in a thread, so that the agent never waits for the handler.

An exception of the handler is logged once, and the handler gets the next event.  While the handler blocks, events wait
in a bounded queue; events that do not fit are dropped, which is logged once.  A handler that still blocks at the end is
abandoned: otherwise `logging.shutdown` would wait for it for ever when the program exits.
"""

import logging
import queue
import threading
from contextlib import suppress
from typing import Any

from ripstop.compat import events

log = logging.getLogger("ripstop.compat")

MAX_QUEUED_EVENTS = 1024
CLOSE_TIMEOUT_S = 2.0


class EventThread:
    """Sends events, as text, to the handler with this name; KeyError if there is none."""

    def __init__(self, destination: str) -> None:
        self._logger = events._get_or_create_logger(destination)
        self._name = destination
        self._queue: queue.Queue[str | None] = queue.Queue(MAX_QUEUED_EVENTS)
        self._warned: set[str] = set()
        self._thread = threading.Thread(target=self._main, name="ripstop-events", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Does not wait."""
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self._warn_once("does not keep up, and misses events")

    def close(self) -> None:
        """Wait a short time until the handler has received all events."""
        with suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_TIMEOUT_S)
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._warn_once("was not done at the end")
            at_exit: list[Any] = logging._handlerList  # type: ignore[attr-defined]  # weak references
            for ref in [ref for ref in at_exit if ref() in self._logger.handlers]:
                at_exit.remove(ref)

    def _main(self) -> None:
        while (line := self._queue.get()) is not None:
            try:
                self._logger.info(line)
            except Exception as error:
                self._warn_once("failed", f": {type(error).__name__}: {error}")

    def _warn_once(self, what: str, detail: str = "") -> None:
        if what not in self._warned:
            self._warned.add(what)
            log.warning("the event handler %s %s%s; the job continues", self._name, what, detail)
