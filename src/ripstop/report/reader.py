"""Reads the event files of a job, for reports.

Rules: (1) what cannot be read is skipped and counted: damaged and incomplete lines, unknown kinds, files of another
program; (2) a record is read once, although a new coordinator writes the latest ones again, and although the files of a
job and of its nodes have the same records; (3) files are read as streams, in a bounded amount of memory.
"""

from collections.abc import Callable, Iterator
from functools import cache, reduce
from operator import or_
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import Struct, defstruct

from ripstop.model.event_json import MAX_LINE, VERSION
from ripstop.model.events import Event, EventRecord
from ripstop.model.field_types import Int64
from ripstop.telemetry.event_file import JOB_EVENTS, NODE_EVENTS

CHUNK_BYTES = 1 << 18


class Skipped(Struct):
    """Lines that are no records of a known kind, and versions of the format other than ours."""

    lines: int = 0
    versions: set[int] = msgspec.field(default_factory=set)

    def notes(self) -> Iterator[str]:
        if self.versions:
            found = ", ".join(map(str, sorted(self.versions)))
            yield f"Some events have version {found} of the format; this ripstop knows version {VERSION}."
        if self.lines:
            yield f"{self.lines} lines were skipped: they are incomplete, damaged, or events of another version."


def event_files_for_report(directory: Path) -> list[Path]:
    """The event files in a run's directory, the coordinator's first."""
    return [path for name in (JOB_EVENTS, NODE_EVENTS) if (path := directory / name).is_file()]


def read_events_for_report(paths: list[Path], skipped: Skipped) -> Iterator[EventRecord]:
    """The records of these files.  Raises OSError."""
    decode = _line_decoder_for_report()
    last_seq: dict[str, int] = {}
    for path in paths:
        for line in _read_lines_for_report(path):
            try:
                event = decode(line)
            except (msgspec.MsgspecError, UnicodeError, RecursionError):
                skipped.lines += bool(line)
                continue
            node, seq = event.node, event.seq
            if node:
                if seq <= last_seq.get(node, 0):
                    continue  # rule 2
                last_seq[node] = seq
            if event.v != VERSION:
                skipped.versions.add(event.v)
            yield EventRecord(seq, event.at, node, event)


def _read_lines_for_report(path: Path) -> Iterator[bytes]:
    """The lines of a file, without the end of each; of a line that is too long, only its beginning."""
    with path.open("rb", buffering=0) as file:
        rest = b""
        while chunk := file.read(CHUNK_BYTES):
            *lines, last = chunk.split(b"\n")
            if lines:
                yield rest + lines[0]
                yield from lines[1:]
                rest = last
            elif len(rest) <= MAX_LINE:
                rest += last
        if rest:
            yield rest


@cache
def _line_decoder_for_report() -> Callable[[bytes], Any]:
    """Decodes a line in one pass, to an event that also has the fields of the header."""
    header = [("v", Int64), ("seq", Int64), ("at", float), ("node", str)]
    options: dict[str, Any] = {"kw_only": True, "frozen": True, "gc": False, "tag_field": "kind"}
    flat = [
        defstruct(cls.__name__, header, bases=(cls,), tag=cls.__struct_config__.tag, **options)
        for cls in get_args(Event)
    ]
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(reduce(or_, flat))
    return decoder.decode
