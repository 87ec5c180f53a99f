"""How a running job is doing, as its own API says, and how many nodes it is to have, as it is told.

`GET /api/v1/status` and `POST /api/v1/scale` at the coordinator's pod.  How the API's token is made of the job's
secret, those know who serve it; they are not of this layer, so it is given.  What comes back is a pod's word, and
pods run what users like: its size, its time and its types are bounded.
"""

import json
import socket
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from typing import Any

from ripstop.kubernetes.spec import PORT
from ripstop.model.errors import QueryFailed

PATIENCE = 2.0  # seconds, from the connection to the last byte
MOST = 1 << 20  # bytes of an answer
LARGEST = 2**31 - 1
LONGEST = 300  # characters of a text
DIGITS = 2  # of a share: enough to read, and seldom another

Bearer = Callable[[str, str], str]  # makes the API's token of the job's secret and its run id


class JobApi:
    """Speaks to the coordinator at its pod's address; `QueryFailed` when it is silent, refuses, or makes no sense."""

    def __init__(self, bearer: Bearer, port: int = PORT) -> None:
        self._bearer = bearer
        self._port = port

    def status(self, address: str, token: str, run_id: str) -> dict[str, Any]:
        """What the job says of itself."""
        return _said(self._request("GET", "status", None, address, token, run_id))

    def scale(self, address: str, token: str, run_id: str, nodes: int) -> None:
        """Have the job run on so many nodes."""
        self._request("POST", "scale", {"nodes": nodes}, address, token, run_id)

    def _request(self, method: str, what: str, body: Any, address: str, token: str, run_id: str) -> Any:
        connection = HTTPConnection(address, self._port)
        headers = {"Authorization": f"Bearer {self._bearer(token, run_id)}", "Content-Type": "application/json"}
        try:
            connection.sock = _connected(address, self._port)
            connection.request(method, f"/api/v1/{what}", None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read(MOST)
            if answer.status != 200:
                raise QueryFailed(f"HTTP {answer.status}: {_error(text)}".rstrip(": "))
            return json.loads(text)
        except (OSError, HTTPException, ValueError) as error:
            raise QueryFailed(str(error)) from error
        finally:
            connection.close()


class _Hurried(socket.socket):
    """Who drips gets no more time: a timeout begins anew with every byte, a deadline does not."""

    deadline = 0.0

    def recv_into(self, *words: Any) -> int:
        self.hurry()
        return super().recv_into(*words)

    def hurry(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self.settimeout(left)


def _connected(address: str, port: int) -> socket.socket:
    deadline = time.monotonic() + PATIENCE
    hurried = _Hurried(fileno=socket.create_connection((address, port), PATIENCE).detach())
    hurried.deadline = deadline
    hurried.hurry()  # what is sent is little, and one call
    return hurried


def _error(text: bytes) -> str:
    """What a refusal says, as the API or as somebody else would, in one line."""
    try:
        said = json.loads(text)["error"]
    except (ValueError, RecursionError, TypeError, KeyError):
        said = text[: 4 * LONGEST].decode("utf-8", "replace")
    return " ".join("".join(c if c.isprintable() else " " for c in str(said)[:LONGEST]).split())


def _said(status: Any) -> dict[str, Any]:
    if not isinstance(status, dict):
        raise QueryFailed(f"its status is not a JSON object: {str(status)[:80]!r}")
    numbers = {name: status.get(name) for name in ("round", "restarts", "target")}
    found: dict[str, Any] = {
        name: value for name, value in numbers.items() if type(value) is int and 0 <= value <= LARGEST
    }
    share, failure = status.get("goodput"), status.get("last_failure")
    if isinstance(share, int | float) and type(share) is not bool and 0 <= share <= 1:
        found["goodput"] = round(share, DIGITS)
    if isinstance(failure, str) and failure:
        found["lastFailure"] = failure[:LONGEST]
    return found
