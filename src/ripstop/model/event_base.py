"""What all events of a job have in common, and why rounds end.  Pure."""

from enum import StrEnum

from msgspec import Struct

MAX_TEXT = 1000  # characters of one field
MAX_TRACEBACK = 8192  # characters of a field `traceback`


def _event_base_kind(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


class EventBase(Struct, frozen=True, tag_field="kind", tag=_event_base_kind):
    """Base of all events: JSON with the class's name in snake case as `kind`."""


def event_kind(event: EventBase) -> str:
    return str(event.__struct_config__.tag)  # the event's name in files and in the API: `round_formed`


def max_event_base_chars(field: str) -> int:
    """How long a text in this field can be."""
    return MAX_TRACEBACK if field == "traceback" else MAX_TEXT


class RoundEndCause(StrEnum):
    """Why a round ended."""

    APPLICATION = "application"  # a worker failed
    INFRASTRUCTURE = "infrastructure"  # a worker hung
    NODE_LOST = "node_lost"  # a node was lost
    NODE_LEFT = "node_left"  # a node left the job
    NODE_JOINED = "node_joined"  # a new node joined
    NODE_UNFIT = "node_unfit"  # an unhealthy or quarantined node lost its place
    SCALED = "scaled"  # an operator reduced the number of nodes
    OPERATOR = "operator"  # an operator requested a new round
    STATE_LOST = "state_lost"  # workers that were recovered in place found no commit to restore
    COORDINATOR = "coordinator"  # a new coordinator could not continue the round that it found
