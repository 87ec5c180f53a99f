"""Requests to the API of a running job: `GET /api/v1/status` and `POST /api/v1/scale` at the coordinator's pod.

The caller supplies the function that derives the API's token from the job's secret.  A pod runs its users' code, so
the size, the time and the types of its reply are bounded.
"""

import json
import socket
from collections.abc import Callable
from functools import partial
from http.client import HTTPException
from typing import Any

from ripstop.api.http_client import ErrorReply, Request, send
from ripstop.kubernetes.spec import PORT
from ripstop.model.errors import QueryFailed
from ripstop.model.round import Address

TIMEOUT_S = 2.0  # from the connection to the last byte
MAX_REPLY_BYTES = 1 << 20
MAX_INTEGER = 2**31 - 1
MAX_TEXT_CHARACTERS = 300
GOODPUT_DIGITS = 2  # enough to read, and changes seldom

TokenFunction = Callable[[str, str], str]  # derives the API's token from the job's secret and its run id


class JobApi:
    """Client of the coordinator at its pod's address.

    Raises `QueryFailed` if the coordinator is unreachable, rejects the request or sends an invalid reply.
    """

    def __init__(self, api_token: TokenFunction, port: int = PORT) -> None:
        self._api_token = api_token
        self._port = port

    def status(self, address: str, secret: str, run_id: str) -> dict[str, Any]:
        """The fields of the job's status that the ElasticJob shows."""
        return _validated(self._request("GET", "status", None, address, secret, run_id))

    def scale(self, address: str, secret: str, run_id: str, nodes: int) -> None:
        """Set the number of nodes the job runs on."""
        self._request("POST", "scale", {"nodes": nodes}, address, secret, run_id)

    def _request(
        self, method: str, operation: str, body: dict[str, Any] | None, address: str, secret: str, run_id: str
    ) -> Any:
        host, token = str(Address(address, self._port)), self._api_token(secret, run_id)
        request = Request(method, f"/api/v1/{operation}", host, token, body=body)
        connect = partial(socket.create_connection, (address, self._port))
        try:
            return json.loads(send(connect, request, timeout_s=TIMEOUT_S, max_bytes=MAX_REPLY_BYTES))
        except ErrorReply as error:
            text = error.error or error.body[: 4 * MAX_TEXT_CHARACTERS].decode("utf-8", "replace")
            raise QueryFailed(f"HTTP {error.status}: {_one_line(text)}".rstrip(": ")) from error
        except (OSError, HTTPException, ValueError, RecursionError) as error:
            raise QueryFailed(str(error)) from error


def _one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text[:MAX_TEXT_CHARACTERS]).split())


def _validated(status: Any) -> dict[str, Any]:
    if not isinstance(status, dict):
        raise QueryFailed(f"its status is not a JSON object: {str(status)[:80]!r}")
    numbers = {name: status.get(name) for name in ("round", "restarts", "target")}
    found: dict[str, Any] = {
        name: value for name, value in numbers.items() if type(value) is int and 0 <= value <= MAX_INTEGER
    }
    goodput, failure = status.get("goodput"), status.get("last_failure")
    if isinstance(goodput, int | float) and type(goodput) is not bool and 0 <= goodput <= 1:
        found["goodput"] = round(goodput, GOODPUT_DIGITS)
    if isinstance(failure, str) and failure:
        found["lastFailure"] = failure[:MAX_TEXT_CHARACTERS]
    return found
