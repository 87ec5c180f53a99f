"""The job's API on the coordinator's port: who may ask, what is answered, and what an audit says afterwards."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

import aiohttp
import pytest

from ripstop.api import streams
from ripstop.coordinator import metrics_collector
from ripstop.model.events import AgentMessage, EventRecord, FirstStep, WorkersStarted
from ripstop.model.operator_commands import StopJob
from ripstop.model.round import Address
from ripstop.protocol.messages import Assign, Closing, Drain, Left, Query, Reply
from ripstop.protocol.secret import api_token
from ripstop.transport import server
from ripstop.transport.tls import for_agent

DEADLINE = 20.0
TOKEN = api_token("s3cret", "job")


class Caller:
    """An operator with a token, or another one."""

    def __init__(self, http: aiohttp.ClientSession, address: Address, token: str = TOKEN, scheme: str = "http") -> None:
        self._http = http
        self._url = f"{scheme}://{address}/api/v1"
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self._http.get(self._url + path, headers=self._headers | headers) as answer:
            return answer.status, await answer.json()

    async def post(self, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
        async with self._http.request(
            method, self._url + path, json={} if body is None else body, headers=self._headers
        ) as answer:
            return answer.status, await answer.json()

    def stream(self, path: str, **headers: str) -> Any:
        return self._http.get(self._url + path, headers=self._headers | headers)


@contextlib.asynccontextmanager
async def job(harness: Any, nodes: int = 1, **more: Any) -> AsyncIterator[tuple[Any, Address, Any, Any]]:
    """A job that runs, with agents that do nothing by themselves: coordinator, address, links, recorders."""
    async with harness.serving(nodes=nodes, **more) as (coordinator, address), contextlib.AsyncExitStack() as stack:
        agents = []
        for name in "abc"[:nodes]:
            link, agent = await stack.enter_async_context(
                harness.linking(address, node=name, **{k: v for k, v in more.items() if k in ("tls", "token")})
            )
            await agent.until(lambda a: a.count("linked") == 1)
            link.send(harness.join(name, nodes, more.get("least", 0)))
            agents.append((link, agent))
        for _, agent in agents:
            await agent.heard(Assign)
        yield coordinator, address, [link for link, _ in agents], [agent for _, agent in agents]


def in_a_job(
    harness: Any, scenario: Callable[[Any, Caller, Any, Any], Coroutine[None, None, None]], nodes: int = 1
) -> None:
    async def run() -> None:
        async with job(harness, nodes) as (coordinator, address, links, agents), aiohttp.ClientSession() as http:
            async with asyncio.timeout(DEADLINE):
                await scenario(coordinator, Caller(http, address), links, agents)

    asyncio.run(run())


def test_a_coordinator_whose_office_has_run_out_is_not_the_one_to_ask(harness: Any) -> None:
    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        coordinator._may_decide = lambda: False
        for answer in (await caller.get("/status"), await caller.post("/stop"), await caller.post("/restart")):
            assert (answer[0], "is not in this process now" in answer[1]["error"]) == (503, True)
        assert steered(coordinator) == []

    in_a_job(harness, scenario)


def steered(coordinator: Any) -> list[tuple[str, str, str]]:
    found = [entry.event for _, entry in coordinator.journal.since(0)]
    return [(e.action, e.by, e.result) for e in found if type(e).__name__ == "OperatorAction"]


# who may ask ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["", "guess", "s3cret", api_token("s3cret", "other"), "ü"])
def test_a_wrong_token_is_refused_and_the_connection_closed(harness: Any, token: str) -> None:
    async def run() -> None:
        async with job(harness) as (coordinator, address, _, _), aiohttp.ClientSession() as http:
            for path in ("/status", "/events", "/nothing", "/openapi.json"):
                async with Caller(http, address, token).stream(path) as answer:
                    assert answer.status == 401
                    assert answer.headers["WWW-Authenticate"] == "Bearer"
                    assert "RIPSTOP_TOKEN" in (await answer.json())["error"] or not token
                    assert answer.headers["Connection"] == "close"
            assert (await Caller(http, address, token).post("/stop"))[0] == 401
            assert coordinator.status().phase == "running"
            assert steered(coordinator) == []

    asyncio.run(run())


def test_a_job_without_a_secret_is_not_steered_over_the_network(harness: Any) -> None:
    async def run() -> None:
        async with job(harness, token="") as (_, address, _, _), aiohttp.ClientSession() as http:
            for token in ("", api_token("", "job")):
                status, answer = await Caller(http, address, token).get("/status")
                assert status == 403
                assert "start it with RIPSTOP_TOKEN" in answer["error"]

    asyncio.run(run())


def test_who_shows_a_certificate_of_the_jobs_authority_needs_no_secret(harness: Any, authority: Any) -> None:
    async def run() -> None:
        tls = authority.node()
        async with (
            job(harness, token="", tls=tls) as (_, address, _, _),
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=for_agent(tls))) as http,
        ):
            assert (await Caller(http, address, "", "https").get("/status"))[0] == 200

    asyncio.run(run())


def test_who_has_shown_the_token_is_no_stranger_and_others_stay_one(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE", 0.3)

    async def run() -> None:
        async with (
            job(harness) as (_, address, _, _),
            aiohttp.ClientSession() as http,
            Caller(http, address).stream("/events", Accept="text/event-stream") as known,
        ):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(b"POST /api/v1/stop HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n")  # and no more
            assert await asyncio.wait_for(reader.read(), DEADLINE) == b""  # cut off
            writer.close()
            assert await asyncio.wait_for(known.content.readline(), DEADLINE) == b": events of the job\n"
            assert not known.content.at_eof()

    asyncio.run(run())


def test_a_body_that_is_too_large_is_not_taken(harness: Any) -> None:
    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        status, answer = await caller.post("/stop", {"why": "x" * 100_000})
        assert (status, coordinator.status().phase) == (413, "running")
        assert "send less" in answer["error"]

    in_a_job(harness, scenario)


# to see ---------------------------------------------------------------------------------------------------------------


def test_status_members_and_ranks_tell_the_same(harness: Any) -> None:
    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        _, status = await caller.get("/status")
        assert (status["run_id"], status["phase"], status["world_size"]) == ("job", "running", 2)
        assert (await caller.get("/members"))[1] == {"members": status["nodes"]}
        asking = asyncio.create_task(caller.get("/ranks"))
        ask = await agents[0].heard(Query)
        assert ask.question == "workers"
        links[0].send(Reply(ask.number, json.dumps({"round": 1, "pids": [4711]})))
        links[1].send(Reply((await agents[1].heard(Query)).number, error="no workers run on this node now"))
        _, answer = await asking
        rank = {"local_rank": 0, "state": "running"}
        assert answer["ranks"] == [
            {"rank": 0, "node": "a", "pid": 4711} | rank,
            {"rank": 1, "node": "b", "pid": None} | rank,
        ]

    in_a_job(harness, scenario, nodes=2)


def test_status_asks_the_one_node_that_knows_the_goodput_and_does_without_its_answer(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_collector, "STEP_TIMEOUT_S", 0.05)

    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        assert (await caller.get("/status"))[1]["goodput"] is None
        now = time.time()
        coordinator.journal.take(EventRecord(1, now, "b", FirstStep(1, 1, 10, 0.1)))
        coordinator.journal.take(EventRecord(1, now, "a", FirstStep(1, 0, 10, 0.1)))
        assert (await caller.get("/status"))[1]["goodput"] == 0.0  # no answer in time
        monkeypatch.setattr(metrics_collector, "STEP_TIMEOUT_S", DEADLINE)
        asking = asyncio.create_task(caller.get("/status"))
        await agents[0].until(lambda agent: len(asks(agent)) == 2)
        ask = asks(agents[0])[-1]
        assert (ask.question, json.loads(ask.argument)) == ("step", {"rank": 0})
        links[0].send(Reply(ask.number, json.dumps({"round": 1, "step": 12, "at": now + 1e6})))
        assert (await asking)[1]["goodput"] == 1.0
        assert asks(agents[1]) == []

    in_a_job(harness, scenario, nodes=2)


def test_events_are_numbered_and_read_in_parts(harness: Any) -> None:
    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        _, whole = await caller.get("/events")
        assert [event["kind"] for event in whole["events"]][:2] == ["node_joined", "round_formed"]
        assert [event["number"] for event in whole["events"]] == list(range(1, whole["last"] + 1))
        _, part = await caller.get("/events?limit=1")
        assert (part["last"], part["more"]) == (1, True)
        _, rest = await caller.get(f"/events?since={part['last']}")
        assert part["events"] + rest["events"] == whole["events"]
        assert (await caller.get("/events?since=999999"))[1]["events"] == []

    in_a_job(harness, scenario)


async def data(stream: Any) -> dict[str, Any]:
    """The next event of a stream."""
    while not (line := (await stream.content.readline()).decode()).startswith("data: "):
        assert line, "the stream has ended"
    found: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return found


def test_a_stream_of_events_goes_on_and_resumes_where_it_was_left(harness: Any) -> None:
    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        async with caller.stream("/events", Accept="text/event-stream") as stream:
            assert stream.content_type == "text/event-stream"
            assert (await data(stream))["kind"] == "node_joined"
        async with caller.stream("/events", Accept="text/event-stream", **{"Last-Event-ID": "1"}) as stream:
            assert (await data(stream))["number"] == 2
            coordinator.record(AgentMessage("later"))
            while (event := await data(stream))["kind"] != "agent_message":
                pass
            assert (event["text"], event["number"]) == ("later", coordinator.journal.count)
            coordinator.apply_command(StopJob("enough"))
            while event["kind"] != "job_closing":
                event = await data(stream)

    in_a_job(harness, scenario)


def test_a_stream_that_nobody_reads_is_cut_off_and_the_job_never_waits(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "SLOW", 0.2)

    async def run() -> None:
        async with job(harness) as (coordinator, address, _, _):
            gone = asyncio.Event()
            subscribe = coordinator.journal.subscribe
            coordinator.journal.subscribe = lambda sink: partial(_both, subscribe(sink), gone.set)
            writer = await _reader_of_events(address)
            for _ in range(9000):
                coordinator.record(AgentMessage("x" * 900))
            await asyncio.wait_for(gone.wait(), DEADLINE)  # it was more than sockets hold
            writer.close()

    asyncio.run(run())


def test_who_reads_nothing_does_not_put_off_the_end(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "STUCK", 0.05)
    monkeypatch.setattr(server, "FLUSH", 1000.0)  # else aiohttp would cut it off, by and by

    async def run() -> None:
        async with asyncio.timeout(DEADLINE):
            async with job(harness) as (coordinator, address, _, _):
                writer = await _reader_of_events(address)
                for _ in range(9000):
                    coordinator.record(AgentMessage("x" * 900))
            writer.close()

    asyncio.run(run())


async def _reader_of_events(address: Address) -> asyncio.StreamWriter:
    """One that has seen the beginning of an answer, and reads no more."""
    reader, writer = await asyncio.open_connection(address.host, address.port, limit=1024)
    head = f"GET /api/v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nAccept: text/event-stream"
    writer.write(f"{head}\r\n\r\n".encode())
    await reader.readline()
    return writer


def _both(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


def test_streams_are_counted_and_one_too_many_is_refused(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_STREAMS", 1)

    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        async with caller.stream("/events", Accept="text/event-stream") as first:
            await data(first)
            assert (await caller.get("/events", Accept="text/event-stream"))[0] == 503
            following = asyncio.create_task(caller.stream("/logs/0?follow=true").__aenter__())
            links[0].send(Reply((await agents[0].heard(Query)).number, piece("of another kind\n")))
            assert (await following).status == 200
            (await following).close()

    in_a_job(harness, scenario)


def test_who_follows_a_silent_log_and_leaves_is_forgotten(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_STREAMS", 1)
    silence = piece("")

    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        async def answer(message: Any) -> None:
            await asyncio.sleep(0.01)  # as a node that waits, but not as long
            links[0].send(Reply(message.number, silence))

        tasks: list[asyncio.Task[None]] = []
        monkeypatch.setattr(agents[0], "on_message", lambda ask: tasks.append(asyncio.create_task(answer(ask))))
        statuses: list[int] = []
        while statuses.count(200) < 3:
            async with caller.stream("/logs/0?follow=true") as stream:
                statuses.append(stream.status)
            await asyncio.sleep(0.01)
        assert set(statuses) <= {200, 503}

    in_a_job(harness, scenario)


def piece(text: str, at: int = 0, round: int = 1, *, end: bool = False) -> str:
    """An agent's answer about a log."""
    end_at = at + len(text)
    return json.dumps({"round": round, "offset": at, "next": end_at, "size": end_at, "text": text, "end": end})


