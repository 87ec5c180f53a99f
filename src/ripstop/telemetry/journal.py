"""The event records of a whole job, in the order in which its coordinator received them.

Records that an agent sends again after a broken connection are added once.  Only the latest records are kept, bounded
in number and bytes; older ones are in the event files.
"""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from msgspec.structs import fields

from ripstop.model.config import MAX_NODES
from ripstop.model.events import Event, EventRecord, Sink

MAX_RECORDS = 10_000
MAX_BYTES = 64 << 20  # estimated


class Journal:
    """Numbers and keeps the records of a job, and passes them to sinks."""

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._sinks = list(sinks)
        self._records: deque[EventRecord] = deque()
        self._sizes: deque[int] = deque()  # of each record
        self._bytes = 0  # of all records
        self._last_own_seq = 0
        self._last_seq: dict[str, int] = {}  # the last sequence number of each node
        self._on_closed: list[Callable[[], object]] = []
        self.count = 0  # of all records, including those that are no longer kept
        self.is_closed = False

    def record(self, event: Event, at: float) -> EventRecord:
        """Add an event of the coordinator."""
        self._last_own_seq += 1
        record = EventRecord(self._last_own_seq, at, "", event)
        self._append(record)
        return record

    def take(self, record: EventRecord) -> bool:
        """Add a record of an agent; false if it was added before."""
        if record.seq <= self._last_seq.get(record.node, 0):
            return False
        self._last_seq[record.node] = record.seq
        if len(self._last_seq) > MAX_NODES:
            del self._last_seq[next(iter(self._last_seq))]
        self._append(record)
        return True

    def since(self, number: int) -> list[tuple[int, EventRecord]]:
        """The kept records after the `number`-th of the job, with their numbers."""
        first = self.count - len(self._records)
        skip = max(0, number - first)
        return list(enumerate(islice(self._records, skip, None), first + skip + 1))

    def subscribe(self, sink: Sink, on_closed: Callable[[], object]) -> Callable[[], None]:
        """Pass every later record to `sink`, until the returned function is called."""
        self._sinks.append(sink)
        self._on_closed.append(on_closed)

        def unsubscribe() -> None:
            self._sinks.remove(sink)
            self._on_closed.remove(on_closed)

        return unsubscribe

    def close(self) -> None:
        """The coordinator has stopped: no record follows, unless another coordinator writes it."""
        self.is_closed = True
        for call in tuple(self._on_closed):
            call()

    def _append(self, record: EventRecord) -> None:
        self._records.append(record)
        self._sizes.append(_journal_record_size(record))
        self._bytes += self._sizes[-1]
        while len(self._records) > MAX_RECORDS or self._bytes > MAX_BYTES:
            self._records.popleft()
            self._bytes -= self._sizes.popleft()
        self.count += 1
        for sink in tuple(self._sinks):
            sink(record)


def _journal_record_size(record: EventRecord) -> int:
    """Estimated bytes in memory.  Node names in the coordinator's own records are in memory anyway."""
    whole = bool(record.node)
    return 200 + sum(_journal_field_size(getattr(record.event, field.name), whole) for field in fields(record.event))


def _journal_field_size(value: Any, whole: bool) -> int:
    match value:
        case str():
            return 50 + len(value)
        case tuple():
            return 50 + (sum(_journal_field_size(item, whole) for item in value) if whole else 8 * len(value))
        case _:
            return 32
