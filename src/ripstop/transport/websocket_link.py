"""The agent's link to a coordinator on another machine: one WebSocket, which reconnects when it breaks.

It keeps the rules of `link.py`, and these:

1.  The agent sends heartbeats, and asks for answers to all or some of them (`protocol/pacing.py`).  It reconnects if
    the coordinator sends nothing for too long: for a lease, if all are answered.  If only some are answered, the kernel
    closes the connection when the coordinator's machine has not acknowledged a heartbeat for a lease.  An agent whose
    own process was suspended meanwhile asks for an answer and waits for one heartbeat interval.
2.  The coordinator must prove the job's secret before the agent acts on a message.  With TLS, its certificate must be
    valid for the endpoint's name.
3.  A rejection is final.  But a node that was connected once retries, because an unauthenticated peer may now have the
    coordinator's address.
4.  The agent follows no HTTP redirect: the server that sends it has proven nothing.
5.  A lost connection is replaced at once.  If that fails, the coordinator is probably gone, and all nodes of the job
    reconnect: in a large job they spread their tries.
"""

import asyncio
import contextlib
import random
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from enum import Enum
from functools import partial
from http import HTTPStatus
from typing import TypeVar

import aiohttp
from yarl import URL

from ripstop.model.errors import ProtocolError
from ripstop.model.round import Address
from ripstop.protocol import messages, secret
from ripstop.protocol.codec import MAX_FRAME_BYTES, VersionMismatch, decode, encode
from ripstop.protocol.messages import FROM_COORDINATOR, FromAgent, FromCoordinator, Heartbeat, Hello, Rejected
from ripstop.protocol.pacing import ask_after_s, heartbeat_interval_s, reconnect_spread_s, silence_timeout_s
from ripstop.system.network import describe_network_error, enable_keepalive, set_acknowledgement_timeout
from ripstop.transport import websocket
from ripstop.transport.link import Listener
from ripstop.transport.resolver import Resolver
from ripstop.transport.tls import describe_tls_error

FIRST_RETRY_DELAY_S = 0.05  # doubled up to a third of the lease
MIN_CONNECT_TIMEOUT_S = 0.5
SUSPENDED_SHARE = 0.1  # of the timeout for silence: a timer that is later than this means that this process did not run
MAX_ABORTED_HANDSHAKES = 4  # in a row; over TLS, they then count as a rejection

Expected = TypeVar("Expected", messages.Challenge, messages.Welcome)


class ConnectFailure(Enum):
    """Why an attempt to connect failed."""

    REFUSED = "refused"  # nobody listens at the address
    CLOSED = "closed"  # the peer closed the connection before the handshake: it may be ending
    OTHER = "other"


class _FinalRejection(Exception):
    """The coordinator rejects this node, and a retry does not help."""


class _Retry(Exception):
    """This connection failed or ended; connect again."""


