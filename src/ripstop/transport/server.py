"""The coordinator's port: agents at `/agent` (WebSocket), operators at `/api`, Prometheus at `/metrics`, `/healthz`.

This module accepts connections, does TLS, and passes an authenticated agent's messages to the `Coordinator`.  It makes
no decisions.  A connection is unauthenticated until it has proven the job's secret:

1.  `connection_limits.py` limits the number of such connections and their time.
2.  `agent_authentication.py` authenticates agents; `api_authorization.py` authorizes HTTP requests.
3.  Nothing an unauthenticated peer sends affects the job.  `rejection_log.py` logs it once per address and kind.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Protocol

from aiohttp import web

from ripstop.api.http_api import MAX_BODY, Api
from ripstop.api.job_interface import JobInterface
from ripstop.coordinator.job_types import JobSettings
from ripstop.model.errors import ProtocolError
from ripstop.model.failure import JobReport
from ripstop.protocol import secret
from ripstop.protocol.codec import MAX_FRAME_BYTES, decode
from ripstop.protocol.limits import MAX_NAME
from ripstop.protocol.messages import FROM_AGENT, FromAgent, FromCoordinator, Heartbeat, Join, Rejected
from ripstop.system.network import enable_keepalive
from ripstop.transport.agent_authentication import AgentAuthentication, PreAuthProtocol
from ripstop.transport.api_authorization import ApiAuthorization
from ripstop.transport.connection_limits import UnauthenticatedConnections, abort, peer_host
from ripstop.transport.rejection_log import RejectionLog
from ripstop.transport.tls import describe_tls_error, starts_tls
from ripstop.transport.websocket import AGENT_PATH, CLOSE_CODE_RETURNING, FLUSH_TIMEOUT_S, Outbox, receive

ACCEPT_RETRY_S = 0.1  # after an error, such as no free descriptor
TLS_REQUIRED = b"HTTP/1.1 426 Upgrade Required\r\nUpgrade: TLS/1.3\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class AgentSession(Protocol):
    """The other end of one agent's connection."""

    def receive(self, message: FromAgent) -> None: ...

    def detach(self, *, returning: bool = False) -> None: ...


class AgentHost(Protocol):
    """What agents connect to: a coordinator, or an agent that may become one (`election/candidate_host.py`)."""

    settings: JobSettings
    ended: asyncio.Future[JobReport]

    @property
    def job(self) -> JobInterface | None:
        """The job for the API; None while its coordinator is in another process."""

    def attach(
        self, node: str, send: Callable[[FromCoordinator], object], close: Callable[[], object]
    ) -> AgentSession: ...


