"""The agent's link to a coordinator elsewhere: one WebSocket, sought again whenever it breaks.

It keeps the rules of `link.py`.  While linked it beats three times a lease, and a coordinator that says nothing for a
lease counts as gone, unless it was this process that was away.  A coordinator must prove that it knows the job's secret
before anything it says is acted on, and with TLS its certificate must be good for the endpoint's name.  Its refusal is
final, except that a node which was once welcome does not give up for the word of a stranger at the same address.
"""

import asyncio
import contextlib
import os
import random
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import aiohttp
from yarl import URL

from ripstop.model.errors import ProtocolError
from ripstop.model.round import Address
from ripstop.protocol import secret
from ripstop.protocol.codec import MAX_FRAME, VersionMismatch, decode, encode
from ripstop.protocol.messages import (
    FROM_COORDINATOR,
    Challenge,
    FromAgent,
    FromCoordinator,
    Heartbeat,
    Hello,
    Rejected,
    Welcome,
)
from ripstop.transport.keepalive import tune
from ripstop.transport.link import Listener
from ripstop.transport.outbox import FLUSH, HANDSHAKE, PATH, PREAUTH_HEADER, RETURNING, Outbox, receive
from ripstop.transport.resolver import Resolver
from ripstop.transport.tls import describe as describe_tls

FIRST_PAUSE = 0.05  # seconds before the second try; doubled up to a third of the lease
LEAST_CONNECT_TIMEOUT_S = 0.5
PATIENCE = 4  # handshakes that are broken off without a word, until it is taken for a refusal
NO_TLS = 426  # the HTTP status for a client without TLS where there is TLS

A = TypeVar("A", Challenge, Welcome)
CHALLENGE: tuple[type[Challenge | Rejected], ...] = (Challenge, Rejected)
ANSWER: tuple[type[Welcome | Rejected], ...] = (Welcome, Rejected)


class _Refused(Exception):
    """The coordinator does not take this node, and asking again will not help."""


class _TryAgain(Exception):
    """The coordinator does not take this node now."""