class WebSocketLink:
    """A `Link` over the network; create it inside a running event loop."""

    def __init__(
        self,
        endpoint: Address,
        *,
        run_id: str,
        node: str,
        token: str,
        lease: float,
        max_nodes: int,
        tls: ssl.SSLContext | None = None,
        handshake_timeout: float = websocket.HANDSHAKE_TIMEOUT_S,
        listed_address: str = "",
        is_elected: bool = False,
        on_failed: Callable[[ConnectFailure], None] = lambda _failure: None,
    ) -> None:
        """`on_failed` is called after each attempt before the first connection that fails.

        `listed_address` is this endpoint's address in a job with several addresses; the proofs contain it.
        `is_elected`: another coordinator can replace this one.
        """
        self._listed_address = listed_address
        self._loop = asyncio.get_running_loop()
        self._endpoint = endpoint
        self._run_id = run_id
        self._node = node
        self._token = token
        self._lease = lease  # after the first handshake, the coordinator's
        self._max_nodes = max_nodes
        self._is_elected = is_elected
        self._listener: Listener | None = None
        self._task: asyncio.Task[None] | None = None
        self._outbox: websocket.WebSocketOutbox | None = None  # while connected
        self.local_host: str | None = None
        self._clock_offset: float | None = None  # this machine's monotonic clock minus the coordinator's time
        self._tls = tls
        self._aborted_handshakes = 0  # in a row
        self._was_connected = False
        self._on_failed = on_failed
        self._handshake_timeout = handshake_timeout
        self.is_lost_by_silence = False  # the last connection ended because the coordinator sent nothing
        self._disconnected_at = time.time()
        self._tries = 0
        self._last_error = "not tried yet"

    @property
    def skew(self) -> float | None:
        if self._clock_offset is None:
            return None
        return self._clock_offset + (time.time() - time.monotonic())  # includes later changes of this node's clock

    @property
    def disconnect_reason(self) -> str:
        if self._outbox is not None:
            return ""
        since = time.strftime("%H:%M:%S", time.localtime(self._disconnected_at))
        tries = "1 try" if self._tries == 1 else f"{self._tries} tries"
        return f"{self._endpoint}: {self._last_error}, since {since}, {tries}"

    def open(self, listener: Listener) -> None:
        self._listener = listener
        self._task = asyncio.create_task(self._run(), name="ripstop-link")

    def send(self, message: FromAgent) -> None:
        if self._outbox is not None:
            self._outbox.put(message)

    def drop(self) -> None:
        if self._outbox is not None:
            self._outbox.abort()

    async def close(self) -> None:
        self._listener = None
        if self._task is None:
            return
        if self._outbox is not None:
            self._outbox.finish()
            await asyncio.wait([self._task], timeout=2 * websocket.FLUSH_TIMEOUT_S)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def _notify(self, call: Callable[[Listener], None]) -> None:
        """Call the listener in a later turn of the event loop, so that the link does not handle its errors."""
        self._loop.call_soon(lambda: call(self._listener) if self._listener is not None else None)

    # connecting -------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        delay = FIRST_RETRY_DELAY_S
        connector = aiohttp.TCPConnector(resolver=Resolver(), use_dns_cache=False, force_close=True)
        redirects = aiohttp.TraceConfig()
        redirects.on_request_redirect.append(_reject_link_redirect)
        # The address of a lost machine or pod does not answer, while the name may already have a new address.  A short
        # timeout looks the name up again soon.  With TLS, it includes the TLS handshake.
        connect_timeout = websocket.HANDSHAKE_TIMEOUT_S if self._tls else max(self._lease / 3, MIN_CONNECT_TIMEOUT_S)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, trace_configs=[redirects]) as http:
            while True:
                began = self._loop.time()
                self._tries += 1
                try:
                    await self._connect_once(http)
                except _FinalRejection as error:
                    self._last_error = str(error)
                    self._notify(lambda listener: listener.on_rejected(self._last_error))
                    return
                except (aiohttp.ClientError, OSError, ProtocolError, _Retry) as error:
                    self._last_error = _describe_websocket_link_error(error)
                    if not self._was_connected:
                        self._loop.call_soon(self._on_failed, _websocket_link_failure(error))
                if self._listener is None:
                    return
                if self._loop.time() - began > websocket.HANDSHAKE_TIMEOUT_S + self._lease:
                    delay = FIRST_RETRY_DELAY_S  # the last connection worked
                spread = reconnect_spread_s(self._max_nodes) if self._tries else 0.0  # rule 5
                await asyncio.sleep(delay * random.uniform(0.5, 1.0) + random.uniform(0.0, spread))
                delay = min(2 * delay, max(self._lease / 3, FIRST_RETRY_DELAY_S))

    async def _connect_once(self, http: aiohttp.ClientSession) -> None:
        """One connection, from its start to its end."""
        scheme = "wss" if self._tls else "ws"
        url = URL.build(scheme=scheme, host=self._endpoint.host, port=self._endpoint.port, path=websocket.AGENT_PATH)
        async with asyncio.timeout(self._handshake_timeout) as limit, contextlib.AsyncExitStack() as stack:
            ws = await self._connect(http, url)
            stack.push_async_callback(ws.close)
            connection = ws.get_extra_info("socket")
            enable_keepalive(connection)
            await self._handshake(ws)
            limit.reschedule(None)
            self.local_host = connection.getsockname()[0]
            await self._exchange_messages(ws, connection, limit)

    async def _connect(self, http: aiohttp.ClientSession, url: URL) -> aiohttp.ClientWebSocketResponse:
        """A WebSocket to a server with a valid certificate.  TLS errors are rejections: they do not go away."""
        timeout = aiohttp.ClientWSTimeout(ws_close=websocket.FLUSH_TIMEOUT_S)
        try:
            ws = await http.ws_connect(
                url,
                timeout=timeout,
                autoping=False,  # `receive_from_websocket` returns a Pong: it shows that the coordinator lives
                max_msg_size=MAX_FRAME_BYTES + 1,
                ssl=self._tls or True,
                headers={websocket.PREAUTH_HEADER: encode(self._hello(challenge=""))},
            )
        except aiohttp.ClientConnectorCertificateError as error:
            raise self._rejection(describe_tls_error(error.certificate_error), "is not trusted") from error
        except aiohttp.ClientConnectorSSLError as error:
            raise self._rejection(describe_tls_error(error.os_error), "cannot be used") from error
        except aiohttp.WSServerHandshakeError as error:
            if error.status != HTTPStatus.UPGRADE_REQUIRED:
                raise
            raise self._rejection("it requires TLS; add tls_ca=FILE to --rdzv-conf, as on the other nodes") from error
        except (aiohttp.ServerDisconnectedError, ConnectionError) as error:
            # Only the coordinator's log has the reason; it may also be shutting down.
            self._aborted_handshakes += 1
            if self._tls is None or self._aborted_handshakes < MAX_ABORTED_HANDSHAKES:
                raise
            raise self._rejection(
                "it disconnects after the TLS handshake; give this node a certificate that the coordinator's tls_ca "
                "has signed (tls_cert, tls_key), and see the coordinator's log"
            ) from error
        self._aborted_handshakes = 0
        return ws

    async def _handshake(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        try:
            challenge = await self._expect(ws, messages.Challenge)
            hello = self._hello(challenge.nonce)
            sent_at = time.monotonic()
            await ws.send_str(encode(hello))
            welcome = await self._expect(ws, messages.Welcome)
            received_at = time.monotonic()
        except VersionMismatch as error:
            raise self._rejection(str(error)) from error
        exchange = secret.SecretProofExchange(
            hello.run_id, hello.node, challenge.nonce, hello.nonce, self._listed_address
        )
        if not secret.proofs_match(welcome.proof, exchange.coordinator_proof(self._token)):
            raise self._rejection("it does not have the job's secret; set the same RIPSTOP_TOKEN on every node")
        if not 0 < welcome.lease < 86400:
            raise ProtocolError(f"a lease is between 0 s and a day, received {welcome.lease}")
        self._lease = welcome.lease
        self._clock_offset = (sent_at + received_at) / 2 - welcome.time

    def _hello(self, challenge: str) -> Hello:
        exchange = secret.SecretProofExchange(
            self._run_id, self._node, challenge, secrets.token_hex(16), self._listed_address
        )
        return Hello(self._run_id, self._node, exchange.agent_nonce, exchange.agent_proof(self._token))

    async def _expect(self, ws: aiohttp.ClientWebSocketResponse, kind: type[Expected]) -> Expected:
        """The next message of the handshake."""
        text = await websocket.receive_from_websocket(ws)
        if text is None:
            raise _Retry("the connection was closed during the handshake")
        kinds: tuple[type[Expected | Rejected], ...] = (kind, Rejected)
        message = decode(text, kinds)
        if isinstance(message, Rejected):
            raise self._rejection(message.why) if message.final else _Retry(message.why)
        return message

    def _rejection(self, why: str, verb: str = "rejected this node") -> _FinalRejection | _Retry:
        """The error for a rejection by a peer that has not proven the secret (rule 3)."""
        if self._was_connected:
            return _Retry(why)
        return _FinalRejection(f"the coordinator at {self._endpoint} {verb}: {why}")

    # connected --------------------------------------------------------------------------------------------------------

    async def _exchange_messages(
        self, ws: aiohttp.ClientWebSocketResponse, connection: socket.socket, limit: asyncio.Timeout
    ) -> None:
        silence_timeout = silence_timeout_s(self._lease, self._max_nodes, is_elected=self._is_elected)
        if silence_timeout > self._lease:
            set_acknowledgement_timeout(connection, self._lease)
        self._outbox = websocket.WebSocketOutbox(ws, partial(_shut_down_websocket_link, connection))
        writer = asyncio.create_task(self._outbox.run(), name="ripstop-to-coordinator")
        heartbeats = _WebSocketLinkHeartbeats(
            silence_timeout,
            heartbeat_interval_s(self._lease, self._max_nodes),
            ask_after_s(self._lease, self._max_nodes, is_elected=self._is_elected),
            send=lambda wants_answer: self.send(Heartbeat(wants_answer)),
            on_expired=lambda: limit.reschedule(self._loop.time()),
        )
        self._was_connected = True
        self._notify(lambda listener: listener.on_connected())
        why = "the connection broke"
        try:
            while (text := await websocket.receive_from_websocket(ws)) is not None:
                heartbeats.on_received()
                if text:
                    self._on_message(decode(text, FROM_COORDINATOR))
            if ws.close_code != aiohttp.WSCloseCode.ABNORMAL_CLOSURE:
                why = "the coordinator closed the connection"
        except asyncio.CancelledError:
            if not heartbeats.expired:
                raise
            self.is_lost_by_silence = True
            why = f"the coordinator sent nothing for {silence_timeout:g} s"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(websocket.FLUSH_TIMEOUT_S):
                    await ws.close(code=websocket.CLOSE_CODE_RETURNING)
        except (OSError, ProtocolError) as error:
            why = _describe_websocket_link_error(error)
        finally:
            heartbeats.stop()
            self._outbox = None
            self._disconnected_at, self._tries = time.time(), 0
            if self._listener is not None:
                writer.cancel()
            await asyncio.wait([writer])
            self._notify(lambda listener: listener.on_disconnected(why))
        raise _Retry(why)

    def _on_message(self, message: FromCoordinator) -> None:
        match message:
            case Heartbeat():
                pass
            case Rejected(why, final):
                raise _FinalRejection(why) if final else _Retry(why)
            case _:
                self._notify(lambda listener: listener.on_message(message))


class _WebSocketLinkHeartbeats:
    """Sends heartbeats, asks for answers after `ask_after` seconds of silence, and detects a silent coordinator."""

    def __init__(
        self,
        timeout: float,
        interval: float,
        ask_after: float,
        *,
        send: Callable[[bool], None],
        on_expired: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout = timeout
        self._interval = interval
        self._ask_after = ask_after
        self._send = send
        self._on_expired = on_expired
        self._received_at = self._loop.time()
        self._send_timer = self._loop.call_later(interval, self._on_send_timer)
        self._silence_timer = self._loop.call_later(timeout, self._on_silence_timer)
        self.expired = False

    def on_received(self) -> None:
        """The coordinator sent a message."""
        self._received_at = self._loop.time()

    def stop(self) -> None:
        self._send_timer.cancel()
        self._silence_timer.cancel()

    def _on_send_timer(self) -> None:
        self._send(self._loop.time() - self._received_at >= self._ask_after)
        self._send_timer = self._loop.call_later(self._interval, self._on_send_timer)

    def _on_silence_timer(self) -> None:
        now = self._loop.time()
        deadline = self._received_at + self._timeout
        if now - self._silence_timer.when() > SUSPENDED_SHARE * self._timeout:
            # This process was suspended, or got no CPU: messages may wait in the socket, or no heartbeat was sent.
            self._send(True)
            deadline = max(deadline, now + self._interval)
        if deadline > now:
            self._silence_timer = self._loop.call_at(deadline, self._on_silence_timer)
        else:
            self.expired = True
            self._on_expired()


async def _reject_link_redirect(
    _: aiohttp.ClientSession, __: object, redirect: aiohttp.TraceRequestRedirectParams
) -> None:
    redirect.response.close()
    raise _Retry(_websocket_link_http_error(redirect.response.status))


def _shut_down_websocket_link(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # already closed
        connection.shutdown(socket.SHUT_RDWR)


def _describe_websocket_link_error(error: BaseException) -> str:
    match error:
        case aiohttp.WSServerHandshakeError():
            return _websocket_link_http_error(error.status)
        case aiohttp.ConnectionTimeoutError():
            return "the address does not answer"
        case _:
            return describe_network_error(error, websocket.HANDSHAKE_TIMEOUT_S)


def _websocket_link_failure(error: BaseException) -> ConnectFailure:
    match error:
        case aiohttp.ClientConnectorError(os_error=ConnectionRefusedError()):
            return ConnectFailure.REFUSED
        case aiohttp.ServerDisconnectedError() | ConnectionResetError() | aiohttp.ClientOSError() | _Retry():
            return ConnectFailure.CLOSED
        case _:
            return ConnectFailure.OTHER


def _websocket_link_http_error(status: int) -> str:
    return f"answers HTTP {status}, so it is not a ripstop coordinator"
