"""What an HTTP API takes and gives, as one table of routes: requests are read by it, and OpenAPI is written from it.

Pure: who answers, and how bytes travel, is in `api.py`.  What a table does not name is refused, so that a word spelled
wrong is never silently without effect.  Those who ask (`cli/`) go by `PREFIX` and `MAX_TAIL`, too.
"""

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from msgspec import Struct
from msgspec.structs import fields

import ripstop

PREFIX = "/api/v1"
MAX_TAIL = 10_000  # lines of a log
LARGEST = 2**53  # what every JSON reader takes as a whole number

Schema = dict[str, Any]


class Malformed(Exception):
    """A request that is not what the table says, in words."""


class Parameter(Struct, frozen=True):
    """One word of a request.  A `text` has `most` characters at most, none of them control characters."""

    name: str
    kind: type[int] | type[str] | type[bool]
    says: str
    least: int = 0
    most: int = LARGEST
    choices: tuple[str, ...] = ()
    required: bool = False
    default: int | str | bool | None = None

    def schema(self) -> Schema:
        if self.kind is bool:
            return {"type": "boolean"}
        if self.kind is int:
            return {"type": "integer", "minimum": self.least, "maximum": self.most}
        if self.choices:
            return {"type": "string", "enum": list(self.choices)}
        return {"type": "string", "minLength": self.least, "maxLength": self.most, "pattern": "^[^\\x00-\\x1f\\x7f]*$"}

    def read(self, text: str) -> int | str | bool:
        """From a path or a query."""
        if self.kind is bool:
            if text not in ("true", "false", "1", "0", ""):
                raise Malformed(f"{self.name}={text[:80]!r}: neither true nor false; write {self.name}=true")
            return text not in ("false", "0")
        if self.kind is int:
            digits = text.removeprefix("-")
            if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
                raise Malformed(f"{self.name}={text[:80]!r}: not a whole number; give one from {self._range()}")
            return self.check(int(text))
        return self.check(text)

    def check(self, value: object) -> int | str | bool:
        """From a JSON body, or read; JSON knows no difference between 2 and 2.0."""
        if self.kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not self.kind:
            word = {int: "a whole number", str: "a text", bool: "true or false"}[self.kind]
            raise Malformed(f"{self.name} is {word}, received {str(value)[:80]!r}")
        if isinstance(value, str):
            self._check_text(value)
        elif self.kind is int and not self.least <= value <= self.most:
            raise Malformed(f"{self.name}={value}: give a number from {self._range()}")
        return value

    def _check_text(self, text: str) -> None:
        if self.choices and text not in self.choices:
            raise Malformed(
                f"{self.name}={text[:80]!r}: there is no such {self.name}; write {' or '.join(self.choices)}"
            )
        if not self.choices and not self.least <= len(text) <= self.most:
            raise Malformed(f"{self.name} has {len(text)} characters; give {self.least} to {self.most}")
        if any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000 for c in text):
            raise Malformed(f"{self.name} has control characters; write plain text")

    def _range(self) -> str:
        return f"{self.least} on" if self.most == LARGEST else f"{self.least} to {self.most}"


class ApiRoute(Struct, frozen=True):
    """One thing that can be asked for.  `handler` is called by `api.py`; `refusals` are the statuses of its own."""

    method: str
    path: str
    handler: Callable[..., Awaitable[Any]]
    says: str
    answer: Schema
    path_values: tuple[Parameter, ...] = ()
    query: tuple[Parameter, ...] = ()
    body: tuple[Parameter, ...] = ()
    refusals: tuple[int, ...] = ()
    streams: str = ""  # another media type in which the answer may come, for as long as there is more


# requests -------------------------------------------------------------------------------------------------------------