def started(rank: int) -> EventRecord:
    return EventRecord(1, 1.0, f"node{rank}", WorkersStarted(2, rank, 8, 1, (1,), 0.0, 0.0, ""))


def asks(agent: Any) -> list[Query]:
    return [message for message in agent.messages if isinstance(message, Query)]


def test_what_happens_in_the_job_makes_nobody_ask_again_for_a_log_but_new_workers_do(harness: Any) -> None:
    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        (link,), (agent,) = links, agents
        following = asyncio.create_task(caller.stream("/logs/0?follow=true").__aenter__())
        link.send(Reply((await agent.heard(Query)).number, piece("")))
        stream = await following
        await agent.until(lambda a: len(asks(a)) == 2)
        for number in range(50):
            coordinator.record(AgentMessage(f"{number}"))
            await caller.get("/status")
        assert len(asks(agent)) == 2
        link.send(Reply(asks(agent)[1].number, piece("late\n")))  # to the question of before
        assert await stream.content.readline() == b"late\n"
        await agent.until(lambda a: len(asks(a)) == 3)
        link.send(Reply(asks(agent)[2].number, piece("", at=5)))
        await agent.until(lambda a: len(asks(a)) == 4)
        link.send(Reply(asks(agent)[3].number, piece("", at=5, end=True)))  # its round is over
        coordinator.journal.take(started(rank=7))
        await caller.get("/status")
        assert len(asks(agent)) == 4
        coordinator.journal.take(started(rank=0))
        await agent.until(lambda a: len(asks(a)) == 5)
        assert json.loads(asks(agent)[4].argument)["offset"] == 5
        stream.close()

    in_a_job(harness, scenario)


