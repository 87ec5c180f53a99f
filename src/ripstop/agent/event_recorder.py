"""Records the events of one node: each gets a number and goes to the log, to the sinks and to the coordinator.

The latest events are sent again after every reconnect.  So an event that was lost with a connection still arrives, and
a new coordinator learns the recent history.  A coordinator ignores an event with a lower number than the last one of
its node.  So an event that is recorded during a reconnect is held back until the events before it are sent.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

from ripstop.model.event_json import to_json
from ripstop.model.events import Event, EventRecord, Sink
from ripstop.protocol.messages import Events
from ripstop.telemetry.stderr_log import log_event_to_stderr

log = logging.getLogger("ripstop.agent")

MAX_RESENT_EVENTS = 64
MAX_BATCH_CHARS = 32 * 1024  # in one message


class EventRecorder:
    """`send` sends to the coordinator if it is reachable; `sinks` take every record."""

    def __init__(self, node: str, send: Callable[[Events], None], sinks: Iterable[Sink] = ()) -> None:
        self._node = node
        self._send = send
        self._sinks = tuple(sinks)
        self._seq = 0
        self._is_held = False
        self._latest: deque[str] = deque(maxlen=MAX_RESENT_EVENTS)

    def record(self, event: Event, level: int = logging.INFO) -> None:
        """Record an event that happens now."""
        self._seq += 1
        record = EventRecord(self._seq, time.time(), self._node, event)
        log_event_to_stderr(log, record, level)
        for sink in self._sinks:
            sink(record)
        line = to_json(record)
        self._latest.append(line)
        if not self._is_held:
            self._send(Events((line,)))

    def hold(self) -> None:
        """Send no event until `send_again`."""
        self._is_held = True

    def send_again(self) -> None:
        """Send the latest events over a new connection."""
        self._is_held = False
        batch: list[str] = []
        for line in self._latest:
            if batch and sum(map(len, batch)) + len(line) > MAX_BATCH_CHARS:
                self._send(Events(tuple(batch)))
                batch = []
            batch.append(line)
        if batch:
            self._send(Events(tuple(batch)))
