"""How much of a node's words the coordinator keeps.  Pure.

What a node says may become part of a reason, and everybody is told the reason.  So words are cut where they come in,
and reasons before they go out: nothing that a node says makes a message of the coordinator's too large for its frame,
and whatever it says, so much of it is kept in memory.
"""

from collections.abc import Iterable
from typing import Any

from msgspec.structs import fields, replace

from ripstop.model.config import MOST_SLOTS
from ripstop.model.events import MAX_TEXT, EventRecord
from ripstop.model.failure import MOST_STANDINGS, CollectiveProgress, Failure
from ripstop.model.round import Node, Place
from ripstop.protocol.messages import Failed, FromAgent, Inspected, Join, Leaving, Left, Problems, Stopped

NAME = 256  # characters of a node's name, address, role or label
PHRASE = 500  # of one thing that a node says
REASON = 4000  # of all that is known of why something is done
STACK = 16_384  # of a traceback, twice what an agent sends
TAIL = 64  # lines of a log
FILE = 1000  # characters of a path
WORDS = 256  # in one list of an event
PROBLEMS = 8  # of an unhealthy node
INTERVAL = 3600.0  # seconds between two looks at a node's health, as far as others wait for it


def bounded(message: FromAgent) -> FromAgent:
    """The message, without what is too much of it."""
    match message:
        case Join(failures=failures, closing=closing, problems=problems):
            return replace(
                message,
                failures=_failures(failures),
                closing=closing and replace(closing, why=cut(closing.why)),
                problems=_problems(problems),
                health_interval=min(max(0.0, message.health_interval), INTERVAL),
            )
        case Failed(failures=failures) | Inspected(failures=failures) | Stopped(failures):
            return replace(message, failures=_failures(failures))
        case Problems(problems):
            return Problems(_problems(problems))
        case Leaving(why) | Left(why):
            return replace(message, why=cut(why, PHRASE))
        case _:
            return message


def bounded_entry(entry: EventRecord) -> EventRecord:
    """What a node tells, without what is too much of it."""
    event = entry.event
    return replace(entry, event=replace(event, **{f.name: _value(getattr(event, f.name)) for f in fields(event)}))


def _value(value: Any) -> Any:
    match value:
        case str():
            return cut(value, MAX_TEXT)
        case (str(), *_):
            return tuple(cut(word, NAME) for word in value[:WORDS])
        case tuple():
            return value[:MOST_SLOTS]
        case _:
            return value


def cut(text: str, most: int = REASON) -> str:
    """The beginning of a text that is too long."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def is_name(text: str) -> bool:
    """Short enough, and with no half of a pair of surrogates: names are written everywhere, as UTF-8."""
    if len(text) > NAME:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def misnamed(node: Node, held: Place | None) -> str:
    """Which of the names that others are told is none; empty when all are."""
    names = {"address": node.host, "role": node.role, "label": node.label, "store": held.store.host if held else ""}
    return next((what for what, name in names.items() if not is_name(name)), "")


def _problems(problems: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(cut(problem, PHRASE) for problem in problems[:PROBLEMS])


def _failures(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Whatever an agent of ours sends fits; all evidence together is cut where it travels (`codec.fit`)."""
    return tuple(
        replace(
            failure,
            host=cut(failure.host, NAME),
            signal=failure.signal and cut(failure.signal, NAME),
            message=cut(failure.message),
            traceback=cut(failure.traceback, STACK),
            oom=cut(failure.oom),
            log_tail=tuple(cut(line, PHRASE) for line in failure.log_tail[-TAIL:]),
            error_file=cut(failure.error_file, FILE),
            logs=cut(failure.logs, FILE),
            hang=failure.hang
            and replace(
                failure.hang,
                sign=cut(failure.hang.sign, PHRASE),
                call=cut(failure.hang.call, PHRASE),
                where=cut(failure.hang.where, PHRASE),
                state=failure.hang.state[:1],
                file=cut(failure.hang.file, FILE),
                standings=failure.hang.standings and _standings(failure.hang.standings),
            ),
        )
        for failure in failures
    )


def _standings(standings: tuple[CollectiveProgress, ...]) -> tuple[CollectiveProgress, ...]:
    return tuple(
        replace(
            one,
            group=cut(one.group, NAME),
            label=cut(one.label, NAME),
            op=cut(one.op, NAME),
            size=cut(one.size, NAME),
        )
        for one in standings[:MOST_STANDINGS]
    )
