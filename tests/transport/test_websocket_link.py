import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ripstop.election.etcd_client import Denied, EtcdClient
from ripstop.model.config import Etcd
from ripstop.model.round import Address, Outcome
from ripstop.protocol.messages import Assign, Closed, Left, Status, Succeeded
from ripstop.transport import agent_authentication, websocket, websocket_link
from ripstop.transport.websocket_link import WebSocketLink, _WebSocketLinkHeartbeats
from tests.e2e.harness import free_port

DEADLINE = 120.0


def test_a_link_has_the_local_address_of_its_connection(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (_, address), harness.linking(address) as (link, agent):
            assert link.local_host is None
            await agent.until(lambda a: a.count("linked") == 1)
            assert link.local_host == "127.0.0.1"
            assert link.disconnect_reason == ""

    asyncio.run(scenario())


def test_a_link_measures_the_clock_skew_to_the_coordinator(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = SimpleNamespace(time=lambda: time.time() - 100.0)
    monkeypatch.setattr(agent_authentication, "time", wrong)

    async def scenario() -> None:
        async with harness.serving() as (_, address), harness.linking(address) as (link, agent):
            assert link.skew is None
            await agent.until(lambda a: a.count("linked") == 1)
            assert abs(link.skew - 100.0) < DEADLINE
            right = time.time
            monkeypatch.setattr(
                websocket_link.time, "time", lambda: right() + 1000.0
            )  # the clock is set while connected
            assert abs(link.skew - 1100.0) < DEADLINE
            monkeypatch.undo()

    asyncio.run(scenario())


def test_a_wrong_secret_is_a_final_rejection(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (_, address), harness.linking(address, token="guess") as (link, agent):
            await agent.until(lambda a: a.count("refused") == 1)
            ((_, why),) = agent.told
            assert f"the coordinator at {address} rejected this node: the job secret does not match" in why
            assert "RIPSTOP_TOKEN" in link.disconnect_reason

    asyncio.run(scenario())


def test_another_jobs_coordinator_is_a_final_rejection(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (_, address), harness.linking(address, run_id="job2") as (_, agent):
            await agent.until(lambda a: a.count("refused") == 1)
            assert "job 'job', not of 'job2'" in agent.told[0][1]

    asyncio.run(scenario())


def test_a_different_node_range_is_a_final_rejection(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving(nodes=2) as (_, address), harness.linking(address) as (link, agent):
            await agent.until(lambda a: a.count("linked") == 1)
            link.send(harness.join("a", nodes=3))
            await agent.until(lambda a: a.count("refused") == 1)
            assert "--nnodes" in agent.told[-1][1]

    asyncio.run(scenario())


def test_a_job_without_a_secret_works_the_same(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving(token="") as (_, address), harness.linking(address, token="") as (_, agent):
            await agent.until(lambda a: a.count("linked") == 1)

    asyncio.run(scenario())


@contextlib.contextmanager
def unresponsive_address(host: str, port: int) -> Iterator[None]:
    """The backlog is full, so packets are dropped, as for the address of a lost machine."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind((host, port))
        server.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield


def test_a_name_is_looked_up_again_while_its_old_address_does_not_answer(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "HANDSHAKE_TIMEOUT_S", 1000.0)
    look_up, looked_up = socket.getaddrinfo, list[str]()

    async def scenario() -> None:
        async with harness.serving() as (_, address):
            with unresponsive_address("127.0.0.2", address.port):

                def moved(host: str, port: int, *options: Any) -> Any:
                    if host != "coordinator.test":
                        return look_up(host, port, *options)
                    looked_up.append(host)
                    return look_up("127.0.0.2" if len(looked_up) == 1 else address.host, port, *options)

                monkeypatch.setattr(socket, "getaddrinfo", moved)
                async with harness.linking(Address("coordinator.test", address.port)) as (_, agent):
                    await agent.until(lambda a: a.count("linked") == 1)

    asyncio.run(scenario())
    assert len(looked_up) > 1


def test_a_link_waits_for_a_coordinator_that_starts_later(harness: Any) -> None:
    async def scenario() -> None:
        address = Address("127.0.0.1", free_port())
        async with harness.linking(address) as (link, agent):
            async with asyncio.timeout(DEADLINE):
                while not re.search(r" [2-9] tries", link.disconnect_reason):  # noqa: ASYNC110 - there is no event for a failed try
                    await asyncio.sleep(0.01)
            assert re.fullmatch(
                rf"{address}: connection refused, since \d\d:\d\d:\d\d, \d tries", link.disconnect_reason
            )
            assert agent.told == []
            async with harness.serving(port=address.port):
                await agent.until(lambda a: a.count("linked") == 1)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (
            b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
            "answers HTTP 404, so it is not a ripstop coordinator",
        ),
        (b"", "disconnected"),
        (b"\x00\x01 no http at all\r\n\r\n", ""),
    ],
    ids=["another web server", "a server that disconnects", "not a web server"],
)
def test_another_server_at_the_endpoint_is_reported(harness: Any, reply: bytes, expected: str) -> None:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        writer.close()

    async def scenario() -> None:
        other = await asyncio.start_server(respond, "127.0.0.1", 0)
        async with other:
            address = Address("127.0.0.1", other.sockets[0].getsockname()[1])
            async with harness.linking(address) as (link, agent):
                async with asyncio.timeout(DEADLINE):
                    while "not tried yet" in link.disconnect_reason:  # noqa: ASYNC110 - there is no event for a failed try
                        await asyncio.sleep(0.01)
                assert expected in link.disconnect_reason.lower() or expected in link.disconnect_reason
                assert agent.told == []

    asyncio.run(scenario())


@contextlib.asynccontextmanager
async def redirecting(status: int) -> AsyncIterator[tuple[Address, list[bytes]]]:
    """A server that redirects to another, and the requests that the other received."""
    asked: list[bytes] = []

    async def victim(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        port = there.sockets[0].getsockname()[1]
        where = f"Location: http://127.0.0.1:{port}/anything"
        writer.write(f"HTTP/1.1 {status} Go\r\n{where}\r\nContent-Length: 0\r\n\r\n".encode())
        writer.close()

    there = await asyncio.start_server(victim, "127.0.0.1", 0)
    here = await asyncio.start_server(redirect, "127.0.0.1", 0)
    async with there, here:
        yield Address("127.0.0.1", here.sockets[0].getsockname()[1]), asked


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_an_agent_follows_no_redirect(harness: Any, status: int) -> None:
    async def scenario() -> None:
        async with redirecting(status) as (address, asked), harness.linking(address) as (link, agent):
            async with asyncio.timeout(DEADLINE):
                while "not tried yet" in link.disconnect_reason:  # noqa: ASYNC110 - there is no event for a failed try
                    await asyncio.sleep(0.01)
            assert f"answers HTTP {status}, so it is not a ripstop coordinator" in link.disconnect_reason
            assert (asked, agent.told) == ([], [])

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [302, 307])
def test_the_etcd_client_follows_no_redirect(status: int) -> None:
    async def scenario() -> None:
        async with redirecting(status) as (address, asked):
            etcd = EtcdClient(Etcd((address,), "p"))
            try:
                async with asyncio.timeout(DEADLINE):
                    with pytest.raises(Denied):
                        await etcd.read("p/")
                    assert not await etcd.wait_for_change({}, 1)
            finally:
                await etcd.close()
            assert asked == []

    asyncio.run(scenario())


def test_an_unknown_name_is_looked_up_again(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.linking(Address("no-such-host.invalid", 29400)) as (link, agent):
            async with asyncio.timeout(DEADLINE):
                while "not tried yet" in link.disconnect_reason:  # noqa: ASYNC110 - there is no event for a failed try
                    await asyncio.sleep(0.01)
            assert link.disconnect_reason.startswith("no-such-host.invalid:29400: the name has no address, since")
            assert agent.told == []

    asyncio.run(scenario())


def test_a_hanging_name_service_does_not_delay_the_end(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, release = threading.Event(), threading.Event()

    def hanging(*_: object, **__: object) -> object:
        asked.set()
        release.wait(DEADLINE)
        raise socket.gaierror("too late")

    async def scenario() -> None:
        async with harness.linking(Address("slow-name-service.invalid", 29400)):
            assert await asyncio.to_thread(asked.wait, DEADLINE)

    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    try:
        asyncio.run(scenario())  # returns while the lookup hangs
        assert not release.is_set()
    finally:
        release.set()


def test_a_link_connects_to_a_host_name(harness: Any) -> None:
    async def scenario() -> None:
        async with (
            harness.serving() as (_, address),
            harness.linking(Address("localhost", address.port)) as (_, agent),
        ):
            await agent.until(lambda a: a.count("linked") == 1)

    asyncio.run(scenario())


def test_a_silent_server_times_out(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "HANDSHAKE_TIMEOUT_S", 0.2)

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            address = Address(*mute.getsockname())
            async with harness.linking(address) as (link, _):
                async with asyncio.timeout(DEADLINE):
                    while "no answer in 0.2 s" not in link.disconnect_reason:  # noqa: ASYNC110 - there is no event for a failed try
                        await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_an_agent_reconnects_to_a_restarted_coordinator_with_its_state(harness: Any) -> None:
    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            async with harness.serving() as (_, address):
                link, agent = await stack.enter_async_context(harness.linking(address))
                await agent.until(lambda a: a.count("linked") == 1)
                link.send(harness.join("a"))
                place = (await agent.heard(Assign)).place
            await agent.until(lambda a: a.count("unlinked") == 1)
            assert "closed the connection" in agent.told[-1][1]
            link.send(Left("dropped, as there is no connection"))
            async with harness.serving(port=address.port):
                await agent.until(lambda a: a.count("linked") == 2)
                link.send(harness.join("a", held=place, newest=place.round, status=Status.RUNNING))
                link.send(Succeeded(place.round))
                report = (await agent.heard(Closed)).report
                assert (report.outcome, report.rounds) == (Outcome.SUCCEEDED, 1)

    asyncio.run(scenario())


def test_a_node_that_was_connected_retries_when_an_impostor_rejects_it(harness: Any) -> None:
    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            async with harness.serving() as (_, address):
                link, agent = await stack.enter_async_context(harness.linking(address))
                await agent.until(lambda a: a.count("linked") == 1)
            async with harness.serving(port=address.port, token="another"), asyncio.timeout(DEADLINE):
                while "secret" not in link.disconnect_reason:  # noqa: ASYNC110 - there is no event for a failed try
                    await asyncio.sleep(0.01)
            async with harness.serving(port=address.port):
                await agent.until(lambda a: a.count("linked") == 2)
            assert agent.count("refused") == 0

    asyncio.run(scenario())


COORDINATOR = """
import asyncio, sys
from ripstop.model.config import Timing
from ripstop.coordinator.driver import Coordinator
from ripstop.transport.endpoint import bind_endpoint
from ripstop.coordinator.job_types import JobSettings
from ripstop.transport.server import Server
from ripstop.model.round import Address

async def main():
    coordinator = Coordinator(JobSettings("job", 1, 1, Timing(lease=0.6)))
    bound = bind_endpoint(Address("127.0.0.1", 0), required=True)
    server = Server(bound.listening, coordinator, token="s3cret")
    await server.start()
    print(bound.address.port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    coordinator.stop()
    await server.close()

asyncio.run(main())
"""


@contextlib.contextmanager
def coordinator_process() -> Iterator[tuple[subprocess.Popen[str], Address]]:
    """A coordinator in a process of its own, with a lease of 0.6 s; killed at the end, even if stopped."""
    process = subprocess.Popen(
        [sys.executable, "-c", COORDINATOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process, Address("127.0.0.1", int(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


def test_an_agent_reconnects_after_a_silent_lease_and_the_job_survives(harness: Any) -> None:
    async def scenario(process: "subprocess.Popen[str]", address: Address) -> None:
        async with harness.linking(address, lease=0.6) as (link, agent):
            await agent.until(lambda a: a.count("linked") == 1)
            link.send(harness.join("a"))
            place = (await agent.heard(Assign)).place
            os.kill(process.pid, signal.SIGSTOP)
            await agent.until(lambda a: a.count("unlinked") == 1)
            assert "the coordinator sent nothing for 0.6 s" in agent.told[-1][1]
            os.kill(process.pid, signal.SIGCONT)
            await agent.until(lambda a: a.count("linked") == 2)
            link.send(harness.join("a", held=place, newest=place.round, status=Status.RUNNING))
            link.send(Succeeded(place.round))
            report = (await agent.heard(Closed)).report
            assert (report.outcome, report.rounds) == (Outcome.SUCCEEDED, 1)

    with coordinator_process() as (process, address):
        asyncio.run(scenario(process, address))


def test_a_killed_coordinator_is_detected_at_once(harness: Any) -> None:
    async def scenario(process: "subprocess.Popen[str]", address: Address) -> None:
        async with harness.linking(address, lease=600) as (_, agent):
            await agent.until(lambda a: a.count("linked") == 1)
            process.kill()
            await agent.until(lambda a: a.count("unlinked") == 1)

    with coordinator_process() as (process, address):
        asyncio.run(scenario(process, address))


def test_heartbeats_alone_keep_a_link_connected(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving(lease=0.9) as (coordinator, address), harness.linking(address) as (link, agent):
            await agent.until(lambda a: a.count("linked") == 1)
            link.send(harness.join("a"))
            await agent.heard(Assign)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(agent.until(lambda a: a.count("unlinked") == 1), 3.0)
            assert coordinator.forgotten == []

    asyncio.run(scenario())


def heartbeats_that_ask(late: float, count: int) -> list[int]:
    """The numbers of the heartbeats in a large job that ask for an answer, if each is late by `late` seconds."""

    async def scenario() -> list[bool]:
        loop = asyncio.get_running_loop()
        real, now, asked = loop.time, 0.0, list[bool]()
        loop.time = lambda: now  # type: ignore[method-assign]
        heartbeats = _WebSocketLinkHeartbeats(13.5, 1.5, 9.0, send=asked.append, on_expired=lambda: None)
        try:
            for _ in range(count):
                now += 1.5 + late
                heartbeats._send_timer.cancel()
                heartbeats._on_send_timer()
                if asked[-1]:
                    now += 0.01
                    heartbeats.on_received()
                    now -= 0.01
            return asked
        finally:
            heartbeats.stop()
            loop.time = real  # type: ignore[method-assign]

    return [number for number, wants_answer in enumerate(asyncio.run(scenario())) if wants_answer]


def test_an_agent_of_a_large_job_asks_for_an_answer_with_one_of_seven_heartbeats() -> None:
    first, second, third = heartbeats_that_ask(late=0.0, count=20)
    assert second - first == third - second == 7


def test_an_agent_of_a_large_job_asks_in_time_although_its_heartbeats_are_late() -> None:
    first, second, *_ = heartbeats_that_ask(late=1.4, count=20)
    assert (second - first) * 2.9 < 13.5 - 1.5


def test_an_agent_of_a_large_job_asks_for_an_answer_after_it_was_suspended() -> None:
    async def scenario() -> None:
        loop, asked = asyncio.get_running_loop(), asyncio.Event()
        real = loop.time
        heartbeats = _WebSocketLinkHeartbeats(
            DEADLINE,
            10 * DEADLINE,
            60 * DEADLINE,
            send=lambda wants_answer: asked.set() if wants_answer else None,
            on_expired=lambda: None,
        )
        loop.time = lambda: real() + 2 * DEADLINE  # type: ignore[method-assign]
        try:
            async with asyncio.timeout(DEADLINE / 2):
                await asked.wait()
        finally:
            heartbeats.stop()
            loop.time = real  # type: ignore[method-assign]

    asyncio.run(scenario())


def test_a_suspended_agent_does_not_take_the_coordinator_for_lost(harness: Any) -> None:
    async def scenario(address: Address) -> None:
        async with harness.linking(address) as (_, agent):
            await agent.until(lambda a: a.count("linked") == 1)  # it has not joined, so it has no lease
            harness.block(1.5)  # more than two leases
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(agent.until(lambda a: a.count("unlinked") == 1), 1.0)

    with coordinator_process() as (_, address):
        asyncio.run(scenario(address))


@pytest.mark.parametrize("late", [0.2, 1.0])  # leases
def test_a_suspended_agent_asks_once_more_and_does_not_wait_for_another_lease(late: float) -> None:
    async def scenario() -> None:
        loop, sent, expired = asyncio.get_running_loop(), [], asyncio.Event()
        real = loop.time
        heartbeats = _WebSocketLinkHeartbeats(
            DEADLINE, 0.05, 0.0, send=lambda _: sent.append(loop.time()), on_expired=expired.set
        )
        loop.time = lambda: real() + (1 + late) * DEADLINE  # type: ignore[method-assign]
        try:
            async with asyncio.timeout(DEADLINE / 2):
                await expired.wait()
            assert len(sent) >= 2  # the regular heartbeat is late, too
        finally:
            heartbeats.stop()
            loop.time = real  # type: ignore[method-assign]

    asyncio.run(scenario())


def test_queued_messages_are_sent_before_the_link_closes(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving() as (coordinator, address):
            async with harness.linking(address) as (link, agent):
                await agent.until(lambda a: a.count("linked") == 1)
                link.send(harness.join("a"))
                place = (await agent.heard(Assign)).place
                link.send(Succeeded(place.round))
                link.send(Left("the job is over"))
            report = await asyncio.wait_for(coordinator.ended, DEADLINE)
            assert report.outcome is Outcome.SUCCEEDED

    asyncio.run(scenario())


def test_a_link_can_be_closed_while_it_connects_and_leaves_no_task(harness: Any) -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            for host in ("127.0.0.1", "no-such-host.invalid"):
                link = WebSocketLink(
                    Address(host, mute.getsockname()[1]), run_id="job", node="a", token="", lease=3.0, max_nodes=1
                )
                agent = harness.Recorder()
                link.open(agent)
                await asyncio.sleep(0)
                await asyncio.wait_for(link.close(), DEADLINE)
                assert agent.told == []
                assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


def test_an_error_of_the_listener_is_not_an_error_of_the_link(harness: Any) -> None:
    class Failing(harness.Recorder):  # type: ignore[misc, name-defined]
        def on_connected(self) -> None:
            super().on_connected()
            raise OSError("no space left on device")

    async def scenario() -> None:
        errors: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        async with harness.serving() as (_, address):
            link = WebSocketLink(address, run_id="job", node="a", token="s3cret", lease=3.0, max_nodes=1)
            agent = Failing()
            link.open(agent)
            await agent.until(lambda a: a.count("linked") == 1)
            link.send(harness.join("a"))
            await agent.heard(Assign)
            await link.close()
        assert [str(error["exception"]) for error in errors] == ["no space left on device"]

    asyncio.run(scenario())
