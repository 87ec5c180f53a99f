"""Requests are read by the table of routes, and OpenAPI is written from it."""

import pytest
from msgspec import Struct

from ripstop.api.http_api import ROUTES
from ripstop.api.routes import Malformed, Parameter, describe, read_body, read_words, record, schema_of
from ripstop.model.status import JobStatus

COUNT = Parameter("count", int, "how many", least=1, most=9, default=3)
NAME = Parameter("name", str, "whose", least=1, most=5, required=True)
SIDE = Parameter("side", str, "which", choices=("left", "right"))
LOUD = Parameter("loud", bool, "whether", default=False)


def test_what_is_not_given_has_its_default_and_what_is_given_its_type() -> None:
    assert read_words((COUNT, LOUD), []) == {"count": 3, "loud": False}
    assert read_words((COUNT, LOUD, SIDE), [("count", "9"), ("loud", "true"), ("side", "left")]) == {
        "count": 9,
        "loud": True,
        "side": "left",
    }
    assert read_body((NAME, COUNT), b'{"name": "a"}') == {"name": "a", "count": 3}
    assert read_body((COUNT,), b'{"count": 2.0}') == {"count": 2}


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ([("count", "ten")], "count='ten': not a whole number; give one from 1 to 9"),
        ([("count", "10")], "count=10: give a number from 1 to 9"),
        ([("count", "1"), ("count", "2")], "count is there twice; keep one of the two"),
        ([("cuont", "1")], "'cuont': there is no such parameter; there are count, side, loud"),
        ([("side", "up")], "side='up': there is no such side; write left or right"),
        ([("loud", "maybe")], "loud='maybe': neither true nor false; write loud=true"),
    ],
)
def test_a_wrong_query_is_told_rule_value_and_remedy(given: list[tuple[str, str]], word: str) -> None:
    with pytest.raises(Malformed) as found:
        read_words((COUNT, SIDE, LOUD), given)
    assert str(found.value) == word


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"{", "the body is JSON, this is not"),
        (b"[" * 100_000, "the body is JSON, this is not"),
        (b"[]", "the body is a JSON object"),
        (b"{}", "name is missing: whose"),
        (b'{"name": ""}', "name has 0 characters; give 1 to 5"),
        (b'{"name": "a\\n"}', "name has control characters"),
        (b'{"name": "\\ud800"}', "name has control characters"),
        (b'{"name": 1}', "name is a text, received '1'"),
        (b'{"name": "a", "count": true}', "count is a whole number, received 'True'"),
        (b'{"name": "a", "more": 1}', "'more': there is no such field; there are name, count"),
    ],
)
def test_a_wrong_body_is_told_rule_value_and_remedy(body: bytes, word: str) -> None:
    with pytest.raises(Malformed) as found:
        read_body((NAME, COUNT), body)
    assert str(found.value).startswith(word)


def test_a_record_has_a_schema() -> None:
    class Inner(Struct, frozen=True):
        share: float

    found = schema_of(JobStatus)
    assert found["required"][:3] == ["run_id", "phase", "why"]
    assert found["properties"]["nodes"]["items"]["properties"]["first_rank"] == {"type": "integer"}
    assert found["properties"]["goodput"] == {"type": ["number", "null"]}
    assert schema_of(Inner)["properties"] == {"share": {"type": "number"}}


def test_what_is_optional_is_described_and_not_required() -> None:
    found = record({"rank": {"type": "integer"}}, optional={"recorder": {"type": "string"}})
    assert list(found["properties"]) == ["rank", "recorder"]
    assert (found["required"], found["additionalProperties"]) == (["rank"], False)


def test_every_route_is_described_once() -> None:
    found = describe(ROUTES)
    operations = [operation for methods in found["paths"].values() for operation in methods.values()]
    assert len(operations) == len(ROUTES)
    assert len({operation["operationId"] for operation in operations}) == len(ROUTES)
    assert all("401" in operation["responses"] for operation in operations)