class WebSocketLink:
    """A `Link` over the network; to be made inside a running event loop."""

    def __init__(
        self,
        endpoint: Address,
        *,
        run_id: str,
        node: str,
        token: str,
        lease: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._endpoint = endpoint
        self._run_id = run_id
        self._node = node
        self._token = token
        self._lease = lease  # the coordinator's own, once it has told it
        self._listener: Listener | None = None
        self._task: asyncio.Task[None] | None = None
        self._outbox: Outbox | None = None  # while linked
        self._local_host: str | None = None
        self._distance: float | None = None  # this machine's uptime less the coordinator's clock
        self._tls = tls
        self._broken_off = 0  # TLS handshakes that ended without a word, in a row
        self._welcome = False  # has been linked at least once
        self._since = time.time()
        self._tries = 0
        self._last = "not tried yet"

    @property
    def local_host(self) -> str | None:
        return self._local_host

    @property
    def skew(self) -> float | None:
        if self._distance is None:
            return None
        return self._distance + (time.time() - time.monotonic())  # so a clock that was set since is noticed

    @property
    def trouble(self) -> str:
        if self._outbox is not None:
            return ""
        since = time.strftime("%H:%M:%S", time.localtime(self._since))
        return f"{self._endpoint}: {self._last}, since {since}, {self._tries} {'try' if self._tries == 1 else 'tries'}"

    def open(self, listener: Listener) -> None:
        self._listener = listener
        self._task = asyncio.create_task(self._run(), name="ripstop-link")

    def send(self, message: FromAgent) -> None:
        if self._outbox is not None:
            self._outbox.put(message)

    async def close(self) -> None:
        self._listener = None
        if self._task is None:
            return
        if self._outbox is not None:
            self._outbox.finish()
            await asyncio.wait([self._task], timeout=2 * FLUSH)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def _tell(self, call: Callable[[Listener], None]) -> None:
        """Call the listener in a turn of its own, so that its errors are never taken for the link's."""
        self._loop.call_soon(self._call, call)

    def _call(self, call: Callable[[Listener], None]) -> None:
        if self._listener is not None:
            call(self._listener)

    # linking ----------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        pause = FIRST_PAUSE
        connector = aiohttp.TCPConnector(resolver=Resolver(), use_dns_cache=False, force_close=True)
        redirects = aiohttp.TraceConfig()
        redirects.on_request_redirect.append(_refuse_redirect)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, trace_configs=[redirects]) as http:
            while True:
                began = self._loop.time()
                self._tries += 1
                try:
                    await self._link(http)
                except _Refused as error:
                    self._refuse(str(error))
                    return
                except (aiohttp.ClientError, OSError, ProtocolError, _TryAgain) as error:
                    self._last = _describe(error)
                if self._listener is None:
                    return
                if self._loop.time() - began > HANDSHAKE + self._lease:
                    pause = FIRST_PAUSE  # that one had held
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, max(self._lease / 3, FIRST_PAUSE))

    @property
    def _connect_timeout(self) -> float:
        """Seconds for a TCP connection.

        The address of a machine or pod that is gone does not answer, and meanwhile the name may have another address.
        So it is looked up again as often as a coordinator expects us to try.  With TLS the time includes its handshake.
        """
        return HANDSHAKE if self._tls else max(self._lease / 3, LEAST_CONNECT_TIMEOUT_S)

    def _refuse(self, why: str) -> None:
        self._last = why
        self._tell(lambda listener: listener.on_refused(why))

    async def _link(self, http: aiohttp.ClientSession) -> None:
        """One connection, from its making to its end."""
        url = URL.build(
            scheme="wss" if self._tls else "ws", host=self._endpoint.host, port=self._endpoint.port, path=PATH
        )
        async with asyncio.timeout(HANDSHAKE) as limit, contextlib.AsyncExitStack() as stack:
            ws = await self._connect(http, url)
            stack.push_async_callback(ws.close)
            connection = ws.get_extra_info("socket")
            tune(connection)
            await self._greet(ws)
            limit.reschedule(None)
            self._local_host = connection.getsockname()[0]
            await self._talk(ws, connection, limit)

    async def _connect(self, http: aiohttp.ClientSession, url: URL) -> aiohttp.ClientWebSocketResponse:
        """A WebSocket, to somebody whose certificate is good.  What TLS objects to will not mend itself."""
        timeout = aiohttp.ClientWSTimeout(ws_close=FLUSH)
        try:
            ws = await http.ws_connect(
                url,
                timeout=timeout,
                max_msg_size=MAX_FRAME + 1,
                ssl=self._tls or True,
                headers={PREAUTH_HEADER: encode(self._hello(challenge=""))},
            )
        except aiohttp.ClientConnectorCertificateError as error:
            raise self._no(describe_tls(error.certificate_error), "is not trusted") from error
        except aiohttp.ClientConnectorSSLError as error:
            raise self._no(describe_tls(error.os_error), "is not understood") from error
        except aiohttp.WSServerHandshakeError as error:
            if error.status != NO_TLS:
                raise
            raise self._no("it speaks TLS only; add tls_ca=FILE to --rdzv-conf, as on the other nodes") from error
        except (aiohttp.ServerDisconnectedError, ConnectionError) as error:
            # The reason is in the coordinator's log only, and it may also just be going down.
            self._broken_off += 1
            if self._tls is None or self._broken_off < PATIENCE:
                raise
            raise self._no(
                "it breaks off after the TLS handshake; give this node a certificate that the coordinator's tls_ca "
                "has signed (tls_cert, tls_key); its log says more"
            ) from error
        self._broken_off = 0
        return ws

    async def _greet(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        try:
            challenge = self._unless_rejected(decode(await _expect(ws), CHALLENGE))
            hello = self._hello(challenge.nonce)
            asked = time.monotonic()
            await ws.send_str(encode(hello))
            answer = self._unless_rejected(decode(await _expect(ws), ANSWER))
            heard = time.monotonic()
        except VersionMismatch as error:
            raise self._no(str(error)) from error
        exchange = secret.Exchange(hello.run_id, hello.node, challenge.nonce, hello.nonce)
        if not secret.same(answer.proof, exchange.by_coordinator(self._token)):
            raise self._no("it does not know the job's secret; set the same RIPSTOP_TOKEN on every node")
        if not 0 < answer.lease < 86400:
            raise ProtocolError(f"a lease is between 0 s and a day, received {answer.lease}")
        self._lease = answer.lease
        self._distance = (asked + heard) / 2 - answer.time

    def _hello(self, challenge: str) -> Hello:
        exchange = secret.Exchange(self._run_id, self._node, challenge, secrets.token_hex(16))
        return Hello(self._run_id, self._node, exchange.answer, exchange.by_agent(self._token))

    def _unless_rejected(self, answer: A | Rejected) -> A:
        if isinstance(answer, Rejected):
            raise self._no(answer.why) if answer.final else _TryAgain(answer.why)
        return answer

    def _no(self, why: str, how: str = "refused") -> _Refused | _TryAgain:
        """A refusal by somebody who has proven nothing ends this node only if it never was part of the job."""
        return _TryAgain(why) if self._welcome else _Refused(f"the coordinator at {self._endpoint} {how}: {why}")

    # linked -----------------------------------------------------------------------------------------------------------

    async def _talk(
        self, ws: aiohttp.ClientWebSocketResponse, connection: socket.socket, limit: asyncio.Timeout
    ) -> None:
        self._outbox = Outbox(ws.send_str, partial(_cut_off, connection))
        writer = asyncio.create_task(_write(ws, self._outbox), name="ripstop-to-coordinator")
        pulse = _Pulse(
            self._lease, beat=partial(self.send, Heartbeat()), give_up=lambda: limit.reschedule(self._loop.time())
        )
        self._welcome = True
        self._tell(lambda listener: listener.on_connected())
        why = "the coordinator closed the connection"
        try:
            while (text := await receive(ws)) is not None:
                pulse.heard()
                self._hear(decode(text, FROM_COORDINATOR))
        except asyncio.CancelledError:
            if not pulse.silent:
                raise
            why = f"nothing was heard for {self._lease:g} s"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH):
                    await ws.close(code=RETURNING)
        except (OSError, ProtocolError) as error:
            why = _describe(error)
        finally:
            pulse.stop()
            self._outbox = None
            self._since, self._tries = time.time(), 0
            if self._listener is not None:
                writer.cancel()
            await asyncio.wait([writer])
            self._tell(lambda listener: listener.on_disconnected(why))
        raise _TryAgain(why)

    def _hear(self, message: FromCoordinator) -> None:
        match message:
            case Heartbeat():
                pass
            case Rejected(why, final):
                raise _Refused(why) if final else _TryAgain(why)
            case _:
                self._tell(lambda listener: listener.on_message(message))


