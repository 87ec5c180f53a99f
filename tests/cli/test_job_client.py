"""Requests to a job that is slow or silent."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ripstop.cli import job_client
from ripstop.cli.job_client import JobClient, JobUnreachable, RequestRejected, find_job_client
from ripstop.cli.options.flags import ParsedArguments
from ripstop.model.round import Address
from ripstop.system.network import enable_keepalive

DEADLINE = 120.0


@contextmanager
def coordinator(*parts: bytes) -> Iterator[tuple[JobClient, threading.Event]]:
    """Sends the first part at once and the others after the event; without parts, waits for the client to close."""
    go_on = threading.Event()

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.settimeout(DEADLINE)
            connection.recv(65536)
            for number, part in enumerate(parts):
                assert not number or go_on.wait(DEADLINE)
                connection.sendall(part)
            if not parts:
                connection.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield JobClient("job", None, Address(*listening.getsockname()), "", None), go_on
        thread.join(DEADLINE)


def test_a_job_that_does_not_reply_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_client, "REPLY_TIMEOUT_S", 0.2)
    with coordinator() as (job, _), pytest.raises(JobUnreachable, match="no reply in time"):
        list(job.stream_lines("/logs/0", "text/plain", None))


def test_a_stream_without_an_idle_timeout_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_client, "REPLY_TIMEOUT_S", 1.0)
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nfirst\n"
    with coordinator(head, b"second\n") as (job, go_on):
        threading.Timer(2.0, go_on.set).start()
        assert list(job.stream_lines("/logs/0", "text/plain", None)) == ["first", "second"]


def test_a_stream_with_an_idle_timeout_is_unreachable_after_it() -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nfirst\n"
    with coordinator(head, b"second\n") as (job, go_on):
        stream = job.stream_lines("/events", "text/event-stream", 1.0)
        assert next(stream) == "first"
        with pytest.raises(JobUnreachable, match="no reply in time"):
            next(stream)
        go_on.set()


def test_a_connection_to_another_machine_has_keepalives(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def recorded_tune(sock: socket.socket) -> None:
        enable_keepalive(sock)
        seen.append(sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))

    monkeypatch.setattr(job_client, "enable_keepalive", recorded_tune)
    with coordinator(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") as (job, _):
        assert list(job.stream_lines("/logs/0", "text/plain", None)) == []
    assert seen == [1]


def test_a_reply_above_the_limit_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_client, "MAX_REPLY_BYTES", 10)
    reply = b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"run_id": "job"}'
    with coordinator(reply) as (job, _), pytest.raises(JobUnreachable, match="the reply is larger than 10 bytes"):
        job.get("/status")


def test_a_redirect_is_not_followed() -> None:
    reply = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    with coordinator(reply) as (job, _), pytest.raises(RequestRejected, match="replied HTTP 302"):
        job.get("/status")


NOT_HERE = b'HTTP/1.1 503 Unavailable\r\nContent-Length: 20\r\n\r\n{"error":"not here"}'
HERE = b'HTTP/1.1 200 OK\r\nContent-Length: 34\r\n\r\n{"events":[],"last":0,"more":false}'


def test_of_several_addresses_the_one_where_the_coordinator_answers_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        refusing = Address(*closed.getsockname())
    with coordinator(NOT_HERE) as (candidate, _), coordinator(HERE) as (elected, _):
        assert candidate.endpoint and elected.endpoint
        endpoints = f"{refusing},{candidate.endpoint},{elected.endpoint}"
        found = find_job_client(ParsedArguments({"--endpoint": endpoints}, {}, ()), {})
    assert found.endpoint == elected.endpoint


def test_if_no_address_has_the_coordinator_the_reply_of_a_node_is_the_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        refusing = Address(*closed.getsockname())
    with coordinator(NOT_HERE) as (candidate, _), pytest.raises(RequestRejected, match="not here"):
        find_job_client(ParsedArguments({"--endpoint": f"{refusing},{candidate.endpoint}"}, {}, ()), {})
