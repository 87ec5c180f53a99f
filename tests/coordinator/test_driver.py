import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from ripstop.model.errors import ProtocolError, QueryFailed
from ripstop.model.event_json import to_json
from ripstop.model.events import CheckpointSaved, Event, EventRecord, FirstStep, RoundEnded
from ripstop.model.failure import Failure
from ripstop.model.operator_commands import StopJob
from ripstop.model.round import Outcome
from ripstop.protocol.messages import (
    Assign,
    Closed,
    Events,
    Failed,
    FromCoordinator,
    Heartbeat,
    Left,
    Ready,
    Rejected,
    Succeeded,
)
from ripstop.transport.link import InProcessLink


class Peer:
    """A connection that records the messages sent to it."""

    def __init__(self) -> None:
        self.sent: list[FromCoordinator] = []
        self.closed = asyncio.Event()

    async def end(self) -> None:
        await asyncio.wait_for(self.closed.wait(), 120)


def test_a_job_within_one_process_runs_to_its_end(harness: Any) -> None:
    async def scenario() -> None:
        coordinator = harness.coordinator()
        link, agent = InProcessLink(coordinator, "a"), harness.Recorder()
        assert "not open" in link.disconnect_reason
        link.open(agent)
        await agent.until(lambda a: a.count("linked") == 1)
        assert (link.disconnect_reason, link.local_host) == ("", None)
        link.send(harness.join("a"))
        assign = await agent.heard(Assign)
        link.send(Succeeded(assign.place.round))
        closed = await agent.heard(Closed)
        link.send(Left("the job is over"))
        await link.close()
        report = await asyncio.wait_for(coordinator.ended, 120)
        assert report == closed.report
        assert report.outcome is Outcome.SUCCEEDED
        coordinator.stop()

    asyncio.run(scenario())


def test_a_local_link_never_calls_back_from_within_a_call(harness: Any) -> None:
    async def scenario() -> None:
        coordinator = harness.coordinator()
        link, agent = InProcessLink(coordinator, "a"), harness.Recorder()
        link.open(agent)
        assert agent.told == []
        await agent.until(lambda a: a.count("linked") == 1)
        link.send(harness.join("a"))
        assert agent.messages == []
        await agent.heard(Assign)
        await link.close()
        coordinator.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "progress", [lambda round: FirstStep(round, 0, 7, 0.1), lambda round: CheckpointSaved(round, 0, 7, "")]
)
def test_a_round_with_a_step_or_a_checkpoint_is_not_part_of_a_crash_loop(
    harness: Any, progress: Callable[[int], Event]
) -> None:
    async def scenario() -> None:
        coordinator = harness.coordinator(restarts=5)
        link, agent = InProcessLink(coordinator, "a"), harness.Recorder()
        link.open(agent)
        await agent.until(lambda a: a.count("linked") == 1)
        link.send(harness.join("a"))
        for round in range(1, 5):
            await agent.until(lambda a, n=round: sum(isinstance(m, Assign) for m in a.messages) == n)
            link.send(Events((to_json(EventRecord(round, 1.0, "a", progress(round))),)))
            link.send(Ready(29500 + round, round))
            link.send(Failed(round, (Failure(0, 0, round, "host", 1.0, exitcode=1),)))
        await agent.until(lambda a: sum(isinstance(m, Assign) for m in a.messages) == 5)
        ends = [entry.event for _, entry in coordinator.journal.since(0) if isinstance(entry.event, RoundEnded)]
        assert [end.delay for end in ends] == [0.0] * 4
        await link.close()
        coordinator.stop()

    asyncio.run(scenario())


def test_a_local_agent_with_other_settings_is_rejected_once(harness: Any) -> None:
    async def scenario() -> None:
        coordinator = harness.coordinator(nodes=2)
        link, agent = InProcessLink(coordinator, "a"), harness.Recorder()
        link.open(agent)
        link.send(harness.join("a", nodes=3))
        await agent.until(lambda a: a.count("refused") == 1)
        await link.close()
        assert [event[0] for event in agent.told] == ["linked", "refused"]
        coordinator.stop()

    asyncio.run(scenario())


