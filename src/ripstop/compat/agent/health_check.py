"""`torch.distributed.elastic.agent.server.health_check_server`, with a working server.

HTTP for probes such as those of Kubernetes.  `/live` (also `/` and `/healthz`) answers 200 while the agent's last
activity is younger than the timeout, otherwise 503.  `/ready` answers 200 if also workers are running.

Rule: a stopped server is in no reference cycle and refers to no workers.  Its callbacks refer to an agent, its
rendezvous and its stores, and a store must not live until the garbage collector runs, perhaps in a forked child.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # slow to import, and few launches have a server
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["HealthCheckServer", "create_healthcheck_server"]

log = logging.getLogger("ripstop.compat")

TORCHELASTIC_HEALTH_CHECK_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
TIMEOUT_S = 60


class HealthCheckServer:
    """`alive_callback` returns the wall-clock time of the last activity; port 0 chooses a free port, see `port`."""

    def __init__(self, alive_callback: Callable[[], float], port: int, timeout: int) -> None:
        self._alive_callback = alive_callback
        self._port = port
        self._timeout = timeout
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None
        self.ready_callback: Callable[[], bool] = lambda: True

    @property
    def port(self) -> int:
        return int(self._server.server_address[1]) if self._server else self._port

    def start(self) -> None:
        """Serve in a thread; if the port is in use, log a warning and continue without."""
        if self._server is not None:
            return
        from http.server import ThreadingHTTPServer

        try:
            self._server = ThreadingHTTPServer(("", self._port), _health_check_request_handler())
        except OSError as error:
            log.warning("no health check: port %d cannot be listened on: %s", self._port, error.strerror)
            return
        self._server.daemon_threads = True
        self._server.respond = self.respond  # type: ignore[attr-defined]  # for the request handler, until `stop`
        self._thread = threading.Thread(target=self._serve, args=(self._server,), name="ripstop-health", daemon=True)
        self._thread.start()
        log.info("health check at port %d", self.port)

    def stop(self) -> None:
        """Free the port.  May be called again."""
        if self._server is None or self._thread is None:
            return
        server, self._server = self._server, None
        server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        server.server_close()
        self._thread = None
        self.ready_callback = lambda: True

    def _serve(self, server: ThreadingHTTPServer) -> None:
        while self._server is server:
            server.handle_request()

    def respond(self, path: str) -> tuple[int, str]:
        """Status and text for a request."""
        if path not in ("/", "/live", "/healthz", "/ready"):
            return 404, "there are /live and /ready"
        idle = time.time() - self._alive_callback()
        if idle >= self._timeout:
            return 503, f"no activity for {idle:.0f} s"
        if path == "/ready" and not self.ready_callback():
            return 503, "no workers are running"
        return 200, "ok"


@cache
def _health_check_request_handler() -> type[BaseHTTPRequestHandler]:
    """One class for all servers: a class is in a reference cycle, so it must not refer to a server."""
    from http.server import BaseHTTPRequestHandler

    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds for a client to send its request

        def do_GET(self) -> None:
            status, text = self.server.respond(self.path.partition("?")[0])  # type: ignore[attr-defined]
            body = f"{text}\n".encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Probes come every few seconds."""

    return Handler


create_healthcheck_server = HealthCheckServer  # not started yet


def health_check_from_environment(alive_callback: Callable[[], float] = time.time) -> HealthCheckServer | None:
    """Start the server, if `TORCHELASTIC_HEALTH_CHECK_PORT` is set."""
    text = os.environ.get(TORCHELASTIC_HEALTH_CHECK_PORT)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 16):
        log.warning("%s=%s: not a port; no health check is started", TORCHELASTIC_HEALTH_CHECK_PORT, text)
        return None
    server = create_healthcheck_server(alive_callback, int(text), TIMEOUT_S)
    server.start()
    return server
