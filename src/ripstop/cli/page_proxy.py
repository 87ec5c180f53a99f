"""Serves a job's page at an address of this machine, and passes its requests for the API on to the job.

Rules: (1) other users of this machine can reach the address, so every request that is passed on needs a random token;
the page gets it in the fragment of its address; (2) the browser's command line is readable by other users: it has the
name of a private file that leads to this address; (3) the job's own token and certificates never reach the browser;
(4) the job is looked for again if it cannot be reached, because its coordinator may have moved; (5) only requests to
this machine by name or address are answered, against DNS rebinding; (6) a path reaches the job as it was checked.
"""

import asyncio
import hmac
import os
import re
import secrets
import signal
import tempfile
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from posixpath import normpath

import aiohttp
from aiohttp import web

from ripstop.api.http_api import MAX_BODY, Handler, http_error_response
from ripstop.api.job_interface import RequestRefused
from ripstop.api.page_files import PageFiles
from ripstop.cli.job_client import JobClient
from ripstop.model.errors import RipstopError, UsageError
from ripstop.system.socket_directory import HeldDirectory, socket_address

FORWARDED_REQUEST_HEADERS = ("Accept", "Content-Type", "If-None-Match", "Last-Event-ID")
FORWARDED_REPLY_HEADERS = ("Allow", "Cache-Control", "Content-Encoding", "Content-Type", "ETag", "WWW-Authenticate")
CONNECT_TIMEOUT_S = 5.0
LOCAL_HOST = r"(?i)(?:127\.0\.0\.1|localhost|\[::1\])(?::\d+)?"
REDIRECTION = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={url}">'


class PageProxy:
    def __init__(self, find_job: Callable[[], JobClient]) -> None:
        self._find_job = find_job
        self._job: tuple[JobClient, aiohttp.ClientSession, AsyncExitStack] | None = None
        self._finding = asyncio.Lock()
        self.token = secrets.token_urlsafe(32)
        self.was_used = asyncio.Event()  # a request had the token

    def mount(self, app: web.Application) -> None:
        app.router.add_route("*", "/api/{path:.*}", self._pass_on_api)
        PageFiles().mount(app)  # of this version of ripstop: without a token, nothing is passed on

    async def close(self) -> None:
        if self._job is not None:
            _, _, stack = self._job
            self._job = None
            await stack.aclose()

    async def _pass_on_api(self, request: web.Request) -> web.StreamResponse:
        """Rule 1."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.encode(), self.token.encode()):
            refused = RequestRefused(401, "the token is not this page's; run `ripstop page` again, and use its address")
            return http_error_response(refused, close=True)
        self.was_used.set()
        if normpath(request.path) != request.path:  # rule 6: the client would remove `..`
            return http_error_response(
                RequestRefused(404, f"{request.path[:80]}: no such path; use one without `.` and `//`")
            )
        return await self._pass_on(request)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        try:
            job, session = await self._session()
            headers = {name: request.headers[name] for name in FORWARDED_REQUEST_HEADERS if name in request.headers}
            if job.token:
                headers["Authorization"] = f"Bearer {job.token}"
            body = await request.read()
            async with session.request(
                request.method, request.rel_url, headers=headers, data=body or None, allow_redirects=False
            ) as reply:
                return await _copy_proxied_reply(reply, request)
        except (RipstopError, aiohttp.ClientError, OSError, TimeoutError) as error:
            await self.close()  # rule 4
            return http_error_response(RequestRefused(503, f"the job cannot be reached: {error}; the page tries again"))

    async def _session(self) -> tuple[JobClient, aiohttp.ClientSession]:
        async with self._finding:
            if self._job is None:
                self._job = await self._connect(await asyncio.to_thread(self._find_job))
            return self._job[:2]

    @staticmethod
    async def _connect(job: JobClient) -> tuple[JobClient, aiohttp.ClientSession, AsyncExitStack]:
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


async def _copy_proxied_reply(reply: aiohttp.ClientResponse, request: web.Request) -> web.StreamResponse:
    headers = {name: reply.headers[name] for name in FORWARDED_REPLY_HEADERS if name in reply.headers}
    response = web.StreamResponse(status=reply.status, headers=headers)
    await response.prepare(request)
    with suppress(ConnectionError, aiohttp.ClientError):  # one of them has disconnected: the page connects again
        async for chunk in reply.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
    return response


@web.middleware
async def require_local_page_host(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Rule 5."""
    host = request.headers.get("Host", "")
    if not re.fullmatch(LOCAL_HOST, host):
        refused = RequestRefused(403, f"the host must be 127.0.0.1, localhost or [::1], not {host[:80]!r}")
        return http_error_response(refused, close=True)
    return await handler(request)


@contextmanager
def page_proxy_redirect_file(url: str) -> Iterator[Path]:
    """Rule 2: a file that only this user can read, which leads a browser to `url`."""
    directory = HeldDirectory(os.environ)
    try:
        with tempfile.NamedTemporaryFile("w", dir=directory.path, prefix="page-", suffix=".html") as file:  # mode 600
            file.write(REDIRECTION.format(url=url))
            file.flush()
            yield Path(file.name)
    finally:
        directory.release()


async def serve_page_proxy(
    find_job: Callable[[], JobClient], port: int, announce: Callable[[str], None], *, opens_browser: bool
) -> None:
    """Serve the page until SIGINT or SIGTERM; `announce` gets its address."""
    proxy = PageProxy(find_job)
    app = web.Application(client_max_size=MAX_BODY, middlewares=[require_local_page_host])
    proxy.mount(app)
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    stopped = asyncio.Event()

    def stop() -> None:
        stopped.set()
        proxy.was_used.set()  # nothing waits for the browser any more

    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop)
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        try:
            await site.start()
        except OSError as error:
            raise UsageError(f"--port={port}: {error.strerror}; give another port, or none") from error
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/#token={proxy.token}"
        with page_proxy_redirect_file(url) if opens_browser else nullcontext() as file:
            announce(url)
            if file is not None:
                has_browser = await asyncio.to_thread(webbrowser.open, file.as_uri())
                if has_browser:
                    await proxy.was_used.wait()
        await stopped.wait()
    finally:
        await runner.cleanup()
        await proxy.close()
