import json
import math
import types
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import fields

from ripstop.model.errors import ProtocolError
from ripstop.model.failure import Failure, JobEnd
from ripstop.model.field_types import MAX_ITEMS
from ripstop.model.round import Outcome
from ripstop.protocol.codec import MAX_FRAME_BYTES, VersionMismatch, decode, encode
from ripstop.protocol.messages import Closed, Failed, Heartbeat, Hello, Message, Ready, StandBy, Welcome

ALL: tuple[type[Any], ...] = get_args(Message)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """All values that a field of this type can have."""
    if get_origin(hint) is Annotated:
        base, bounds = get_args(hint)
        return st.integers(bounds.ge, bounds.le) if base is int else values(base)
    if hint is str:
        return st.text(max_size=40)
    if hint is bool:
        return st.booleans()
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if isinstance(hint, types.UnionType) or get_origin(hint) is Union:
        return st.one_of(*(values(arg) for arg in get_args(hint)))
    if hint is types.NoneType:
        return st.none()
    if get_origin(hint) is tuple:
        return st.lists(values(get_args(hint)[0]), max_size=3).map(tuple)
    if issubclass(hint, Struct):
        hints = get_type_hints(hint, include_extras=True)
        return st.builds(hint, **{field.name: values(hints[field.name]) for field in fields(hint)})
    assert issubclass(hint, Enum)
    return st.sampled_from(hint)


MESSAGES: st.SearchStrategy[Message] = st.one_of(*(values(cls) for cls in ALL))


@settings(max_examples=300, deadline=None)
@given(MESSAGES)
def test_every_message_survives_encoding_and_decoding(message: Message) -> None:
    assert decode(encode(message), ALL) == message


def test_a_frame_is_ascii_and_lone_surrogates_are_replaced() -> None:
    text = encode(StandBy(1, "\udcff broken \x00 bytes, ü 🙂"))
    assert text.isascii() and text.startswith('{"v":1,"type":"StandBy",')
    assert decode(text, ALL) == StandBy(1, "? broken \x00 bytes, ü 🙂")


def test_a_string_subclass_is_encoded_as_a_string() -> None:
    class Text(str):
        pass

    assert decode(encode(StandBy(1, Text("why"))), ALL) == StandBy(1, "why")


@settings(max_examples=500, deadline=None)
@given(st.one_of(st.text(), st.binary().map(lambda raw: raw.decode("latin-1"))))
def test_arbitrary_text_raises_a_protocol_error(text: str) -> None:
    with pytest.raises(ProtocolError):
        decode(text, ALL)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def nearly_messages(draw: st.DrawFn) -> str:
    """A valid message with some of its fields replaced, removed or added."""
    frame = json.loads(encode(draw(MESSAGES)))
    for name in draw(st.sets(st.sampled_from(sorted(frame)), max_size=2)):
        frame[name] = draw(JSON)
    if draw(st.booleans()):
        frame.pop(draw(st.sampled_from(sorted(frame))))
    return json.dumps(frame | draw(st.dictionaries(st.text(max_size=5), JSON, max_size=1)))


