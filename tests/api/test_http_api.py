"""The job's API on the coordinator's port: authorization, replies, and the audit events."""

import asyncio
import contextlib
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

import aiohttp
import pytest
from msgspec import to_builtins

from ripstop.api import streams
from ripstop.api.page_files import read_page_files
from ripstop.coordinator import metrics_collector
from ripstop.model.events import AgentMessage, CheckpointSaved, EventRecord, FirstStep, WorkersStarted
from ripstop.model.operator_commands import StopJob
from ripstop.model.round import Address
from ripstop.model.usage import GpuSample, NodeSample, RankSample
from ripstop.protocol.messages import Assign, Closing, Drain, Left, Query, Reply
from ripstop.protocol.secret import api_token_from_secret
from ripstop.telemetry import history
from ripstop.transport import connection_limits, server
from ripstop.transport.tls import client_context

DEADLINE = 120.0
TOKEN = api_token_from_secret("s3cret", "job")


class Caller:
    """An operator with a token, or another one."""

    def __init__(self, http: aiohttp.ClientSession, address: Address, token: str = TOKEN, scheme: str = "http") -> None:
        self._http = http
        self._url = f"{scheme}://{address}/api/v1"
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self._http.get(self._url + path, headers=self._headers | headers) as reply:
            return reply.status, await reply.json()

    async def post(self, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
        async with self._http.request(
            method, self._url + path, json={} if body is None else body, headers=self._headers
        ) as reply:
            return reply.status, await reply.json()

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


def test_a_coordinator_that_may_not_decide_replies_503(harness: Any) -> None:
    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        coordinator._may_decide = lambda: False
        for reply in (await caller.get("/status"), await caller.post("/stop"), await caller.post("/restart")):
            assert (reply[0], "is not in this process now" in reply[1]["error"]) == (503, True)
        assert operator_actions(coordinator) == []

    in_a_job(harness, scenario)


def operator_actions(coordinator: Any) -> list[tuple[str, str, str]]:
    found = [entry.event for _, entry in coordinator.journal.since(0)]
    return [(e.action, e.by, e.result) for e in found if type(e).__name__ == "OperatorAction"]


# authorization --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["", "guess", "s3cret", api_token_from_secret("s3cret", "other"), "ü"])
def test_a_wrong_token_is_rejected_and_the_connection_closed(harness: Any, token: str) -> None:
    async def run() -> None:
        async with job(harness) as (coordinator, address, _, _), aiohttp.ClientSession() as http:
            for path in ("/status", "/events", "/nothing", "/openapi.json"):
                async with Caller(http, address, token).stream(path) as reply:
                    assert reply.status == 401
                    assert reply.headers["WWW-Authenticate"] == "Bearer"
                    assert "RIPSTOP_TOKEN" in (await reply.json())["error"] or not token
                    assert reply.headers["Connection"] == "close"
            assert (await Caller(http, address, token).post("/stop"))[0] == 401
            assert coordinator.status().phase == "running"
            assert operator_actions(coordinator) == []

    asyncio.run(run())


def test_a_job_without_a_secret_cannot_be_controlled_over_the_network(harness: Any) -> None:
    async def run() -> None:
        async with job(harness, token="") as (_, address, _, _), aiohttp.ClientSession() as http:
            for token in ("", api_token_from_secret("", "job")):
                status, reply = await Caller(http, address, token).get("/status")
                assert status == 403
                assert "start it with RIPSTOP_TOKEN" in reply["error"]

    asyncio.run(run())


def test_a_client_certificate_of_the_jobs_authority_replaces_the_secret(harness: Any, authority: Any) -> None:
    async def run() -> None:
        tls = authority.node()
        async with (
            job(harness, token="", tls=tls) as (_, address, _, _),
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=client_context(tls))) as http,
        ):
            assert (await Caller(http, address, "", "https").get("/status"))[0] == 200

    asyncio.run(run())


def test_only_connections_with_a_token_outlive_the_handshake_timeout(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "HANDSHAKE_TIMEOUT_S", 1.0)

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


def test_a_body_that_is_too_large_is_rejected(harness: Any) -> None:
    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        status, reply = await caller.post("/stop", {"why": "x" * 100_000})
        assert (status, coordinator.status().phase) == (413, "running")
        assert "send less" in reply["error"]

    in_a_job(harness, scenario)


# status ---------------------------------------------------------------------------------------------------------------


