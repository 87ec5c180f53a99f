"""Bounds on what the coordinator keeps of an agent's messages.  Pure.

The coordinator may make an agent's text part of a reason, and sends reasons to all nodes.  So it truncates texts when
it receives them, and reasons before it sends them.  No agent can make a message of the coordinator too large for a
frame, or use more than a bounded amount of its memory.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import asdict, replace

from ripstop.model.config import MAX_SLOTS
from ripstop.model.events import MAX_TEXT, EventRecord
from ripstop.model.failure import MAX_STANDINGS, Failure, Hang
from ripstop.model.round import Node, Place
from ripstop.model.text import truncate, without_surrogates
from ripstop.protocol.messages import Failed, FromAgent, Inspected, Join, Leaving, Left, Problems, Stopped

# characters
MAX_NAME = 256  # a node's name, address, role or label
MAX_PHRASE = 500  # one statement of a node
MAX_REASON = 4000  # all reasons for a decision
MAX_STACK = 16_384  # a traceback; agents send half of this
MAX_PATH = 1000
# elements
MAX_TAIL_LINES = 64  # lines of a log
MAX_EVENT_ITEMS = 256  # texts in one list of an event
MAX_PROBLEMS = 8
# seconds
MAX_HEALTH_INTERVAL_S = 3600.0

_FAILURE_TEXTS = {
    "host": MAX_NAME,
    "signal": MAX_NAME,
    "message": MAX_REASON,
    "traceback": MAX_STACK,
    "oom": MAX_REASON,
    "error_file": MAX_PATH,
    "logs": MAX_PATH,
}
_HANG_TEXTS = {"sign": MAX_PHRASE, "call": MAX_PHRASE, "where": MAX_PHRASE, "file": MAX_PATH}
_STANDING_TEXTS = {"group": MAX_NAME, "label": MAX_NAME, "op": MAX_NAME, "size": MAX_NAME}

S = TypeVar("S", bound=Struct)


def bounded(message: FromAgent) -> FromAgent:
    """The message, truncated where it is too long."""
    match message:
        case Join(failures=failures, closing=closing, problems=problems):
            return replace(
                message,
                failures=_failures(failures),
                closing=closing and _truncated(closing, {"why": MAX_REASON}),
                problems=_problems(problems),
                health_interval=min(max(0.0, message.health_interval), MAX_HEALTH_INTERVAL_S),
            )
        case Failed(failures=failures) | Inspected(failures=failures) | Stopped(failures):
            return replace(message, failures=_failures(failures))
        case Problems(problems):
            return Problems(_problems(problems))
        case Leaving() | Left():
            return _truncated(message, {"why": MAX_PHRASE})
        case _:
            return message


def bounded_record(record: EventRecord) -> EventRecord:
    """The event record, truncated where it is too long."""
    values = {name: _bounded_value(value) for name, value in asdict(record.event).items()}
    return replace(record, event=replace(record.event, **values))


def truncate_reason(text: str) -> str:
    return truncate(text, MAX_REASON)


def is_valid_name(text: str) -> bool:
    """Names are short, and valid Unicode: they are written everywhere, as UTF-8."""
    return len(text) <= MAX_NAME and text == without_surrogates(text)


def invalid_name(node: Node, held: Place | None) -> str:
    """Which of the names that are sent to others is not valid; empty if all are."""
    names = {"address": node.host, "role": node.role, "label": node.label, "store": held.store.host if held else ""}
    return next((what for what, name in names.items() if not is_valid_name(name)), "")


def _bounded_value(value: Any) -> Any:
    match value:
        case str():
            return truncate(value, MAX_TEXT)
        case (str(), *_):
            return tuple(truncate(text, MAX_NAME) for text in value[:MAX_EVENT_ITEMS])
        case tuple():
            return value[:MAX_SLOTS]
        case _:
            return value


def _truncated(record: S, limits: Mapping[str, int]) -> S:
    texts = {name: getattr(record, name) for name in limits}
    return replace(record, **{name: truncate(text, limits[name]) for name, text in texts.items() if text})


def _problems(problems: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(truncate(problem, MAX_PHRASE) for problem in problems[:MAX_PROBLEMS])


def _failures(failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
    """Agents send failures within these bounds.  `codec.fit` bounds all failures of a message together."""
    return tuple(_failure(failure) for failure in failures)


def _failure(failure: Failure) -> Failure:
    tail = tuple(truncate(line, MAX_PHRASE) for line in failure.log_tail[-MAX_TAIL_LINES:])
    hang = failure.hang and _hang(failure.hang)
    return replace(_truncated(failure, _FAILURE_TEXTS), log_tail=tail, hang=hang)


def _hang(hang: Hang) -> Hang:
    standings = hang.standings
    if standings is not None:
        standings = tuple(_truncated(standing, _STANDING_TEXTS) for standing in standings[:MAX_STANDINGS])
    return replace(_truncated(hang, _HANG_TEXTS), state=hang.state[:1], standings=standings)