@settings(max_examples=200, deadline=None)
@given(nearly_messages())
def test_a_changed_message_is_decoded_or_raises_a_protocol_error(text: str) -> None:
    try:
        message = decode(text, ALL)
    except ProtocolError:
        return
    assert decode(encode(message), ALL) == message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "JSON"),
        ("[1, 2]", "object"),
        ("[" * 200_000, "deep|JSON"),
        ('{"v":1,"type":"Heartbeat"', "JSON"),
        ('{"v":1,"type":"Heartbeat","extra":1}', "Heartbeat: Object contains unknown field `extra`"),
        ('{"v":1,"type":"Ready","after":0}', "Ready: Object missing required field `store_port`"),
        (
            '{"v":1,"type":"Ready","after":0,"store_port":"80"}',
            r"Expected `int`, got `str` - at `\$.store_port`",
        ),
        ('{"v":1,"type":"Ready","after":0,"store_port":true}', "Expected `int`, got `bool`"),
        ('{"v":1,"type":"Ready","after":0,"store_port":null}', "Expected `int`, got `null`"),
        ('{"v":1,"type":"Ready","after":0,"store_port":9223372036854775808}', "Expected `int` <= 9223372036854775807"),
        ('{"v":1,"type":"Ready","after":0,"store_port":' + "9" * 5000 + "}", "JSON|<= 9223372036854775807"),
        (f'{{"v":1,"type":"Join","newest":{2**63 - 1}}}', f"Expected `int` <= {2**53}"),  # the next could not be sent
        ('{"v":1,"type":"Welcome","proof":"","lease":NaN}', "JSON"),
        ('{"v":1,"type":"Welcome","proof":"","lease":Infinity}', "JSON"),
        ('{"v":1,"type":"Welcome","proof":"","lease":1e999,"time":0}', "out of range"),
        ('{"v":1,"type":"Failed","round":1,"failures":{}}', "Expected `array`, got `object`"),
        ('{"v":1,"type":"Failed","round":1,"failures":[1]}', r"Expected `object`, got `int` - at `\$.failures"),
        ('{"v":1,"type":"Ready","after":0,"store_port":1.0}', "Expected `int`, got `float`"),
        ('{"v":1,"type":"StandBy","round":1,"why":"\\udcff"}', "JSON"),
        ('{"v":1,"type":"StandBy","round":1,"why":"\udcff"', "JSON"),
        ('{"v":1,"type":' + "[" * 100_000, "deep|JSON"),
        ('{"v":1,"type":' + "[" * 900 + "]" * 900 + "}", "deep|received type"),
        ('{"v":1,"type":"os.system"}', "received type 'os.system'"),
        ('{"v":1,"type":["Heartbeat"]}', "received type"),
        ('{"v":1}', "received type None"),
        ('{"v":true,"type":"Heartbeat"}', "version"),
        (json.dumps({"v": 1, "type": "Left", "why": "x" * MAX_FRAME_BYTES}), "at most"),
        (json.dumps({"v": 1, "type": "Stopped", "failures": [0] * (MAX_ITEMS + 1)}), "Stopped: "),
    ],
)
def test_an_invalid_message_is_rejected_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        decode(text, ALL)


def test_the_error_for_another_version_has_a_remedy() -> None:
    with pytest.raises(VersionMismatch, match=r"version 1, the peer 2; install the same version"):
        decode('{"v":2,"type":"Whatever"}', ALL)


def test_a_type_that_is_not_allowed_is_rejected() -> None:
    with pytest.raises(ProtocolError, match="expected Hello, received type 'Heartbeat'"):
        decode(encode(Heartbeat()), (Hello,))


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("proof", ["", "null", "ü", "\udcff"])
def test_a_number_that_is_not_finite_is_not_encoded(proof: str, number: float) -> None:
    with pytest.raises(ProtocolError, match="finite"):
        encode(Welcome(proof, number, 0.0))


def test_a_list_that_is_too_long_is_rejected() -> None:
    with pytest.raises(ProtocolError, match=f"length <= {MAX_ITEMS}"):
        decode(json.dumps({"v": 1, "type": "Events", "lines": [""] * (MAX_ITEMS + 1)}), ALL)


def test_the_order_of_fields_and_white_space_do_not_matter() -> None:
    assert decode('{"store_port": 1, "type": "Ready",\n"after": 2, "v": 1}', ALL) == Ready(1, 2)


def test_an_integer_is_accepted_as_a_number_of_seconds() -> None:
    assert decode('{"v":1,"type":"Welcome","proof":"","lease":3,"time":1}', (Welcome,)) == Welcome("", 3.0, 1.0)


def failure(rank: int, size: int) -> Failure:
    return Failure(rank, 0, 1, "host", 1.0, exitcode=1, message="m" * 100, traceback="t" * size, log_tail=("l",))


def test_a_message_that_is_too_large_is_not_encoded() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        encode(StandBy(1, "x" * MAX_FRAME_BYTES))


def test_the_last_failures_of_a_large_message_are_dropped_first() -> None:
    failures = tuple(failure(rank, MAX_FRAME_BYTES // 10) for rank in range(64))
    report = JobEnd("job", Outcome.FAILED, "why", 1, 0, failures)
    kept = decode(encode(Closed(report)), (Closed,)).report.failures
    assert 0 < len(kept) < 64
    assert kept == failures[: len(kept)]


def test_encoding_keeps_the_message_of_a_single_large_failure() -> None:
    (kept,) = decode(encode(Failed(1, (failure(3, MAX_FRAME_BYTES),))), (Failed,)).failures
    assert (kept.rank, kept.message, kept.traceback) == (3, "m" * 100, "")
