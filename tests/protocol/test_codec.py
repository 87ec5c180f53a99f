import json
import math
import types
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import fields

from ripstop.model.errors import ProtocolError
from ripstop.model.failure import Failure, JobReport
from ripstop.model.round import Outcome
from ripstop.protocol.codec import MAX_FRAME, MAX_ITEMS, VersionMismatch, decode, encode, fit
from ripstop.protocol.messages import Closed, Failed, Heartbeat, Hello, Message, Ready, StandBy, Welcome

ALL: tuple[type[Any], ...] = get_args(Message)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Anything a field may hold."""
    if hint is str:
        return st.text(max_size=40)
    if hint is bool:
        return st.booleans()
    if hint is int:
        return st.integers(-(2**63), 2**63 - 1)
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if isinstance(hint, types.UnionType):
        return st.one_of(*(values(arg) for arg in get_args(hint)))
    if hint is types.NoneType:
        return st.none()
    if get_origin(hint) is tuple:
        return st.lists(values(get_args(hint)[0]), max_size=3).map(tuple)
    if issubclass(hint, Struct):
        hints = get_type_hints(hint)
        return st.builds(hint, **{field.name: values(hints[field.name]) for field in fields(hint)})
    assert issubclass(hint, Enum)
    return st.sampled_from(hint)


@settings(max_examples=300, deadline=None)
@given(st.one_of(*(values(cls) for cls in ALL)))
def test_every_message_comes_back_as_it_was(message: Message) -> None:
    assert decode(encode(message), ALL) == message


def test_text_that_is_no_unicode_comes_back_too() -> None:
    message = StandBy(1, "\udcff broken \x00 bytes")
    assert decode(encode(message), ALL) == message


@settings(max_examples=500, deadline=None)
@given(st.one_of(st.text(), st.binary().map(lambda raw: raw.decode("latin-1"))))
def test_arbitrary_text_is_refused_with_a_protocol_error(text: str) -> None:
    with pytest.raises(ProtocolError):
        decode(text, ALL)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def nearly_messages(draw: st.DrawFn) -> str:
    """A true message with some of its fields replaced, removed or added."""
    frame = json.loads(encode(draw(st.one_of(*(values(cls) for cls in ALL)))))
    for name in draw(st.sets(st.sampled_from(sorted(frame)), max_size=2)):
        frame[name] = draw(JSON)
    if draw(st.booleans()):
        frame.pop(draw(st.sampled_from(sorted(frame))))
    return json.dumps(frame | draw(st.dictionaries(st.text(max_size=5), JSON, max_size=1)))


@settings(max_examples=200, deadline=None)
@given(nearly_messages())
def test_a_mangled_message_is_a_message_or_a_protocol_error(text: str) -> None:
    try:
        message = decode(text, ALL)
    except ProtocolError:
        return
    assert decode(encode(message), ALL) == message


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "JSON"),
        ("[1, 2]", "object"),
        ("[" * 200_000, "deep|JSON"),
        ('{"v":1,"type":"Heartbeat"', "JSON"),
        ('{"v":1,"type":"Heartbeat","extra":1}', "unknown: .'extra'"),
        ('{"v":1,"type":"Ready","after":0}', "missing: .'store_port'"),
        ('{"v":1,"type":"Ready","after":0,"store_port":"80"}', "Ready.store_port is an integer"),
        ('{"v":1,"type":"Ready","after":0,"store_port":true}', "integer"),
        ('{"v":1,"type":"Ready","after":0,"store_port":null}', "integer"),
        ('{"v":1,"type":"Ready","after":0,"store_port":9223372036854775808}', "64 bits"),
        ('{"v":1,"type":"Ready","after":0,"store_port":' + "9" * 5000 + "}", "JSON|64 bits"),
        ('{"v":1,"type":"Welcome","proof":"","lease":NaN}', "JSON"),
        ('{"v":1,"type":"Welcome","proof":"","lease":Infinity}', "JSON"),
        ('{"v":1,"type":"Welcome","proof":"","lease":1e999,"time":0}', "finite"),
        ('{"v":1,"type":"Failed","round":1,"failures":{}}', "a list"),
        ('{"v":1,"type":"Failed","round":1,"failures":[1]}', "a Failure object"),
        ('{"v":1,"type":"os.system"}', "received type 'os.system'"),
        ('{"v":1,"type":["Heartbeat"]}', "received type"),
        ('{"v":1}', "received type None"),
        ('{"v":true,"type":"Heartbeat"}', "version"),
        (json.dumps({"v": 1, "type": "Left", "why": "x" * MAX_FRAME}), "at most"),
        (json.dumps({"v": 1, "type": "Stopped", "failures": [0] * (MAX_ITEMS + 1)}), "at most"),
    ],
)
def test_what_breaks_the_protocol_is_refused_with_a_clear_word(text: str, word: str) -> None:
    with pytest.raises(ProtocolError, match=word):
        decode(text, ALL)


def test_another_version_is_named_with_its_remedy() -> None:
    with pytest.raises(VersionMismatch, match=r"version 1, the peer 2; install the same version"):
        decode('{"v":2,"type":"Whatever"}', ALL)


def test_a_message_of_the_other_direction_is_not_accepted() -> None:
    with pytest.raises(ProtocolError, match="expected Hello, received type 'Heartbeat'"):
        decode(encode(Heartbeat()), (Hello,))


def test_an_infinite_number_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="finite"):
        encode(Welcome("", math.inf, 0.0))


def test_a_whole_number_of_seconds_is_a_number_of_seconds() -> None:
    assert decode('{"v":1,"type":"Welcome","proof":"","lease":3,"time":1}', (Welcome,)) == Welcome("", 3.0, 1.0)


def failure(rank: int, size: int) -> Failure:
    return Failure(rank, 0, 1, "host", 1.0, exitcode=1, message="m" * 100, traceback="t" * size, log_tail=("l",))


def test_a_message_too_large_is_not_encoded() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        encode(Failed(1, (failure(0, MAX_FRAME),)))


def test_too_much_evidence_is_cut_from_the_end() -> None:
    whole = tuple(failure(rank, MAX_FRAME // 10) for rank in range(64))
    report = JobReport("job", Outcome.FAILED, "why", 1, 0, whole)
    told = decode(fit(Closed(report)), (Closed,)).report.failures
    assert 0 < len(told) < 64
    assert told == whole[: len(told)]


def test_a_single_failure_too_large_keeps_its_message() -> None:
    (told,) = decode(fit(Failed(1, (failure(3, MAX_FRAME),))), (Failed,)).failures
    assert (told.rank, told.message, told.traceback) == (3, "m" * 100, "")


def test_a_message_that_fits_is_left_alone() -> None:
    message = Ready(29500, 0)
    assert fit(message) == encode(message)
