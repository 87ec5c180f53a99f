"""A coordinator behind a real socket, and a listener that records its calls."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from ripstop.coordinator.driver import Coordinator, CoordinatorDriverSession
from ripstop.coordinator.job_types import JobSettings
from ripstop.model.config import Budget, Timing, Tls
from ripstop.model.round import Address, Node
from ripstop.protocol.messages import FromCoordinator, Join, Ready
from ripstop.transport.endpoint import bind_endpoint
from ripstop.transport.server import Server
from ripstop.transport.tls import client_context, server_context
from ripstop.transport.websocket_link import WebSocketLink
from tests.certificates import Authority

DEADLINE = 120.0  # seconds for every wait: generous, test machines can be slow


class Recorder:
    """A listener that records its calls, as ("linked",), ("message", m), ("unlinked", why), ("refused", why)."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self._news = asyncio.Event()

    def on_connected(self) -> None:
        self._add("linked")

    def on_message(self, message: FromCoordinator) -> None:
        self._add("message", message)

    def on_disconnected(self, why: str) -> None:
        self._add("unlinked", why)

    def on_rejected(self, why: str) -> None:
        self._add("refused", why)

    def _add(self, *event: Any) -> None:
        self.told.append(event)
        self._news.set()

    @property
    def messages(self) -> list[FromCoordinator]:
        return [event[1] for event in self.told if event[0] == "message"]

    def count(self, what: str) -> int:
        return sum(event[0] == what for event in self.told)

    async def until(self, true: Callable[["Recorder"], bool]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not true(self):
                self._news.clear()
                await self._news.wait()

    async def heard(self, kind: type[Any]) -> Any:
        """Wait for the first message of this type."""
        await self.until(lambda self: any(isinstance(message, kind) for message in self.messages))
        return next(message for message in self.messages if isinstance(message, kind))


class Tapped(Coordinator):
    """A coordinator that records its sessions."""

    def __init__(self, settings: JobSettings) -> None:
        super().__init__(settings)
        self.attached: list[CoordinatorDriverSession] = []
        self.forgotten: list[CoordinatorDriverSession] = []
        self.returning: list[CoordinatorDriverSession] = []
        self.closed_by_node: list[str] = []
        self._news = asyncio.Event()

    def attach(self, node: str, send: Any, close: Any) -> CoordinatorDriverSession:
        session = super().attach(node, send, close)
        self.attached.append(session)
        self._news.set()
        return session

    def detach(self, session: CoordinatorDriverSession, *, returning: bool, closed_by_node: bool) -> None:
        super().detach(session, returning=returning, closed_by_node=closed_by_node)
        self.forgotten.append(session)
        if closed_by_node:
            self.closed_by_node.append(session.node)
        if returning:
            self.returning.append(session)
        self._news.set()

    async def until(self, true: Callable[["Tapped"], bool]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not true(self):
                self._news.clear()
                await self._news.wait()


class Harness:
    """Helpers for tests with real sockets."""

    Recorder = Recorder

    @staticmethod
    def block(seconds: float) -> None:
        """Block this process, as if it had been stopped."""
        time.sleep(seconds)

    @staticmethod
    def settings(
        nodes: int = 1, lease: float = 3.0, least: int = 0, restarts: int = 0, run_id: str = "job"
    ) -> JobSettings:
        return JobSettings(run_id, least or nodes, nodes, Timing(lease=lease), Budget(restarts))

    @staticmethod
    def coordinator(nodes: int = 1, lease: float = 3.0, least: int = 0, restarts: int = 0) -> Tapped:
        return Tapped(Harness.settings(nodes, lease, least, restarts))

    @staticmethod
    def join(node: str, nodes: int = 1, least: int = 0, **more: Any) -> Join:
        return Join(Node(node, "127.0.0.1", 1), least or nodes, nodes, ready=Ready(29500, 0), **more)

    @staticmethod
    @contextlib.asynccontextmanager
    async def serving(
        *,
        nodes: int = 1,
        least: int = 0,
        lease: float = 3.0,
        token: str = "s3cret",
        port: int = 0,
        tls: Tls | None = None,
        run_id: str = "job",
        name: str = "",
    ) -> AsyncIterator[tuple[Tapped, Address]]:
        """A coordinator on its own port."""
        coordinator = Tapped(Harness.settings(nodes, lease, least, run_id=run_id))
        bound = bind_endpoint(Address("127.0.0.1", port), required=True)
        assert bound is not None
        server = Server(bound.listening, coordinator, token=token, tls=tls and server_context(tls), endpoint_host=name)
        address = bound.address
        await server.start()
        try:
            yield coordinator, address
        finally:
            coordinator.stop()
            await server.close()

    @staticmethod
    @contextlib.asynccontextmanager
    async def linking(
        address: Address,
        *,
        node: str = "a",
        token: str = "s3cret",
        run_id: str = "job",
        lease: float = 3.0,
        tls: Tls | None = None,
    ) -> AsyncIterator[tuple[WebSocketLink, Recorder]]:
        """An open link of an agent to the coordinator."""
        link = WebSocketLink(
            address, run_id=run_id, node=node, token=token, lease=lease, max_nodes=1, tls=tls and client_context(tls)
        )
        recorder = Recorder()
        link.open(recorder)
        try:
            yield link, recorder
        finally:
            await link.close()


@pytest.fixture
def harness() -> type[Harness]:
    return Harness


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The CA of the nodes' certificates."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def other_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """A CA that the job does not trust."""
    return Authority(tmp_path_factory.mktemp("other-authority"))
