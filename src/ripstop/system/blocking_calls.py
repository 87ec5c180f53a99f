"""Calls that may block for ever, on a file server or a driver: they run in daemon threads, with a timeout.

Daemon threads do not keep an agent from exiting.  Their number is limited.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

log = logging.getLogger("ripstop.workers")

T = TypeVar("T")

CALL_TIMEOUT_S = 4.0  # shorter than the timeout of a query to an agent
MAX_BLOCKED_THREADS = 128

_running = 0
_running_lock = threading.Lock()  # launches of one program may overlap, each in its own thread


async def run_in_daemon_thread(function: Callable[[], T], timeout: float | None = CALL_TIMEOUT_S) -> T:
    """Call a function in a thread.  TimeoutError: it blocks, or MAX_BLOCKED_THREADS others do."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[T | None, Exception | None]] = loop.create_future()

    def run() -> None:
        outcome: tuple[T | None, Exception | None]
        try:
            outcome = (function(), None)
        except Exception as error:
            outcome = (None, error)
        _count(-1)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, done, outcome)

    if _count(1) > MAX_BLOCKED_THREADS:
        _count(-1)
        raise TimeoutError(f"{MAX_BLOCKED_THREADS} earlier calls still block")
    try:
        threading.Thread(target=run, name="ripstop-call", daemon=True).start()
    except RuntimeError:
        _count(-1)
        raise
    async with asyncio.timeout(timeout):
        result, error = await done
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # the one or the other is set


def _count(change: int) -> int:
    global _running
    with _running_lock:
        _running += change
        return _running


class ExclusiveCall(Generic[T]):
    """Calls `function` in a thread, and not again while the last call blocks; used in one event loop.

    If it raises, the last result is returned again, or `initial` if there is none.
    """

    def __init__(self, function: Callable[[], T], initial: T) -> None:
        self._function = function
        self._result = initial
        self._has_warned = False
        self._pending: asyncio.Future[T] | None = None

    async def call(self, timeout: float) -> T | None:
        """The result; None if the call takes longer than this."""
        pending = self._pending
        if pending is None or pending.done():
            pending = asyncio.get_running_loop().create_future()
            try:
                threading.Thread(target=self._run, args=(pending,), name="ripstop-probe", daemon=True).start()
            except RuntimeError as error:  # no more threads available
                self._warn_once(error)
                return self._result
            self._pending = pending
        done, _ = await asyncio.wait([pending], timeout=timeout)
        return pending.result() if done else None

    def _run(self, pending: asyncio.Future[T]) -> None:
        try:
            self._result = self._function()
        except Exception as error:
            self._warn_once(error)
        with suppress(RuntimeError):  # the loop is closed
            pending.get_loop().call_soon_threadsafe(settle, pending, self._result)

    def _warn_once(self, error: Exception) -> None:
        if not self._has_warned:
            log.warning("a probe of this node failed; its last result is used (logged once): %r", error)
        self._has_warned = True


def settle(future: asyncio.Future[T], value: T) -> None:
    """Set the result, unless the future is done or cancelled."""
    if not future.done():
        future.set_result(value)