class Server:
    """Serves one coordinator on a listening socket, which it owns."""

    def __init__(
        self,
        listening: socket.socket,
        coordinator: AgentHost,
        *,
        token: str,
        tls: ssl.SSLContext | None = None,
        serves_agents: bool = True,
        endpoint_host: str = "",
    ) -> None:
        self._listening = listening
        self._coordinator = coordinator
        self._tls = tls
        self._serves_agents = serves_agents
        self._rejections = RejectionLog()
        self._unauthenticated = UnauthenticatedConnections(coordinator.settings.max_nodes, self._rejections)
        self._authentication = AgentAuthentication(
            coordinator.settings, coordinator.ended.done, token, self._rejections
        )
        api_token = secret.api_token(token, coordinator.settings.run_id) if token else ""
        self._authorization = ApiAuthorization(api_token, tls, endpoint_host, self._unauthenticated)
        self._outboxes: set[Outbox] = set()
        self._runner: web.AppRunner | None = None
        self._accepting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to accept connections."""
        app = web.Application(client_max_size=MAX_BODY)
        if self._serves_agents:
            app.router.add_get(AGENT_PATH, self._serve_agent)
        Api(lambda: self._coordinator.job, self._authorization.operator, self._authorization.metrics_reader).mount(app)
        app.router.add_get("/healthz", _healthz)
        app.router.add_route("*", "/{path:.*}", _not_found)
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
        for outbox in self._outboxes:
            outbox.finish()
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
            try:
                if self._tls is not None:
                    self._start_tls(connection, self._tls)
                    await asyncio.sleep(0)  # let other tasks run between many new connections
                    continue
                transport, _ = await loop.connect_accepted_socket(self._preauth, connection)
            except OSError:
                connection.close()
                continue
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

    def _preauth(self) -> PreAuthProtocol:
        return PreAuthProtocol(self._check_preauth, self._pass_to_http, self._unauthenticated.remove)

    def _check_preauth(self, transport: asyncio.Transport, text: str, origin: str | None) -> Rejected | None:
        if not self._serves_agents:
            return None  # HTTP answers that the path is not found
        return self._authentication.pre_authenticate(peer_host(transport), text, origin)

    def _pass_to_http(self, transport: asyncio.Transport, received: bytes, pre_authenticated: bool) -> None:
        """HTTP takes over the connection, which stays unauthenticated."""
        assert self._runner is not None and self._runner.server is not None
        if pre_authenticated:
            self._unauthenticated.mark_pre_authenticated(transport)
        enable_keepalive(transport.get_extra_info("socket"))
        handler = self._runner.server()
        transport.set_protocol(handler)
        handler.connection_made(transport)
        handler.data_received(received)

    # agents -----------------------------------------------------------------------------------------------------------

    async def _serve_agent(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        if transport is None:
            return web.Response()  # already disconnected
        host = peer_host(transport)
        if not self._unauthenticated.use_pre_authentication(transport):
            return self._bad_request(host, f"{AGENT_PATH} must be the first request of a connection")
        ws = web.WebSocketResponse(timeout=FLUSH_TIMEOUT_S, compress=False, max_msg_size=MAX_FRAME_BYTES + 1)
        if not _can_upgrade(ws, request):
            return self._bad_request(host, f"{AGENT_PATH} accepts WebSocket requests only")
        try:
            await ws.prepare(request)
            if node := await self._authentication.handshake(ws, host):
                self._unauthenticated.remove(transport)
                await self._exchange_messages(ws, node, transport)
        except ProtocolError as error:
            self._rejections.log(host, str(error), kind="protocol")
        except ConnectionError:
            pass  # the agent reconnects if it still runs
        if not ws.prepared:
            return _plain(400, "disconnected")
        await ws.close()
        return ws

    def _bad_request(self, host: str, why: str) -> web.Response:
        self._rejections.log(host, why, kind="http")
        return _plain(400, why)

    async def _exchange_messages(self, ws: web.WebSocketResponse, node: str, transport: asyncio.BaseTransport) -> None:
        outbox = Outbox(ws, partial(abort, transport))
        self._outboxes.add(outbox)
        session = self._coordinator.attach(node, send=outbox.put, close=outbox.finish)
        writer = asyncio.create_task(outbox.run(), name=f"ripstop-to-{node}")
        try:
            while (text := await receive(ws)) is not None:
                message = decode(text, FROM_AGENT)
                match message:
                    case Heartbeat():
                        outbox.put(message)
                    case Join(node=joining) if joining.id != node:
                        raise ProtocolError(f"node {node} must join with its own id, not {joining.id[:MAX_NAME]!r}")
                session.receive(message)
        finally:
            session.detach(returning=ws.close_code == CLOSE_CODE_RETURNING)
            outbox.finish()
            self._outboxes.discard(outbox)
            await writer


async def _healthz(_: web.Request) -> web.Response:
    return _plain(200, "ok")


async def _not_found(_: web.Request) -> web.Response:
    return _plain(404, "not found")


def _plain(status: int, text: str) -> web.Response:
    response = web.Response(status=status, text=text)
    response.force_close()
    return response


def _can_upgrade(ws: web.WebSocketResponse, request: web.Request) -> bool:
    try:
        return bool(ws.can_prepare(request))
    except ValueError:  # a key that is not ASCII
        return False