def test_a_log_is_read_to_its_end_where_it_is_though_its_rank_has_moved(harness: Any) -> None:
    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        following = asyncio.create_task(caller.stream("/logs/0?follow=true").__aenter__())
        links[0].send(Reply((await agents[0].heard(Query)).number, piece("one\n")))
        stream = await following
        await agents[0].until(lambda a: len(asks(a)) == 2)
        job = coordinator._job
        job.places["a"], job.places["b"] = job.places["b"], job.places["a"]
        links[0].send(Reply(asks(agents[0])[1].number, piece("two\n", at=4)))
        await agents[0].until(lambda a: len(asks(a)) == 3)
        links[0].send(Reply(asks(agents[0])[2].number, piece("three\n", at=8, end=True)))
        coordinator.journal.take(started(rank=0))
        ask = await agents[1].heard(Query)
        assert {ask.argument for ask in asks(agents[0])} != {ask.argument}
        assert json.loads(ask.argument)["reader"] == json.loads(asks(agents[0])[0].argument)["reader"]
        links[1].send(Reply(ask.number, piece("four\n", round=2)))
        assert [await stream.content.readline() for _ in range(4)] == [b"one\n", b"two\n", b"three\n", b"four\n"]
        stream.close()

    in_a_job(harness, scenario, nodes=2)


