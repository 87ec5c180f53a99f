"""The types of a table of routes: the API parses requests by it, and generates its OpenAPI description from it.

Pure; the handlers are in `http_api.py`.  Parameters and fields that the table does not name are rejected, so a misspelt
one is never silently ignored.
"""

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec

import ripstop
from ripstop.api.replies import Error

PREFIX = "/api/v1"
MAX_TAIL_LINES = 10_000  # of a log
MAX_INTEGER = 2**53  # every JSON parser reads integers up to this exactly
SCHEMA_REF = "#/components/schemas/{name}"


class InvalidRequest(Exception):
    """A request that does not match the table."""


class RouteParameter(msgspec.Struct, frozen=True):
    """One parameter or body field.  `minimum` and `maximum` limit a number, or the length of a text."""

    name: str
    kind: type[int] | type[str] | type[bool]
    description: str
    minimum: int = 0
    maximum: int = MAX_INTEGER
    choices: tuple[str, ...] = ()
    required: bool = False
    default: int | str | bool | None = None

    def schema(self) -> dict[str, Any]:
        if self.kind is bool:
            return {"type": "boolean"}
        if self.kind is int:
            return {"type": "integer", "minimum": self.minimum, "maximum": self.maximum}
        if self.choices:
            return {"type": "string", "enum": list(self.choices)}
        length = {"minLength": self.minimum, "maxLength": self.maximum}
        return {"type": "string", **length, "pattern": "^[^\\x00-\\x1f\\x7f]*$"}

    def parse(self, text: str) -> int | str | bool:
        """Parse the text of a path or a query."""
        if self.kind is bool:
            if text not in ("true", "false", "1", "0", ""):
                raise InvalidRequest(f"{self.name}={text[:80]!r}: neither true nor false; write {self.name}=true")
            return text not in ("false", "0")
        if self.kind is int:
            digits = text.removeprefix("-")
            if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
                raise InvalidRequest(f"{self.name}={text[:80]!r}: not an integer; give one from {self._range()}")
            return self.check(int(text))
        return self.check(text)

    def check(self, value: object) -> int | str | bool:
        """Check a parsed value, or one of a JSON body, where 2.0 is an integer too."""
        if self.kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not self.kind:
            expected = {int: "an integer", str: "a string", bool: "true or false"}[self.kind]
            raise InvalidRequest(f"{self.name} must be {expected}, received {str(value)[:80]!r}")
        if isinstance(value, str):
            self._check_text(value)
        elif self.kind is int and not self.minimum <= value <= self.maximum:
            raise InvalidRequest(f"{self.name}={value}: out of range; give a number from {self._range()}")
        return value

    def _check_text(self, text: str) -> None:
        if self.choices and text not in self.choices:
            raise InvalidRequest(f"{self.name}={text[:80]!r}: unknown {self.name}; write {' or '.join(self.choices)}")
        if not self.choices and not self.minimum <= len(text) <= self.maximum:
            raise InvalidRequest(f"{self.name} has {len(text)} characters; give {self.minimum} to {self.maximum}")
        if any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000 for c in text):
            raise InvalidRequest(f"{self.name} has control characters; write plain text")

    def _range(self) -> str:
        return f"{self.minimum} up" if self.maximum == MAX_INTEGER else f"{self.minimum} to {self.maximum}"


class ApiRoute(msgspec.Struct, frozen=True):
    """One operation.  `reply` is the type of the reply's body; `errors` are the operation's own error statuses."""

    method: str
    path: str
    handler: Callable[..., Awaitable[Any]]
    reply: Any
    query: tuple[RouteParameter, ...] = ()
    path_parameters: tuple[RouteParameter, ...] = ()
    body: tuple[RouteParameter, ...] = ()
    errors: tuple[int, ...] = ()
    stream_type: str = ""  # media type of the reply if it is a stream


# requests -------------------------------------------------------------------------------------------------------------


