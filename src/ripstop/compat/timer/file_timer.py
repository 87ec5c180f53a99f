"""`torch.distributed.elastic.timer.file_based_local_timer`: timers through a named pipe.

The lines on the pipe are torch's (`diagnostics/timer_pipe.py`), so clients and servers of torch and of ripstop work
together.  Torch's server kills its own process after it has killed a worker.  This one does not: the agent that started
the worker restarts it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ripstop.compat.timer.api import RequestQueue, TimerClient, TimerRequest, TimerTable, send_signal
from ripstop.diagnostics.timer_pipe import Pipe
from ripstop.model.errors import UsageError

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer", "log_debug_info_for_expired_timers"]

log = logging.getLogger("ripstop.compat")

CONNECT_ATTEMPTS, RETRY_PAUSE_S = 10, 0.1  # the server may not have started yet
_VERSION = 1


class FileTimerRequest(TimerRequest):
    """A request of the process `worker_pid`, which gets `signal` when the timer expires (0: no signal)."""

    __slots__ = ("signal", "version")

    def __init__(self, worker_pid: int, scope_id: str, expiration_time: float, signal: int = 0) -> None:
        super().__init__(worker_id=worker_pid, scope_id=scope_id, expiration_time=expiration_time)
        self.version = _VERSION
        self.signal = signal

    @property
    def worker_pid(self) -> int:
        return int(self.worker_id)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FileTimerRequest):
            return False
        return super().__eq__(other) and (self.version, self.signal) == (other.version, other.signal)

    __hash__ = None

    def to_json(self) -> str:
        return json.dumps(
            {
                "version": self.version,
                "pid": self.worker_pid,
                "scope_id": self.scope_id,
                "expiration_time": self.expiration_time,
                "signal": self.signal,
            }
        )


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
            _poll(CONNECT_ATTEMPTS * RETRY_PAUSE_S, (fd, select.POLLOUT))  # until there is room in the pipe
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


class _PipeQueue(RequestQueue):
    """The requests on a pipe; `wake` ends a wait."""

    def __init__(self, path: str) -> None:
        try:
            self._pipe = Pipe(Path(path))
        except UsageError as error:
            raise OSError(str(error)) from None
        self._wake_reader, self._wake_writer = os.pipe()
        self.has_had_client = False

    def size(self) -> int:
        return 0

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """All requests that are there, whatever `size` is."""
        _poll(timeout, (self._pipe.fileno(), select.POLLIN), (self._wake_reader, select.POLLIN))
        received = self._pipe.requests()
        self.has_had_client |= bool(received)
        return [FileTimerRequest(one.pid, one.scope, one.expires, one.signal) for one in received]

    def wake(self) -> None:
        os.write(self._wake_writer, b"\n")

    def close(self) -> None:
        self._pipe.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)


class FileTimerServer(TimerTable):
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
        self._file_path = file_path
        self._run_id = run_id
        self._log_event = log_event
        self._last_progress_time = int(time.time())
        self._pipe = _PipeQueue(file_path)
        self._is_open = True
        super().__init__(self._pipe, max_interval, daemon)

    def start(self) -> None:
        log.info("timers at %s", self._file_path)
        super().start()
        self._call_log_event("watchdog started")

    def stop(self) -> None:
        """May be called again."""
        if self._close():
            self._call_log_event("watchdog stopped")

    def run_once(self) -> None:
        """Process the requests that are there, once, and stop."""
        self._close(before=self._run_watchdog)

    def _close(self, before: Callable[[], None] | None = None) -> bool:
        """Whether the server was open."""
        if not self._is_open:
            return False
        self._stop_signaled = True
        self._pipe.wake()
        if self._watchdog_thread is not None:
            self._watchdog_thread.join()
            self._watchdog_thread = None
        if before is not None:
            before()
        self._pipe.close()
        self._is_open = False
        return True

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
        return self._last_progress_time if self._pipe.has_had_client else int(time.time())

    def _run_watchdog(self) -> None:
        super()._run_watchdog()
        self._last_progress_time = int(time.time())

    def _end_expired(self) -> None:
        expired = self.get_expired_timers(time.time())
        if not expired:
            return
        as_json = {pid: [timer.to_json() for timer in timers] for pid, timers in expired.items()}
        log_debug_info_for_expired_timers(self._run_id, as_json)
        for pid, timers in expired.items():
            self._end_worker(pid, timers)
        self.clear_timers(set(expired))

    def _end_worker(self, pid: int, timers: list[FileTimerRequest]) -> None:
        """Send the signal of the first expired timer that has one."""
        for timer in timers:
            self._call_log_event("timer expired", timer)
            if timer.signal > 0:
                if self._reap_worker(pid, timer.signal):
                    self._call_log_event("kill worker process", timer)
                return
        log.info("timers of pid %d expired, and none of them has a signal", pid)

    def _reap_worker(self, worker_pid: Any, signal: int = signal.SIGKILL) -> bool:
        return send_signal(worker_pid, signal)

    def _call_log_event(self, name: str, request: FileTimerRequest | None = None) -> None:
        if self._log_event is not None:
            try:
                self._log_event(name, request)
            except Exception:
                log.exception("log_event failed at %r; the timers continue", name)


def _poll(timeout: float, *events: tuple[int, int]) -> None:
    poll = select.poll()  # select() is limited to the first 1,024 descriptors
    for fd, mask in events:
        poll.register(fd, mask)
    poll.poll(math.ceil(timeout * 1000))


def log_debug_info_for_expired_timers(run_id: str, expired_timers: dict[int, list[str]]) -> None:
    """Log the expired timers, as JSON by pid."""
    if expired_timers:
        log.warning("timers expired in run %s: %s", run_id, expired_timers)
