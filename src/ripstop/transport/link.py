"""The agent's connection to its coordinator, as an interface.

`in_process.py` connects within one process, `client.py` over the network.  Rules for both:

1.  Callbacks come from the event loop, never from within a call by the agent.
2.  `on_connected` comes first, and again after every `on_disconnected`.  Messages come only between the two.
3.  A message sent while disconnected is dropped.  The `Join` after `on_connected` carries the agent's whole state.
4.  `on_rejected` is final.  There are no callbacks after `close()`.
"""

from typing import Protocol

from ripstop.protocol.messages import FromAgent, FromCoordinator


class Listener(Protocol):
    """The callbacks of an agent."""

    def on_connected(self) -> None:
        """The coordinator is connected and has proven the job's secret."""

    def on_message(self, message: FromCoordinator) -> None:
        """The coordinator sent a message."""

    def on_disconnected(self, why: str) -> None:
        """The connection is lost; the link reconnects."""

    def on_rejected(self, why: str) -> None:
        """The coordinator rejects this node, and a retry does not help."""


class Link(Protocol):
    """A connection to the coordinator that reconnects by itself."""

    @property
    def local_host(self) -> str | None:
        """This node's address on the route to the coordinator, once known; None within one process."""

    @property
    def skew(self) -> float | None:
        """Seconds that this node's clock is ahead of the coordinator's; None within one process, or if unknown."""

    @property
    def disconnect_reason(self) -> str:
        """Why there is no connection, since when, and the number of tries; empty while connected."""

    def open(self, listener: Listener) -> None:
        """Start to connect; call once, in the event loop."""

    def send(self, message: FromAgent) -> None:
        """Queue a message; messages keep their order."""

    async def close(self) -> None:
        """Write the queued messages within a short time limit, and disconnect."""
