"""What agents connect to: a coordinator, or an agent that may become one.  Interfaces only."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from ripstop.api.job_interface import JobInterface
from ripstop.coordinator.job_types import JobSettings
from ripstop.model.failure import JobReport
from ripstop.protocol.messages import FromAgent, FromCoordinator


class AgentSession(Protocol):
    """The other end of one agent's connection."""

    @property
    def node(self) -> str: ...

    def receive(self, message: FromAgent) -> None: ...

    def renew(self) -> None:
        """The agent sent a heartbeat."""

    def detach(self, *, returning: bool = False) -> None: ...


class AgentHost(Protocol):
    """What agents connect to: a coordinator, or an agent that may become one (`election/candidate_host.py`)."""

    settings: JobSettings
    ended: asyncio.Future[JobReport]

    @property
    def job(self) -> JobInterface | None:
        """The job for the API; None while its coordinator is in another process."""

    def attach(
        self, node: str, send: Callable[[FromCoordinator], object], close: Callable[[], object]
    ) -> AgentSession: ...
