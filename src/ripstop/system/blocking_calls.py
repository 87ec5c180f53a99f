"""What may hang, at a file server or at a driver: done in a thread that is not waited for beyond its time.

The threads are daemons, so that none of them keeps an agent from ending, and bounded in number.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

log = logging.getLogger("ripstop.workers")

T = TypeVar("T")

PATIENCE = 4.0  # seconds, less than whoever asks an agent has
MOST = 128  # threads that have not come back

_aside = 0
_counting = threading.Lock()  # launches of one program may overlap, each in a thread of its own


async def run_in_daemon_thread(function: Callable[[], T], patience: float = PATIENCE) -> T:
    """What a function finds, out of the loop's way.  TimeoutError: it hangs, or as many as there may be do."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[T | None, Exception | None]] = loop.create_future()

    def run() -> None:
        found: tuple[T | None, Exception | None]
        try:
            found = (function(), None)
        except Exception as error:
            found = (None, error)
        _count(-1)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, done, found)

    if _count(1) > MOST:
        _count(-1)
        raise TimeoutError(f"{MOST} looks at files have not come back")
    try:
        threading.Thread(target=run, name="ripstop-aside", daemon=True).start()
    except RuntimeError:
        _count(-1)
        raise
    async with asyncio.timeout(patience):
        found, error = await done
    if error is not None:
        raise error
    return found  # type: ignore[return-value]  # there is one or the other


def _count(change: int) -> int:
    global _aside
    with _counting:
        _aside += change
        return _aside


class ExclusiveCall(Generic[T]):
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
