"""The coordinator's port: agents at `/agent` (WebSockets), operators at `/api`, Prometheus at `/metrics`, `/healthz`.

A connection is a stranger until it has proven the job's secret: it has `HANDSHAKE` seconds for it, and as many for TLS
before; when there are too many strangers the oldest makes room, and most get no further than the `PreAuthProtocol`.
Whatever
a stranger sends, the job does not notice; operators do, once per address and kind.  Nothing is decided here: a known
agent's messages go to the `Coordinator`.

Operators show a token that is made of the secret.  A job without one is steered over the network only where TLS asks
everybody for a certificate; else through the socket on its coordinator's machine (`api/job_socket.py`).

Pages in an operator's browser are strangers, too.  One cannot become an agent: a request with an `Origin` is refused.
One that got its own name to mean this address (DNS rebinding) reads nothing: what is open to anybody is told only under
a name of this coordinator or an IP address, and strangers are not told the run id.
"""

import asyncio
import contextlib
import logging
import resource
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address

from aiohttp import web
from aiohttp.http import HttpProcessingError

from ripstop.api.http_api import MAX_BODY, Api
from ripstop.api.job_interface import RequestRefused
from ripstop.coordinator.service import Coordinator
from ripstop.model.errors import ProtocolError
from ripstop.protocol import secret
from ripstop.protocol.codec import MAX_FRAME_BYTES, decode, encode
from ripstop.protocol.limits import MAX_NAME, is_valid_name
from ripstop.protocol.messages import FROM_AGENT, Challenge, Heartbeat, Hello, Join, Rejected, Welcome
from ripstop.transport.keepalive import tune
from ripstop.transport.outbox import FLUSH, HANDSHAKE, PATH, RETURNING, Outbox, receive
from ripstop.transport.preauth import PreAuthProtocol
from ripstop.transport.tls import describe, speaks_tls

log = logging.getLogger("ripstop.coordinator")

MAX_STRANGERS = 1024  # connections not yet known, beside one for each node; fewer where descriptors are few
OWN_DESCRIPTORS = 512  # for what else this process does
FAIR = 0.5  # seconds that even a crowd leaves each of them
MAX_COMPLAINTS = 1024  # lines about strangers, in a job's life
MAX_KNOCKS = 4096  # that are remembered, so that they are not heard twice
NO_DESCRIPTORS = 0.1  # seconds until accepting is tried again
NO_TLS = b"HTTP/1.1 426 Upgrade Required\r\nUpgrade: TLS/1.3\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
SIGNS_OF_TLS = ("HTTPS", "\\x16\\x03")  # in aiohttp's complaint about a TLS client, by its version

