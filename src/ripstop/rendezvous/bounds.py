"""How much of a node's words the coordinator keeps.  Pure.

What a node says may become part of a reason, and everybody is told the reason.  So words are cut where they come in,
and reasons before they go out: nothing that a node says makes a message of the coordinator's too large for its frame.
"""

from collections.abc import Iterable
from dataclasses import replace

from ripstop.observe.failure import MOST_STANDINGS, Failure, Standing
from ripstop.rendezvous.messages import Failed, FromAgent, Inspected, Join, Leave, Leaving, Problems, Stopped
from ripstop.round import Node, Place

NAME = 256  # characters of a node's name, address, role or label
PHRASE = 500  # of one thing that a node says
REASON = 4000  # of all that is known of why something is done
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
        case Leaving(why) | Leave(why):
            return replace(message, why=cut(why, PHRASE))
        case _:
            return message


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
    """What is said of a failure in a reason; the evidence itself is cut where it travels (`codec.fit`)."""
    return tuple(
        replace(
            failure,
            host=cut(failure.host, NAME),
            signal=failure.signal and cut(failure.signal, NAME),
            hang=failure.hang
            and replace(
                failure.hang,
                sign=cut(failure.hang.sign, PHRASE),
                call=cut(failure.hang.call, PHRASE),
                where=cut(failure.hang.where, PHRASE),
                state=failure.hang.state[:1],
                standings=failure.hang.standings and _standings(failure.hang.standings),
            ),
        )
        for failure in failures
    )


def _standings(standings: tuple[Standing, ...]) -> tuple[Standing, ...]:
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
