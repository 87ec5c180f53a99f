"""The coordinator's port: agents at `/agent` (WebSocket), operators at `/api`, Prometheus at `/metrics`, `/healthz`.

This module accepts connections, does TLS, and passes connections to their handlers: aiohttp serves HTTP, and
`agent_connection.py` serves agents.  It makes no decisions.  A connection is unauthenticated until it has proven the
job's secret:

1.  `connection_limits.py` limits the number of such connections and their time.
2.  `agent_authentication.py` authenticates agents; `api_authorization.py` authorizes HTTP requests.
3.  Nothing an unauthenticated peer sends affects the job.  `rejection_log.py` logs it once per address and kind.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator

from aiohttp import web

from ripstop.api.http_api import MAX_BODY, Api
from ripstop.protocol import secret
from ripstop.protocol.messages import Rejected
from ripstop.system.network import enable_keepalive
from ripstop.transport.agent_authentication import AgentAuthentication, AgentPreAuthenticationProtocol
from ripstop.transport.agent_connection import AgentConnection
from ripstop.transport.agent_host import AgentHost
from ripstop.transport.agent_request import BAD_REQUEST, END_OF_HEAD, agent_request_websocket_key
from ripstop.transport.api_authorization import ApiAuthorization
from ripstop.transport.connection_limits import UnauthenticatedConnections, host_of_limited_connection
from ripstop.transport.rejection_log import RejectionLog
from ripstop.transport.tls import describe_tls_error, starts_tls
from ripstop.transport.websocket import AGENT_PATH, FLUSH_TIMEOUT_S

READ_BUFFER_BYTES = 64 * 1024  # for all agents: each reads and handles its bytes in one step
ACCEPT_BATCH = 32
ACCEPT_RETRY_S = 0.1  # after an error, such as no free descriptor
TLS_REQUIRED = b"HTTP/1.1 426 Upgrade Required\r\nUpgrade: TLS/1.3\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Server:
    """Serves one `AgentHost` on a listening socket, which it owns."""

    def __init__(
        self,
        listening: socket.socket,
        agent_host: AgentHost,
        *,
        token: str,
        tls: ssl.SSLContext | None = None,
        serves_agents: bool = True,
        endpoint_host: str = "",
        listed_address: str = "",
    ) -> None:
        self._listening = listening
        self._host = agent_host
        self._tls = tls
        self._serves_agents = serves_agents
        self._rejections = RejectionLog()
        self._unauthenticated = UnauthenticatedConnections(agent_host.settings.max_nodes, self._rejections)
        self._authentication = AgentAuthentication(
            agent_host.settings, agent_host.ended.done, token, self._rejections, listed_address
        )
        api_token = secret.api_token_from_secret(token, agent_host.settings.run_id) if token else ""
        self._authorization = ApiAuthorization(api_token, tls, endpoint_host, self._unauthenticated)
        self._agents: set[AgentConnection] = set()
        self._no_agents = asyncio.Event()  # set when the last one has closed
        self._read_buffer = memoryview(bytearray(READ_BUFFER_BYTES))
        self._runner: web.AppRunner | None = None
        self._accepting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to accept connections."""
        app = web.Application(client_max_size=MAX_BODY)
        if self._serves_agents:
            app.router.add_get(AGENT_PATH, self._late_agent_request)
        Api(lambda: self._host.job, self._authorization.operator, self._authorization.metrics_reader).mount(app)
        app.router.add_get("/healthz", _serve_healthz)
        app.router.add_route("*", "/{path:.*}", _serve_not_found)
        logger = logging.Logger("ripstop.coordinator.http", logging.DEBUG)  # has no parent: prints nothing by itself
        logger.addHandler(self._rejections)
        self._runner = web.AppRunner(
            app, access_log=None, logger=logger, handle_signals=False, shutdown_timeout=2 * FLUSH_TIMEOUT_S
        )
        await self._runner.setup()
        self._listening.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(), name="ripstop-accept")

    async def close(self) -> None:
        """Stop accepting, write what is queued for agents, and close all connections."""
        if self._accepting is not None:
            self._accepting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._accepting
        self._listening.close()
        self._unauthenticated.close_all()
        if self._agents:
            self._no_agents.clear()
            for agent in tuple(self._agents):
                agent.finish()
            await self._no_agents.wait()  # each has its time limit
        if self._runner is not None:
            await self._runner.cleanup()

    # connections ------------------------------------------------------------------------------------------------------

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._unauthenticated.wait_for_room()
            try:
                connection, _ = await loop.sock_accept(self._listening)
            except ConnectionError:
                continue  # the peer has already disconnected
            except OSError as error:
                self._rejections.log("this machine", f"cannot accept connections: {error.strerror}", kind="accept")
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            await asyncio.gather(*map(self._start_connection, (connection, *self._accept_more())))

    def _accept_more(self) -> Iterator[socket.socket]:
        """Connections that wait too.  A turn of the event loop for each of them would be slow if it has much to do."""
        for _ in range(min(ACCEPT_BATCH, self._unauthenticated.room) - 1):
            try:
                connection, _ = self._listening.accept()
            except OSError:  # there is no other one; a real error comes again
                return
            connection.setblocking(False)
            yield connection

    async def _start_connection(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            if self._tls is not None:
                self._start_tls(connection, self._tls)
                return
            transport, _ = await loop.connect_accepted_socket(self._preauth, connection)
        except OSError:  # the peer has already disconnected
            connection.close()
        else:
            self._unauthenticated.add(transport)

    def _start_tls(self, connection: socket.socket, tls: ssl.SSLContext) -> None:
        """Run the TLS handshake in a task of its own, which counts as an unauthenticated connection."""
        host = str(connection.getpeername()[0])
        task = asyncio.create_task(self._tls_handshake(connection, host, tls), name=host)
        self._unauthenticated.add(task)
        task.add_done_callback(self._unauthenticated.remove)

    async def _tls_handshake(self, connection: socket.socket, host: str, tls: ssl.SSLContext) -> None:
        owns_socket = True
        try:
            if await starts_tls(connection):
                owns_socket = False
                loop = asyncio.get_running_loop()
                transport, _ = await loop.connect_accepted_socket(
                    self._preauth, connection, ssl=tls, ssl_shutdown_timeout=FLUSH_TIMEOUT_S
                )
                self._unauthenticated.add(transport)
            else:
                self._rejections.log(host, "it does not use TLS, and this coordinator requires it", kind="tls")
                connection.send(TLS_REQUIRED)
        except ssl.SSLError as error:
            self._rejections.log(host, describe_tls_error(error), kind="tls")
        except OSError:
            why = "it aborted the TLS handshake; if it is a node, its log has the reason"
            self._rejections.log(host, why, kind="tls")
        finally:
            if owns_socket:
                connection.close()

    def _preauth(self) -> AgentPreAuthenticationProtocol:
        return AgentPreAuthenticationProtocol(self._check_preauth, self._on_request, self._unauthenticated.remove)

    def _check_preauth(self, transport: asyncio.Transport, text: str, origin: str | None) -> Rejected | None:
        if not self._serves_agents:
            return None  # HTTP answers that the path is not found
        return self._authentication.pre_authenticate(host_of_limited_connection(transport), text, origin)

    def _on_request(self, transport: asyncio.Transport, received: bytes, pre_authenticated: bool) -> None:
        """An agent's request, or anything else.  The connection stays unauthenticated."""
        enable_keepalive(transport.get_extra_info("socket"))
        if pre_authenticated:
            self._serve_agent(transport, received)
        else:
            self._pass_to_http(transport, received)

    def _pass_to_http(self, transport: asyncio.Transport, received: bytes) -> None:
        assert self._runner is not None and self._runner.server is not None
        handler = self._runner.server()
        transport.set_protocol(handler)
        handler.connection_made(transport)
        handler.data_received(received)

    # agents -----------------------------------------------------------------------------------------------------------

    def _serve_agent(self, transport: asyncio.Transport, received: bytes) -> None:
        head, end, rest = received.partition(END_OF_HEAD)
        key = agent_request_websocket_key(head + end)
        if key is None:
            why = f"{AGENT_PATH} accepts WebSocket requests only"
            self._rejections.log(host_of_limited_connection(transport), why, kind="http")
            transport.write(BAD_REQUEST)
            transport.close()
            return
        connection = AgentConnection(
            transport,
            host_of_limited_connection(transport),
            self._host,
            self._authentication,
            self._rejections,
            self._read_buffer,
            self._unauthenticated.remove,
            self._on_agent_closed,
        )
        self._agents.add(connection)
        transport.set_protocol(connection)
        connection.start(key, rest)

    def _on_agent_closed(self, connection: AgentConnection, transport: asyncio.BaseTransport) -> None:
        self._unauthenticated.remove(transport)
        self._agents.discard(connection)
        if not self._agents:
            self._no_agents.set()

    async def _late_agent_request(self, request: web.Request) -> web.Response:
        why = f"{AGENT_PATH} must be the first request of a connection"
        if request.remote is not None:
            self._rejections.log(request.remote, why, kind="http")
        return _plain_server_response(400, why)


async def _serve_healthz(_: web.Request) -> web.Response:
    return _plain_server_response(200, "ok")


async def _serve_not_found(_: web.Request) -> web.Response:
    return _plain_server_response(404, "not found")


def _plain_server_response(status: int, text: str) -> web.Response:
    response = web.Response(status=status, text=text)
    response.force_close()
    return response