def test_status_members_and_ranks_agree(harness: Any) -> None:
    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        _, status = await caller.get("/status")
        assert (status["run_id"], status["phase"], status["world_size"]) == ("job", "running", 2)
        assert (await caller.get("/members"))[1] == {"members": status["nodes"]}
        request = asyncio.create_task(caller.get("/ranks"))
        query = await agents[0].heard(Query)
        assert query.name == "workers"
        links[0].send(Reply(query.number, json.dumps({"round": 1, "pids": [4711]})))
        links[1].send(Reply((await agents[1].heard(Query)).number, error="no workers run on this node now"))
        _, reply = await request
        rank = {"local_rank": 0, "state": "running"}
        assert reply["ranks"] == [
            {"rank": 0, "node": "a", "pid": 4711} | rank,
            {"rank": 1, "node": "b", "pid": None} | rank,
        ]

    in_a_job(harness, scenario, nodes=2)


def test_status_queries_one_node_for_the_goodput_and_works_without_its_reply(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_collector, "STEP_TIMEOUT_S", 0.05)

    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        assert (await caller.get("/status"))[1]["goodput"] is None
        now = time.time()
        coordinator.journal.take(EventRecord(1, now, "b", FirstStep(1, 1, 10, 0.1)))
        coordinator.journal.take(EventRecord(1, now, "a", FirstStep(1, 0, 10, 0.1)))
        assert (await caller.get("/status"))[1]["goodput"] == 0.0  # no reply in time
        monkeypatch.setattr(metrics_collector, "STEP_TIMEOUT_S", DEADLINE)
        request = asyncio.create_task(caller.get("/status"))
        await agents[0].until(lambda agent: len(queries_of(agent)) == 2)
        query = queries_of(agents[0])[-1]
        assert (query.name, json.loads(query.argument)) == ("step", {"rank": 0})
        links[0].send(Reply(query.number, json.dumps({"round": 1, "step": 12, "at": now + 1e6})))
        assert (await request)[1]["goodput"] == 1.0
        assert queries_of(agents[1]) == []

    in_a_job(harness, scenario, nodes=2)


def test_usage_has_the_samples_of_the_round_as_columns_and_names_silent_nodes(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_collector, "NODE_TIMEOUT_S", 1.0)
    monkeypatch.setattr(history, "FIRST_INTERVAL_S", 0.05)
    rank = RankSample(0, 1.5, 4096, 1, 1, 10, step=7, steps_per_second=4.0, age=0.5)
    sample = NodeSample(time.time(), 1, 0.5, 1, (rank,), (GpuSample(3, 0.25, 10, 40, 60, 300.0),))

    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        coordinator.journal.take(EventRecord(1, 100.0, "a", CheckpointSaved(1, 0, 5, "/x")))

        async def answer() -> None:
            for number in itertools.count():
                await agents[0].until(lambda agent, number=number: len(queries_of(agent)) > number)
                query = queries_of(agents[0])[number]
                links[0].send(Reply(query.number, json.dumps(to_builtins(sample))))

        answering = asyncio.create_task(answer())
        status, usage = await caller.get("/usage")
        assert (status, usage["round"], usage["missing"]) == (200, 1, ["b"])
        assert (usage["checkpoint_step"], usage["checkpoint_at"]) == (5, 100.0)
        columns = {
            "rank": [0],
            "step": [7],
            "own_time": [None],
            "step_time": [0.25],
            "age": [0.5],
            "memory": [4096],
            "cpu": [1.5],
        }
        assert usage["ranks"] == columns
        assert (usage["gpus"]["node"], usage["gpus"]["index"], usage["gpus"]["utilisation"]) == (["a"], [3], [0.25])
        while not (past := (await caller.get("/history"))[1])["at"]:
            pass  # the first sample is on its way
        assert (past["step_time_p50"][0], past["memory"][0], past["gpu"][0]) == (0.25, 4096, 0.25)
        answering.cancel()

    in_a_job(harness, scenario, nodes=2)


