"""Encode messages as JSON text, and decode them.

A frame is one JSON object in ASCII, `{"v":1,"type":"Join",…}`.  The other fields are those of the message's class.  For
any input, `decode` returns a message of an allowed type or raises `ProtocolError`.

Rules, which msgspec checks by the types of the fields: (1) a frame has at most `MAX_FRAME_BYTES`; (2) unknown types and
unknown fields are rejected; (3) numbers are finite, integers have 64 bits, lists have at most `MAX_ITEMS` elements.
Pure.
"""

from functools import cache
from typing import Any, TypeVar, Union

import msgspec
from msgspec.structs import replace

from ripstop.model.errors import ProtocolError
from ripstop.model.failure import Failure
from ripstop.model.text_formatting import format_ascii_json, truncate
from ripstop.protocol.messages import VERSION, Closed, Failed, Inspected, Join, Message, Stopped

MAX_FRAME_BYTES = 256 * 1024  # frames are ASCII, so this is also the number of characters
_PREFIX = f'{{"v":{VERSION},'
_MAX_SHOWN = 80  # characters of a wrong value in an error message

M = TypeVar("M")


class VersionMismatch(ProtocolError):
    """The peer uses another version of the protocol."""


def encode(message: Message) -> str:
    """Encode one frame.  Evidence is dropped until it fits; the root cause comes first, and is dropped last.

    Any other message that is too large raises `ProtocolError`.
    """
    text = _encode(message)
    while len(text) > MAX_FRAME_BYTES:
        match message:
            case Failed() | Join() | Stopped() | Inspected() if message.failures:
                message = replace(message, failures=_fewer_failures_to_encode(message.failures))
            case Closed(report) if report.failures:
                message = Closed(replace(report, failures=_fewer_failures_to_encode(report.failures)))
            case _:
                name = type(message).__name__
                raise ProtocolError(f"a message has at most {MAX_FRAME_BYTES} bytes, this {name} has {len(text)}")
        text = _encode(message)
    return text


def _fewer_failures_to_encode(failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
    if len(failures) > 1:
        return failures[: len(failures) // 2]
    (last,) = failures
    if not (last.traceback or last.log_tail):
        return ()
    return (replace(last, message=last.message[:4096], traceback="", log_tail=()),)


def _encode(message: Message) -> str:
    text = format_ascii_json(message)
    if "null" in text:  # msgspec encodes NaN and infinity as null, which the decoder rejects
        try:
            _message_decoder((type(message),)).decode(text)
        except msgspec.ValidationError as error:
            name = type(message).__name__
            raise ProtocolError(f"numbers in a message are finite, one in this {name} is not: {error}") from None
    return _PREFIX + text[1:]


def decode(text: str, allowed: tuple[type[M], ...]) -> M:
    """Decode a frame as one of the allowed types."""
    if text.startswith(_PREFIX) and len(text) <= MAX_FRAME_BYTES and text.isascii():
        try:
            message: M = _message_decoder(allowed).decode("{" + text[len(_PREFIX) :])
            return message
        except (msgspec.MsgspecError, RecursionError):
            pass  # the slow path below finds the reason
    try:
        return _decode_message_step_by_step(text, allowed)
    except RecursionError:
        raise ProtocolError("a message is nested too deep") from None


def decode_protocol_record(text: str, cls: type[M]) -> M:
    """Decode one record, as strictly as a message."""
    try:
        record: M = _message_decoder((cls,)).decode(_message_bytes_to_decode(text))
        return record
    except RecursionError:
        raise ProtocolError(f"a {cls.__name__} is nested too deep") from None
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"{cls.__name__}: {error}") from None


def _decode_message_step_by_step(text: str, allowed: tuple[type[M], ...]) -> M:
    """Decode step by step.  Accepts any order of fields, and any white space."""
    try:
        frame = msgspec.json.decode(_message_bytes_to_decode(text))
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a message is JSON, this is not: {_undecodable_excerpt(text)}: {error}") from None
    if not isinstance(frame, dict):
        raise ProtocolError(f"a message is a JSON object, this is {_undecodable_excerpt(text)}")
    version = frame.pop("v", None)
    if type(version) is not int or version != VERSION:
        raise VersionMismatch(
            f"this side uses protocol version {VERSION}, the peer {_undecodable_excerpt(version)}; "
            "install the same version of ripstop on every node"
        )
    name = frame.get("type")
    cls = next((cls for cls in allowed if cls.__name__ == name), None)
    if cls is None:
        raise ProtocolError(
            f"expected {' or '.join(cls.__name__ for cls in allowed)}, received type {_undecodable_excerpt(name)}"
        )
    try:
        return msgspec.convert(frame, cls)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"{name}: {error}") from None


def _message_bytes_to_decode(text: str) -> bytes:
    data = text.encode("utf-8", "replace")
    if len(data) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message has at most {MAX_FRAME_BYTES} bytes, this one has {len(data)}")
    return data


def _undecodable_excerpt(value: object) -> str:
    return truncate(repr(value), _MAX_SHOWN)


@cache
def _message_decoder(types: tuple[type, ...]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(Union[types])  # noqa: UP007
