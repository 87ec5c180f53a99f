"""The entries of a whole job, in the order in which its coordinator learned of them.

What an agent tells again after a broken connection is taken once.  Only the latest are kept, so many entries and so
many bytes of them; a reader that was away for longer finds the rest in the event files.
"""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from msgspec.structs import fields

from ripstop.model.config import MAX_NODES
from ripstop.model.events import Event, EventRecord, Sink

KEPT = 10_000  # entries
KEPT_BYTES = 64 << 20  # of them, about


class Journal:
    """Numbers, keeps and passes on what happens in a job."""

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._sinks = list(sinks)
        self._entries: deque[EventRecord] = deque()
        self._sizes: deque[int] = deque()  # of each of them
        self._bytes = 0  # of all of them
        self._own = 0
        self._seen: dict[str, int] = {}  # the last number of each node
        self.count = 0  # of all that were ever here

    def record(self, event: Event, at: float) -> EventRecord:
        """The coordinator itself has something to say."""
        self._own += 1
        entry = EventRecord(self._own, at, "", event)
        self._append(entry)
        return entry

    def take(self, entry: EventRecord) -> bool:
        """An agent's entry; false if it was here before."""
        if entry.seq <= self._seen.get(entry.node, 0):
            return False
        self._seen[entry.node] = entry.seq
        if len(self._seen) > MAX_NODES:
            del self._seen[next(iter(self._seen))]
        self._append(entry)
        return True

    def since(self, number: int) -> list[tuple[int, EventRecord]]:
        """The kept entries after the `number`-th of the job, numbered."""
        first = self.count - len(self._entries)
        skip = max(0, number - first)
        return list(enumerate(islice(self._entries, skip, None), first + skip + 1))

    def subscribe(self, sink: Sink) -> Callable[[], None]:
        """Have every later entry given to `sink`; the result ends that."""
        self._sinks.append(sink)
        return lambda: self._sinks.remove(sink)

    def _append(self, entry: EventRecord) -> None:
        self._entries.append(entry)
        self._sizes.append(_size(entry))
        self._bytes += self._sizes[-1]
        while len(self._entries) > KEPT or self._bytes > KEPT_BYTES:
            self._entries.popleft()
            self._bytes -= self._sizes.popleft()
        self.count += 1
        for sink in tuple(self._sinks):
            sink(entry)


def _size(entry: EventRecord) -> int:
    """Bytes in memory, about.  What the coordinator lists itself, names of nodes, is in memory anyway."""
    return 200 + sum(_size_of(getattr(entry.event, field.name), bool(entry.node)) for field in fields(entry.event))


def _size_of(value: Any, whole: bool) -> int:
    match value:
        case str():
            return 50 + len(value)
        case tuple():
            return 50 + (sum(_size_of(item, whole) for item in value) if whole else 8 * len(value))
        case _:
            return 32
