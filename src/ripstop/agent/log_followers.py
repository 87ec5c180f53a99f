"""Waits at the agent's end until the clients that follow this node's logs have read them completely.

A client reads a log in pieces, one query each; a flag in the reply marks the last piece.  The agent does not wait for a
client that has received the last piece, or that has sent no query for `NEXT_QUERY_TIMEOUT_S` after a reply.
"""

import asyncio
import math
from collections import Counter
from contextlib import suppress

NEXT_QUERY_TIMEOUT_S = 1.0


class LogFollowers:
    """Clients are identified by the name in their queries."""

    def __init__(self) -> None:
        self._open_queries: Counter[str] = Counter()
        self._replied_at: dict[str, float] = {}  # of clients that have not received the last piece
        self._changed = asyncio.Event()

    def on_query(self, client: str) -> None:
        self._open_queries[client] += 1

    def on_reply(self, client: str, *, is_last: bool) -> None:
        self._open_queries -= Counter([client])
        now = asyncio.get_running_loop().time()
        self._replied_at = {
            name: at for name, at in self._replied_at.items() if name != client and now < at + NEXT_QUERY_TIMEOUT_S
        }
        if not is_last:
            self._replied_at[client] = now
        self._changed.set()

    async def wait(self, timeout: float) -> None:
        """Return when every client has read its log completely, or after `timeout` seconds."""
        now = asyncio.get_running_loop().time
        end = now() + timeout
        while (until := min(end, self._deadline())) > now():
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._changed.wait()

    def _deadline(self) -> float:
        if self._open_queries:
            return math.inf
        return max(self._replied_at.values(), default=-math.inf) + NEXT_QUERY_TIMEOUT_S
