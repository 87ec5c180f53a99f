"""`torch.distributed.elastic.timer`: blocks of code with a deadline, and servers that end a worker which misses one.

`LocalTimerServer` receives timers from a queue, `FileTimerServer` from a named pipe.  A server of your own derives from
`TimerServer` and implements how a worker is ended; it may also store timers itself.  An agent starts a
`FileTimerServer` itself with `TORCHELASTIC_ENABLE_FILE_TIMER=1`.

The lines on the pipe are torch's (`diagnostics/timer_pipe.py`), so clients and servers of torch and of ripstop work
together.  Torch's server kills its own process after it has killed a worker.  This one does not: the agent that started
the worker restarts it.
"""

from __future__ import annotations

import abc
import json
import logging
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

from ripstop.diagnostics.timer_pipe import Pipe
from ripstop.diagnostics.timer_table import Timers
from ripstop.model.errors import UsageError

__all__ = [
    "FileTimerClient",
    "FileTimerRequest",
    "FileTimerServer",
    "LocalTimerClient",
    "LocalTimerServer",
    "MultiprocessingRequestQueue",
    "RequestQueue",
    "TimerClient",
    "TimerRequest",
    "TimerServer",
    "configure",
    "expires",
    "log_debug_info_for_expired_timers",
]

log = logging.getLogger("ripstop.compat")

CONNECT_ATTEMPTS, RETRY_PAUSE_S = 10, 0.1  # the server of a pipe may not have started yet


# the with block -------------------------------------------------------------------------------------------------------


class TimerClient(abc.ABC):
    """The worker's side."""

    @abc.abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Set a timer that expires at this wall-clock time."""

    @abc.abstractmethod
    def release(self, scope_id: str) -> None:
        """Clear the timer."""


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
    return _expiring_compat_timer(after, scope, client)


@contextmanager
def _expiring_compat_timer(after: float, scope: str, client: TimerClient | None) -> Iterator[None]:
    client = client or _timer_client
    if client is None:
        raise RuntimeError("no timer can be set without a client; call configure(FileTimerClient(…)) first")
    client.acquire(scope, time.time() + after)
    try:
        yield
    finally:
        client.release(scope)


# servers --------------------------------------------------------------------------------------------------------------


@dataclass
class TimerRequest:
    """Sets a timer, or clears it if `expiration_time` is negative; client and server agree on what `worker_id` is."""

    worker_id: Any
    scope_id: str
    expiration_time: float


class RequestQueue(abc.ABC):
    """Where a server reads requests."""

    @abc.abstractmethod
    def size(self) -> int:
        """A lower bound: a `get` of this size does not wait."""

    @abc.abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Up to `size` requests; waits at most `timeout` seconds."""


