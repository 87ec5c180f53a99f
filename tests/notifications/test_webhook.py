"""Messages are delivered to a real server, and no server can hold up a job."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ripstop.model import events
from ripstop.model.events import EventRecord
from ripstop.notifications import webhook
from ripstop.notifications.webhook import MAX_ATTEMPTS, MAX_QUEUED, Webhook
from tests.e2e.harness import free_port, wait_until
from tests.notifications.server import Received, webhook_server

HANG = EventRecord(1, 1.0, "", events.HangDiagnosed(1, (1,), "rank 1 is in read_shard"))
END = EventRecord(2, 2.0, "", events.JobClosed("succeeded", "all workers exited 0", 1, 0))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(webhook, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(webhook, "CLOSING_DELAY_S", 0.01)
    monkeypatch.setattr(webhook, "FLUSH_TIMEOUT_S", 30.0)
    caplog.set_level(logging.INFO, "ripstop.notifications")


def notify(url: str, *records: EventRecord, until: Callable[[], bool] = lambda: True) -> None:
    async def run() -> None:
        sender = Webhook(f"{url}/services/S3CRET", "job7")
        for record in records:
            sender.add(record)
        await asyncio.to_thread(wait_until, lambda: until() or None)
        await sender.close()

    asyncio.run(run())


def kinds(received: Received) -> list[Any]:
    return [message["event"] for message in received.messages]


def test_messages_arrive_in_order_as_json_with_a_text() -> None:
    with webhook_server() as received:
        notify(received.url, HANG, END)
    assert kinds(received) == ["hang", "job_finished"]
    first = received.messages[0]
    assert first["text"].startswith("▲ ripstop job job7 hangs") and first["job"] == "job7"
    assert received.paths == ["/services/S3CRET"] * 2


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_temporary_error_is_retried(status: int, caplog: pytest.LogCaptureFixture) -> None:
    with webhook_server(status, status, 200) as received:
        notify(received.url, HANG, until=lambda: len(received.messages) == 3)
    assert kinds(received) == ["hang"] * 3
    assert [record.message for record in caplog.records] == [
        f"a notification was not accepted by {received.url.removeprefix('http://')}: HTTP {status}; the job continues",
        f"{received.url.removeprefix('http://')} accepts notifications again",
    ]


def test_a_server_that_always_fails_gets_a_bounded_number_of_requests(caplog: pytest.LogCaptureFixture) -> None:
    with webhook_server(500) as received:
        notify(received.url, HANG, END, until=lambda: len(received.messages) == 2 * MAX_ATTEMPTS)
    assert len(received.messages) == 2 * MAX_ATTEMPTS
    assert len(caplog.records) == 2 and "2 notifications were not sent" in caplog.text
    assert "S3CRET" not in caplog.text


def test_a_wrong_address_is_not_retried(caplog: pytest.LogCaptureFixture) -> None:
    with webhook_server(404) as received:
        notify(received.url, HANG)
    assert len(received.messages) == 1 and "HTTP 404" in caplog.text


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(status: int, caplog: pytest.LogCaptureFixture) -> None:
    with webhook_server(status) as received:
        notify(received.url, HANG)
    assert received.paths == ["/services/S3CRET"] and f"HTTP {status}" in caplog.text


def test_a_dead_server_never_delays_a_record(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "FLUSH_TIMEOUT_S", 2.0)
    notify(f"http://127.0.0.1:{free_port()}", HANG, END)
    assert "Connection refused" in caplog.text and "2 notifications were not sent" in caplog.text


@pytest.mark.parametrize("accepts", [True, False])
def test_a_server_that_does_not_reply_delays_only_the_end_and_the_queue_is_bounded(
    accepts: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "FLUSH_TIMEOUT_S", 0.2)
    with webhook_server(0) as slow, socket.create_server(("127.0.0.1", 0)) as silent:
        url = slow.url if accepts else f"http://127.0.0.1:{silent.getsockname()[1]}"
        before = set(threading.enumerate())
        notify(url, *[HANG] * (3 * MAX_QUEUED))
        assert len(set(threading.enumerate()) - before) <= 4
        assert f"{3 * MAX_QUEUED} notifications were not sent" in caplog.text


def test_a_server_that_speaks_no_http_is_a_problem_and_not_a_defect(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reply() -> None:
            for _ in range(MAX_ATTEMPTS):
                connection, _address = server.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"\x00\x01 not HTTP\r\n\r\n")

        thread = threading.Thread(target=reply)
        thread.start()
        notify(f"http://127.0.0.1:{server.getsockname()[1]}", HANG, until=lambda: not thread.is_alive())
        thread.join()
    assert "1 notifications were not sent" in caplog.text and "Traceback" not in caplog.text


def test_records_without_a_message_start_no_thread() -> None:
    before = set(threading.enumerate())  # threads of earlier tests may end meanwhile
    notify("http://127.0.0.1:9", EventRecord(1, 1.0, "a", events.AgentMessage("x")))
    assert set(threading.enumerate()) <= before
