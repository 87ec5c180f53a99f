"""What counts as a notice that this machine will be taken away."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from ripstop.agent import preemption_notice
from ripstop.agent.preemption_notice import has_notice, wait_for_notice

ANSWERS = {
    "/true": (200, b"TRUE"),
    "/false": (200, b"FALSE\n"),
    "/empty": (200, b""),
    "/none": (200, b"NONE"),
    "/json": (200, b'{"action": 1}'),
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        code, body = ANSWERS.get(self.path, (404, b"not found"))
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("path", "is_notice"), [("true", True), ("json", True), ("false", False), ("empty", False), ("none", False)]
)
def test_a_text_other_than_false_or_none_is_a_notice(server: str, path: str, is_notice: bool) -> None:
    assert has_notice(f"{server}/{path}") is is_notice


def test_a_missing_page_or_file_is_no_notice(server: str, tmp_path: Path) -> None:
    assert not has_notice(f"{server}/missing")
    assert not has_notice(str(tmp_path / "missing"))


def test_a_file_is_reported_when_it_appears_and_a_server_that_is_down_is_asked_again(tmp_path: Path) -> None:
    async def scenario() -> list[str]:
        found: list[str] = []
        waiting = asyncio.create_task(wait_for_notice(str(tmp_path / "notice"), found.append))
        down = asyncio.create_task(wait_for_notice("http://127.0.0.1:9/", found.append))
        (tmp_path / "notice").touch()
        async with asyncio.timeout(120):
            await waiting
        assert not down.done()
        down.cancel()
        return found

    assert asyncio.run(scenario()) == [str(tmp_path / "notice")]


@pytest.mark.parametrize("start", [b"", b"HTTP/1.0 200 OK\r\n\r\n"])
def test_an_endless_answer_is_an_error_that_is_logged_once_and_the_next_answer_counts(
    start: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(preemption_notice, "INTERVAL_S", 0.01)
    monkeypatch.setattr(preemption_notice, "REQUEST_TIMEOUT_S", 0.5)
    found: list[str] = []

    def serve(listener: socket.socket) -> None:
        """Two answers of which each byte comes before the timeout, and there is always another one; then a notice."""
        for _ in range(2):
            with listener.accept()[0] as connection, suppress(OSError):
                connection.sendall(start)
                while True:
                    connection.sendall(b"x")
                    time.sleep(0.05)
        with listener.accept()[0] as connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\nTRUE")

    async def scenario(url: str) -> None:
        async with asyncio.timeout(120):
            await wait_for_notice(url, found.append)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        asyncio.run(scenario(url))
        thread.join(120)
    assert found == [url]
    (message,) = (text for text in caplog.messages if url in text)  # a request of another test may end only now
    assert message.startswith(f"--preemption-notice={url} failed") and len(message) < 500
