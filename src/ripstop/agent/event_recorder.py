"""What one agent has to tell of its node: numbered, said in the log, written down, and told to the coordinator.

The latest entries are told again over every new connection: what was lost with the last one arrives after all, and a
coordinator that knows nothing learns what happened lately.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

from ripstop.model.event_text import log_line
from ripstop.model.events import Event, EventRecord, Sink, to_json
from ripstop.protocol.messages import Events

log = logging.getLogger("ripstop.agent")

REPEATED = 64  # entries
BATCH = 32 * 1024  # characters in one message


class EventRecorder:
    """`tell` sends to the coordinator, if it can be reached now; `sinks` take every entry."""

    def __init__(self, node: str, tell: Callable[[Events], None], sinks: Iterable[Sink] = ()) -> None:
        self._node = node
        self._tell = tell
        self._sinks = tuple(sinks)
        self._seq = 0
        self._latest: deque[str] = deque(maxlen=REPEATED)

    def record(self, event: Event, level: int = logging.INFO) -> None:
        """This has just happened."""
        if text := log_line(event):
            log.log(level, "%s", text)
        self._seq += 1
        entry = EventRecord(self._seq, time.time(), self._node, event)
        for sink in self._sinks:
            sink(entry)
        line = to_json(entry)
        self._latest.append(line)
        self._tell(Events((line,)))

    def tell_again(self) -> None:
        """The coordinator is there, or another one."""
        batch: list[str] = []
        for line in self._latest:
            if batch and sum(map(len, batch)) + len(line) > BATCH:
                self._tell(Events(tuple(batch)))
                batch = []
            batch.append(line)
        if batch:
            self._tell(Events(tuple(batch)))