def parse_route_parameters(parameters: Iterable[RouteParameter], texts: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Parse the parameters of a path or a query."""
    known = {parameter.name: parameter for parameter in parameters}
    values: dict[str, Any] = {}
    for name, text in texts:
        if name not in known:
            raise InvalidRequest(f"{name[:80]!r}: unknown parameter; the parameters are {', '.join(known) or 'none'}")
        if name in values:
            raise InvalidRequest(f"{name} is given twice; remove one")
        values[name] = known[name].parse(text)
    return _with_route_defaults(known, values)


def parse_route_body(fields: Iterable[RouteParameter], data: bytes) -> dict[str, Any]:
    """Parse a JSON body."""
    known = {field.name: field for field in fields}
    try:
        body = json.loads(data) if data else {}
    except (ValueError, RecursionError):
        raise InvalidRequest("the body is not JSON; send an object such as {}") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body is not a JSON object; send one such as {}")
    for name in body:
        if name not in known:
            raise InvalidRequest(f"{name[:80]!r}: unknown field; the fields are {', '.join(known) or 'none'}")
    return _with_route_defaults(known, {name: known[name].check(value) for name, value in body.items()})


def _with_route_defaults(known: Mapping[str, RouteParameter], values: dict[str, Any]) -> dict[str, Any]:
    for parameter in known.values():
        if parameter.required and parameter.name not in values:
            raise InvalidRequest(f"{parameter.name} is missing: {parameter.description}")
    return {name: parameter.default for name, parameter in known.items()} | values


# the description ------------------------------------------------------------------------------------------------------

ERROR_DESCRIPTIONS = {
    400: "The request does not match this description.",
    401: "The token is missing or wrong.",
    403: "The job has no secret, so it cannot be controlled from here; or it does not allow this command.",
    404: "Not found.",
    405: "Method not allowed.",
    409: "Not possible in the job's current state.",
    413: "The body is too large.",
    415: "The content type of the body is not JSON.",
    503: "Unavailable: too many streams are open, or the coordinator has moved.",
}


def describe_routes(routes: Iterable[ApiRoute]) -> dict[str, Any]:
    """The OpenAPI description."""
    routes = list(routes)
    replies = [route.reply for route in routes]
    schemas, components = msgspec.json.schema_components((*replies, Error), ref_template=SCHEMA_REF)
    *reply_schemas, error_schema = schemas
    paths: dict[str, dict[str, Any]] = {}
    for route, reply_schema in zip(routes, reply_schemas, strict=True):
        paths.setdefault(route.path, {})[route.method.lower()] = _route_operation(route, reply_schema, error_schema)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ripstop: one job",
            "version": ripstop.__version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "Inspect and control a job. Every command is recorded as an event.",
        },
        "servers": [{"url": "/"}],
        "security": [{"token": []}],
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}, "schemas": components},
        "paths": paths,
    }


def _route_operation(route: ApiRoute, reply_schema: dict[str, Any], error_schema: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": reply_schema}}
    if route.stream_type:
        content[route.stream_type] = {"schema": {"type": "string"}}
    responses: dict[str, Any] = {"200": {"description": "The reply.", "content": content}}
    for status in sorted({400, 401, 403, 503, *route.errors} | ({413, 415} if route.method == "POST" else set())):
        error_content = {"application/json": {"schema": error_schema}}
        responses[str(status)] = {"description": ERROR_DESCRIPTIONS[status], "content": error_content}
    name, summary = route.handler.__name__, route.handler.__doc__
    operation: dict[str, Any] = {"operationId": name, "summary": summary, "responses": responses}
    parameters = [_route_parameter_description(parameter, "path") for parameter in route.path_parameters]
    parameters += [_route_parameter_description(parameter, "query") for parameter in route.query]
    if parameters:
        operation["parameters"] = parameters
    if route.method == "POST":
        body = {
            "type": "object",
            "properties": {field.name: field.schema() | {"description": field.description} for field in route.body},
            "required": [field.name for field in route.body if field.required],
            "additionalProperties": False,
        }
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation


def _route_parameter_description(parameter: RouteParameter, location: str) -> dict[str, Any]:
    default = {} if parameter.default is None else {"default": parameter.default}
    return {
        "name": parameter.name,
        "in": location,
        "required": location == "path" or parameter.required,
        "description": parameter.description,
        "schema": parameter.schema() | default,
    }
