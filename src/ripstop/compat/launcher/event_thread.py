"""Events on their way to a handler of the program's: in a thread, so that the agent never waits for it.

A handler that raises is said once and told the next event all the same; while one blocks, events wait, and those for
which there is no more room are dropped, which is said once too.  One that blocks at the end is left alone: logging
takes leave of every handler when the program exits, and would wait for it for ever.
"""

import logging
import queue
import threading
from contextlib import suppress
from typing import Any

from ripstop.compat import events

log = logging.getLogger("ripstop.compat")

WAITING = 1024  # events that may wait
GOODBYE = 2.0  # seconds for the last ones


class EventThread:
    """Tells events, as text, to the handler of this name; KeyError where there is none."""

    def __init__(self, destination: str) -> None:
        self._logger = events._get_or_create_logger(destination)
        self._name = destination
        self._waiting: queue.Queue[str | None] = queue.Queue(WAITING)
        self._said: set[str] = set()
        self._thread = threading.Thread(target=self._tell, name="ripstop-events", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Does not wait."""
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._say("does not keep up, and misses events")

    def close(self) -> None:
        """Waits, briefly, until the handler has heard all."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=GOODBYE)
            self._thread.join(GOODBYE)
        if self._thread.is_alive():
            self._say("was not done at the end")
            farewell: list[Any] = logging._handlerList  # type: ignore[attr-defined]  # weak references
            for ref in [ref for ref in farewell if ref() in self._logger.handlers]:
                farewell.remove(ref)

    def _tell(self) -> None:
        while (line := self._waiting.get()) is not None:
            try:
                self._logger.info(line)
            except Exception as error:
                self._say(f"failed: {type(error).__name__}: {error}")

    def _say(self, what: str) -> None:
        if what.partition(":")[0] not in self._said:
            self._said.add(what.partition(":")[0])
            log.warning("the event handler %s %s; the job goes on", self._name, what)
