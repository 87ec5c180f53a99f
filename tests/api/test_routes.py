"""Requests are parsed by the table of routes, and OpenAPI is generated from it."""

import pytest

from ripstop.api.http_api import ROUTES
from ripstop.api.routes import InvalidRequest, RouteParameter, describe_routes, parse_route_body, parse_route_parameters

COUNT = RouteParameter("count", int, "how many", minimum=1, maximum=9, default=3)
NAME = RouteParameter("name", str, "whose", minimum=1, maximum=5, required=True)
SIDE = RouteParameter("side", str, "which", choices=("left", "right"))
LOUD = RouteParameter("loud", bool, "whether", default=False)


def test_absent_parameters_have_their_default_and_others_their_type() -> None:
    assert parse_route_parameters((COUNT, LOUD), []) == {"count": 3, "loud": False}
    assert parse_route_parameters((COUNT, LOUD, SIDE), [("count", "9"), ("loud", "true"), ("side", "left")]) == {
        "count": 9,
        "loud": True,
        "side": "left",
    }
    assert parse_route_body((NAME, COUNT), b'{"name": "a"}') == {"name": "a", "count": 3}
    assert parse_route_body((COUNT,), b'{"count": 2.0}') == {"count": 2}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([("count", "ten")], "count='ten': not an integer; give one from 1 to 9"),
        ([("count", "10")], "count=10: out of range; give a number from 1 to 9"),
        ([("count", "1"), ("count", "2")], "count is given twice; remove one"),
        ([("cuont", "1")], "'cuont': unknown parameter; the parameters are count, side, loud"),
        ([("side", "up")], "side='up': unknown side; write left or right"),
        ([("loud", "maybe")], "loud='maybe': neither true nor false; write loud=true"),
    ],
)
def test_a_wrong_query_is_rejected_with_rule_value_and_remedy(texts: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(InvalidRequest) as found:
        parse_route_parameters((COUNT, SIDE, LOUD), texts)
    assert str(found.value) == message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body is not JSON"),
        (b"[" * 100_000, "the body is not JSON"),
        (b"[]", "the body is not a JSON object"),
        (b"{}", "name is missing: whose"),
        (b'{"name": ""}', "name has 0 characters; give 1 to 5"),
        (b'{"name": "a\\n"}', "name has control characters"),
        (b'{"name": "\\ud800"}', "name has control characters"),
        (b'{"name": 1}', "name must be a string, received '1'"),
        (b'{"name": "a", "count": true}', "count must be an integer, received 'True'"),
        (b'{"name": "a", "more": 1}', "'more': unknown field; the fields are name, count"),
    ],
)
def test_a_wrong_body_is_rejected_with_rule_value_and_remedy(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest) as found:
        parse_route_body((NAME, COUNT), body)
    assert str(found.value).startswith(message)


def test_the_schemas_are_those_of_the_replies() -> None:
    schemas = describe_routes(ROUTES)["components"]["schemas"]
    assert schemas["JobStatus"]["required"][:3] == ["run_id", "phase", "why"]
    assert schemas["JobStatus"]["properties"]["nodes"]["items"] == {"$ref": "#/components/schemas/NodeStatus"}
    assert schemas["RankStatus"]["properties"]["pid"] == {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    assert "recorder" not in schemas["WorkerStack"]["required"]


def test_every_route_is_described_once() -> None:
    found = describe_routes(ROUTES)
    operations = [operation for methods in found["paths"].values() for operation in methods.values()]
    assert len(operations) == len(ROUTES)
    assert len({operation["operationId"] for operation in operations}) == len(ROUTES)
    assert all("401" in operation["responses"] for operation in operations)
