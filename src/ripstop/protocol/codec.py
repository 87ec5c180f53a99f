"""Messages as JSON text and back.

A frame is one JSON object, `{"v": 1, "type": "Join", …}`, its fields those of the dataclass, every one of them present
and nothing else.  What a field may hold is read once from the dataclasses' type hints; there is no pickle and no import
by name.  Whatever arrives, `decode` returns a message of an allowed type or raises `ProtocolError`: sizes, counts,
numbers and nesting are bounded before anybody acts on them.  Pure.
"""

import json
import math
import types
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from msgspec import Struct
from msgspec.structs import fields, replace

from ripstop.model.errors import ProtocolError
from ripstop.protocol.messages import VERSION, Closed, Failed, Heartbeat, Inspected, Join, Message, Stopped

MAX_FRAME = 256 * 1024  # bytes of one message; frames are ASCII, so also characters
MAX_ITEMS = 4096  # elements of one list
MAX_INT = 2**63

M = TypeVar("M")
Pack = Callable[[Any], Any]
Unpack = Callable[[Any, str], Any]  # (JSON value, where it stood) → field value


class VersionMismatch(ProtocolError):
    """The peer speaks another version of the protocol."""


# out ------------------------------------------------------------------------------------------------------------------


def encode(message: Message) -> str:
    """One frame.  A message too large for it raises `ProtocolError`; see `fit`."""
    text = _dump(message)
    if len(text) > MAX_FRAME:
        raise ProtocolError(f"a message has at most {MAX_FRAME} bytes, this {type(message).__name__} has {len(text)}")
    return text


def fit(message: Message) -> str:
    """One frame, with less evidence where all of it would be too large: the culprit comes first and stays longest."""
    if isinstance(message, Heartbeat):
        return BEAT
    text = _dump(message)
    while len(text) > MAX_FRAME:
        match message:
            case Failed() | Join() | Stopped() | Inspected() if message.failures:
                message = replace(message, failures=_fewer(message.failures))
            case Closed(report) if report.failures:
                message = Closed(replace(report, failures=_fewer(report.failures)))
            case _:
                return encode(message)
        text = _dump(message)
    return text