def test_the_page_is_served_to_anyone_with_strict_headers_and_an_etag(harness: Any) -> None:
    async def scenario() -> None:
        async with harness.serving(token="") as (_, address), aiohttp.ClientSession() as http:
            async with http.get(f"http://{address}/") as reply:
                assert (reply.status, reply.content_type) == (200, "text/html")
                policy = reply.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy and "unsafe" not in policy
                assert reply.headers["X-Content-Type-Options"] == "nosniff"
                assert reply.headers["Connection"] == "close"
                names, etag = re.findall(r'(?:src|href)="(page/[^"]+)"', await reply.text()), reply.headers["ETag"]
            async with http.get(f"http://{address}/", headers={"If-None-Match": etag}) as reply:
                assert (reply.status, await reply.read()) == (304, b"")
            assert len(names) > 4
            imported = [name for name in read_page_files() if name.endswith((".js", ".css"))]
            for name in {*names, *(f"page/{name}" for name in imported)}:
                async with http.get(f"http://{address}/{name}") as reply:
                    assert reply.status == 200, name
            for name in ("uplot.LICENSE", "..%2f..%2fhttp_api.py", "nothing.js"):
                async with http.get(f"http://{address}/page/{name}") as reply:
                    assert reply.status == 404

    asyncio.run(scenario())


def test_events_are_numbered_and_read_in_pages(harness: Any) -> None:
    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        _, whole = await caller.get("/events")
        assert [event["kind"] for event in whole["events"]][:3] == ["job_started", "node_joined", "round_formed"]
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


def test_a_stream_of_events_continues_and_can_be_resumed(harness: Any) -> None:
    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        async with caller.stream("/events", Accept="text/event-stream") as stream:
            assert stream.content_type == "text/event-stream"
            assert (await data(stream))["kind"] == "job_started"
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


def test_a_stream_without_a_reader_is_closed_and_the_job_never_waits(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "WRITE_TIMEOUT_S", 0.2)

    async def run() -> None:
        async with job(harness) as (coordinator, address, _, _):
            gone = asyncio.Event()
            subscribe = coordinator.journal.subscribe
            coordinator.journal.subscribe = lambda *calls: partial(_both, subscribe(*calls), gone.set)
            writer = await _reader_of_events(address)
            for _ in range(9000):
                coordinator.record(AgentMessage("x" * 900))
            await asyncio.wait_for(gone.wait(), DEADLINE)  # it was more than sockets hold
            writer.close()

    asyncio.run(run())


