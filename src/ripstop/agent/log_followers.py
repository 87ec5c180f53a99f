"""Who follows the logs of this node, piece by piece, and is to have them whole before the agent goes.

The answer that reaches the end of what was ever written says so.  Rules: (1) who has had the end is not waited for; (2)
nor is who has not asked again for `PATIENCE` seconds after an answer: it has left, or does not read.
"""

import asyncio
import math
from collections import Counter
from contextlib import suppress

PATIENCE = 1.0  # seconds


class LogFollowers:
    """A reader is known by the name that its questions bear."""

    def __init__(self) -> None:
        self._asking: Counter[str] = Counter()  # questions that are being answered
        self._answered: dict[str, float] = {}  # when, those who have not had the end
        self._news = asyncio.Event()

    def ask(self, reader: str) -> None:
        """It wants a piece."""
        self._asking[reader] += 1

    def answer(self, reader: str, *, last: bool) -> None:
        """It gets one; the last, if there is no more to be had here."""
        self._asking -= Counter([reader])
        now = asyncio.get_running_loop().time()
        self._answered = {who: at for who, at in self._answered.items() if who != reader and now < at + PATIENCE}
        if not last:
            self._answered[reader] = now
        self._news.set()

    async def part(self, most: float) -> None:
        """Wait for them, so many seconds at most."""
        now = asyncio.get_running_loop().time
        limit = now() + most
        while (until := min(limit, self._until())) > now():
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._news.wait()

    def _until(self) -> float:
        return math.inf if self._asking else max(self._answered.values(), default=-math.inf) + PATIENCE
