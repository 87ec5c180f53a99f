"""Event records as JSON.  Pure.

A record is one flat object on one line: `v`, `seq`, `at`, `node`, `kind`, and the event's own fields.

Rules: (1) readers skip unknown kinds, unknown fields and damaged lines, so a file that a crash truncated is still
readable; (2) numbers are finite, integers have 64 bits, and texts are valid Unicode.
"""

from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from ripstop.model.events import MAX_TEXT, Event, EventRecord, max_event_base_chars
from ripstop.model.field_types import Int64
from ripstop.model.text_formatting import format_ascii_json, truncate

VERSION = 1
MAX_LINE = 1 << 20  # characters of one record


class _Header(Struct, frozen=True):
    v: Int64
    seq: Int64
    at: Annotated[float, Meta(lt=2.0**63)]
    node: str


_decode_header = msgspec.json.Decoder(_Header).decode


@cache
def _event_decoder() -> msgspec.json.Decoder[Event]:
    return msgspec.json.Decoder(Event)


def to_json(record: EventRecord) -> str:
    """One line, without its end.  Long texts are truncated."""
    header = format_ascii_json(_Header(VERSION, record.seq, record.at, record.node))
    body = format_ascii_json(record.event)
    if len(body) > MAX_TEXT:
        texts = {name: value for name, value in asdict(record.event).items() if isinstance(value, str)}
        short = {name: truncate(text, max_event_base_chars(name)) for name, text in texts.items()}
        body = format_ascii_json(replace(record.event, **short))
    return f"{header[:-1]},{body[1:]}"


def to_dict(record: EventRecord) -> dict[str, Any]:
    """The same, as a flat dictionary."""
    found: dict[str, Any] = msgspec.json.decode(to_json(record))
    return found


def from_json(line: str) -> EventRecord | None:
    """Read one line.  None if it is not an event record, or has an unknown kind."""
    if len(line) > MAX_LINE:
        return None
    try:
        data = line.encode()
        header = _decode_header(data)
        return EventRecord(header.seq, header.at, header.node, _event_decoder().decode(data))
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return None