def test_a_reader_that_reads_nothing_does_not_delay_the_end(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "FINAL_WRITE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(server, "FLUSH_TIMEOUT_S", 1000.0)  # else aiohttp would cut it off, by and by

    async def run() -> None:
        async with asyncio.timeout(DEADLINE):
            async with job(harness) as (coordinator, address, _, _):
                writer = await _reader_of_events(address)
                for _ in range(9000):
                    coordinator.record(AgentMessage("x" * 900))
            writer.close()

    asyncio.run(run())


async def _reader_of_events(address: Address) -> asyncio.StreamWriter:
    """A reader that has read the beginning of a reply and reads no more."""
    reader, writer = await asyncio.open_connection(address.host, address.port, limit=1024)
    head = f"GET /api/v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nAccept: text/event-stream"
    writer.write(f"{head}\r\n\r\n".encode())
    await reader.readline()
    return writer


def _both(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


def test_streams_above_the_limit_are_rejected(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_STREAMS", 1)

    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        async with caller.stream("/events", Accept="text/event-stream") as first:
            await data(first)
            assert (await caller.get("/events", Accept="text/event-stream"))[0] == 503
            following = asyncio.create_task(caller.stream("/logs/0?follow=true").__aenter__())
            links[0].send(Reply((await agents[0].heard(Query)).number, chunk("of another kind\n")))
            assert (await following).status == 200
            (await following).close()

    in_a_job(harness, scenario)


def test_a_follower_of_a_silent_log_that_disconnects_is_removed(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_STREAMS", 1)
    silence = chunk("")

    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        async def reply(message: Any) -> None:
            await asyncio.sleep(0.01)  # as a node that waits, but not as long
            links[0].send(Reply(message.number, silence))

        tasks: list[asyncio.Task[None]] = []
        monkeypatch.setattr(agents[0], "on_message", lambda query: tasks.append(asyncio.create_task(reply(query))))
        statuses: list[int] = []
        while statuses.count(200) < 3:
            async with caller.stream("/logs/0?follow=true") as stream:
                statuses.append(stream.status)
            await asyncio.sleep(0.01)
        assert set(statuses) <= {200, 503}

    in_a_job(harness, scenario)


def chunk(text: str, at: int = 0, round: int = 1, *, end: bool = False) -> str:
    """An agent's reply with a part of a log."""
    end_at = at + len(text)
    return json.dumps({"round": round, "offset": at, "next": end_at, "size": end_at, "text": text, "end": end})


def started(rank: int) -> EventRecord:
    return EventRecord(1, 1.0, f"node{rank}", WorkersStarted(2, rank, 8, 1, (1,), 0.0, 0.0, ""))


def queries_of(agent: Any) -> list[Query]:
    return [message for message in agent.messages if isinstance(message, Query)]


def test_only_new_workers_cause_another_query_for_a_log(harness: Any) -> None:
    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        (link,), (agent,) = links, agents
        following = asyncio.create_task(caller.stream("/logs/0?follow=true").__aenter__())
        link.send(Reply((await agent.heard(Query)).number, chunk("")))
        stream = await following
        await agent.until(lambda a: len(queries_of(a)) == 2)
        for number in range(50):
            coordinator.record(AgentMessage(f"{number}"))
            await caller.get("/status")
        assert len(queries_of(agent)) == 2
        link.send(Reply(queries_of(agent)[1].number, chunk("late\n")))  # the reply to the earlier query
        assert await stream.content.readline() == b"late\n"
        await agent.until(lambda a: len(queries_of(a)) == 3)
        link.send(Reply(queries_of(agent)[2].number, chunk("", at=5)))
        await agent.until(lambda a: len(queries_of(a)) == 4)
        link.send(Reply(queries_of(agent)[3].number, chunk("", at=5, end=True)))  # its round is over
        coordinator.journal.take(started(rank=7))
        await caller.get("/status")
        assert len(queries_of(agent)) == 4
        coordinator.journal.take(started(rank=0))
        await agent.until(lambda a: len(queries_of(a)) == 5)
        assert json.loads(queries_of(agent)[4].argument)["offset"] == 5
        stream.close()

    in_a_job(harness, scenario)


def test_a_log_is_read_to_its_end_on_its_node_after_its_rank_has_moved(harness: Any) -> None:
    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        following = asyncio.create_task(caller.stream("/logs/0?follow=true").__aenter__())
        links[0].send(Reply((await agents[0].heard(Query)).number, chunk("one\n")))
        stream = await following
        await agents[0].until(lambda a: len(queries_of(a)) == 2)
        job = coordinator._job
        job.places["a"], job.places["b"] = job.places["b"], job.places["a"]
        links[0].send(Reply(queries_of(agents[0])[1].number, chunk("two\n", at=4)))
        await agents[0].until(lambda a: len(queries_of(a)) == 3)
        links[0].send(Reply(queries_of(agents[0])[2].number, chunk("three\n", at=8, end=True)))
        coordinator.journal.take(started(rank=0))
        query = await agents[1].heard(Query)
        assert {query.argument for query in queries_of(agents[0])} != {query.argument}
        assert json.loads(query.argument)["reader"] == json.loads(queries_of(agents[0])[0].argument)["reader"]
        links[1].send(Reply(query.number, chunk("four\n", round=2)))
        assert [await stream.content.readline() for _ in range(4)] == [b"one\n", b"two\n", b"three\n", b"four\n"]
        stream.close()

    in_a_job(harness, scenario, nodes=2)


def test_replies_of_a_node_that_left_are_written_before_the_stream_ends(harness: Any) -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as http:
            async with job(harness) as (coordinator, address, (link,), (agent,)):
                following = asyncio.create_task(Caller(http, address).stream("/logs/0?follow=true").__aenter__())
                link.send(Reply((await agent.heard(Query)).number, chunk("first\n")))
                stream = await following
                await agent.until(lambda a: len(queries_of(a)) == 2)
                link.send(Reply(queries_of(agent)[1].number, chunk("last", at=6, end=True)))
                link.send(Left("the job is over"))
                await coordinator.until(lambda c: not c.status().nodes)
            assert await asyncio.wait_for(stream.text(), DEADLINE) == "first\nlast"

    asyncio.run(run())


def test_the_concurrent_queries_to_a_node_are_limited(harness: Any) -> None:
    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        (link,), (agent,) = links, agents
        request = [asyncio.create_task(caller.get("/logs/0")) for _ in range(12)]
        await agent.until(lambda a: len(queries_of(a)) == 4)
        for number in range(12):
            await caller.get("/status")
            assert len(queries_of(agent)) <= number + 4
            await agent.until(lambda a: len(queries_of(a)) > number)  # noqa: B023
            link.send(Reply(queries_of(agent)[number].number, chunk("x")))
        assert {status for status, _ in await asyncio.gather(*request)} == {200}

    in_a_job(harness, scenario)


def test_stacks_have_the_replies_and_the_errors_of_nodes(harness: Any) -> None:
    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        request = asyncio.create_task(caller.get("/stacks"))
        query = await agents[0].heard(Query)
        links[0].send(Reply(query.number, json.dumps({"ranks": [{"rank": 0, "stack": "main"}]})))
        links[1].send(Reply((await agents[1].heard(Query)).number, error="ptrace is forbidden"))
        assert await request == (
            200,
            {
                "stacks": [{"node": "a", "rank": 0, "stack": "main"}],
                "unanswered": [{"node": "b", "why": "ptrace is forbidden"}],
            },
        )
        status, reply = await caller.get("/stacks?rank=2")
        assert (status, reply["error"]) == (404, "there is no rank 2: the job has ranks 0 to 1")

    in_a_job(harness, scenario, nodes=2)


# commands -------------------------------------------------------------------------------------------------------------


def test_an_impossible_command_is_rejected_and_audited(harness: Any) -> None:
    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        status, reply = await caller.post("/scale", {"nodes": 2})
        assert (status, reply["error"].split(";")[0]) == (409, "the job runs on 1 to 1 nodes, not on 2")
        status, reply = await caller.post("/drain", {"node": "a"})
        assert (status, "stop the job, or add a node first" in reply["error"]) == (409, True)
        assert (await caller.post("/drain", {"node": "z"}))[0] == 404
        assert [(action, by, result[:8]) for action, by, result in operator_actions(coordinator)] == [
            ("scale to 2", "127.0.0.1", "refused:"),
            ("drain of node a", "127.0.0.1", "refused:"),
            ("drain of node z", "127.0.0.1", "refused:"),
        ]

    in_a_job(harness, scenario)


def test_a_restart_and_a_stop_are_carried_out_and_audited(harness: Any) -> None:
    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        assert (await caller.post("/restart"))[0] == 200
        assert coordinator.status().why == "restart requested by 127.0.0.1"
        assert (await caller.post("/restart"))[0] == 409  # it gathers
        assert (await caller.post("/stop", {"why": "lunch"}))[0] == 200
        closing = await agents[0].heard(Closing)
        assert closing.why == "stopped by 127.0.0.1: lunch"
        assert (await caller.post("/stop"))[0] == 409
        assert [result[:8] for _, _, result in operator_actions(coordinator)] == [
            "accepted",
            "refused:",
            "accepted",
            "refused:",
        ]

    in_a_job(harness, scenario)


def test_a_drained_node_receives_drain(harness: Any) -> None:
    async def run() -> None:
        async with job(harness, 2, least=1) as (_, address, _, agents), aiohttp.ClientSession() as http:
            assert (await Caller(http, address).post("/drain", {"node": "b"}))[0] == 200
            assert (await agents[1].heard(Drain)).why == "drained by 127.0.0.1"
            assert not any(isinstance(message, Drain) for message in agents[0].messages)

    asyncio.run(run())


# invalid requests -----------------------------------------------------------------------------------------------------


def test_a_request_that_does_not_match_the_description_is_rejected(harness: Any) -> None:
    async def scenario(coordinator: Any, caller: Caller, links: Any, agents: Any) -> None:
        assert (await caller.get("/nothing"))[0] == 404
        assert (await caller.get("/logs/x"))[0] == 400
        assert (await caller.get("/logs/9"))[0] == 404
        assert (await caller.get("/logs/0?tail=1&offset=1"))[0] == 409
        assert (await caller.get("/status?verbose=1"))[0] == 400
        assert (await caller.post("/scale", {"nodes": "2"}))[0] == 400
        assert (await caller.post("/scale", [2]))[0] == 400
        status, reply = await caller.post("/status", method="DELETE")
        assert (status, reply["error"]) == (405, "DELETE: wrong method; use GET")
        async with caller._http.post(f"{caller._url}/stop", data=b"{}", headers=caller._headers) as plain:
            assert plain.status == 415
        assert coordinator.status().phase == "running"

    in_a_job(harness, scenario)
