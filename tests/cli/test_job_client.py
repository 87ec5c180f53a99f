"""How a running job is asked, when it does not answer as it should."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ripstop.cli import job_client
from ripstop.cli.job_client import JobUnreachable, Target, lines
from ripstop.model.round import Address
from ripstop.system.network import enable_keepalive

DEADLINE = 20.0


@contextmanager
def coordinator(*answer: bytes) -> Iterator[tuple[Target, threading.Event]]:
    """Sends the first part at once, and the others when it may go on; then it waits for the caller's end."""
    go_on = threading.Event()

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.settimeout(DEADLINE)
            connection.recv(65536)
            for number, part in enumerate(answer):
                assert not number or go_on.wait(DEADLINE)
                connection.sendall(part)
            if not answer:
                connection.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Target("job", None, Address(*listening.getsockname()), "", None), go_on
        thread.join(DEADLINE)


def test_a_job_that_does_not_begin_to_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_client, "PATIENCE", 0.2)
    with coordinator() as (target, _), pytest.raises(JobUnreachable, match="no answer in time"):
        list(lines(target, "/logs/0", "text/plain", None))


def test_a_stream_may_be_silent_for_as_long_as_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_client, "PATIENCE", 0.2)
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nfirst\n"
    with coordinator(head, b"second\n") as (target, go_on):
        threading.Timer(1.0, go_on.set).start()
        assert list(lines(target, "/logs/0", "text/plain", None)) == ["first", "second"]


def test_a_stream_that_has_signs_of_life_is_given_up_without_them() -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nfirst\n"
    with coordinator(head, b"second\n") as (target, go_on):
        stream = lines(target, "/events", "text/event-stream", 0.2)
        assert next(stream) == "first"
        with pytest.raises(JobUnreachable, match="no answer in time"):
            next(stream)
        go_on.set()


def test_the_kernel_watches_over_a_connection_to_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def look(line: socket.socket) -> None:
        enable_keepalive(line)
        seen.append(line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))

    monkeypatch.setattr(job_client, "enable_keepalive", look)
    with coordinator(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") as (target, _):
        assert list(lines(target, "/logs/0", "text/plain", None)) == []
    assert seen == [1]
