"""Serves a job's page at an address of this machine, and passes its requests on to the job.

Rules: (1) other users of this machine can reach the address, so a request for the API needs a random token; the page
gets it in the fragment of its address; (2) the browser's command line is readable by other users: it has an address
that works once and leads to the one with the token; (3) the job's own token and certificates never reach the browser;
(4) the job is looked for again if it cannot be reached, because its coordinator may have moved.
"""

import asyncio
import hmac
import secrets
import signal
import webbrowser
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress

import aiohttp
from aiohttp import web

from ripstop.api.http_api import MAX_BODY, error_response
from ripstop.api.job_interface import RequestRefused
from ripstop.api.local_jobs import socket_address
from ripstop.cli.job_client import RunningJob
from ripstop.model.errors import RipstopError, UsageError

FORWARDED_REQUEST_HEADERS = ("Accept", "Content-Type", "If-None-Match", "Last-Event-ID")
DROPPED_REPLY_HEADERS = ("Connection", "Content-Length", "Date", "Keep-Alive", "Server", "Transfer-Encoding")
CONNECT_TIMEOUT_S = 5.0
OPEN_PATH = "/open/{key}"


class PageProxy:
    def __init__(self, find_job: Callable[[], RunningJob]) -> None:
        self._find_job = find_job
        self._job: tuple[RunningJob, aiohttp.ClientSession, AsyncExitStack] | None = None
        self._finding = asyncio.Lock()
        self.token = secrets.token_urlsafe(32)
        self.key = secrets.token_urlsafe(16)  # of the address for the browser's command line; "" once it was used

    def mount(self, app: web.Application) -> None:
        app.router.add_get(OPEN_PATH, self._open)
        app.router.add_route("*", "/api/{path:.*}", self._pass_on_api)
        app.router.add_get("/{path:.*}", self._pass_on)

    async def close(self) -> None:
        if self._job is not None:
            _, _, stack = self._job
            self._job = None
            await stack.aclose()

    async def _open(self, request: web.Request) -> web.Response:
        """Rule 2."""
        if not self.key or not hmac.compare_digest(request.match_info["key"], self.key):
            return web.Response(status=404, text="This address was used already. Run `ripstop page` again.")
        self.key = ""
        return web.Response(status=303, headers={"Location": f"/#token={self.token}", "Cache-Control": "no-store"})

    async def _pass_on_api(self, request: web.Request) -> web.StreamResponse:
        """Rule 1."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.encode(), self.token.encode()):
            refused = RequestRefused(401, "the token is not this page's; run `ripstop page` again, and use its address")
            return error_response(refused, close=True)
        return await self._pass_on(request)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        try:
            job, session = await self._session()
            headers = {name: request.headers[name] for name in FORWARDED_REQUEST_HEADERS if name in request.headers}
            if job.token:
                headers["Authorization"] = f"Bearer {job.token}"
            body = await request.read()
            async with session.request(request.method, request.rel_url, headers=headers, data=body or None) as reply:
                return await _copy(reply, request)
        except (RipstopError, aiohttp.ClientError, OSError, TimeoutError) as error:
            await self.close()  # rule 4
            return error_response(RequestRefused(503, f"the job cannot be reached: {error}; the page tries again"))

    async def _session(self) -> tuple[RunningJob, aiohttp.ClientSession]:
        async with self._finding:
            if self._job is None:
                self._job = await self._connect(await asyncio.to_thread(self._find_job))
            return self._job[:2]

    @staticmethod
    async def _connect(job: RunningJob) -> tuple[RunningJob, aiohttp.ClientSession, AsyncExitStack]:
        stack = AsyncExitStack()
        connector: aiohttp.BaseConnector
        if job.socket_path is not None:
            base = "http://localhost"
            connector = aiohttp.UnixConnector(stack.enter_context(socket_address(job.socket_path)), limit=0)
        else:
            base = f"{'https' if job.tls else 'http'}://{job.endpoint}"
            connector = aiohttp.TCPConnector(ssl=job.tls or True, limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        session = aiohttp.ClientSession(base, connector=connector, timeout=timeout, auto_decompress=False)
        return job, await stack.enter_async_context(session), stack


async def _copy(reply: aiohttp.ClientResponse, request: web.Request) -> web.StreamResponse:
    headers = {name: value for name, value in reply.headers.items() if name.title() not in DROPPED_REPLY_HEADERS}
    response = web.StreamResponse(status=reply.status, headers=headers)
    await response.prepare(request)
    with suppress(ConnectionError, aiohttp.ClientError):  # one of them has disconnected: the page connects again
        async for chunk in reply.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
    return response


async def serve(
    find_job: Callable[[], RunningJob], port: int, announce: Callable[[str], None], *, opens_browser: bool
) -> None:
    """Serve the page until SIGINT or SIGTERM; `announce` gets its address."""
    proxy = PageProxy(find_job)
    app = web.Application(client_max_size=MAX_BODY)
    proxy.mount(app)
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    stopped = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stopped.set)
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        try:
            await site.start()
        except OSError as error:
            raise UsageError(f"--port={port}: {error.strerror}; give another port, or none") from error
        bound = runner.addresses[0][1]
        announce(f"http://127.0.0.1:{bound}/#token={proxy.token}")
        if opens_browser:
            await asyncio.to_thread(webbrowser.open, f"http://127.0.0.1:{bound}{OPEN_PATH.format(key=proxy.key)}")
        await stopped.wait()
    finally:
        await runner.cleanup()
        await proxy.close()
