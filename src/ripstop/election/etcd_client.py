"""A client for etcd's v3 API, through the JSON gateway of every member.

Rules:

1.  A request goes to one member after another until one replies.
2.  It raises one of two errors: `Unavailable` (no member replied; a retry may help) or `Denied` (etcd rejected the
    request; a retry does not help).
3.  etcd may have executed a request whose reply was lost.  So a repeated write must do no harm.

In the gateway's JSON, keys and values are base64, 64-bit numbers are strings, and false, zero or empty fields are
omitted.
"""

import asyncio
import json
import socket
import ssl
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import aiohttp
from msgspec import Struct
from yarl import URL

from ripstop.model.config import Etcd
from ripstop.model.errors import RipstopError, UsageError
from ripstop.model.round import Address
from ripstop.system.network import describe_network_error, enable_keepalive
from ripstop.transport.resolver import Resolver

REQUEST_TIMEOUT_S = 2.0  # for each member
STATUS_TIMEOUT_S = 0.5
MAX_REPLY_BYTES = 4 * 1024 * 1024
# gRPC's status codes for requests that must not be retried
INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED, FAILED_PRECONDITION, UNAUTHENTICATED = 3, 5, 7, 9, 16
FINAL_CODES = (INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED, FAILED_PRECONDITION, UNAUTHENTICATED)
REMEDIES = {  # by a part of etcd's error
    "user name is empty": "set RIPSTOP_ETCD_USER and RIPSTOP_ETCD_PASSWORD",
    "authentication failed": "check RIPSTOP_ETCD_USER and RIPSTOP_ETCD_PASSWORD",
    "authentication is not enabled": "unset RIPSTOP_ETCD_USER and RIPSTOP_ETCD_PASSWORD",
    "permission denied": "grant the user reading and writing below etcd_prefix",
}

Json = dict[str, Any]


class Unavailable(RipstopError):
    """No member replied; the text has the error of each."""


class Denied(RipstopError):
    """etcd rejected the request."""

    def __init__(self, why: str, code: int = 0) -> None:
        super().__init__(why)
        self.code = code


class KeyValue(Struct, frozen=True):
    """A key's value, the etcd revisions of its creation and its last change, and the lease it is bound to."""

    value: bytes
    created: int
    revision: int
    lease: int


