"""Polls the API of a running job, and sends the job its size.

`PolledJobApi` requests `GET /api/v1/status` and `POST /api/v1/scale` at the coordinator's pod.  A pod runs its users'
code, so the size, the time and the types of its reply are bounded.  Rules of the poller:

1.  Requests go only to addresses of pods that were just read.  Another pod that gets an old address would receive
    the job's token.
2.  Nothing waits for a job.  Requests run in a task, in separate threads, one at a time.
3.  A poller exists while its job runs.  A later one starts without state.
"""

import asyncio
import json
import logging
import math
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from http.client import HTTPException
from typing import Any

from ripstop.api.http_client import ErrorReply, Request, send
from ripstop.kubernetes.kube_client import in_thread
from ripstop.kubernetes.manifests import Owner, manifest_run_id
from ripstop.kubernetes.spec import PORT, Json
from ripstop.model.errors import QueryFailed
from ripstop.model.round import Address

POLL_INTERVAL_S = 10.0
SEARCH_TIMEOUT_S = 5.0  # for the coordinator among the pods
MAX_FAILED_POLLS = 3  # then the job counts as unreachable
TIMEOUT_S = 2.0  # of a request, from the connection to the last byte
MAX_REPLY_BYTES = 1 << 20
MAX_INTEGER = 2**31 - 1
MAX_TEXT_CHARACTERS = 300
GOODPUT_DIGITS = 2  # enough to read, and changes seldom

TokenFunction = Callable[[str, str], str]  # derives the API's token from the job's secret and its run id

log = logging.getLogger("ripstop.operator")


class PolledJobApi:
    """Client of the coordinator at its pod's address.

    Raises `QueryFailed` if the coordinator is unreachable, rejects the request or sends an invalid reply.
    """

    def __init__(self, api_token: TokenFunction, port: int = PORT) -> None:
        self._api_token = api_token
        self._port = port

    def status(self, address: str, secret: str, run_id: str) -> dict[str, Any]:
        """The fields of the job's status that the ElasticJob shows."""
        return _validated_polled_status(self._request("GET", "status", None, address, secret, run_id))

    def scale(self, address: str, secret: str, run_id: str, nodes: int) -> None:
        """Set the number of nodes the job runs on."""
        self._request("POST", "scale", {"nodes": nodes}, address, secret, run_id)

    def _request(self, method: str, operation: str, body: Json | None, address: str, secret: str, run_id: str) -> Any:
        host, token = str(Address(address, self._port)), self._api_token(secret, run_id)
        request = Request(method, f"/api/v1/{operation}", host, token, body=body)
        connect = partial(socket.create_connection, (address, self._port))
        try:
            return json.loads(send(connect, request, timeout_s=TIMEOUT_S, max_bytes=MAX_REPLY_BYTES))
        except ErrorReply as error:
            text = error.error or error.body[: 4 * MAX_TEXT_CHARACTERS].decode("utf-8", "replace")
            printable = "".join(c if c.isprintable() else " " for c in text[:MAX_TEXT_CHARACTERS])
            raise QueryFailed(f"HTTP {error.status}: {' '.join(printable.split())}".rstrip(": ")) from error
        except (OSError, HTTPException, ValueError, RecursionError) as error:
            raise QueryFailed(str(error)) from error


def _validated_polled_status(status: Any) -> dict[str, Any]:
    """The fields with valid values, under the names of the ElasticJob's status."""
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


class JobPoller:
    """Polls one job.  Calls `changed` if `telemetry` or `unreachable` changed, or if a size could not be sent yet."""

    def __init__(
        self, api: PolledJobApi, threads: Executor, owner: Owner, token: str, changed: Callable[[], None]
    ) -> None:
        self._api = api
        self._threads = threads
        self._secret = token, manifest_run_id(owner)
        self._name = f"job={owner.namespace}/{owner.name}"
        self._changed = changed
        self._task: asyncio.Task[None] | None = None
        self._size_pending = False  # a size arrived during a request
        self._polled_at = -math.inf
        self._last_address = ""
        self._failed_polls = 0  # consecutive
        self._last_error = ""
        self.telemetry: Json = {}

    @property
    def unreachable(self) -> str:
        """Why the last polls failed; empty if the job is reachable."""
        return self._last_error if self._failed_polls >= MAX_FAILED_POLLS else ""

    def poll(self, addresses: Sequence[str], size: int | None, now: float) -> None:
        """Send a new size, if any, and query the status if it is due."""
        if self._task is not None and not self._task.done():
            self._size_pending = self._size_pending or size is not None
            return
        if self._address not in addresses:  # rule 1
            size = None
        due = now - self._polled_at >= POLL_INTERVAL_S
        if due:
            self._polled_at = now
        if due or size is not None:
            self._size_pending = False
            self._task = asyncio.create_task(self._exchange(addresses, size, due), name=f"poll {self._name}")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    @property
    def _address(self) -> str:
        """The address of the last successful request."""
        return self._last_address if self._failed_polls == 0 else ""

    async def _exchange(self, addresses: Sequence[str], size: int | None, due: bool) -> None:
        known = self.unreachable, self.telemetry
        sent = size is None or await self._send_size(size)
        if due or not sent:
            await self._query(addresses)
        if self._size_pending or (self.unreachable, self.telemetry) != known:
            self._changed()

    async def _send_size(self, size: int) -> bool:
        try:
            await in_thread(self._threads, self._api.scale, self._address, *self._secret, size)
        except Exception as error:  # retried after the next successful poll
            log.warning("%s size=%d could not be sent: %s", self._name, size, error)
            return False
        self.telemetry = {**self.telemetry, "target": size}
        log.info("%s size=%d sent", self._name, size)
        return True

    async def _query(self, addresses: Sequence[str]) -> None:
        """Query the status at the first address that replies."""
        began, why = time.monotonic(), "no pod that could host the coordinator runs"
        for address in self._ordered(addresses):
            self._last_address = address
            try:
                self.telemetry = await in_thread(self._threads, self._api.status, address, *self._secret)
                self._failed_polls = 0
                return
            except Exception as error:  # the job does not depend on it
                why = f"{address}: {error}"
            if time.monotonic() - began >= SEARCH_TIMEOUT_S:
                break
        self._failed_polls, self._last_error = self._failed_polls + 1, why
        log.debug("%s unreachable: %s", self._name, why)

    def _ordered(self, addresses: Sequence[str]) -> list[str]:
        """Start with the last working address, else after the last one tried, which may have hung."""
        if self._last_address not in addresses:
            return list(addresses)
        first = addresses.index(self._last_address) + (not self._address)
        return [*addresses[first:], *addresses[:first]]