def test_a_closed_local_link_reports_nothing(harness: Any) -> None:
    async def scenario() -> None:
        coordinator = harness.coordinator()
        link, agent = InProcessLink(coordinator, "a"), harness.Recorder()
        link.open(agent)
        await link.close()
        coordinator.stop()
        assert agent.told == []

    asyncio.run(scenario())


def test_a_second_connection_replaces_the_first(harness: Any) -> None:
    async def scenario() -> None:
        coordinator = harness.coordinator()
        first, second = Peer(), Peer()
        old = coordinator.attach("a", first.sent.append, first.closed.set)
        old.receive(harness.join("a"))
        new = coordinator.attach("a", second.sent.append, second.closed.set)
        await first.end()
        place = first.sent[-1].place
        new.receive(harness.join("a", held=place, newest=place.round))
        old.receive(Left("late"))
        old.detach()
        new.receive(Succeeded(place.round))
        assert isinstance(second.sent[-1], Closed)
        assert second.sent[-1].report.rounds == 1
        assert not second.closed.is_set()
        coordinator.stop()
        assert second.closed.is_set()

    asyncio.run(scenario())


def test_a_silent_node_is_disconnected_after_its_lease(harness: Any) -> None:
    async def scenario() -> None:
        coordinator = harness.coordinator(nodes=2, lease=0.2)
        peer = Peer()
        coordinator.attach("a", peer.sent.append, peer.closed.set).receive(harness.join("a", nodes=2))
        await peer.end()
        coordinator.stop()

    asyncio.run(scenario())


def test_a_node_that_announced_its_return_is_not_lost(harness: Any) -> None:
    async def scenario() -> None:
        coordinator = harness.coordinator()
        first, second = Peer(), Peer()
        session = coordinator.attach("a", first.sent.append, first.closed.set)
        session.receive(harness.join("a"))
        place = first.sent[-1].place
        session.detach(returning=True)
        session = coordinator.attach("a", second.sent.append, second.closed.set)
        session.receive(harness.join("a", held=place, newest=place.round))
        session.receive(Succeeded(place.round))
        (closed,) = second.sent
        assert closed.report.outcome is Outcome.SUCCEEDED
        coordinator.stop()

    asyncio.run(scenario())


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("away", [0.65, 0.8, 2.0])
def test_a_coordinator_that_was_suspended_first_reads_pending_messages(harness: Any, away: float) -> None:
    async def scenario() -> None:
        coordinator = harness.coordinator(nodes=2, lease=0.6)
        peers = [Peer(), Peer()]
        sessions = [
            coordinator.attach(node, peer.sent.append, peer.closed.set) for node, peer in zip("ab", peers, strict=True)
        ]
        for session in sessions:
            session.receive(harness.join(session.node, nodes=2))
        await turns(1)  # the timer of their leases is set
        harness.block(away)
        for session in sessions:
            await turns(2)  # the loop needs some turns to read what has arrived
            session.receive(Heartbeat())
        await turns(2)
        for session in sessions:
            session.receive(Succeeded(1))
        assert isinstance(peers[0].sent[-1], Closed)
        coordinator.stop()

    asyncio.run(scenario())


def test_a_message_soon_after_a_suspension_counts(harness: Any) -> None:
    async def scenario() -> None:
        coordinator = harness.coordinator(lease=0.6)
        peer = Peer()
        session = coordinator.attach("a", peer.sent.append, peer.closed.set)
        session.receive(harness.join("a"))
        harness.block(0.85)
        await asyncio.sleep(0.05)  # the agent had closed the link, and reconnects
        session.receive(Succeeded(1))
        assert isinstance(peer.sent[-1], Closed)
        coordinator.stop()

    asyncio.run(scenario())