def read_words(values: Iterable[Parameter], given: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """A path's or a query's words."""
    known = {value.name: value for value in values}
    words: dict[str, Any] = {}
    for name, text in given:
        if name not in known:
            raise Malformed(f"{name[:80]!r}: there is no such parameter; there are {_list(known)}")
        if name in words:
            raise Malformed(f"{name} is there twice; keep one of the two")
        words[name] = known[name].read(text)
    return _complete(known, words)


def read_body(values: Iterable[Parameter], data: bytes) -> dict[str, Any]:
    """A JSON body's."""
    known = {value.name: value for value in values}
    try:
        body = json.loads(data) if data else {}
    except (ValueError, RecursionError):
        raise Malformed("the body is JSON, this is not; send an object such as {}") from None
    if not isinstance(body, dict):
        raise Malformed("the body is a JSON object, this is not; send one such as {}")
    for name in body:
        if name not in known:
            raise Malformed(f"{name[:80]!r}: there is no such field; there are {_list(known)}")
    return _complete(known, {name: known[name].check(value) for name, value in body.items()})


def _complete(known: Mapping[str, Parameter], words: dict[str, Any]) -> dict[str, Any]:
    for value in known.values():
        if value.required and value.name not in words:
            raise Malformed(f"{value.name} is missing: {value.says}")
    return {name: value.default for name, value in known.items()} | words


def _list(known: Mapping[str, Parameter]) -> str:
    return ", ".join(known) or "none"


# descriptions ---------------------------------------------------------------------------------------------------------


def schema_of(kind: Any) -> Schema:
    """The JSON schema of a dataclass of numbers, words, tuples of such, and numbers or words that may be unknown."""
    plain = {str: "string", int: "integer", float: "number", bool: "boolean"}
    if kind in plain:
        return {"type": plain[kind]}
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return {"type": "string", "enum": [member.value for member in kind]}
    if isinstance(kind, UnionType):
        known, unknown = get_args(kind)
        assert unknown is NoneType and known in plain, f"{kind} has no schema"
        return {"type": [plain[known], "null"]}
    if get_origin(kind) is tuple:
        return array(schema_of(get_args(kind)[0]))
    assert issubclass(kind, Struct), f"{kind} has no schema"
    hints = get_type_hints(kind)
    return record({field.name: schema_of(hints[field.name]) for field in fields(kind)})


def record(properties: Mapping[str, Schema], *, optional: Mapping[str, Schema] = {}, more: bool = False) -> Schema:
    """An object with all of these, and perhaps the `optional` ones; `more`: and perhaps others."""
    return {
        "type": "object",
        "properties": {**properties, **optional},
        "required": list(properties),
        "additionalProperties": more,
    }


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def describe(routes: Iterable[ApiRoute]) -> dict[str, Any]:
    """The OpenAPI description."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ripstop: one job",
            "version": ripstop.__version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "What a job is and does, and what operators may do to it. A changed job is an event.",
        },
        "servers": [{"url": "/"}],
        "security": [{"token": []}],
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": record({"error": {"type": "string"}})},
        },
        "paths": paths,
    }


_REFUSALS = {
    400: "The request is not what is described here.",
    401: "The token is missing or wrong.",
    403: "This job has no secret, and so nobody may steer it from here.",
    404: "There is no such thing.",
    405: "Not this method.",
    409: "Not as the job is now.",
    413: "The body is too large.",
    415: "The body is not said to be JSON.",
    503: "Not now: too many streams, or the coordinator is elsewhere.",
}


def _operation(route: ApiRoute) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": route.answer}}
    if route.streams:
        content[route.streams] = {"schema": {"type": "string"}}
    refusals = {400, 401, 403, 503, *route.refusals} | ({413, 415} if route.method == "POST" else set())
    found: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": route.says,
        "responses": {"200": {"description": "The answer.", "content": content}}
        | {str(status): _refusal(status) for status in sorted(refusals)},
    }
    parameters = [_parameter(value, "path") for value in route.path_values]
    parameters += [_parameter(value, "query") for value in route.query]
    if parameters:
        found["parameters"] = parameters
    if route.method == "POST":
        body: Schema = {
            "type": "object",
            "properties": {value.name: value.schema() | {"description": value.says} for value in route.body},
            "required": [value.name for value in route.body if value.required],
            "additionalProperties": False,
        }
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return found


def _parameter(value: Parameter, where: str) -> dict[str, Any]:
    schema = value.schema() | ({} if value.default is None else {"default": value.default})
    return {
        "name": value.name,
        "in": where,
        "required": where == "path" or value.required,
        "description": value.says,
        "schema": schema,
    }


def _refusal(status: int) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": _REFUSALS[status], "content": {"application/json": {"schema": schema}}}
