"""Agents that elect their coordinator over real connections, in one event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import wraps

import pytest
from msgspec.structs import replace

from ripstop.coordinator.job_types import JobSettings
from ripstop.election.succession_link import SuccessionLink
from ripstop.model.config import Timing
from ripstop.model.electorate import MAX_VOTERS, Electorate, first_electorate
from ripstop.model.errors import ProtocolError
from ripstop.model.round import Address, Node, Place
from ripstop.protocol.messages import Assign, Follow, Join, LeaderElected, Ready, Redirect, RequestPromise
from ripstop.transport.endpoint import Bound, bind_endpoint, bind_first_endpoint
from ripstop.transport.server import Server
from ripstop.transport.websocket_link import WebSocketLink
from tests.coordinator_fixtures import Recorder
from tests.e2e.harness import free_port

SETTINGS = JobSettings("job", 2, 3, Timing(last_call=0.2, lease=1.0))


def in_loop(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    """Run an async test."""

    @wraps(test)
    def run(*args: object, **more: object) -> None:
        asyncio.run(test(*args, **more))

    return run


class Agent:
    """A link, and a listener that joins the job as the driver does."""

    def __init__(self, name: str, addresses: list[Address], bound: Bound | None, token: str = "s3cret") -> None:
        self.name = name
        self.port = free_port()
        self.heard = Recorder()
        self.newest: Place | None = None
        self.link = SuccessionLink(addresses, SETTINGS, node=name, token=token, bound=bound)
        self.link.open(self)

    def on_connected(self) -> None:
        self.heard.on_connected()
        number = self.newest.round if self.newest else 0
        ready = Ready(self.port, number)
        self.link.send(Join(Node(self.name, "127.0.0.1", 1), 2, 3, ready=ready, newest=number, held=self.newest))

    def on_message(self, message: object) -> None:
        if isinstance(message, Assign):
            self.newest = message.place
        self.heard.on_message(message)  # type: ignore[arg-type]

    def on_disconnected(self, why: str) -> None:
        self.heard.on_disconnected(why)

    def on_rejected(self, why: str) -> None:
        self.heard.on_rejected(why)

    @property
    def leads(self) -> bool:
        return self.link._host is not None and self.link._host.coordinator is not None

    async def assigned(self, round: int) -> None:
        await self.heard.until(
            lambda heard: any(isinstance(m, Assign) and m.place.round >= round for m in heard.messages)
        )

    async def dies(self) -> None:
        """As a killed process: every socket is closed, nothing more is sent."""
        link, server = self.link, self.link._server
        link._listener = None
        if link._link is not None and link._link._task is not None:
            link._link.drop()
            link._link._task.cancel()
        if link._host is not None and server is not None:
            link._host._stop_leading()
            await server.close()


@contextlib.asynccontextmanager
async def agents(count: int = 3, addresses: int = 3) -> AsyncIterator[tuple[list[Address], list[Agent]]]:
    listed_addresses = [Address("127.0.0.1", free_port()) for _ in range(addresses)]
    made = [Agent(f"n{i}", listed_addresses, bind_first_endpoint(listed_addresses)) for i in range(count)]
    try:
        yield listed_addresses, made
    finally:
        await asyncio.gather(*(agent.link.close() for agent in made))


def leader(made: list[Agent]) -> Agent:
    (found,) = (agent for agent in made if agent.leads)
    return found


@in_loop
async def test_agents_elect_one_coordinator_and_form_a_round() -> None:
    async with agents() as (_, made):
        for agent in made:
            await agent.assigned(1)
        assert leader(made).heard.count("linked") == 1


@in_loop
async def test_heartbeats_alone_keep_nodes_in_the_round_of_an_elected_coordinator() -> None:
    async with agents() as (_, made):
        for agent in made:
            await agent.assigned(1)
        await asyncio.sleep(3 * SETTINGS.timing.lease)
        assert [agent.heard.count("linked") for agent in made] == [1, 1, 1]
        coordinator = leader(made).link._host
        assert coordinator is not None and coordinator.job is not None
        assert coordinator.job.status().round == 1 and len(coordinator.job.status().nodes) == 3


@in_loop
async def test_a_successor_is_elected_when_the_coordinator_dies() -> None:
    async with agents() as (_, made):
        for agent in made:
            await agent.assigned(1)
        old = leader(made)
        rest = [agent for agent in made if agent is not old]
        await old.dies()
        for agent in rest:
            await agent.heard.until(lambda heard: heard.count("linked") == 2)
        assert leader(rest).link._host is not None


@in_loop
async def test_the_first_coordinator_may_be_restarted_before_the_first_round() -> None:
    for _ in range(3):
        listed_addresses = [Address("127.0.0.1", free_port()) for _ in range(2)]
        first, second = (Agent(f"n{i}", listed_addresses, bind_first_endpoint(listed_addresses)) for i in range(2))
        await first.heard.until(lambda heard: heard.count("linked") == 1)
        old = leader([first, second])
        other = second if old is first else first
        await old.dies()
        again = Agent("again", listed_addresses, bind_first_endpoint(listed_addresses))
        try:
            await again.assigned(1)
            await other.assigned(1)
        finally:
            await asyncio.gather(again.link.close(), other.link.close())


@in_loop
async def test_a_newcomer_that_reaches_any_candidate_finds_the_coordinator() -> None:
    async with agents() as (listed_addresses, made):
        for agent in made:
            await agent.assigned(1)
        listed_address = leader(made).link._listed_address
        others = [address for address in listed_addresses if address != listed_address]
        newcomer = Agent(
            "late", [*others, *(address for address in listed_addresses if address == listed_address)], None
        )
        await newcomer.heard.until(lambda heard: heard.count("linked") == 1)
        await newcomer.link.close()


@in_loop
async def test_an_agent_without_the_secret_is_rejected_by_every_candidate() -> None:
    async with agents() as (listed_addresses, made):
        for agent in made:
            await agent.assigned(1)
        stranger = Agent("stranger", listed_addresses, None, token="wrong")
        await stranger.heard.until(lambda heard: heard.count("refused") == 1)
        assert not stranger.heard.count("linked")
        await stranger.link.close()


class FalseCandidate:
    """Asks every agent for a promise, redirects it and claims the leadership."""

    job = None

    def __init__(self) -> None:
        self.settings = SETTINGS
        self.ended = asyncio.get_running_loop().create_future()
        self.received: list[object] = []
        self.send = lambda message: None

    def attach(self, node: str, send: object, close: object) -> "FalseCandidate":
        for message in (RequestPromise(9, 1, "evil"), Redirect(Address("192.0.2.1", 1)), LeaderElected(10, "evil")):
            send(message)  # type: ignore[operator]
        return self

    def receive(self, message: object) -> None:
        self.received.append(message)

    node = "n0"

    def renew(self) -> None:
        pass

    def detach(self, *, returning: bool = False, closed_by_node: bool = False) -> None:
        pass


@pytest.mark.parametrize("token", ["s3cret", "wrong"])
@in_loop
async def test_only_a_peer_with_the_secret_gets_a_promise_and_a_redirect_leads_to_listed_addresses_only(
    token: str,
) -> None:
    listed_addresses = [Address("127.0.0.1", free_port())]
    bound = bind_endpoint(listed_addresses[0], required=True)
    assert bound is not None
    false = FalseCandidate()
    server = Server(bound.listening, false, token=token, listed_address=str(listed_addresses[0]))
    await server.start()
    agent = Agent("n0", [*listed_addresses, Address("127.0.0.1", free_port())], None)
    if token == "wrong":
        await agent.heard.until(lambda heard: heard.count("refused") == 1)
        assert false.received == []
        assert agent.link._voter.promised == 0
    else:
        await agent.heard.until(lambda heard: heard.count("linked") == 1)
        assert agent.link._voter.promised == 10
        assert agent.link._link is not None and agent.link._link._endpoint == listed_addresses[0]
    await agent.link.close()
    await server.close()


@in_loop
async def test_a_peer_that_relays_the_handshake_to_another_address_is_rejected() -> None:
    """It has no secret, and listens at an address of the job whose node is away."""
    listed_addresses = [Address("127.0.0.1", free_port()) for _ in range(2)]
    bound = bind_endpoint(listed_addresses[1], required=True)
    assert bound is not None
    real = Server(bound.listening, FalseCandidate(), token="s3cret", listed_address=str(listed_addresses[1]))
    await real.start()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward, back = await asyncio.open_connection("127.0.0.1", listed_addresses[1].port)

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                sink.write(data)
            sink.close()

        await asyncio.gather(copy(reader, back), copy(onward, writer), return_exceptions=True)

    false = await asyncio.start_server(relay, "127.0.0.1", listed_addresses[0].port)
    agent = Agent("n0", [listed_addresses[0]], None)
    await agent.heard.until(lambda heard: heard.count("refused") == 1)
    assert not agent.heard.count("linked") and agent.link._voter.promised == 0
    await agent.link.close()
    false.close()
    await real.close()


@in_loop
async def test_a_candidate_disconnects_an_agent_with_an_absurd_epoch_or_an_unlisted_address() -> None:
    async with agents(count=1, addresses=2) as (_, made):
        host = made[0].link._host
        assert host is not None
        peer = host.attach("x", lambda message: None, lambda: None)
        known = made[0].link._voter.electorate
        for follow in (
            Follow(2**62, "y", known),
            Follow(1, "y", replace(known, epoch=2**62)),
            Follow(1, "y", replace(known, serial=2**53)),
            Follow(1, "y", replace(known, round=2**53)),
            Follow(1, "y", replace(known, voters=())),
            Follow(1, "y", known, "elsewhere:1"),
        ):
            with pytest.raises(ProtocolError):
                peer.receive(follow)


@in_loop
async def test_a_candidate_disconnects_an_agent_with_too_many_voters() -> None:
    async with agents(count=1, addresses=2) as (_, made):
        host = made[0].link._host
        assert host is not None
        peer = host.attach("x", lambda message: None, lambda: None)
        names = tuple(f"n{i}" for i in range(MAX_VOTERS + 1))
        with pytest.raises(ProtocolError, match="at most 63 voters"):
            peer.receive(Follow(1, "y", Electorate(1, 1, 1, names)))
        long = replace(first_electorate(["a"]), voters=("n" * 300,))
        with pytest.raises(ProtocolError):
            peer.receive(Follow(1, "y", long))


@in_loop
async def test_a_link_reports_that_an_address_refuses_connections() -> None:
    failures = []
    done = asyncio.Event()

    def on_failed(failure: object) -> None:
        failures.append(failure)
        done.set()

    address = Address("127.0.0.1", free_port())
    link = WebSocketLink(address, run_id="job", node="n", token="", lease=1.0, max_nodes=3, on_failed=on_failed)
    link.open(Recorder())
    async with asyncio.timeout(120):
        await done.wait()
    assert failures[0].name == "REFUSED"
    await link.close()
