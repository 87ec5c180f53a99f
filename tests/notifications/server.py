"""A real HTTP server for notifications."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Received:
    """The messages that arrived, and the replies to give: HTTP status codes, one a request, and the last for ever."""

    def __init__(self, *replies: int) -> None:
        self.replies = list(replies or (200,))
        self.messages: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.release = threading.Event()  # for the status 0: a server that does not reply
        self.url = ""


@contextmanager
def webhook_server(*replies: int) -> Iterator[Received]:
    received = Received(*replies)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = received.replies.pop(0) if len(received.replies) > 1 else received.replies[0]
            received.paths.append(self.path)
            received.messages.append(json.loads(body))
            if status == 0:
                received.release.wait(60)
                return
            self.send_response(status)
            if status in (301, 302, 307, 308):
                self.send_header("Location", f"{received.url}/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            received.paths.append(self.path)
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    received.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield received
    finally:
        received.release.set()
        server.shutdown()
        thread.join()
        server.server_close()
