"""What an agent's driver holds of its coordinator: a link, wherever the coordinator is.

`local.py` links within one process, `client.py` over the network.  Rules both keep:

1. Callbacks come from the event loop, never from within a call of the agent's.
2. `on_connected` comes first and again after every `on_disconnected`; messages come only between the two.
3. What is sent while there is no link is gone.  A `Join` after `on_connected` tells everything again.
4. `on_refused` is final, and after `close()` there are no callbacks.
"""

from typing import Protocol

from ripstop.protocol.messages import FromAgent, FromCoordinator


class Listener(Protocol):
    """The agent's side of a link."""

    def on_connected(self) -> None:
        """The coordinator is there and knows the job's secret."""

    def on_message(self, message: FromCoordinator) -> None:
        """It said something."""

    def on_disconnected(self, why: str) -> None:
        """The link broke; another is being sought."""

    def on_refused(self, why: str) -> None:
        """It will not have this node, and asking again will not help."""


class Link(Protocol):
    """The coordinator's side, as the agent sees it."""

    @property
    def local_host(self) -> str | None:
        """This node's address on the way to the coordinator, once known; None within one process."""

    @property
    def skew(self) -> float | None:
        """Seconds that this node's clock is ahead of the coordinator's; None within one process, or before a link."""

    @property
    def trouble(self) -> str:
        """Why there is no link now, since when, and what was tried; empty while linked."""

    def open(self, listener: Listener) -> None:
        """Start linking; call once, in the event loop."""

    def send(self, message: FromAgent) -> None:
        """Say something, in order."""

    async def close(self) -> None:
        """Let what was sent go out, briefly, and end the link."""
