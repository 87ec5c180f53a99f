"""What a running job says of itself, and what is made of jobs that say something else."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ripstop.kubernetes import job_poller
from ripstop.kubernetes.job_poller import MAX_TEXT_CHARACTERS, PolledJobApi
from ripstop.model.errors import QueryFailed


@contextmanager
def a_coordinator(body: bytes, received: list[tuple[str, bytes]] | None = None) -> Iterator[int]:
    """Answers those who show `bearer-of-secret-run`; what it is told is put into `received`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers["Authorization"] == "Bearer bearer-of-secret-run"
            if known and self.command == "POST" and received is not None:
                received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200 if known and self.path in ("/api/v1/status", "/api/v1/scale") else 401)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def api_token(token: str, run_id: str) -> str:
    return f"bearer-of-{token}-{run_id}"


def said(status: dict[str, Any]) -> dict[str, Any]:
    with a_coordinator(json.dumps(status).encode()) as port:
        return PolledJobApi(api_token, port).status("127.0.0.1", "secret", "run")


def test_a_job_says_how_it_is_doing() -> None:
    status = {"round": 7, "restarts": 2, "target": 3, "phase": "running", "goodput": 0.97371, "last_failure": "rank 3"}
    assert said(status) == {"round": 7, "restarts": 2, "target": 3, "goodput": 0.97, "lastFailure": "rank 3"}


def test_unknown_and_missing_values_of_a_job_are_left_out() -> None:
    assert said({"round": 7, "goodput": None, "last_failure": ""}) == {"round": 7}


@pytest.mark.parametrize("share", [-0.1, 1.1, "much", True, [1], 1e400])
def test_a_share_that_is_none_is_left_out(share: Any) -> None:
    assert said({"goodput": share}) == {}


def test_numbers_that_are_none_are_left_out() -> None:
    assert said({"round": "many", "restarts": True, "target": -1}) == {}


def test_a_long_word_is_cut() -> None:
    assert said({"last_failure": "x" * 5000}) == {"lastFailure": "x" * MAX_TEXT_CHARACTERS}


def test_the_operator_sends_the_number_of_nodes_to_the_job() -> None:
    received: list[tuple[str, bytes]] = []
    with a_coordinator(b"{}", received) as port:
        PolledJobApi(api_token, port).scale("127.0.0.1", "secret", "run", 3)
        with pytest.raises(QueryFailed, match="401"):
            PolledJobApi(api_token, port).scale("127.0.0.1", "wrong", "run", 3)
    assert received == [("/api/v1/scale", b'{"nodes": 3}')]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"[7]", r"its status is not a JSON object: '\[7\]'"),
        (b"{", "Expecting"),
        (b"\xff", "utf-8"),
        (b"", "Expecting"),
    ],
)
def test_an_answer_that_is_none_is_a_silence(body: bytes, why: str) -> None:
    with a_coordinator(body) as port, pytest.raises(QueryFailed, match=why):
        PolledJobApi(api_token, port).status("127.0.0.1", "secret", "run")


def test_a_job_that_knows_us_not_is_a_silence() -> None:
    with a_coordinator(b"{}") as port, pytest.raises(QueryFailed, match="401"):
        PolledJobApi(api_token, port).status("127.0.0.1", "wrong", "run")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": "no target\\nbelow 2"}', "HTTP 401: no target below 2"),
        (b"<b>a proxy\x1b</b>", "HTTP 401: <b>a proxy </b>"),
        (b'{"error": "%s"}' % (b"x" * 5000), f"HTTP 401: {'x' * MAX_TEXT_CHARACTERS}"),
        (b"7", "HTTP 401: 7"),
        (b"", "HTTP 401"),
    ],
)
def test_the_reason_of_a_rejection_is_one_short_line(body: bytes, said: str) -> None:
    with a_coordinator(body) as port, pytest.raises(QueryFailed) as refused:
        PolledJobApi(api_token, port).scale("127.0.0.1", "wrong", "run", 3)
    assert str(refused.value) == said


def test_nobody_there_is_a_silence() -> None:
    with a_coordinator(b"{}") as port:
        pass
    with pytest.raises(QueryFailed):
        PolledJobApi(api_token, port).status("127.0.0.1", "secret", "run")


@contextmanager
def a_dripping_pod(start: bytes, drop: bytes, bell: threading.Event) -> Iterator[int]:
    """Says `start`, then a drop at a time, until the bell rings or who listens has gone."""
    server = socket.create_server(("127.0.0.1", 0))

    def drip() -> None:
        with suppress(OSError):
            peer, _ = server.accept()
            with peer:
                peer.sendall(start)
                while not bell.wait(0.02):
                    peer.sendall(drop)

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        bell.set()
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        server.close()


@pytest.mark.parametrize(
    ("start", "drop"),
    [(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b" "), (b"HTTP/1.1 200 OK\r\nX: ", b"x"), (b"", b"H")],
)
def test_a_pod_that_drips_has_no_more_time_than_one_that_hangs(
    start: bytes, drop: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_poller, "TIMEOUT_S", 0.2)
    bell = threading.Event()
    rescue = threading.Timer(60.0, bell.set)  # for a listener who would wait
    rescue.start()
    try:
        with a_dripping_pod(start, drop, bell) as port:
            with pytest.raises(QueryFailed, match="timed out"):
                PolledJobApi(api_token, port).status("127.0.0.1", "secret", "run")
            assert not bell.is_set()
    finally:
        rescue.cancel()
