"""`torch.distributed.elastic.timer.local_timer`: timers through a `multiprocessing.Queue` of both sides."""

from __future__ import annotations

import logging
import os
import signal
import time
from queue import Empty
from typing import Any

from ripstop.compat.timer.api import RequestQueue, TimerClient, TimerRequest, TimerServer
from ripstop.diagnostics.timers import Timers

__all__ = ["LocalTimerClient", "LocalTimerServer", "MultiprocessingRequestQueue"]

log = logging.getLogger("ripstop.compat")


class LocalTimerClient(TimerClient):
    """For a worker on the server's machine; its pid is its name."""

    def __init__(self, mp_queue: Any) -> None:
        self._mp_queue = mp_queue

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, -1))


class MultiprocessingRequestQueue(RequestQueue):
    """A `multiprocessing.Queue` of requests."""

    def __init__(self, mp_queue: Any) -> None:
        self._mp_queue = mp_queue

    def size(self) -> int:
        return int(self._mp_queue.qsize())

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        requests: list[TimerRequest] = []
        end = time.monotonic() + timeout
        while len(requests) < size:
            try:
                requests.append(self._mp_queue.get(block=True, timeout=max(0.0, end - time.monotonic())))
            except Empty:
                break
        return requests


class LocalTimerServer(TimerServer):
    """Ends with SIGKILL whoever misses a timer, when it is missed and not `max_interval` later.

    Who cannot be ended is tried again after every `max_interval`.
    """

    def __init__(self, mp_queue: Any, max_interval: float = 60, daemon: bool = True) -> None:
        super().__init__(MultiprocessingRequestQueue(mp_queue), max_interval, daemon)
        self._timers: Timers[Any, TimerRequest] = Timers()

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        for request in timer_requests:
            if request.expiration_time < 0:
                self._timers.clear(request.worker_id, request.scope_id)
            else:
                self._timers.set(request.worker_id, request.scope_id, request.expiration_time, request)

    def clear_timers(self, worker_ids: set[Any]) -> None:
        for worker_id in worker_ids:
            self._timers.forget(worker_id)

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        return self._timers.expired(deadline)

    def _patience(self) -> float:
        deadline = self._timers.deadline()
        if deadline is None:
            return self._max_interval
        return min(self._max_interval, max(0.0, deadline - time.time()))

    def _reap_worker(self, worker_id: int) -> bool:
        if kill(worker_id, signal.SIGKILL, again=worker_id in self._not_ended):
            return True
        now = time.time()
        for request in self._timers.expired(now).get(worker_id, ()):
            self._timers.set(worker_id, request.scope_id, now + self._max_interval, request)
        return False


def kill(pid: int, signum: int, *, again: bool = False) -> bool:
    """Whether the process has got the signal, or is gone; what is in the way is said unless it is `again`."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        log.info("pid %d is gone already", pid)
    except Exception:
        if not again:
            log.exception("pid %d cannot be sent signal %d", pid, signum)
        return False
    return True