class EtcdClient:
    """Create it inside a running event loop."""

    def __init__(self, settings: Etcd) -> None:
        self._endpoints = settings.endpoints
        self._scheme = "https" if settings.tls else "http"
        self._user, self._password = settings.user, settings.password
        connector = aiohttp.TCPConnector(
            resolver=Resolver(), use_dns_cache=False, ssl=_etcd_client_tls(settings) or True
        )
        self._http = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        self._current = 0  # the endpoint that replied last
        self._token = ""

    async def close(self) -> None:
        await self._http.close()

    async def local_host(self) -> str:
        """This machine's address on the route to etcd; no packet is sent to find it."""
        endpoint = self._endpoints[self._current]
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            found = (await Resolver().resolve(endpoint.host, endpoint.port))[0]
        with socket.socket(found["family"], socket.SOCK_DGRAM) as probe:
            probe.connect((found["host"], found["port"]))
            return str(probe.getsockname()[0])

    # keys -------------------------------------------------------------------------------------------------------------

    async def read(self, *keys: str) -> tuple[int, list[KeyValue | None]]:
        """etcd's revision, and what these keys hold."""
        return await self.transaction([], [etcd_get_request(key) for key in keys])

    async def create(self, key: str, value: str, lease: int, *, unless: str) -> KeyValue | None:
        """Create a key unless it or `unless` exists.  Returns what the key holds then; None if only `unless` exists.

        The lease shows who created the key, also if the reply to an earlier try was lost.
        """
        absent = [if_revision(name, "create", 0) for name in (key, unless)]
        _, (found,) = await self.transaction(
            absent, [etcd_put_request(key, value, lease), etcd_get_request(key)], [etcd_get_request(key)]
        )
        return found

    async def replace(self, key: str, created: int, other: str, value: str, lease: int) -> None:
        """Replace a key by another in one transaction, if the key was created at revision `created`."""
        changes = [etcd_put_request(other, value, lease), {"request_delete_range": {"key": b64(key)}}]
        await self.transaction([if_revision(key, "create", created)], changes)

    async def transaction(
        self, conditions: Sequence[Json], success: Sequence[Json], failure: Sequence[Json] = ()
    ) -> tuple[int, list[KeyValue | None]]:
        """Make all requests of `success` if all conditions hold, otherwise those of `failure`.

        Returns etcd's revision, or 0 after `failure`; and the results of each `etcd_get_request` among the requests.
        """
        reply = await self.call("kv/txn", {"compare": conditions, "success": success, "failure": failure})
        with parsing_etcd_reply():
            revision = int(reply["header"]["revision"])
            ranges = [each["response_range"] for each in reply.get("responses", ()) if "response_range" in each]
            found = [_key_value_in_etcd_reply(one["kvs"][0]) if one.get("kvs") else None for one in ranges]
            return revision if reply.get("succeeded") else 0, found

    async def wait_for_change(self, keys: dict[str, str], revision: int) -> bool:
        """Wait until a key, or one in a `prefix_range`, changes at this revision or later.  False: the watch failed."""
        body = {"create_request": {**keys, "start_revision": str(revision)}}
        # with this header, a member without a leader ends the watch
        headers = {**self._headers(), "Grpc-Metadata-Hasleader": "true"}
        endpoint = self._endpoints[self._current]
        try:
            async with self._http.post(
                self._url(endpoint, "watch"), json=body, headers=headers, allow_redirects=False
            ) as response:
                connection = response.connection
                if connection is not None and connection.transport is not None:
                    enable_keepalive(connection.transport.get_extra_info("socket"))
                received = b""
                async for chunk in response.content.iter_any():
                    received += chunk
                    first, _, more = received.partition(b"\n")
                    if more:  # everything after the first line is a change
                        return b"error" not in first
        except (aiohttp.ClientError, OSError):
            pass  # the next request selects another member, or reports the errors of all
        return False

    # leases -----------------------------------------------------------------------------------------------------------

    async def grant(self, ttl: int) -> tuple[int, float]:
        """A new lease: its id, and its time to live in seconds, which may be longer than requested."""
        reply = await self.call("lease/grant", {"TTL": str(ttl)})
        with parsing_etcd_reply():
            return int(reply["ID"]), float(reply["TTL"])

    async def keep_alive(self, lease: int, timeout: float = REQUEST_TIMEOUT_S) -> float:
        """Renew a lease: its time to live in seconds; 0 if the lease does not exist any more."""
        reply = await self.call("lease/keepalive", {"ID": str(lease)}, timeout)
        with parsing_etcd_reply():
            return float(reply.get("result", {}).get("TTL", 0))

    async def revoke(self, lease: int) -> None:
        """End a lease and delete the keys bound to it."""
        try:
            await self.call("lease/revoke", {"ID": str(lease)})
        except Denied as error:
            if error.code != NOT_FOUND:
                raise

    # members ----------------------------------------------------------------------------------------------------------

    async def members_without_leader(self) -> list[Address]:
        """The members that reply but have no leader, because the cluster has no quorum."""

        async def lacks_leader(endpoint: Address) -> bool:
            try:
                async with asyncio.timeout(STATUS_TIMEOUT_S):
                    status = await self._post(endpoint, "maintenance/status", {})
            except (aiohttp.ClientError, OSError, RipstopError):
                return False
            return "leader" not in status

        lacking = await asyncio.gather(*map(lacks_leader, self._endpoints))
        return [endpoint for endpoint, lacks in zip(self._endpoints, lacking, strict=True) if lacks]

    # requests ---------------------------------------------------------------------------------------------------------

    async def call(self, path: str, body: Json, timeout: float = REQUEST_TIMEOUT_S) -> Json:
        """Send a request of the gateway's API; returns the reply."""
        if self._user and not self._token:
            await self._authenticate()
        try:
            return await self._call_members(path, body, timeout)
        except Denied as error:
            if error.code != UNAUTHENTICATED or not self._user:
                raise
        await self._authenticate()  # the token has expired, or etcd was restarted
        return await self._call_members(path, body, timeout)

    async def _authenticate(self) -> None:
        self._token = ""
        credentials = {"name": self._user, "password": self._password}
        reply = await self._call_members("auth/authenticate", credentials, REQUEST_TIMEOUT_S)
        with parsing_etcd_reply():
            self._token = str(reply["token"])

    async def _call_members(self, path: str, body: Json, timeout: float) -> Json:
        """Try one member after another, first the one that replied last."""
        errors = []
        for _ in self._endpoints:
            endpoint = self._endpoints[self._current]
            try:
                async with asyncio.timeout(timeout):
                    return await self._post(endpoint, path, body)
            except (aiohttp.ClientError, OSError, Unavailable) as error:
                if isinstance(error, aiohttp.ClientConnectorCertificateError):
                    why = error.certificate_error
                    raise Denied(
                        f"the certificate of etcd at {endpoint} is not trusted ({why}); give its authority as cacert"
                    ) from error
                errors.append(f"{endpoint}: {_describe_etcd_error(error, timeout)}")
                self._current = (self._current + 1) % len(self._endpoints)
        raise Unavailable("; ".join(errors))

    async def _post(self, endpoint: Address, path: str, body: Json) -> Json:
        async with self._http.post(
            self._url(endpoint, path), json=body, headers=self._headers(), allow_redirects=False
        ) as response:
            text = await response.content.read(MAX_REPLY_BYTES)
            while len(text) < MAX_REPLY_BYTES and (more := await response.content.read(MAX_REPLY_BYTES)):
                text += more
            try:
                reply = json.loads(text)
            except ValueError:
                reply = None
            match reply:
                case {"error": dict(error)}:  # from a streaming call
                    code, why = error.get("grpc_code"), error.get("message")
                case {"error": str(why)}:
                    code = reply.get("code")
                case dict() if response.status == 200:
                    return reply
                case _:
                    raise Denied(
                        f"{endpoint} answers HTTP {response.status}, so it is not an etcd with a v3 API; "
                        "give the address of an etcd, 3.4 or later"
                    )
            if code in FINAL_CODES:
                remedy = next((f"; {what}" for text, what in REMEDIES.items() if text in str(why)), "")
                raise Denied(f"etcd at {endpoint} rejected the request: {why}{remedy}", code)
            raise Unavailable(str(why))

    def _url(self, endpoint: Address, path: str) -> URL:
        return URL.build(scheme=self._scheme, host=endpoint.host, port=endpoint.port, path=f"/v3/{path}")

    def _headers(self) -> dict[str, str]:
        return {"Authorization": self._token} if self._token else {}