def test_what_a_node_answered_before_it_left_is_written_before_the_stream_ends(harness: Any) -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as http:
            async with job(harness) as (coordinator, address, (link,), (agent,)):
                following = asyncio.create_task(Caller(http, address).stream("/logs/0?follow=true").__aenter__())
                link.send(Reply((await agent.heard(Query)).number, piece("first\n")))
                stream = await following
                await agent.until(lambda a: len(asks(a)) == 2)
                link.send(Reply(asks(agent)[1].number, piece("last", at=6, end=True)))
                link.send(Left("the job is over"))
                await coordinator.until(lambda c: not c.status().nodes)
            assert await asyncio.wait_for(stream.text(), DEADLINE) == "first\nlast"

    asyncio.run(run())


def test_a_node_is_asked_a_few_things_at_a_time(harness: Any) -> None:
    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        (link,), (agent,) = links, agents
        asking = [asyncio.create_task(caller.get("/logs/0")) for _ in range(12)]
        await agent.until(lambda a: len(asks(a)) == 4)
        for number in range(12):
            await caller.get("/status")
            assert len(asks(agent)) <= number + 4
            await agent.until(lambda a: len(asks(a)) > number)  # noqa: B023
            link.send(Reply(asks(agent)[number].number, piece("x")))
        assert {status for status, _ in await asyncio.gather(*asking)} == {200}

    in_a_job(harness, scenario)