def _fewer(failures: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(failures) > 1:
        return failures[: len(failures) // 2]
    (last,) = failures
    if not (last.traceback or last.log_tail):
        return ()
    return (replace(last, message=last.message[:4096], traceback="", log_tail=()),)


def _dump(message: Message) -> str:
    cls = type(message)
    pack = _PACKS[cls.__name__]
    try:
        return json.dumps({"v": VERSION, "type": cls.__name__} | pack(message), separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise ProtocolError(f"a number in a message is finite, one in this {cls.__name__} is not") from error


# in -------------------------------------------------------------------------------------------------------------------


def decode(text: str, allowed: tuple[type[M], ...]) -> M:
    """The message in a frame, one of the allowed types."""
    if text == BEAT and Heartbeat in allowed:
        return Heartbeat()  # type: ignore[return-value]  # it is allowed
    frame = _load(text)
    version = frame.pop("v", None)
    if type(version) is not int or version != VERSION:
        raise VersionMismatch(
            f"this side speaks protocol version {VERSION}, the peer {_cut(version)}; "
            "install the same version of ripstop on every node"
        )
    name = frame.pop("type", None)
    for cls in allowed:
        if cls.__name__ == name:
            message: M = _UNPACKS[name](frame, name)
            return message
    raise ProtocolError(f"expected {' or '.join(cls.__name__ for cls in allowed)}, received type {_cut(name)}")


def reader(cls: type[M]) -> Callable[[str], M]:
    """Reads such a record from its JSON, as strictly as a message."""
    unpack = _record(cls)[1]
    return lambda text: unpack(_load(text), cls.__name__)


def _load(text: str) -> dict[str, Any]:
    if len(text) > MAX_FRAME:
        raise ProtocolError(f"a message has at most {MAX_FRAME} bytes, this one has {len(text)}")
    try:
        frame = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise ProtocolError(f"a message is JSON, this is not: {_cut(text)}") from error
    except RecursionError as error:
        raise ProtocolError("a message is not nested this deep") from error
    if not isinstance(frame, dict):
        raise ProtocolError(f"a message is a JSON object, this is {_cut(text)}")
    return frame


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _cut(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


# tables ---------------------------------------------------------------------------------------------------------------


def _wrong(where: str, expected: str, value: object) -> ProtocolError:
    return ProtocolError(f"{where} is {expected}, received {_cut(value)}")


def _plain(value: Any) -> Any:
    return value


def _unpack_str(value: Any, where: str) -> str:
    if type(value) is not str:
        raise _wrong(where, "a string", value)
    return value


def _unpack_bool(value: Any, where: str) -> bool:
    if type(value) is not bool:
        raise _wrong(where, "true or false", value)
    return value


def _unpack_int(value: Any, where: str) -> int:
    if type(value) is not int or not -MAX_INT <= value < MAX_INT:
        raise _wrong(where, "an integer of 64 bits", value)
    return value


def _unpack_float(value: Any, where: str) -> float:
    if type(value) is int and -MAX_INT <= value < MAX_INT:
        return float(value)
    if type(value) is not float or not math.isfinite(value):
        raise _wrong(where, "a finite number", value)
    return value


def _enum(cls: type[StrEnum]) -> tuple[Pack, Unpack]:
    members = {member.value: member for member in cls}

    def unpack(value: Any, where: str) -> Any:
        if type(value) is not str or value not in members:
            raise _wrong(where, f"one of {', '.join(members)}", value)
        return members[value]

    return (lambda member: member.value), unpack


def _optional(inner: tuple[Pack, Unpack]) -> tuple[Pack, Unpack]:
    pack, unpack = inner
    return (
        lambda value: None if value is None else pack(value),
        lambda value, where: None if value is None else unpack(value, where),
    )


def _list(inner: tuple[Pack, Unpack]) -> tuple[Pack, Unpack]:
    pack, unpack = inner

    def unpack_all(value: Any, where: str) -> tuple[Any, ...]:
        if type(value) is not list or len(value) > MAX_ITEMS:
            raise _wrong(where, f"a list of at most {MAX_ITEMS}", value)
        return tuple([unpack(item, where) for item in value])

    return (lambda values: [pack(value) for value in values]), unpack_all


def _record(cls: type[Any]) -> tuple[Pack, Unpack]:
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls)]
    packs = {name: _codec(hints[name])[0] for name in names}
    unpacks = {name: _codec(hints[name])[1] for name in names}

    def pack(record: Any) -> dict[str, Any]:
        return {name: pack_field(getattr(record, name)) for name, pack_field in packs.items()}

    def unpack(value: Any, where: str) -> Any:
        if type(value) is not dict:
            raise _wrong(where, f"a {cls.__name__} object", value)
        if value.keys() != unpacks.keys():
            missing = sorted(unpacks.keys() - value.keys())
            extra = sorted(value.keys() - unpacks.keys())
            raise ProtocolError(f"{where} has exactly its fields; missing: {_cut(missing)}, unknown: {_cut(extra)}")
        return cls(**{name: unpack_field(value[name], f"{where}.{name}") for name, unpack_field in unpacks.items()})

    return pack, unpack


_SCALARS: dict[type, tuple[Pack, Unpack]] = {
    str: (_plain, _unpack_str),
    bool: (_plain, _unpack_bool),
    int: (_plain, _unpack_int),
    float: (_plain, _unpack_float),
}


def _codec(hint: Any) -> tuple[Pack, Unpack]:
    if hint in _SCALARS:
        return _SCALARS[hint]
    args = get_args(hint)
    if isinstance(hint, types.UnionType):
        (inner,) = [arg for arg in args if arg is not types.NoneType]
        return _optional(_codec(inner))
    if get_origin(hint) is tuple:
        element, dots = args
        assert dots is ..., f"{hint}: only tuples of any length travel"
        return _list(_codec(element))
    if issubclass(hint, Struct):
        return _record(hint)
    assert issubclass(hint, StrEnum), f"{hint} does not travel"
    return _enum(hint)


_PACKS: dict[str, Pack] = {}
_UNPACKS: dict[str, Unpack] = {}
for _cls in get_args(Message):
    _PACKS[_cls.__name__], _UNPACKS[_cls.__name__] = _record(_cls)

BEAT = _dump(Heartbeat())  # nearly all that is ever said
