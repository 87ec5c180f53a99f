"""`torch.distributed.elastic.timer.api`: clients, servers, and the `with` block that sets a timer.

A server of your own derives from `TimerServer` and implements how timers are stored and workers are ended.
`TimerTable` is the storage of the two servers in `local_timer.py` and `file_timer.py`.
"""

from __future__ import annotations

import abc
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ripstop.diagnostics.timer_table import Timers

__all__ = ["RequestQueue", "TimerClient", "TimerRequest", "TimerServer", "configure", "expires"]

log = logging.getLogger("ripstop.compat")


class TimerRequest:
    """Sets a timer, or clears it if `expiration_time` is negative; client and server agree on what `worker_id` is."""

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

    __hash__ = None  # type: ignore[assignment]  # it is mutable, as torch's is

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.worker_id!r}, {self.scope_id!r}, {self.expiration_time!r})"


class TimerClient(abc.ABC):
    """The worker's side."""

    @abc.abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Set a timer that expires at this wall-clock time."""

    @abc.abstractmethod
    def release(self, scope_id: str) -> None:
        """Clear the timer."""


class RequestQueue(abc.ABC):
    """Where a server reads requests."""

    @abc.abstractmethod
    def size(self) -> int:
        """A lower bound: a `get` of this size does not wait."""

    @abc.abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Up to `size` requests; waits at most `timeout` seconds."""


class TimerServer(abc.ABC):
    """Stores timers and ends workers whose timer expires, in a thread between `start` and `stop`."""

    def __init__(self, request_queue: RequestQueue, max_interval: float, daemon: bool = True) -> None:
        self._request_queue = request_queue
        self._max_interval = max_interval
        self._daemon = daemon
        self._watchdog_thread: threading.Thread | None = None
        self._stop_signaled = False
        self._not_ended: set[Any] = set()  # workers whose failed end was logged

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
        """End this worker; False to be called again.  After an exception the worker counts as ended."""

    def _wait_seconds(self) -> float:
        """How long to wait for a request before timers are checked."""
        return self._max_interval

    def _reap_worker_no_throw(self, worker_id: Any) -> bool:
        try:
            return self._reap_worker(worker_id)
        except Exception:
            log.exception("worker %s could not be ended; this is not retried", worker_id)
            return True

    def _watchdog_loop(self) -> None:
        while not self._stop_signaled:
            try:
                self._run_watchdog()
            except Exception:
                log.exception("the timer server failed once, and continues")

    def _run_watchdog(self) -> None:
        size = max(1, self._request_queue.size())
        self.register_timers(self._request_queue.get(size, self._wait_seconds()))
        self._end_expired()

    def _end_expired(self) -> None:
        ended = set()
        for worker_id, expired in self.get_expired_timers(time.time()).items():
            if worker_id not in self._not_ended:
                log.warning("timers of worker %s expired, ending it: %s", worker_id, self._get_scopes(expired))
            if self._reap_worker_no_throw(worker_id):
                ended.add(worker_id)
            elif worker_id not in self._not_ended:
                self._not_ended.add(worker_id)
                log.error("worker %s could not be ended; this is retried", worker_id)
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


class TimerTable(TimerServer):
    """A server that stores its timers in the engine's table and checks them at the next deadline."""

    def __init__(self, request_queue: RequestQueue, max_interval: float, daemon: bool) -> None:
        super().__init__(request_queue, max_interval, daemon)
        self._timers: Timers[Any, Any] = Timers()

    def register_timers(self, timer_requests: list[Any]) -> None:
        for request in timer_requests:
            if request.expiration_time < 0:
                self._timers.clear(request.worker_id, request.scope_id)
            else:
                self._timers.set(request.worker_id, request.scope_id, request.expiration_time, request)

    def clear_timers(self, worker_ids: set[Any]) -> None:
        for worker_id in worker_ids:
            self._timers.forget(worker_id)

    def get_expired_timers(self, deadline: float) -> dict[Any, list[Any]]:
        return self._timers.expired(deadline)

    def _wait_seconds(self) -> float:
        deadline = self._timers.deadline()
        if deadline is None:
            return self._max_interval
        return min(self._max_interval, max(0.0, deadline - time.time()))


def send_signal(pid: int, signum: int, *, retry: bool = False) -> bool:
    """Whether the process received the signal or has exited; a `retry` logs no error."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        log.info("pid %d has exited already", pid)
    except Exception:
        if not retry:
            log.exception("pid %d cannot be sent signal %d", pid, signum)
        return False
    return True


_timer_client: TimerClient | None = None


def configure(timer_client: TimerClient) -> None:
    """Set the client that `expires` uses in this process."""
    global _timer_client
    _timer_client = timer_client


def expires(after: float, scope: str | None = None, client: TimerClient | None = None) -> AbstractContextManager[None]:
    """`with expires(after=60):` ends the worker if the block takes more than 60 seconds.

    The default scope is the caller's file and line, so nested blocks have different timers.
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