def test_stacks_come_from_the_nodes_that_can_tell(harness: Any) -> None:
    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        asking = asyncio.create_task(caller.get("/stacks"))
        ask = await agents[0].heard(Query)
        links[0].send(Reply(ask.number, json.dumps({"ranks": [{"rank": 0, "stack": "main"}]})))
        links[1].send(Reply((await agents[1].heard(Query)).number, error="ptrace is forbidden"))
        assert await asking == (
            200,
            {
                "stacks": [{"node": "a", "rank": 0, "stack": "main"}],
                "unanswered": [{"node": "b", "why": "ptrace is forbidden"}],
            },
        )
        status, answer = await caller.get("/stacks?rank=2")
        assert (status, answer["error"]) == (404, "there is no rank 2: the job has ranks 0 to 1")

    in_a_job(harness, scenario, nodes=2)


# to steer -------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_with_words_and_audited(harness: Any) -> None:
    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        status, answer = await caller.post("/scale", {"nodes": 2})
        assert (status, answer["error"].split(";")[0]) == (409, "the job runs on 1 to 1 nodes, not on 2")
        status, answer = await caller.post("/drain", {"node": "a"})
        assert (status, "stop the job, or add a node first" in answer["error"]) == (409, True)
        assert (await caller.post("/drain", {"node": "z"}))[0] == 404
        assert [(action, by, result[:8]) for action, by, result in steered(coordinator)] == [
            ("scale to 2", "127.0.0.1", "refused:"),
            ("drain of node a", "127.0.0.1", "refused:"),
            ("drain of node z", "127.0.0.1", "refused:"),
        ]

    in_a_job(harness, scenario)


def test_a_restart_and_a_stop_are_carried_out_and_audited(harness: Any) -> None:
    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        assert (await caller.post("/restart"))[0] == 200
        assert coordinator.status().why == "restart asked for by 127.0.0.1"
        assert (await caller.post("/restart"))[0] == 409  # it gathers
        assert (await caller.post("/stop", {"why": "lunch"}))[0] == 200
        closing = await agents[0].heard(Closing)
        assert closing.why == "stopped by 127.0.0.1: lunch"
        assert (await caller.post("/stop"))[0] == 409
        assert [result[:8] for _, _, result in steered(coordinator)] == ["accepted", "refused:", "accepted", "refused:"]

    in_a_job(harness, scenario)


def test_a_drained_node_is_told_to_leave(harness: Any) -> None:
    async def run() -> None:
        async with job(harness, 2, least=1) as (_, address, _, agents), aiohttp.ClientSession() as http:
            assert (await Caller(http, address).post("/drain", {"node": "b"}))[0] == 200
            assert (await agents[1].heard(Drain)).why == "drained by 127.0.0.1"
            assert not any(isinstance(message, Drain) for message in agents[0].messages)

    asyncio.run(run())


# what is no request ---------------------------------------------------------------------------------------------------


def test_a_request_that_is_not_as_described_is_told_so(harness: Any) -> None:
    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        assert (await caller.get("/nothing"))[0] == 404
        assert (await caller.get("/logs/x"))[0] == 400
        assert (await caller.get("/logs/9"))[0] == 404
        assert (await caller.get("/logs/0?tail=1&offset=1"))[0] == 409
        assert (await caller.get("/status?verbose=1"))[0] == 400
        assert (await caller.post("/scale", {"nodes": "2"}))[0] == 400
        assert (await caller.post("/scale", [2]))[0] == 400
        status, answer = await caller.post("/status", method="DELETE")
        assert (status, answer["error"]) == (405, "DELETE: there is no such thing here; write GET")
        async with caller._http.post(f"{caller._url}/stop", data=b"{}", headers=caller._headers) as plain:
            assert plain.status == 415
        assert coordinator.status().phase == "running"

    in_a_job(harness, scenario)
