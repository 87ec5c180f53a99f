"""`torch.distributed.elastic.timer.local_timer`: timers through a `multiprocessing.Queue`."""

from __future__ import annotations

import os
import signal
import time
from queue import Empty
from typing import Any

from ripstop.compat.timer.api import RequestQueue, TimerClient, TimerRequest, TimerTable, send_signal

__all__ = ["LocalTimerClient", "LocalTimerServer", "MultiprocessingRequestQueue"]


class LocalTimerClient(TimerClient):
    """For a worker on the server's machine; its `worker_id` is its pid."""

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


class LocalTimerServer(TimerTable):
    """Sends SIGKILL to a worker when its timer expires, not up to `max_interval` later.

    If that fails, the server retries after every `max_interval`.
    """

    def __init__(self, mp_queue: Any, max_interval: float = 60, daemon: bool = True) -> None:
        super().__init__(MultiprocessingRequestQueue(mp_queue), max_interval, daemon)

    def _reap_worker(self, worker_id: int) -> bool:
        if send_signal(worker_id, signal.SIGKILL, retry=worker_id in self._not_ended):
            return True
        now = time.time()
        for request in self._timers.expired(now).get(worker_id, ()):
            self._timers.set(worker_id, request.scope_id, now + self._max_interval, request)
        return False
