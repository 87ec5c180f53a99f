"""What the server passes agents to: the interface of a coordinator, and of an agent that may become one.

Rules: (1) `send` and `close`, which `attach` gets, must not call back at once; (2) every message of an agent that is no
heartbeat comes to `receive`, and every heartbeat to `renew`, whether the peer is the coordinator yet or not; (3) there
are no calls after `detach`.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from ripstop.api.job_interface import JobInterface
from ripstop.coordinator.job_types import JobSettings
from ripstop.model.failure import JobEnd
from ripstop.protocol.messages import FromAgent, FromCoordinator


class AgentSession(Protocol):
    """The other end of one agent's connection."""

    @property
    def node(self) -> str: ...

    def receive(self, message: FromAgent) -> None: ...

    def renew(self) -> None:
        """The agent sent a heartbeat."""

    def detach(self, *, returning: bool = False, closed_by_node: bool = False) -> None:
        """The connection closed.  `returning`: the agent announced that it connects again.

        `closed_by_node`: a FIN or RST came from the agent's machine, without a Close frame.
        """


class AgentHost(Protocol):
    """What agents connect to: a coordinator, or an agent that may become one (`election/candidate_host.py`)."""

    settings: JobSettings
    ended: asyncio.Future[JobEnd]

    @property
    def job(self) -> JobInterface | None:
        """The job for the API; None while its coordinator is in another process."""

    def attach(
        self, node: str, send: Callable[[FromCoordinator], object], close: Callable[[], object]
    ) -> AgentSession: ...
