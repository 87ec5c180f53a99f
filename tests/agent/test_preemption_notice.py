"""What counts as a notice that this machine will be taken away."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from ripstop.agent import preemption_notice
from ripstop.agent.preemption_notice import has_notice, wait_for_notice

ANSWERS = {"/true": (200, b"TRUE"), "/false": (200, b"FALSE\n"), "/empty": (200, b""), "/json": (200, b'{"action": 1}')}


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


@pytest.mark.parametrize(("path", "is_notice"), [("true", True), ("json", True), ("false", False), ("empty", False)])
def test_a_text_other_than_false_is_a_notice(server: str, path: str, is_notice: bool) -> None:
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
        async with asyncio.timeout(60):
            await waiting
        assert not down.done()
        down.cancel()
        return found

    assert asyncio.run(scenario()) == [str(tmp_path / "notice")]


def test_a_server_that_never_ends_its_answer_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption_notice, "INTERVAL_S", 0.01)
    monkeypatch.setattr(preemption_notice, "REQUEST_TIMEOUT_S", 0.5)
    tries = 0

    def trickle(listener: socket.socket, is_over: threading.Event) -> None:
        """Each byte comes before the timeout, and there is always another one."""
        nonlocal tries
        listener.settimeout(0.1)
        connections: list[socket.socket] = []
        while not is_over.wait(0.05):
            try:
                connections.append(listener.accept()[0])
                tries += 1
            except TimeoutError:
                pass
            for connection in connections:
                connection.send(b"x")
        for connection in connections:
            connection.close()

    async def scenario(url: str) -> None:
        waiting = asyncio.create_task(wait_for_notice(url, pytest.fail))
        await asyncio.sleep(3)
        waiting.cancel()

    before = threading.active_count()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        is_over = threading.Event()
        thread = threading.Thread(target=trickle, args=(listener, is_over))
        thread.start()
        try:
            asyncio.run(scenario(f"http://127.0.0.1:{listener.getsockname()[1]}/"))
            assert tries == 1 and threading.active_count() <= before + 2
        finally:
            is_over.set()
            thread.join()
