"""Who may use the HTTP API of the coordinator.  Rules:

1.  An operator sends a token derived from the job's secret.
2.  A job without a secret is operated over the network only if TLS requires a certificate of every client.  Otherwise
    operators use the socket on the coordinator's machine (`api/job_socket.py`).
3.  Without a secret, `/metrics` is open to all but web pages.  A page whose own name resolves to this address (DNS
    rebinding) requests that name, so only a name of this coordinator or an IP address is served.
"""

import contextlib
import socket
import ssl
from ipaddress import ip_address

from aiohttp import web

from ripstop.api.job_interface import RequestRefused
from ripstop.protocol import secret
from ripstop.system.blocking_calls import ExclusiveCall
from ripstop.transport.connection_limits import UnauthenticatedConnections, host_of_limited_connection

FULL_NAME_TIMEOUT_S = 2.0


class ApiAuthorization:
    """Checks requests.  The connection of a request that rule 1 or 2 allows is no longer unauthenticated.

    `api_token` is empty for a job without a secret.
    """

    def __init__(
        self, api_token: str, tls: ssl.SSLContext | None, endpoint: str, unauthenticated: UnauthenticatedConnections
    ) -> None:
        self._api_token = api_token
        self._tls = tls
        self._names = (endpoint.lower(), socket.gethostname().lower(), "localhost")
        self._full_name = ""  # until it is found
        self._full_name_lookup = ExclusiveCall(self._find_full_name, None)
        self._unauthenticated = unauthenticated

    def operator(self, request: web.Request) -> str:
        """The address of an operator; raises `RequestRefused` for anyone else."""
        transport = request.transport
        if transport is None:
            raise RequestRefused(401, "this connection is closed")
        host = host_of_limited_connection(transport)
        if self._api_token:
            self._check_token(request, host)
        elif self._tls is None or self._tls.verify_mode is not ssl.CERT_REQUIRED:
            raise RequestRefused(
                403,
                "a job without a secret cannot be operated over the network; start it with RIPSTOP_TOKEN, "
                "or run the command as its user on its coordinator's machine",
            )
        self._unauthenticated.remove(transport)
        return host

    def _check_token(self, request: web.Request, host: str) -> None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise RequestRefused(
                401, "this job requires its API token; send Authorization: Bearer and the output of `ripstop token`"
            )
        if not secret.proofs_match(token.strip(), self._api_token):
            self._unauthenticated.rejections.log(host, "a wrong token for the API", kind="token")
            raise RequestRefused(
                401, "the token is not this job's; set the job's RIPSTOP_TOKEN, and give the job's id with --job"
            )

    async def metrics_reader(self, request: web.Request) -> str:
        """Who reads `/metrics`; raises `RequestRefused` (rule 3)."""
        if self._api_token:
            return self.operator(request)
        # With TLS, a page has no certificate for its own name.
        if self._tls is None and not await self._is_own_name(name := _host_for_api_authorization(request)):
            raise RequestRefused(
                403,
                f"{name[:80]!r} is not a name of this coordinator; use its IP address or its --rdzv-endpoint, "
                "or start the job with RIPSTOP_TOKEN and send its token",
            )
        return "anybody"

    async def _is_own_name(self, name: str) -> bool:
        """DNS cannot rebind an IP address, so any is accepted.  A browser always sends a name."""
        if not name or name in self._names:
            return True
        with contextlib.suppress(ValueError):
            return bool(ip_address(name))
        if not self._full_name:  # it may query a DNS server; the job's end does not wait for that
            await self._full_name_lookup.call(FULL_NAME_TIMEOUT_S)
        return name == self._full_name

    def _find_full_name(self) -> None:
        with contextlib.suppress(OSError, UnicodeError):  # the next request tries again
            self._full_name = socket.getfqdn().lower()


def _host_for_api_authorization(request: web.Request) -> str:
    """The host of the `Host` header, without its port."""
    host = request.headers.get("Host", "").strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")
