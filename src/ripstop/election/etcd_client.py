"""etcd's v3 API, as far as an election needs it: through the JSON gateway that every member serves.

Nothing is decided here.  A request goes to one member after the other until one answers.  Two errors come out: nobody
answered (`Unavailable`: try again), or the answer was no (`Denied`: asking again will not help).  A request whose
answer was lost may have been carried out; those that write are made so that repeating them does no harm.

Of the gateway: keys and values are base64, 64-bit numbers are strings, and what is false, zero or empty is left out.
"""

import asyncio
import json
import os
import socket
import ssl
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
from msgspec import Struct
from yarl import URL

from ripstop.model.config import Etcd
from ripstop.model.errors import RipstopError, UsageError
from ripstop.model.round import Address
from ripstop.transport.keepalive import tune
from ripstop.transport.resolver import Resolver

REQUEST = 2.0  # seconds a member has for an answer
STATUS = 0.5  # seconds a member has to tell of itself
MAX_ANSWER = 4 * 1024 * 1024  # bytes
INVALID, NOT_FOUND, DENIED, UNFIT, UNAUTHENTICATED = 3, 5, 7, 9, 16  # gRPC's codes for: asking again will not help


class Unavailable(RipstopError):
    """No member answered; the words say which were asked, and what became of it."""


class Denied(RipstopError):
    """etcd does not do what was asked."""

    def __init__(self, why: str, code: int = 0) -> None:
        super().__init__(why)
        self.code = code


class KeyValue(Struct, frozen=True):
    """A key's value, the revision at which the key was made, and the lease that it goes with."""

    value: str
    created: int
    lease: int


class View(Struct, frozen=True):
    """What there was below a prefix at one revision."""

    revision: int
    entries: dict[str, KeyValue]