class _Pulse:
    """Beats three times a lease, and says so when nothing was heard for a whole one."""

    def __init__(self, lease: float, *, beat: Callable[[], None], give_up: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._lease = lease
        self._beat = beat
        self._give_up = give_up
        self._heard = self._loop.time()
        self._beating = self._loop.call_later(lease / 3, self._on_beat)
        self._watching = self._loop.call_later(lease, self._on_lease)
        self.silent = False

    def heard(self) -> None:
        """The coordinator lives."""
        self._heard = self._loop.time()

    def stop(self) -> None:
        """No more timers."""
        self._beating.cancel()
        self._watching.cancel()

    def _on_beat(self) -> None:
        self._beat()
        self._beating = self._loop.call_later(self._lease / 3, self._on_beat)

    def _on_lease(self) -> None:
        now = self._loop.time()
        due = self._heard + self._lease
        if now - self._watching.when() > self._lease / 2:
            due = now + self._lease  # it was us who were away: what came meanwhile is still to be read
        if due > now:
            self._watching = self._loop.call_at(due, self._on_lease)
        else:
            self.silent = True
            self._give_up()


async def _refuse_redirect(_: aiohttp.ClientSession, __: object, redirect: aiohttp.TraceRequestRedirectParams) -> None:
    """Whoever answers has proven nothing yet, and does not say where requests go."""
    redirect.response.close()
    raise _TryAgain(f"answers HTTP {redirect.response.status}, so it is no ripstop coordinator")


async def _write(ws: aiohttp.ClientWebSocketResponse, outbox: Outbox) -> None:
    await outbox.run()
    await ws.close()


async def _expect(ws: aiohttp.ClientWebSocketResponse) -> str:
    text = await receive(ws)
    if text is None:
        raise _TryAgain("the connection was closed in the handshake")
    return text


def _cut_off(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is gone already
        connection.shutdown(socket.SHUT_RDWR)


def _describe(error: BaseException) -> str:
    match error:
        case aiohttp.ClientConnectorDNSError() | socket.gaierror():
            return "the name has no address"
        case aiohttp.ClientConnectorError():
            number = error.os_error.errno
            return os.strerror(number).lower() if number else str(error.os_error)
        case aiohttp.WSServerHandshakeError():
            return f"answers HTTP {error.status}, so it is no ripstop coordinator"
        case aiohttp.ConnectionTimeoutError():
            return "the address does not answer"
        case TimeoutError():
            return f"no answer in {HANDSHAKE:g} s"
        case _:
            return str(error) or type(error).__name__
