"""A look that may hang, at a file server or at a driver: made in a thread that is not waited for beyond its time."""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

log = logging.getLogger("ripstop.workers")

T = TypeVar("T")


class Look(Generic[T]):
    """Calls `function` whenever a look is taken, and while it hangs not again; used in one event loop.

    When it raises, what it found last stands: `found`, if it never found anything.
    """

    def __init__(self, function: Callable[[], T], found: T) -> None:
        self._function = function
        self._found = found
        self._failed = False
        self._pending: asyncio.Future[T] | None = None

    async def take(self, patience: float) -> T | None:
        """What there is to see; None when the look does not come back within so many seconds."""
        pending = self._pending
        if pending is None or pending.done():
            pending = asyncio.get_running_loop().create_future()
            try:
                threading.Thread(target=self._run, args=(pending,), name="ripstop-look", daemon=True).start()
            except RuntimeError as defect:  # no thread is left
                self._say(defect)
                return self._found
            self._pending = pending
        done, _ = await asyncio.wait([pending], timeout=patience)
        return pending.result() if done else None

    def _run(self, pending: asyncio.Future[T]) -> None:
        try:
            self._found = self._function()
        except Exception as defect:
            self._say(defect)
        with suppress(RuntimeError):  # the loop is closed
            pending.get_loop().call_soon_threadsafe(settle, pending, self._found)

    def _say(self, defect: Exception) -> None:
        if not self._failed:
            log.warning("a look at this node failed, and what was seen before stands (said once): %r", defect)
        self._failed = True


def settle(future: asyncio.Future[T], value: T) -> None:
    """The future has this value, unless nobody wants to know any more."""
    if not future.done():
        future.set_result(value)