class _CompatTimerThread(abc.ABC):
    """A table of timers, and a thread that checks them."""

    def __init__(self, max_interval: float, daemon: bool) -> None:
        self._max_interval = max_interval
        self._daemon = daemon
        self._watchdog_thread: threading.Thread | None = None
        self._stop_signaled = False
        self._timers: Timers[Any, Any] = Timers()

    def register_timers(self, timer_requests: list[Any]) -> None:
        """Set timers, and clear those of requests with a negative time."""
        for request in timer_requests:
            if request.expiration_time < 0:
                self._timers.clear(request.worker_id, request.scope_id)
            else:
                self._timers.set(request.worker_id, request.scope_id, request.expiration_time, request)

    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Clear all timers of these workers."""
        for worker_id in worker_ids:
            self._timers.forget(worker_id)

    def get_expired_timers(self, deadline: float) -> dict[Any, list[Any]]:
        """The timers that expire at `deadline` or before, by worker."""
        return self._timers.expired(deadline)

    def start(self) -> None:
        log.info("starting %s", type(self).__name__)
        self._watchdog_thread = threading.Thread(target=self._watchdog_loop, name="ripstop-timers", daemon=self._daemon)
        self._watchdog_thread.start()

    def _watchdog_loop(self) -> None:
        while not self._stop_signaled:
            try:
                self._run_watchdog()
            except Exception:
                log.exception("the timer server failed once, and continues")

    @abc.abstractmethod
    def _run_watchdog(self) -> None:
        """Wait for requests, register them, and end workers whose timers have expired."""

    def _wait_seconds(self) -> float:
        """How long to wait for a request before timers are checked: until the next deadline."""
        deadline = self._timers.deadline()
        return self._max_interval if deadline is None else min(self._max_interval, max(0.0, deadline - time.time()))


class TimerServer(_CompatTimerThread):
    """Stores timers and ends workers whose timer expires, in a thread between `start` and `stop`."""

    def __init__(self, request_queue: RequestQueue, max_interval: float, daemon: bool = True) -> None:
        super().__init__(max_interval, daemon)
        self._request_queue = request_queue
        self._not_ended: set[Any] = set()  # workers whose failed end was logged

    @abc.abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """End this worker; False to be called again.  After an exception the worker counts as ended."""

    def _reap_worker_no_throw(self, worker_id: Any) -> bool:
        try:
            return self._reap_worker(worker_id)
        except Exception:
            log.exception("worker %s could not be ended; this is not retried", worker_id)
            return True

    def _run_watchdog(self) -> None:
        size = max(1, self._request_queue.size())
        self.register_timers(self._request_queue.get(size, self._wait_seconds()))
        ended = set()
        for worker_id, expired in self.get_expired_timers(time.time()).items():
            if worker_id not in self._not_ended:
                scopes = [timer.scope_id for timer in expired]
                log.warning("timers of worker %s expired, ending it: %s", worker_id, scopes)
            if self._reap_worker_no_throw(worker_id):
                ended.add(worker_id)
            elif worker_id not in self._not_ended:
                self._not_ended.add(worker_id)
                log.error("worker %s could not be ended; this is retried", worker_id)
        self._not_ended -= ended
        self.clear_timers(ended)

    def stop(self) -> None:
        self._stop_signaled = True
        if self._watchdog_thread is not None:
            self._watchdog_thread.join(self._max_interval)
            self._watchdog_thread = None


def _send_timer_signal(pid: int, signum: int, *, retry: bool = False) -> bool:
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


# timers through a queue -----------------------------------------------------------------------------------------------


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


class LocalTimerServer(TimerServer):
    """Sends SIGKILL to a worker when its timer expires, not up to `max_interval` later.

    If that fails, the server retries after every `max_interval`.
    """

    def __init__(self, mp_queue: Any, max_interval: float = 60, daemon: bool = True) -> None:
        super().__init__(MultiprocessingRequestQueue(mp_queue), max_interval, daemon)

    def _reap_worker(self, worker_id: int) -> bool:
        if _send_timer_signal(worker_id, signal.SIGKILL, retry=worker_id in self._not_ended):
            return True
        now = time.time()
        for request in self._timers.expired(now).get(worker_id, ()):
            self._timers.set(worker_id, request.scope_id, now + self._max_interval, request)
        return False


# timers through a named pipe ------------------------------------------------------------------------------------------


@dataclass(init=False)
class FileTimerRequest(TimerRequest):
    """A request of the process `worker_pid`, which gets `signal` when the timer expires (0: no signal)."""

    signal: int
    version: int = 1

    def __init__(self, worker_pid: int, scope_id: str, expiration_time: float, signal: int = 0) -> None:
        super().__init__(worker_pid, scope_id, expiration_time)
        self.signal = signal

    @property
    def worker_pid(self) -> int:
        return int(self.worker_id)

    def to_json(self) -> str:
        fields = {"version": self.version, "pid": self.worker_pid, "scope_id": self.scope_id}
        return json.dumps(fields | {"expiration_time": self.expiration_time, "signal": self.signal})


class FileTimerClient(TimerClient):
    """For a worker on the server's machine; with a `signal` of 0 or less an expired timer is only logged."""

    def __init__(self, file_path: str, signal: int = signal.SIGKILL) -> None:
        self._file_path = file_path
        self.signal = signal

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self._send(FileTimerRequest(os.getpid(), scope_id, expiration_time, self.signal))

    def release(self, scope_id: str) -> None:
        self._send(FileTimerRequest(os.getpid(), scope_id, -1, 0))

    def _send(self, request: FileTimerRequest) -> None:
        text = request.to_json()
        if len(text) >= select.PIPE_BUF:  # a longer write could be mixed with another worker's
            raise RuntimeError(f"a timer request is shorter than {select.PIPE_BUF} bytes, not {len(text)}: {text}")
        fd = self._open()
        try:
            # until there is room in the pipe
            _poll_compat_timer_pipe(CONNECT_ATTEMPTS * RETRY_PAUSE_S, (fd, select.POLLOUT))
            os.write(fd, f"{text}\n".encode())
        except OSError as error:
            raise BrokenPipeError(f"{self._file_path}: the timer server does not read: {error.strerror}") from error
        finally:
            os.close(fd)

    def _open(self) -> int:
        for attempt in range(CONNECT_ATTEMPTS):
            try:
                return os.open(self._file_path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:  # there is no pipe yet, or no reader
                if attempt == CONNECT_ATTEMPTS - 1:
                    raise BrokenPipeError(f"{self._file_path}: there is no timer server: {error.strerror}") from error
                time.sleep(RETRY_PAUSE_S)
        raise AssertionError("the last attempt returns or raises")


class FileTimerServer(_CompatTimerThread):
    """Creates the pipe, and sends the signal of an expired timer to the process that set it, in a thread.

    The server calls `log_event` for every step with the step's name, and its request or None.
    """

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: Callable[[str, FileTimerRequest | None], None] | None = None,
    ) -> None:
        super().__init__(max_interval, daemon)
        try:
            self._pipe = Pipe(Path(file_path))
        except UsageError as error:
            raise OSError(str(error)) from None
        self._wake_reader, self._wake_writer = os.pipe()  # a byte ends the wait for requests
        self._is_open = True
        self._file_path = file_path
        self._run_id = run_id
        self._log_event = log_event
        self._has_had_client = False
        self._last_progress_time = int(time.time())

    def start(self) -> None:
        log.info("timers at %s", self._file_path)
        super().start()
        self._call_log_event("watchdog started")

    def stop(self) -> None:
        """May be called again."""
        if self._is_open:
            self._stop_thread()
            self._close()
            self._call_log_event("watchdog stopped")

    def run_once(self) -> None:
        """Process the requests that are there, once, and stop."""
        if self._is_open:
            self._stop_thread()
            self._run_watchdog()
            self._close()

    def _stop_thread(self) -> None:
        self._stop_signaled = True
        os.write(self._wake_writer, b"\n")
        if self._watchdog_thread is not None:
            self._watchdog_thread.join()
            self._watchdog_thread = None

    def _close(self) -> None:
        self._pipe.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)
        self._is_open = False

    @staticmethod
    def is_process_running(pid: int) -> bool:
        """Whether the process exists and this one may signal it."""
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        return True

    def clear_timers(self, worker_pids: set[int]) -> None:
        """Clear the timers of these processes, and of all that have exited."""
        exited = {pid for pid in self._timers.workers() if not self.is_process_running(pid)}
        super().clear_timers(worker_pids | exited)

    def get_last_progress_time(self) -> int:
        """When the server last checked the timers, in whole seconds; now, before the first client."""
        return self._last_progress_time if self._has_had_client else int(time.time())

    def _run_watchdog(self) -> None:
        _poll_compat_timer_pipe(
            self._wait_seconds(), (self._pipe.fileno(), select.POLLIN), (self._wake_reader, select.POLLIN)
        )
        received = self._pipe.requests()
        self._has_had_client |= bool(received)
        self.register_timers([FileTimerRequest(one.pid, one.scope, one.expires, one.signal) for one in received])
        if expired := self.get_expired_timers(time.time()):
            as_json = {pid: [timer.to_json() for timer in timers] for pid, timers in expired.items()}
            log_debug_info_for_expired_timers(self._run_id, as_json)
            for pid, timers in expired.items():
                self._end_worker(pid, timers)
            self.clear_timers(set(expired))
        self._last_progress_time = int(time.time())

    def _end_worker(self, pid: int, timers: list[FileTimerRequest]) -> None:
        """Send the signal of the first expired timer that has one."""
        for timer in timers:
            self._call_log_event("timer expired", timer)
            if timer.signal > 0:
                if _send_timer_signal(pid, timer.signal):
                    self._call_log_event("kill worker process", timer)
                return
        log.info("timers of pid %d expired, and none of them has a signal", pid)

    def _call_log_event(self, name: str, request: FileTimerRequest | None = None) -> None:
        if self._log_event is not None:
            try:
                self._log_event(name, request)
            except Exception:
                log.exception("log_event failed at %r; the timers continue", name)


def _poll_compat_timer_pipe(timeout: float, *events: tuple[int, int]) -> None:
    poll = select.poll()  # select() is limited to the first 1,024 descriptors
    for fd, mask in events:
        poll.register(fd, mask)
    poll.poll(math.ceil(timeout * 1000))


def log_debug_info_for_expired_timers(run_id: str, expired_timers: dict[int, list[str]]) -> None:
    """Log the expired timers, as JSON by pid."""
    if expired_timers:
        log.warning("timers expired in run %s: %s", run_id, expired_timers)