Stranger = asyncio.BaseTransport | asyncio.Task[None]  # a connection that has proven nothing, or its TLS handshake


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
        nodes: int = 1,
        tls: ssl.SSLContext | None = None,
        agents: bool = True,
        name: str = "",
    ) -> None:
        self._listening = listening
        self._coordinator = coordinator
        self._run_id = run_id
        self._token = token
        self._lease = lease
        self._tls = tls
        self._agents = agents  # whether they come here, too
        self._names = (name.lower(), socket.gethostname().lower(), "localhost")  # the first: the endpoint's
        self._strangers: dict[Stranger, asyncio.TimerHandle] = {}  # the oldest first
        self._most_strangers = _most_strangers(nodes)
        self._room = asyncio.Event()
        self._outboxes: set[Outbox] = set()
        self._full_name: asyncio.Task[str] | None = None
        self._complaints: set[tuple[str, str]] = set()
        self._knocks: dict[str, None] = {}  # nonces of good ones, the oldest first
        self._knocked: set[asyncio.BaseTransport] = set()  # connections with a good one, that may become agents
        self._runner: web.AppRunner | None = None
        self._accepting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to accept connections."""
        app = web.Application(client_max_size=MAX_BODY)
        if self._agents:
            app.router.add_get(PATH, self._agent)
        Api(lambda: self._coordinator, self._admit, self._admit_reader).mount(app)
        app.router.add_get("/healthz", _healthz)
        app.router.add_route("*", "/{path:.*}", _nothing_here)
        logger = logging.Logger("ripstop.coordinator.http", logging.DEBUG)  # ours alone: it never reaches the console
        logger.addHandler(_HttpErrors(partial(self._complain, kind="http"), self._admit_defect))
        self._runner = web.AppRunner(
            app, access_log=None, logger=logger, handle_signals=False, shutdown_timeout=2 * FLUSH
        )
        await self._runner.setup()
        self._listening.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(), name="ripstop-accept")

    async def close(self) -> None:
        """Accept nobody more, let agents take what was sent to them, and end all connections."""
        if self._accepting is not None:
            self._accepting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._accepting
        self._listening.close()
        for stranger in list(self._strangers):
            self._turn_away(stranger)
        for outbox in self._outboxes:
            outbox.finish()
        if self._runner is not None:
            await self._runner.cleanup()

    # strangers --------------------------------------------------------------------------------------------------------

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._make_room()
            try:
                connection, _ = await loop.sock_accept(self._listening)
            except ConnectionError:
                continue  # it went away before we looked
            except OSError as error:
                self._complain("this machine", f"cannot accept connections: {error.strerror}", kind="accept")
                await asyncio.sleep(NO_DESCRIPTORS)
                continue
            try:
                if self._tls is not None:
                    self._encrypt_soon(connection, self._tls)
                    await asyncio.sleep(0)  # a crowd is not let in at one go: this loop has more to do
                    continue
                transport, _ = await loop.connect_accepted_socket(self._doorstep, connection)
            except OSError:
                connection.close()
                continue
            self._meet(transport)

    def _encrypt_soon(self, connection: socket.socket, tls: ssl.SSLContext) -> None:
        """A TLS handshake takes its time, so each has a task of its own, which is a stranger until it is done."""
        host = str(connection.getpeername()[0])
        task = asyncio.create_task(self._encrypt(connection, host, tls), name=host)
        self._meet(task)
        task.add_done_callback(self._part)

    async def _encrypt(self, connection: socket.socket, host: str, tls: ssl.SSLContext) -> None:
        taken = False
        try:
            if await speaks_tls(connection):
                taken = True
                loop = asyncio.get_running_loop()
                transport, _ = await loop.connect_accepted_socket(
                    self._doorstep, connection, ssl=tls, ssl_shutdown_timeout=FLUSH
                )
                self._meet(transport)
            else:
                self._complain(host, "it does not speak TLS, as this coordinator does", kind="tls")
                connection.send(NO_TLS)
        except ssl.SSLError as error:
            self._complain(host, describe(error), kind="tls")
        except OSError:
            self._complain(host, "it broke off the TLS handshake; if it is a node, its log says why", kind="tls")
        finally:
            if not taken:
                connection.close()

    def _doorstep(self) -> PreAuthProtocol:
        return PreAuthProtocol(self._answer_knock, self._let_in, self._part)

    def _let_in(self, transport: asyncio.Transport, heard: bytes, knocked: bool) -> None:
        """On to HTTP; a stranger it remains."""
        assert self._runner is not None and self._runner.server is not None
        if knocked:
            self._knocked.add(transport)
        tune(transport.get_extra_info("socket"))
        handler = self._runner.server()
        transport.set_protocol(handler)
        handler.connection_made(transport)
        handler.data_received(heard)

    def _meet(self, stranger: Stranger) -> None:
        timer = asyncio.get_running_loop().call_later(HANDSHAKE, self._lose_patience, stranger)
        self._strangers[stranger] = timer

    def _part(self, stranger: Stranger) -> None:
        """No stranger any more: it is known, or gone."""
        self._knocked.discard(stranger)
        if timer := self._strangers.pop(stranger, None):
            timer.cancel()
            self._room.set()

    async def _make_room(self) -> None:
        """Wait until one more stranger may come.  The oldest has to go, but everybody gets a fair time first.

        So agents that come all at once wait in the kernel's queue for each other, and do not push each other out.
        """
        while len(self._strangers) >= self._most_strangers:
            oldest, timer = next(iter(self._strangers.items()))
            if _has_left(oldest):  # over TLS, one may be long in going
                self._turn_away(oldest)
                continue
            patience = timer.when() - HANDSHAKE + FAIR - asyncio.get_running_loop().time()
            if patience > 0:
                self._room.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._room.wait(), patience)
                continue
            self._complain(_host(oldest), f"more than {self._most_strangers} unknown connections", kind="crowd")
            self._turn_away(oldest)

    def _lose_patience(self, stranger: Stranger) -> None:
        if not _has_left(stranger):
            self._complain(_host(stranger), f"no proof of the job's secret in {HANDSHAKE:g} s", kind="silence")
        self._turn_away(stranger)

    def _turn_away(self, stranger: Stranger) -> None:
        self._part(stranger)
        if isinstance(stranger, asyncio.Task):
            stranger.cancel()
        else:
            _abort(stranger)

    def _complain(self, host: str, why: str, *, kind: str) -> None:
        """One line for operators: once per address and kind, however often it happens."""
        if self._is_new(host, kind):
            log.warning("refused peer=%s why=%r (said once)", host, why)

    def _admit_defect(self, text: str, error: BaseException | None) -> None:
        """An error of ours: once per place, for a stranger may know how to bring it about."""
        if self._is_new(_place(error), "defect"):
            log.error("%s (said once)", text, exc_info=error)

    def _is_new(self, what: str, kind: str) -> bool:
        if (what, kind) in self._complaints or len(self._complaints) >= MAX_COMPLAINTS:
            return False
        self._complaints.add((what, kind))
        return True

    # operators --------------------------------------------------------------------------------------------------------

    def _admit(self, request: web.Request) -> str:
        """Who asks for something of the API; `RequestRefused` for a stranger, and the connection closes."""
        transport = request.transport
        if transport is None:
            raise RequestRefused(401, "this connection is gone")
        if self._token:
            self._check_token(request, _host(transport))
        elif self._tls is None or self._tls.verify_mode is not ssl.CERT_REQUIRED:
            raise RequestRefused(
                403,
                "a job without a secret is not steered over the network; start it with RIPSTOP_TOKEN, "
                "or ask as its user on its coordinator's machine",
            )
        self._part(transport)
        return _host(transport)

    def _check_token(self, request: web.Request, host: str) -> None:
        scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not shown:
            raise RequestRefused(
                401, "this job is steered with its token; send Authorization: Bearer and `ripstop token`'s"
            )
        if not secret.proofs_match(shown.strip(), secret.api_token(self._token, self._run_id)):
            self._complain(host, "a wrong token for the API", kind="token")
            raise RequestRefused(401, "the token is not this job's; set its RIPSTOP_TOKEN, and give its id with --job")

    async def _admit_reader(self, request: web.Request) -> str:
        """Numbers are for whoever may steer, and for anybody where there is no secret, but a page in a browser.

        A page cannot show a token, has no certificate for its own name, and asks for its own name.
        """
        if self._token:
            return self._admit(request)
        if self._tls is None and not await self._is_called(name := _named(request)):
            raise RequestRefused(
                403,
                f"{name[:80]!r} is no name of this coordinator; ask for its IP address or its --rdzv-endpoint, "
                "or start the job with RIPSTOP_TOKEN and show its token",
            )
        return "anybody"

    async def _is_called(self, name: str) -> bool:
        """An IP address cannot be rebound, so any will do, and who names nobody is no browser."""
        if not name or name in self._names:
            return True
        with contextlib.suppress(ValueError):
            return bool(ip_address(name))
        if self._full_name is None:  # it may have to be asked of a DNS server
            self._full_name = asyncio.create_task(asyncio.to_thread(socket.getfqdn), name="ripstop-full-name")
        return name == (await asyncio.shield(self._full_name)).lower()

    # agents -----------------------------------------------------------------------------------------------------------

    async def _agent(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        if transport is None:
            return web.Response()  # it has left already
        host = _host(transport)
        if transport not in self._knocked:  # it asked for something else first
            self._complain(host, f"{PATH} is the first that an agent asks for", kind="http")
            return _plain(400, f"{PATH} is the first that an agent asks for")
        self._knocked.discard(transport)
        ws = web.WebSocketResponse(timeout=FLUSH, compress=False, max_msg_size=MAX_FRAME_BYTES + 1)
        if not _can_upgrade(ws, request):
            self._complain(host, f"{PATH} speaks WebSocket only", kind="http")
            return _plain(400, f"{PATH} speaks WebSocket only")
        try:
            await ws.prepare(request)
            if node := await self._greet(ws, host):
                self._part(transport)
                await self._talk(ws, node, transport)
        except ProtocolError as error:
            self._complain(host, str(error), kind="protocol")
        except ConnectionError:
            pass  # it left in the middle of something
        if not ws.prepared:
            return _plain(400, "gone")  # before it was answered
        await ws.close()
        return ws

    def _answer_knock(self, transport: asyncio.Transport, text: str, origin: str | None) -> Rejected | None:
        """Why an agent that knocks is not let in; None: it is, and its knock is used up."""
        if not self._agents:
            return None  # HTTP says that they are not served here
        host = _host(transport)
        if origin is not None:
            self._complain(host, f"a web page, of {origin[:MAX_NAME]}, asked to join the job", kind="page")
            return Rejected("a web page cannot join a job; start a node with ripstop run")
        try:
            hello = decode(text or "{}", (Hello,))  # who has no such header is of another version, or no agent
        except ProtocolError as error:
            self._complain(host, str(error), kind="protocol")
            return Rejected(str(error))
        if rejected := self._objection_to_knock(hello):
            self._complain_of(host, hello, rejected)
            return rejected
        self._use_up(hello.nonce)
        return None

    def _objection_to_knock(self, hello: Hello) -> Rejected | None:
        if rejected := self._objection(hello, ""):
            return rejected
        if hello.nonce in self._knocks:
            return Rejected("a knock is used once, and this one was; connect again with a new nonce", final=False)
        return None

    def _use_up(self, nonce: str) -> None:
        self._knocks[nonce] = None
        if len(self._knocks) > MAX_KNOCKS:
            del self._knocks[next(iter(self._knocks))]

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
        if rejected := self._objection(hello, challenge):
            await ws.send_str(encode(rejected))
            self._complain_of(host, hello, rejected)
            return None
        exchange = secret.Exchange(hello.run_id, hello.node, challenge, hello.nonce)
        await ws.send_str(encode(Welcome(exchange.coordinator_proof(self._token), self._lease, time.time())))
        return hello.node

    def _complain_of(self, host: str, hello: Hello, rejected: Rejected) -> None:
        self._complain(host, rejected.why, kind="secret" if hello.run_id == self._run_id else "job")

    def _objection(self, hello: Hello, challenge: str) -> Rejected | None:
        if not all(text and is_valid_name(text) for text in (hello.run_id, hello.node, hello.nonce)):
            return Rejected(f"a run id, a node id and a nonce are text of 1 to {MAX_NAME} characters, these are not")
        exchange = secret.Exchange(hello.run_id, hello.node, challenge, hello.nonce)
        proven = secret.proofs_match(hello.proof, exchange.agent_proof(self._token))
        if hello.run_id != self._run_id:
            # A stranger is not told what this job is called.
            name = f"job {self._run_id!r}" if proven and self._token else "another job"
            # A job that is over leaves the port to the next one in a moment.
            return Rejected(
                f"this is the coordinator of {name}, not of {hello.run_id!r}; "
                "use another --rdzv-endpoint, or the same --rdzv-id on every node",
                final=not self._coordinator.ended.done(),
            )
        if not proven:
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
                    case Heartbeat():
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


def _named(request: web.Request) -> str:
    """The host that a request is for, without its port."""
    host = request.headers.get("Host", "").strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def _can_upgrade(ws: web.WebSocketResponse, request: web.Request) -> bool:
    try:
        return bool(ws.can_prepare(request))
    except ValueError:  # a key that is not even ASCII
        return False


def _host(stranger: Stranger) -> str:
    if isinstance(stranger, asyncio.Task):
        return stranger.get_name()
    peer = stranger.get_extra_info("peername")
    return str(peer[0]) if peer else "unknown"


def _has_left(stranger: Stranger) -> bool:
    return isinstance(stranger, asyncio.BaseTransport) and stranger.is_closing()


def _place(error: BaseException | None) -> str:
    """Where an error was raised."""
    trace = error.__traceback__ if error else None
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{type(error).__name__} {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "nowhere"


def _most_strangers(nodes: int) -> int:
    """Such a number that strangers never take the descriptors of a job of so many nodes.

    A job too large for the descriptors that this process has gets more, if it may; others leave the limit as it is, for
    workers inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * nodes + MAX_STRANGERS + OWN_DESCRIPTORS
    if soft == resource.RLIM_INFINITY:
        soft = wanted
    if soft < 2 * nodes + OWN_DESCRIPTORS:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(MAX_STRANGERS + nodes, soft - nodes - OWN_DESCRIPTORS))


def _abort(transport: asyncio.BaseTransport) -> None:
    assert isinstance(transport, asyncio.Transport)
    transport.abort()


class _HttpErrors(logging.Handler):
    """Where aiohttp's own log goes: peers that do not speak HTTP are complaints, anything else is our defect."""

    def __init__(self, complain: partial[None], defect: Callable[[str, BaseException | None], None]) -> None:
        super().__init__()
        self._complain = complain
        self._defect = defect

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        host = record.args[0] if isinstance(record.args, tuple) and record.args else "unknown"
        if isinstance(error, HttpProcessingError):
            why = "it speaks TLS; give this coordinator tls_cert and tls_key, or take tls_… from the node's --rdzv-conf"
            if not any(sign in error.message for sign in SIGNS_OF_TLS):
                why = f"not HTTP: {error.message[:200]}"
            self._complain(str(host), why)
        elif isinstance(error, web.RequestPayloadError):
            self._complain(str(host), f"not HTTP: {str(error)[:200]}")
        elif isinstance(error, ConnectionError):
            pass  # it left in the middle of something
        elif record.levelno >= logging.ERROR:
            self._defect(record.getMessage(), error)
