"""How a running job is doing, as its own API says: `GET /api/v1/status` at the coordinator's pod.

How the API's token is made of the job's secret, those know who serve it; they are not of this layer, so it is given.
What comes back is a pod's word, and pods run what users like: its size, its time and its types are bounded.
"""

import json
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from typing import Any

from ripstop.errors import RipstopError
from ripstop.schedulers.kubernetes.spec import PORT

PATIENCE = 2.0  # seconds
MOST = 1 << 20  # bytes of an answer
LARGEST = 2**31 - 1


class NoTelemetry(RipstopError):
    """The job says nothing, or nothing of use."""


def asking(bearer: Callable[[str, str], str], port: int = PORT) -> Callable[[str, str, str], dict[str, Any]]:
    """What asks a job; `bearer` makes the API's token of the job's secret and its run id."""

    def ask(address: str, token: str, run_id: str) -> dict[str, Any]:
        connection = HTTPConnection(address, port, timeout=PATIENCE)
        try:
            connection.request("GET", "/api/v1/status", headers={"Authorization": f"Bearer {bearer(token, run_id)}"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise NoTelemetry(f"HTTP {answer.status}")
            return _said(json.loads(answer.read(MOST)))
        except (OSError, HTTPException, ValueError) as error:
            raise NoTelemetry(str(error)) from error
        finally:
            connection.close()

    return ask


def _said(status: Any) -> dict[str, Any]:
    if not isinstance(status, dict):
        raise NoTelemetry("no object")
    numbers = {name: status.get(name) for name in ("round", "restarts")}
    return {name: value for name, value in numbers.items() if type(value) is int and 0 <= value <= LARGEST}
