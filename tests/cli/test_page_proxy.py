"""`ripstop page`'s server: what it passes on to a job, and what it answers to others on the machine."""

import asyncio
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from ripstop.cli.job_client import JobClient
from ripstop.cli.page_proxy import PageProxy, page_proxy_redirect_file, require_local_page_host
from ripstop.model.round import Address

REPLY_HEADERS = {"Set-Cookie": "a=b", "X-Other": "x", "Access-Control-Allow-Origin": "*", "Cache-Control": "no-store"}


@asynccontextmanager
async def listening(app: web.Application) -> AsyncIterator[int]:
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


class Server:
    """The proxy, and an HTTP server in place of the job that records each request."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []  # path and Authorization
        self.port = 0
        self.token = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.seen.append((request.raw_path, request.headers.get("Authorization", "")))
        if request.path == "/api/moved":
            return web.Response(status=302, headers={"Location": "/api/secret"})
        return web.Response(text="from the job", headers=REPLY_HEADERS)

    async def request(self, path: str, *, with_token: bool = False, host: str | None = None) -> tuple[int, str]:
        """Status and the whole reply.  Sent as it is: a client would normalise the path."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        lines = [f"GET {path} HTTP/1.1", "Connection: close"]
        lines.append(f"Host: {f'127.0.0.1:{self.port}' if host is None else host}")
        if with_token:
            lines.append(f"Authorization: Bearer {self.token}")
        writer.write("\r\n".join([*lines, "", ""]).encode())
        async with asyncio.timeout(120):
            reply = (await reader.read()).decode()
        writer.close()
        return int(reply.split(" ", 2)[1]), reply


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    server = Server()
    job = web.Application()
    job.router.add_route("*", "/{path:.*}", server.answer)
    async with listening(job) as job_port:
        proxy = PageProxy(lambda: JobClient("job", None, Address("127.0.0.1", job_port), "the-job-s-token", None))
        app = web.Application(middlewares=[require_local_page_host])
        proxy.mount(app)
        server.token = proxy.token
        async with listening(app) as server.port:
            try:
                yield server
            finally:
                await proxy.close()


def test_a_request_with_the_token_reaches_the_job_with_the_job_s_own_token() -> None:
    async def check() -> None:
        async with serving() as server:
            status, reply = await server.request("/api/v1/logs?rank=1&x=%2F..", with_token=True)
            assert status == 200 and "\r\nfrom the job\r\n" in reply
            assert server.seen == [("/api/v1/logs?rank=1&x=%2F..", "Bearer the-job-s-token")]
            assert "the-job-s-token" not in reply

    asyncio.run(check())


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/api/v1/status",
            "/x/../api/v1/status",
            "/page/../api/v1/status",
            "/%2e%2e/api/v1/status",
            "//api/v1/status",
        ),
        *("/./api/v1/status", "/page/..%2fapi%2fv1%2fstatus", "/metrics", "/api/../metrics", "/healthz", "/open/x"),
        *("http://127.0.0.1/api/v1/status", "http://127.0.0.1/x/../api/v1/status"),
    ],
)
def test_nothing_is_passed_on_without_the_token(path: str) -> None:
    async def check() -> None:
        async with serving() as server:
            status, _ = await server.request(path)
            assert status in (400, 401, 404) and not server.seen

    asyncio.run(check())


@pytest.mark.parametrize(
    "path", ["/api/../metrics", "/api/%2e%2e/metrics", "/api/v1/./status", "/api//v1", "/api/..%2fmetrics", "/metrics"]
)
def test_the_token_opens_the_api_only(path: str) -> None:
    async def check() -> None:
        async with serving() as server:
            status, _ = await server.request(path, with_token=True)
            assert status == 404 and not server.seen

    asyncio.run(check())


def test_the_files_of_the_page_are_served_without_the_job() -> None:
    async def check() -> None:
        async with serving() as server:
            for path in ("/", "/page/page.js"):
                status, reply = await server.request(path)
                assert status == 200 and "Content-Security-Policy" in reply
            assert not server.seen

    asyncio.run(check())


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost@evil", ""])
@pytest.mark.parametrize("path", ["/", "/api/v1/status", "/nothing"])
def test_another_host_is_refused(host: str, path: str) -> None:
    async def check() -> None:
        async with serving() as server:
            status, _ = await server.request(path, with_token=True, host=host)
            assert status in (400, 403) and not server.seen

    asyncio.run(check())


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost:8000", "LOCALHOST", "[::1]:8000"])
def test_a_forwarded_port_is_accepted(host: str) -> None:
    async def check() -> None:
        async with serving() as server:
            assert (await server.request("/api/v1/status", with_token=True, host=host))[0] == 200

    asyncio.run(check())


def test_redirects_are_not_followed_and_only_known_headers_come_back() -> None:
    async def check() -> None:
        async with serving() as server:
            status, reply = await server.request("/api/moved", with_token=True)
            assert (status, [path for path, _ in server.seen]) == (302, ["/api/moved"])
            assert "Location" not in reply
            _, reply = await server.request("/api/v1/status", with_token=True)
            names = {line.partition(":")[0] for line in reply.partition("\r\n\r\n")[0].split("\r\n")[1:]}
            assert {"Cache-Control", "Content-Type"} <= names
            assert not names & {"Set-Cookie", "X-Other", "Access-Control-Allow-Origin"}

    asyncio.run(check())


def test_the_browser_s_file_is_private_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with page_proxy_redirect_file("http://127.0.0.1:1/#token=abc") as file:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        assert 'url=http://127.0.0.1:1/#token=abc"' in file.read_text()
    assert not list(tmp_path.iterdir())
