"""Bounds on what the coordinator keeps of an agent's messages.  Pure.

The coordinator may make an agent's text part of a reason, and sends reasons to all nodes.  So it truncates texts when
it receives them, and reasons before it sends them.  No agent can make a message of the coordinator too large for a
frame, or use more than a bounded amount of its memory.
"""

from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import asdict, replace

from ripstop.model.config import MAX_SLOTS
from ripstop.model.events import EventRecord, max_event_base_chars
from ripstop.model.failure import MAX_COLLECTIVES
from ripstop.model.round import Node, Place
from ripstop.model.text_formatting import truncate, without_surrogates
from ripstop.protocol.messages import (
    Failed,
    FinalCommitMade,
    FromAgent,
    Inspected,
    Join,
    Leaving,
    Left,
    Problems,
    StateLost,
    Stopped,
)

MAX_NAME = 256  # characters of a node's name, address, role or label
MAX_PHRASE = 500  # characters of any other text
MAX_REASON = 4000  # characters of all reasons for a decision
MAX_EVENT_ITEMS = 256  # texts in one list of an event
MAX_HEALTH_INTERVAL_S = 3600.0
MAX_COUNT = 2**52  # what follows can still be counted and sent: a message has up to 2**53
MAX_ROUND_STEP = 2**20

_MAX_CHARS = {  # of a text, by its field; a traceback's is twice what agents send
    **dict.fromkeys(("host", "signal", "group", "label", "op", "size"), MAX_NAME),
    **dict.fromkeys(("message", "oom", "why"), MAX_REASON),
    **dict.fromkeys(("error_file", "logs", "file"), 1000),
    "traceback": 16_384,
    "state": 1,
}
_KEPT_ITEMS = {"problems": slice(8), "collectives": slice(MAX_COLLECTIVES), "log_tail": slice(-64, None)}

S = TypeVar("S", bound=Struct)


def message_within_limits(message: FromAgent) -> FromAgent:
    """Truncate a message.  `codec.encode` bounds all failures of a message together."""
    match message:
        case Join(node=node, held=held, health_interval=interval):  # `name_outside_limits` checks the names in these
            interval = min(max(0.0, interval), MAX_HEALTH_INTERVAL_S)
            restarts = min(message.restarts, MAX_COUNT)
            return replace(
                _record_within_limits(message), node=node, held=held, restarts=restarts, health_interval=interval
            )
        case Failed() | Inspected() | Stopped() | Problems():
            return _record_within_limits(message)
        case FinalCommitMade(why_not=why):
            return replace(message, why_not=truncate(why, MAX_PHRASE))
        case Leaving(why) | Left(why) | StateLost(why=why):
            return replace(message, why=truncate(why, MAX_PHRASE))
        case _:
            return message


def _record_within_limits(record: S) -> S:
    changed = {}
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if value and (short := _field_within_limits(name, value)) is not value:
            changed[name] = short
    return replace(record, **changed) if changed else record


def _field_within_limits(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return truncate(value, _MAX_CHARS.get(name, MAX_PHRASE))
    if isinstance(value, tuple):
        return tuple(_field_within_limits(name, item) for item in value[_KEPT_ITEMS.get(name, slice(None))])
    return _record_within_limits(value) if isinstance(value, Struct) else value


def event_record_within_limits(record: EventRecord) -> EventRecord:
    """Truncate an event record."""
    values = {name: _event_field_within_limits(name, value) for name, value in asdict(record.event).items()}
    return replace(record, event=replace(record.event, **values))


def _event_field_within_limits(name: str, value: Any) -> Any:
    match value:
        case str():
            return truncate(value, max_event_base_chars(name))
        case (str(), *_):
            return tuple(truncate(text, MAX_NAME) for text in value[:MAX_EVENT_ITEMS])
        case tuple():
            return value[:MAX_SLOTS]
        case _:
            return value


def reason_within_limits(text: str) -> str:
    return truncate(text, MAX_REASON)


def max_round_within_limits(known: int) -> int:
    """The highest round that a node may report if `known` is the highest one so far, so that no node exhausts them."""
    return known + MAX_ROUND_STEP if known else MAX_COUNT


def is_name_within_limits(text: str) -> bool:
    """Names are short and valid Unicode: they are written everywhere, as UTF-8."""
    return len(text) <= MAX_NAME and text == without_surrogates(text)


def name_outside_limits(node: Node, held: Place | None) -> str:
    """Which of the names that the coordinator sends to other nodes is invalid; empty if none is."""
    names = {"address": node.host, "role": node.role, "label": node.label, "store": held.store.host if held else ""}
    names["partner"] = held.partner.host if held and held.partner else ""
    return next((what for what, name in names.items() if not is_name_within_limits(name)), "")