class EtcdClient:
    """To be made inside a running event loop."""

    def __init__(self, settings: Etcd) -> None:
        self._endpoints = settings.endpoints
        self._scheme = "https" if settings.tls else "http"
        self._user, self._password = settings.user, settings.password
        connector = aiohttp.TCPConnector(resolver=Resolver(), use_dns_cache=False, ssl=_tls(settings) or True)
        self._http = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        self._current = 0  # the endpoint that answered last
        self._token = ""

    async def close(self) -> None:
        await self._http.close()

    async def local_host(self) -> str:
        """This machine's address on the way to etcd; nothing is sent to find it."""
        endpoint = self._endpoints[self._current]
        async with asyncio.timeout(REQUEST):
            found = (await Resolver().resolve(endpoint.host, endpoint.port))[0]
        with socket.socket(found["family"], socket.SOCK_DGRAM) as probe:
            probe.connect((found["host"], found["port"]))
            return str(probe.getsockname()[0])

    # keys -------------------------------------------------------------------------------------------------------------

    async def read(self, prefix: str) -> View:
        """All keys below a prefix, by what follows it."""
        answer = await self.call("kv/range", below(prefix))
        with as_etcd_answers():
            found = {_text(kv["key"]).removeprefix(prefix): _entry(kv) for kv in answer.get("kvs", ())}
            return View(int(answer["header"]["revision"]), found)

    async def create(self, key: str, value: str, lease: int, *, unless: str) -> KeyValue | None:
        """Make a key, if neither it nor the other is there; what it holds then, None if it is the other that is there.

        The lease tells whose it is, also when an answer was lost and this was the second try.
        """
        absent = [
            {"key": b64(name), "target": "CREATE", "result": "EQUAL", "create_revision": "0"} for name in (key, unless)
        ]
        put = {"request_put": {"key": b64(key), "value": b64(value), "lease": str(lease)}}
        look = {"request_range": {"key": b64(key)}}
        answer = await self.call("kv/txn", {"compare": absent, "success": [put, look], "failure": [look]})
        with as_etcd_answers():
            found = answer["responses"][-1]["response_range"].get("kvs", ())
            return _entry(found[0]) if found else None

    async def replace(self, key: str, created: int, other: str, value: str, lease: int) -> None:
        """In one step, if the key is still the one made at that revision: it goes, and the other comes."""
        same = {"key": b64(key), "target": "CREATE", "result": "EQUAL", "create_revision": str(created)}
        put = {"request_put": {"key": b64(other), "value": b64(value), "lease": str(lease)}}
        delete = {"request_delete_range": {"key": b64(key)}}
        await self.call("kv/txn", {"compare": [same], "success": [put, delete]})

    async def until_changed(self, where: dict[str, str], revision: int) -> bool:
        """Wait until a key, or something `below` a prefix, changes at this revision or later.

        False: this member cannot tell.
        """
        body = {"create_request": {**where, "start_revision": str(revision)}}
        # a member that has lost the others ends the watch, instead of keeping us waiting
        headers = {**self._headers(), "Grpc-Metadata-Hasleader": "true"}
        endpoint = self._endpoints[self._current]
        try:
            async with self._http.post(
                self._url(endpoint, "watch"), json=body, headers=headers, allow_redirects=False
            ) as response:
                connection = response.connection
                if connection is not None and connection.transport is not None:
                    tune(connection.transport.get_extra_info("socket"))
                first = b""
                async for chunk in response.content.iter_any():
                    first += chunk
                    told, _, more = first.partition(b"\n")
                    if more:  # after the first line, whatever comes is a change
                        return b"error" not in told
        except (aiohttp.ClientError, OSError):
            pass  # whoever looks next finds another member, or says which there are
        return False

    # leases -----------------------------------------------------------------------------------------------------------

    async def grant(self, ttl: int) -> tuple[int, float]:
        """A new lease: its id, and the seconds etcd gives it, which may be more."""
        answer = await self.call("lease/grant", {"TTL": str(ttl)})
        with as_etcd_answers():
            return int(answer["ID"]), float(answer["TTL"])

    async def keep_alive(self, lease: int, timeout: float = REQUEST) -> float:
        """Renew a lease: the seconds it has now; 0 when there is no such lease any more."""
        answer = await self.call("lease/keepalive", {"ID": str(lease)}, timeout)
        with as_etcd_answers():
            return float(answer.get("result", {}).get("TTL", 0))

    async def revoke(self, lease: int) -> None:
        """End a lease and the keys that go with it."""
        try:
            await self.call("lease/revoke", {"ID": str(lease)})
        except Denied as error:
            if error.code != NOT_FOUND:
                raise

    # its members ------------------------------------------------------------------------------------------------------

    async def leaderless(self) -> list[Address]:
        """The members that answer, and know of no leader: they have lost most of the others."""

        async def is_leaderless(endpoint: Address) -> bool:
            try:
                async with asyncio.timeout(STATUS):
                    status = await self._post(endpoint, "maintenance/status", {})
            except (aiohttp.ClientError, OSError, RipstopError):
                return False
            return "leader" not in status

        found = await asyncio.gather(*map(is_leaderless, self._endpoints))
        return [endpoint for endpoint, is_one in zip(self._endpoints, found, strict=True) if is_one]

    # requests ---------------------------------------------------------------------------------------------------------

    async def call(self, path: str, body: dict[str, Any], timeout: float = REQUEST) -> dict[str, Any]:
        """A request in the gateway's own words, and the answer."""
        if self._user and not self._token:
            await self._authenticate()
        try:
            return await self._ask(path, body, timeout)
        except Denied as error:
            if error.code != UNAUTHENTICATED or not self._user:
                raise
        await self._authenticate()  # tokens end, and etcd forgets them
        return await self._ask(path, body, timeout)

    async def _authenticate(self) -> None:
        self._token = ""
        answer = await self._ask("auth/authenticate", {"name": self._user, "password": self._password}, REQUEST)
        with as_etcd_answers():
            self._token = str(answer["token"])

    async def _ask(self, path: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        """One member after the other, the one that answered last first."""
        troubles = []
        for _ in self._endpoints:
            endpoint = self._endpoints[self._current]
            try:
                async with asyncio.timeout(timeout):
                    return await self._post(endpoint, path, body)
            except (aiohttp.ClientError, OSError, Unavailable) as error:
                if isinstance(error, aiohttp.ClientConnectorCertificateError):
                    why = error.certificate_error
                    raise Denied(f"etcd at {endpoint} has no certificate that we trust ({why}); see cacert") from error
                troubles.append(f"{endpoint}: {_describe(error, timeout)}")
                self._current = (self._current + 1) % len(self._endpoints)
        raise Unavailable("; ".join(troubles))

    async def _post(self, endpoint: Address, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self._http.post(
            self._url(endpoint, path), json=body, headers=self._headers(), allow_redirects=False
        ) as response:
            text = await response.content.read(MAX_ANSWER)
            while len(text) < MAX_ANSWER and (more := await response.content.read(MAX_ANSWER)):
                text += more
            try:
                answer = json.loads(text)
            except ValueError:
                answer = None
            match answer:
                case {"error": dict(error)}:  # of a stream
                    code, why = error.get("grpc_code"), error.get("message")
                case {"error": str(why)}:
                    code = answer.get("code")
                case dict() if response.status == 200:
                    return answer
                case _:
                    raise Denied(_not_etcd(endpoint, response.status))
            if code in (INVALID, NOT_FOUND, DENIED, UNFIT, UNAUTHENTICATED):
                raise Denied(f"etcd at {endpoint} refused: {_remedy(str(why))}", code)
            raise Unavailable(str(why))

    def _url(self, endpoint: Address, path: str) -> URL:
        return URL.build(scheme=self._scheme, host=endpoint.host, port=endpoint.port, path=f"/v3/{path}")

    def _headers(self) -> dict[str, str]:
        return {"Authorization": self._token} if self._token else {}


@contextmanager
def as_etcd_answers() -> Iterator[None]:
    """What is taken from an answer in here is there, or somebody else has answered."""
    try:
        yield
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise Denied(f"that is no answer of etcd's ({error!r}); give the address of one, 3.4 or later") from error


def _tls(settings: Etcd) -> ssl.SSLContext | None:
    if not settings.tls:
        return None
    try:
        context = ssl.create_default_context(cafile=settings.ca)
    except OSError as error:
        raise UsageError(f"cacert={settings.ca}: holds no certificate ({error.strerror}); give PEM") from error
    if settings.cert is not None and settings.key is not None:
        try:
            context.load_cert_chain(settings.cert, settings.key)
        except OSError as error:
            pair = f"cert={settings.cert}, key={settings.key}"
            raise UsageError(f"{pair}: not a certificate and its key ({error.strerror}); give PEM") from error
    return context


def b64(data: str | bytes) -> str:
    return b64encode(data.encode() if isinstance(data, str) else data).decode()


def _text(encoded: str) -> str:
    return b64decode(encoded).decode(errors="replace")


def below(prefix: str) -> dict[str, str]:
    """All keys that begin with it."""
    return {"key": b64(prefix), "range_end": b64(prefix[:-1] + chr(ord(prefix[-1]) + 1))}


def _entry(kv: dict[str, Any]) -> KeyValue:
    return KeyValue(_text(kv.get("value", "")), int(kv["create_revision"]), int(kv.get("lease", 0)))


def _remedy(why: str) -> str:
    """etcd's words, and what to do about them."""
    if "user name is empty" in why:
        return f"{why}; set RIPSTOP_ETCD_USER and RIPSTOP_ETCD_PASSWORD"
    if "authentication failed" in why:
        return f"{why}; check RIPSTOP_ETCD_USER and RIPSTOP_ETCD_PASSWORD"
    if "authentication is not enabled" in why:
        return f"{why}; unset RIPSTOP_ETCD_USER and RIPSTOP_ETCD_PASSWORD"
    if "permission denied" in why:
        return f"{why}; grant the user reading and writing below etcd_prefix"
    return why


def _not_etcd(endpoint: Address, status: int) -> str:
    return f"{endpoint} answers HTTP {status}, so it is no etcd with a v3 API; give the address of one, 3.4 or later"


def _describe(error: BaseException, timeout: float) -> str:
    match error:
        case aiohttp.ClientConnectorDNSError() | socket.gaierror():
            return "the name has no address"
        case aiohttp.ClientConnectorError():
            number = error.os_error.errno
            return os.strerror(number).lower() if number and number > 0 else str(error.os_error)
        case aiohttp.ServerDisconnectedError():
            return "closed the connection (to one that wants TLS, --rdzv-conf=protocol=https,cacert=FILE)"
        case TimeoutError():
            return f"no answer in {timeout:g} s"
        case _:
            return str(error) or type(error).__name__
