"""The coordinator's port: agents' WebSockets at `/agent`, and `/healthz`.

A connection is a stranger until it has proven the job's secret: it has `HANDSHAKE` seconds, and when there are too many
strangers the oldest makes room.  Whatever a stranger sends, the job does not notice; operators do, once per address and
kind.  Nothing is decided here: a known agent's messages go to the `Coordinator`.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import ssl
from functools import partial

from aiohttp import web
from aiohttp.http import HttpProcessingError

from ripstop.errors import ProtocolError
from ripstop.rendezvous import secret
from ripstop.rendezvous.codec import MAX_FRAME, decode, encode
from ripstop.rendezvous.coordinator import Coordinator
from ripstop.rendezvous.messages import (
    FROM_AGENT,
    Beat,
    Challenge,
    Hello,
    Join,
    Rejected,
    Welcome,
)
from ripstop.rendezvous.tls import describe, speaks_tls
from ripstop.rendezvous.wire import FLUSH, HANDSHAKE, PATH, RETURNING, Outbox, receive, tune

log = logging.getLogger("ripstop.rendezvous")

MAX_STRANGERS = 1024  # connections not yet known
MAX_COMPLAINTS = 1024  # lines about strangers, in a job's life
MAX_NAME = 256  # characters of a run id, a node id, a nonce
NO_DESCRIPTORS = 0.1  # seconds until accepting is tried again
NO_TLS = b"HTTP/1.1 426 Upgrade Required\r\nUpgrade: TLS/1.3\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
SIGNS_OF_TLS = ("HTTPS", "\\x16\\x03")  # in aiohttp's complaint about a TLS client, by its version


class Server:
    """Serves one coordinator on a listening socket, which it owns from now on."""

    def __init__(
        self,
        listening: socket.socket,
        coordinator: Coordinator,
        *,
        run_id: str,
        token: str,
        lease: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._listening = listening
        self._coordinator = coordinator
        self._run_id = run_id
        self._token = token
        self._lease = lease
        self._tls = tls
        self._shaking: dict[asyncio.Task[None], None] = {}  # TLS handshakes under way, the oldest first
        self._strangers: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}  # the oldest first
        self._outboxes: set[Outbox] = set()
        self._complaints: set[tuple[str, str]] = set()
        self._runner: web.AppRunner | None = None
        self._accepting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to accept connections."""
        app = web.Application()
        app.router.add_get(PATH, self._agent)
        app.router.add_get("/healthz", _healthz)
        app.router.add_route("*", "/{path:.*}", _nothing_here)
        logger = logging.Logger("ripstop.rendezvous.http", logging.DEBUG)  # ours alone: it never reaches the console
        logger.addHandler(_HttpErrors(partial(self._complain, kind="http")))
        self._runner = web.AppRunner(
            app, access_log=None, logger=logger, handle_signals=False, shutdown_timeout=2 * FLUSH
        )
        await self._runner.setup()
        self._listening.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._runner), name="ripstop-accept")

    async def close(self) -> None:
        """Accept nobody more, let agents take what was sent to them, and end all connections."""
        if self._accepting is not None:
            self._accepting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._accepting
        self._listening.close()
        for shaking in self._shaking:
            shaking.cancel()
        for transport, timer in self._strangers.items():
            timer.cancel()
            _abort(transport)
        self._strangers.clear()
        for outbox in self._outboxes:
            outbox.finish()
        if self._runner is not None:
            await self._runner.cleanup()

    # strangers --------------------------------------------------------------------------------------------------------

    async def _accept(self, runner: web.AppRunner) -> None:
        loop = asyncio.get_running_loop()
        assert runner.server is not None
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listening)
            except ConnectionError:
                continue  # it went away before we looked
            except OSError as error:
                self._complain("this machine", f"cannot accept connections: {error.strerror}", kind="accept")
                await asyncio.sleep(NO_DESCRIPTORS)
                continue
            if self._tls is not None:
                self._shake_hands(connection, runner.server, self._tls)
                continue
            try:
                tune(connection)
                transport, _ = await loop.connect_accepted_socket(runner.server, connection)
            except OSError:
                connection.close()
                continue
            self._meet(transport)

    def _shake_hands(self, connection: socket.socket, protocol: web.Server, tls: ssl.SSLContext) -> None:
        """A TLS handshake takes its time, so each has a task of its own; the oldest makes room here too."""
        if len(self._shaking) >= MAX_STRANGERS:
            next(iter(self._shaking)).cancel()
        task = asyncio.create_task(self._encrypt(connection, protocol, tls), name="ripstop-tls")
        self._shaking[task] = None
        task.add_done_callback(self._shaking.pop)

    async def _encrypt(self, connection: socket.socket, protocol: web.Server, tls: ssl.SSLContext) -> None:
        host, taken = str(connection.getpeername()[0]), False
        try:
            tune(connection)
            async with asyncio.timeout(HANDSHAKE):
                if await speaks_tls(connection):
                    taken = True
                    loop = asyncio.get_running_loop()
                    transport, _ = await loop.connect_accepted_socket(protocol, connection, ssl=tls)
                    self._meet(transport)
                else:
                    self._complain(host, "it does not speak TLS, as this coordinator does", kind="tls")
                    connection.send(NO_TLS)
        except TimeoutError:
            self._complain(host, f"no TLS handshake in {HANDSHAKE:g} s", kind="silence")
        except ssl.SSLError as error:
            self._complain(host, describe(error), kind="tls")
        except OSError:
            self._complain(host, "it broke off the TLS handshake; if it is a node, its log says why", kind="tls")
        finally:
            if not taken:
                connection.close()

    def _meet(self, transport: asyncio.BaseTransport) -> None:
        if len(self._strangers) >= MAX_STRANGERS:
            self._make_room()
        timer = asyncio.get_running_loop().call_later(HANDSHAKE, self._lose_patience, transport)
        self._strangers[transport] = timer

    def _make_room(self) -> None:
        for transport in [t for t in self._strangers if t.is_closing()]:
            self._strangers.pop(transport).cancel()
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            self._strangers.pop(oldest).cancel()
            self._complain(_host(oldest), f"more than {MAX_STRANGERS} unknown connections", kind="crowd")
            _abort(oldest)

    def _lose_patience(self, transport: asyncio.BaseTransport) -> None:
        del self._strangers[transport]
        if not transport.is_closing():
            self._complain(_host(transport), f"no proof of the job's secret in {HANDSHAKE:g} s", kind="silence")
            _abort(transport)

    def _complain(self, host: str, why: str, *, kind: str) -> None:
        """One line for operators: once per address and kind, however often it happens."""
        if (host, kind) not in self._complaints and len(self._complaints) < MAX_COMPLAINTS:
            self._complaints.add((host, kind))
            log.warning("refused peer=%s why=%r (said once)", host, why)

    # agents -----------------------------------------------------------------------------------------------------------

    async def _agent(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        if transport is None:
            return web.Response()  # it has left already
        ws = web.WebSocketResponse(timeout=FLUSH, compress=False, max_msg_size=MAX_FRAME + 1)
        if not ws.can_prepare(request):
            self._complain(_host(transport), f"{PATH} speaks WebSocket only", kind="http")
            return _plain(400, f"{PATH} speaks WebSocket only")
        try:
            await ws.prepare(request)
            if node := await self._greet(ws, _host(transport)):
                if timer := self._strangers.pop(transport, None):
                    timer.cancel()
                await self._talk(ws, node, transport)
        except ProtocolError as error:
            self._complain(_host(transport), str(error), kind="protocol")
        except ConnectionError:
            pass  # it left in the middle of something
        await ws.close()
        return ws

    async def _greet(self, ws: web.WebSocketResponse, host: str) -> str | None:
        """The handshake: the node's id, or None when it was not let in."""
        challenge = secrets.token_hex(16)
        await ws.send_str(encode(Challenge(challenge)))
        text = await receive(ws)
        if text is None:
            return None
        try:
            hello = decode(text, (Hello,))
        except ProtocolError as error:
            await ws.send_str(encode(Rejected(str(error))))
            raise
        if rejected := self._examine(hello, challenge):
            await ws.send_str(encode(rejected))
            self._complain(host, rejected.why, kind="secret" if hello.run_id == self._run_id else "job")
            return None
        exchange = secret.Exchange(hello.run_id, hello.node, challenge, hello.nonce)
        await ws.send_str(encode(Welcome(exchange.by_coordinator(self._token), self._lease)))
        return hello.node

    def _examine(self, hello: Hello, challenge: str) -> Rejected | None:
        if not all(0 < len(text) <= MAX_NAME for text in (hello.run_id, hello.node, hello.nonce)):
            return Rejected(f"a run id, a node id and a nonce have 1 to {MAX_NAME} characters, these have not")
        if hello.run_id != self._run_id:
            # A job that is over leaves the port to the next one in a moment.
            return Rejected(
                f"this is the coordinator of job {self._run_id!r}, not of {hello.run_id!r}; "
                "use another --rdzv-endpoint, or the same --rdzv-id on every node",
                final=not self._coordinator.ended.done(),
            )
        exchange = secret.Exchange(hello.run_id, hello.node, challenge, hello.nonce)
        if not secret.same(hello.proof, exchange.by_agent(self._token)):
            return Rejected("the job secret does not match the coordinator's; set the same RIPSTOP_TOKEN on every node")
        return None

    async def _talk(self, ws: web.WebSocketResponse, node: str, transport: asyncio.BaseTransport) -> None:
        outbox = Outbox(ws.send_str, partial(_abort, transport))
        self._outboxes.add(outbox)
        session = self._coordinator.attach(node, send=outbox.put, close=outbox.finish)
        writer = asyncio.create_task(_write(ws, outbox), name=f"ripstop-to-{node}")
        try:
            while (text := await receive(ws)) is not None:
                message = decode(text, FROM_AGENT)
                match message:
                    case Beat():
                        outbox.put(message)
                    case Join(node=who) if who.id != node:
                        raise ProtocolError(f"node {node} joins as itself, not as {who.id[:MAX_NAME]!r}")
                session.receive(message)
        finally:
            session.detach(returning=ws.close_code == RETURNING)
            outbox.finish()
            self._outboxes.discard(outbox)
            await writer


async def _write(ws: web.WebSocketResponse, outbox: Outbox) -> None:
    await outbox.run()
    await ws.close()


async def _healthz(_: web.Request) -> web.Response:
    return _plain(200, "ok")


async def _nothing_here(_: web.Request) -> web.Response:
    return _plain(404, "not found")


def _plain(status: int, text: str) -> web.Response:
    response = web.Response(status=status, text=text)
    response.force_close()
    return response


def _host(transport: asyncio.BaseTransport) -> str:
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if peer else "unknown"


def _abort(transport: asyncio.BaseTransport) -> None:
    assert isinstance(transport, asyncio.Transport)
    transport.abort()


class _HttpErrors(logging.Handler):
    """Where aiohttp's own log goes: peers that do not speak HTTP are complaints, anything else is our defect."""

    def __init__(self, complain: partial[None]) -> None:
        super().__init__()
        self._complain = complain

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            host = record.args[0] if isinstance(record.args, tuple) and record.args else "unknown"
            why = "it speaks TLS; give this coordinator tls_cert and tls_key, or take tls_… from the node's --rdzv-conf"
            if not any(sign in error.message for sign in SIGNS_OF_TLS):
                why = f"not HTTP: {error.message[:200]}"
            self._complain(str(host), why)
        elif record.levelno >= logging.ERROR:
            log.error("%s", record.getMessage(), exc_info=record.exc_info)
