"""Calls that may block for ever, on a file server or a driver: they run in daemon threads, with a timeout.

Daemon threads do not keep an agent from exiting.  Their number is limited.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

from ripstop.model.text_formatting import truncate

log = logging.getLogger("ripstop.workers")

T = TypeVar("T")

CALL_TIMEOUT_S = 4.0  # shorter than the timeout of a query to an agent
MAX_BLOCKED_THREADS = 128
MAX_WARNING_CHARS = 200  # of an error, which may contain a server's reply

_free_threads = threading.Semaphore(MAX_BLOCKED_THREADS)  # launches of one program may overlap, each in its own thread


def start_daemon_thread(function: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Call a function in a thread; the future gets its result or its exception.  RuntimeError: no thread is left."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            report = partial(settle_blocking_call, future, function())
        except Exception as error:
            report = partial(_settle_with_error, future, error)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(report)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def settle_blocking_call(future: asyncio.Future[T], value: T) -> None:
    """Set the result, unless the future is done or cancelled."""
    if not future.done():
        future.set_result(value)


def _settle_with_error(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


async def run_in_daemon_thread(function: Callable[[], T], timeout: float | None = CALL_TIMEOUT_S) -> T:
    """Call a function in a thread.  TimeoutError: it blocks, or MAX_BLOCKED_THREADS others do."""

    def call() -> T:
        try:
            return function()
        finally:
            _free_threads.release()

    if not _free_threads.acquire(blocking=False):
        raise TimeoutError(f"{MAX_BLOCKED_THREADS} earlier calls still block")
    try:
        future = start_daemon_thread(call, "ripstop-call")
    except RuntimeError:
        _free_threads.release()
        raise
    async with asyncio.timeout(timeout):
        return await future


class ExclusiveCall(Generic[T]):
    """Calls `function` in a thread, and not again while the last call blocks; used in one event loop.

    If it raises, the last result is returned again, or `initial` if there is none.  `what` names it in the warning,
    which is logged once.
    """

    def __init__(self, function: Callable[[], T], initial: T, what: str = "a probe of this node") -> None:
        self._function = function
        self._result = initial
        self._what = what
        self._has_warned = False
        self._pending: asyncio.Future[T] | None = None

    async def call(self, timeout: float) -> T | None:
        """The result; None if the call takes longer than this."""
        if self._pending is None or self._pending.done():
            try:
                self._pending = start_daemon_thread(self._run, "ripstop-probe")
            except RuntimeError as error:
                self._warn_once(error)
                return self._result
        done, _ = await asyncio.wait([self._pending], timeout=timeout)
        return done.pop().result() if done else None

    def _run(self) -> T:
        try:
            self._result = self._function()
        except Exception as error:
            self._warn_once(error)
        return self._result

    def _warn_once(self, error: Exception) -> None:
        if not self._has_warned:
            text = truncate(repr(error), MAX_WARNING_CHARS)
            log.warning("%s failed; its last result is used (logged once): %s", self._what, text)
        self._has_warned = True