def _etcd_client_tls(settings: Etcd) -> ssl.SSLContext | None:
    if not settings.tls:
        return None
    try:
        context = ssl.create_default_context(cafile=settings.ca)
    except OSError as error:
        raise UsageError(f"cacert={settings.ca}: not a certificate ({error.strerror}); give a PEM file") from error
    if settings.cert is not None and settings.key is not None:
        try:
            context.load_cert_chain(settings.cert, settings.key)
        except OSError as error:
            pair = f"cert={settings.cert}, key={settings.key}"
            raise UsageError(f"{pair}: not a certificate and its key ({error.strerror}); give PEM files") from error
    return context


def b64(data: str | bytes) -> str:
    return b64encode(data.encode() if isinstance(data, str) else data).decode()


def prefix_range(prefix: str) -> dict[str, str]:
    """The request fields for all keys with a prefix."""
    return {"key": b64(prefix), "range_end": b64(prefix[:-1] + chr(ord(prefix[-1]) + 1))}


def etcd_get_request(key: str | bytes) -> Json:
    return {"request_range": {"key": b64(key)}}


def etcd_put_request(key: str | bytes, value: str | bytes, lease: int) -> Json:
    return {"request_put": {"key": b64(key), "value": b64(value), "lease": str(lease)}}


def if_revision(key: str | bytes, kind: Literal["create", "mod"], revision: int) -> dict[str, str]:
    """The condition that the key was created, or last modified, at this revision; 0: it does not exist."""
    return {"key": b64(key), "target": kind.upper(), "result": "EQUAL", f"{kind}_revision": str(revision)}


def _key_value_in_etcd_reply(kv: Json) -> KeyValue:
    value, lease = b64decode(kv.get("value", "")), int(kv.get("lease", 0))
    return KeyValue(value, int(kv["create_revision"]), int(kv["mod_revision"]), lease)


@contextmanager
def parsing_etcd_reply() -> Iterator[None]:
    """A field that is missing in a reply is a `Denied`: the server is not etcd."""
    try:
        yield
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise Denied(f"the reply is not etcd's ({error!r}); give the address of an etcd, 3.4 or later") from error


def _describe_etcd_error(error: BaseException, timeout: float) -> str:
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "closed the connection (if this etcd requires TLS, use --rdzv-conf=protocol=https,cacert=FILE)"
    return describe_network_error(error, timeout)