def test_a_rejected_node_receives_the_reason_before_its_connection_closes(harness: Any) -> None:
    async def scenario() -> None:
        coordinator = harness.coordinator(nodes=2)
        peer = Peer()
        coordinator.attach("a", peer.sent.append, peer.closed.set).receive(harness.join("a", nodes=3))
        (sent,) = peer.sent
        assert isinstance(sent, Rejected)
        assert "--nnodes" in sent.why
        assert peer.closed.is_set()
        coordinator.stop()

    asyncio.run(scenario())


def test_a_message_that_cannot_be_sent_closes_only_that_nodes_connection(harness: Any) -> None:
    async def scenario() -> None:
        def refuse(message: FromCoordinator) -> None:
            raise ProtocolError("a message has at most 10 bytes")

        coordinator = harness.coordinator(nodes=2)
        first, second = Peer(), Peer()
        coordinator.attach("a", first.sent.append, first.closed.set).receive(harness.join("a", nodes=2))
        coordinator.attach("b", refuse, second.closed.set).receive(harness.join("b", nodes=2))
        await second.end()
        await turns(2)
        assert [node.state for node in coordinator.status().nodes if node.name == "b"] == ["absent"]
        assert any(isinstance(message, Assign) for message in first.sent)
        assert not coordinator.ended.done()
        coordinator.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("end", ["replaced", "dropped", "stopped", "refused"])
def test_a_query_fails_when_its_connection_closes(harness: Any, end: str) -> None:
    async def scenario() -> None:
        def refuse(message: FromCoordinator) -> None:
            if end == "refused":
                raise ProtocolError("too long")

        coordinator = harness.coordinator(nodes=2)
        session = coordinator.attach("a", refuse, lambda: None)
        asked = asyncio.create_task(coordinator.ask("a", "what?", timeout_s=60.0))
        await turns(2)
        match end:
            case "replaced":
                coordinator.attach("a", lambda _: None, lambda: None)
            case "dropped":
                session.receive(harness.join("a", nodes=3))
            case "stopped":
                coordinator.stop()
        with pytest.raises(QueryFailed):
            await asyncio.wait_for(asked, 120)
        assert coordinator._queries == {}
        coordinator.stop()

    asyncio.run(scenario())


def test_an_operator_can_stop_the_job(harness: Any) -> None:
    async def scenario() -> None:
        coordinator = harness.coordinator()
        coordinator.apply_command(StopJob("enough"))
        report = await asyncio.wait_for(coordinator.ended, 120)
        assert (report.outcome, report.why) == (Outcome.STOPPED, "enough")
        coordinator.stop()

    asyncio.run(scenario())


def test_a_coordinator_within_one_process_needs_no_network_library() -> None:
    code = "import sys, ripstop.transport.link; print(sorted({'aiohttp', 'torch'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"


def test_events_of_a_node_are_bounded(harness: Any) -> None:
    async def scenario() -> None:
        coordinator = harness.coordinator()
        session = coordinator.attach("a", send=lambda _: None, close=lambda: None)
        huge = "x" * 200_000
        preloaded = tuple("x" * 1000 for _ in range(200))
        session.receive(Events((_line(1, {"kind": "agent_message", "text": huge}),)))
        warm = {"kind": "warmed_up", "start": huge, "preloaded": preloaded, "seconds": 1.0, "why": huge}
        session.receive(Events((_line(2, warm),)))
        found = [entry.event for _, entry in coordinator.journal.since(0) if entry.node == "a"]
        assert [type(event).__name__ for event in found] == ["AgentMessage", "WarmedUp"]
        assert all(len(repr(event)) < 60_000 for event in found)
        coordinator.stop()

    asyncio.run(scenario())


def _line(seq: int, event: dict[str, Any]) -> str:
    return json.dumps({"v": 1, "seq": seq, "at": 1.0, "node": "a", **event})
