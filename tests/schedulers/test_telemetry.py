"""What a running job says of itself, and what is made of jobs that say something else."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ripstop.schedulers.kubernetes.telemetry import NoTelemetry, asking


@contextmanager
def a_coordinator(body: bytes) -> Iterator[int]:
    """Answers those who show `bearer-of-secret-run`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers["Authorization"] == "Bearer bearer-of-secret-run"
            self.send_response(200 if known and self.path == "/api/v1/status" else 401)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def bearer(token: str, run_id: str) -> str:
    return f"bearer-of-{token}-{run_id}"


def test_a_job_says_its_round_and_its_restarts() -> None:
    with a_coordinator(b'{"round": 7, "restarts": 2, "phase": "running"}') as port:
        assert asking(bearer, port)("127.0.0.1", "secret", "run") == {"round": 7, "restarts": 2}


def test_numbers_that_are_none_are_left_out() -> None:
    with a_coordinator(b'{"round": "many", "restarts": true}') as port:
        assert asking(bearer, port)("127.0.0.1", "secret", "run") == {}


@pytest.mark.parametrize("body", [b"[]", b"{", b"\xff", b""])
def test_an_answer_that_is_none_is_a_silence(body: bytes) -> None:
    with a_coordinator(body) as port, pytest.raises(NoTelemetry):
        asking(bearer, port)("127.0.0.1", "secret", "run")


def test_a_job_that_knows_us_not_is_a_silence() -> None:
    with a_coordinator(b"{}") as port, pytest.raises(NoTelemetry, match="401"):
        asking(bearer, port)("127.0.0.1", "wrong", "run")


def test_nobody_there_is_a_silence() -> None:
    with a_coordinator(b"{}") as port:
        pass
    with pytest.raises(NoTelemetry):
        asking(bearer, port)("127.0.0.1", "secret", "run")
