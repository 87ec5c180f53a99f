"""`torch.distributed.elastic.timer.api`: what a timer's client and its server are, and the `with` block between them.

A server of one's own derives from `TimerServer` and says how timers are kept and workers are ended; ours are in
`local_timer.py` and `file_timer.py`.
"""

from __future__ import annotations

import abc
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

__all__ = ["RequestQueue", "TimerClient", "TimerRequest", "TimerServer", "configure", "expires"]

log = logging.getLogger("ripstop.compat")


class TimerRequest:
    """To set a timer, or with a negative `expiration_time` to clear it; `worker_id` is whatever both sides agree on."""

    __slots__ = ("expiration_time", "scope_id", "worker_id")

    def __init__(self, worker_id: Any, scope_id: str, expiration_time: float) -> None:
        self.worker_id = worker_id
        self.scope_id = scope_id
        self.expiration_time = expiration_time

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TimerRequest):
            return False
        mine = (self.worker_id, self.scope_id, self.expiration_time)
        return mine == (other.worker_id, other.scope_id, other.expiration_time)

    __hash__ = None  # type: ignore[assignment]  # it can be changed, as torch's

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.worker_id!r}, {self.scope_id!r}, {self.expiration_time!r})"


class TimerClient(abc.ABC):
    """The worker's side."""

    @abc.abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Set a timer; it expires at this wall-clock time."""

    @abc.abstractmethod
    def release(self, scope_id: str) -> None:
        """Clear it."""


class RequestQueue(abc.ABC):
    """Where a server finds requests."""

    @abc.abstractmethod
    def size(self) -> int:
        """How many are there at least: a `get` of as many does not wait."""

    @abc.abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Up to `size` requests, after `timeout` seconds at most."""


class TimerServer(abc.ABC):
    """Keeps timers and ends the workers that miss one, in a thread between `start` and `stop`."""

    def __init__(self, request_queue: RequestQueue, max_interval: float, daemon: bool = True) -> None:
        self._request_queue = request_queue
        self._max_interval = max_interval
        self._daemon = daemon
        self._watchdog_thread: threading.Thread | None = None
        self._stop_signaled = False
        self._not_ended: set[Any] = set()  # workers of which it was said

    @abc.abstractmethod
    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Set timers, and clear those of requests with a negative time."""

    @abc.abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Clear all timers of these workers."""

    @abc.abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """The timers that expire at `deadline` or before, by worker."""

    @abc.abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """End this worker; False to be asked again.  After an exception it counts as ended."""

    def _patience(self) -> float:
        """Seconds to wait for a request before timers are looked at."""
        return self._max_interval

    def _reap_worker_no_throw(self, worker_id: Any) -> bool:
        try:
            return self._reap_worker(worker_id)
        except Exception:
            log.exception("worker %s could not be ended, and is not tried again", worker_id)
            return True

    def _watchdog_loop(self) -> None:
        while not self._stop_signaled:
            try:
                self._run_watchdog()
            except Exception:
                log.exception("the timer server stumbled, and goes on")

    def _run_watchdog(self) -> None:
        size = max(1, self._request_queue.size())
        self.register_timers(self._request_queue.get(size, self._patience()))
        ended = set()
        for worker_id, expired in self.get_expired_timers(time.time()).items():
            if worker_id not in self._not_ended:
                log.warning("worker %s missed its timers %s and is ended", worker_id, self._get_scopes(expired))
            if self._reap_worker_no_throw(worker_id):
                ended.add(worker_id)
            elif worker_id not in self._not_ended:
                self._not_ended.add(worker_id)
                log.error("worker %s could not be ended; it will be tried again", worker_id)
        self._not_ended -= ended
        self.clear_timers(ended)

    def _get_scopes(self, timer_requests: list[TimerRequest]) -> list[str]:
        return [request.scope_id for request in timer_requests]

    def start(self) -> None:
        log.info("starting %s", type(self).__name__)
        self._watchdog_thread = threading.Thread(target=self._watchdog_loop, name="ripstop-timers", daemon=self._daemon)
        self._watchdog_thread.start()

    def stop(self) -> None:
        self._stop_signaled = True
        if self._watchdog_thread is not None:
            self._watchdog_thread.join(self._max_interval)
            self._watchdog_thread = None


_timer_client: TimerClient | None = None


def configure(timer_client: TimerClient) -> None:
    """The client that `expires` uses from now on in this process."""
    global _timer_client
    _timer_client = timer_client


def expires(after: float, scope: str | None = None, client: TimerClient | None = None) -> AbstractContextManager[None]:
    """`with expires(after=60):` a block that is to be left within so many seconds, or the worker is ended.

    A scope that is not named is the caller's file and line: of the caller's own, so that blocks within blocks have
    timers each.
    """
    if scope is None:
        caller = sys._getframe(1)
        scope = f"{caller.f_code.co_filename}#{caller.f_lineno}"
    return _expires(after, scope, client)


@contextmanager
def _expires(after: float, scope: str, client: TimerClient | None) -> Iterator[None]:
    client = client or _timer_client
    if client is None:
        raise RuntimeError("no timer can be set without a client; call configure(FileTimerClient(…)) first")
    client.acquire(scope, time.time() + after)
    try:
        yield
    finally:
        client.release(scope)
