"""`torch.distributed.elastic.timer.file_based_local_timer`: timers through a named pipe.

What goes over the pipe is torch's (`diagnostics/timers.py`), so a client of torch's and a server of ours, or the
other way
round, understand each other.  Torch's server, once it has killed a worker, kills its own process too; ours does not:
that is for whoever started the workers to say, and an agent starts them again.
"""

from __future__ import annotations

import json
import logging
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ripstop.compat.timer.api import TimerClient, TimerRequest
from ripstop.compat.timer.local_timer import kill
from ripstop.diagnostics.timer_pipe import Pipe
from ripstop.diagnostics.timers import Timers
from ripstop.model.errors import UsageError

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer", "log_debug_info_for_expired_timers"]

log = logging.getLogger("ripstop.compat")

ATTEMPTS, PAUSE = 10, 0.1  # for a server that has not started yet
_VERSION = 1


class FileTimerRequest(TimerRequest):
    """A request of the process `worker_pid`; `signal` is what it is to get if it misses the timer, 0 for nothing."""

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
    """For a worker on the server's machine; a `signal` of 0 or less has a missed timer logged and nobody killed."""

    def __init__(self, file_path: str, signal: int = signal.SIGKILL) -> None:
        self._file_path = file_path
        self.signal = signal

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self._send(FileTimerRequest(os.getpid(), scope_id, expiration_time, self.signal))

    def release(self, scope_id: str) -> None:
        self._send(FileTimerRequest(os.getpid(), scope_id, -1, 0))

    def _send(self, request: FileTimerRequest) -> None:
        text = request.to_json()
        if len(text) >= select.PIPE_BUF:  # longer, it could be torn by another worker's
            raise RuntimeError(f"a timer request is shorter than {select.PIPE_BUF} bytes, not {len(text)}: {text}")
        fd = self._open()
        try:
            _wait(fd, select.POLLOUT, ATTEMPTS * PAUSE)  # the server may be behind
            os.write(fd, f"{text}\n".encode())
        except OSError as error:
            raise BrokenPipeError(f"{self._file_path}: the timer server does not read: {error.strerror}") from error
        finally:
            os.close(fd)

    def _open(self) -> int:
        for attempt in range(ATTEMPTS):
            try:
                return os.open(self._file_path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:  # no pipe yet, or nobody who reads it
                if attempt == ATTEMPTS - 1:
                    raise BrokenPipeError(f"{self._file_path}: there is no timer server: {error.strerror}") from error
                time.sleep(PAUSE)
        raise AssertionError("the last attempt returns or raises")


class FileTimerServer:
    """Makes the pipe, and sends the signal of a missed timer to the process that set it, in a thread.

    `log_event` is told of every step by name, with the request that it is about or None.
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
        self._max_interval = max_interval
        self._daemon = daemon
        self._log_event = log_event
        self._timers: Timers[int, FileTimerRequest] = Timers()
        self._watchdog_thread: threading.Thread | None = None
        self._stop_signaled = False
        self._wakes, self._wake = os.pipe()
        self._client_was_here = False
        self._last_progress_time = int(time.time())
        try:
            self._pipe: Pipe | None = Pipe(Path(file_path))
        except UsageError as error:
            self._close()
            raise OSError(str(error)) from None

    def start(self) -> None:
        log.info("timers at %s", self._file_path)
        self._watchdog_thread = threading.Thread(target=self._watchdog_loop, name="ripstop-timers", daemon=self._daemon)
        self._watchdog_thread.start()
        self._tell("watchdog started")

    def stop(self) -> None:
        """May be called again."""
        if self._end():
            self._tell("watchdog stopped")

    def run_once(self) -> None:
        """Deal with what has come in, once, and stop."""
        self._end(at_last=self._run_watchdog)

    def _end(self, at_last: Callable[[], None] | None = None) -> bool:
        """Whether there was something to end."""
        if self._pipe is None:
            return False
        self._stop_signaled = True
        os.write(self._wake, b"\n")
        if self._watchdog_thread is not None:
            self._watchdog_thread.join()
            self._watchdog_thread = None
        if at_last is not None:
            at_last()
        self._pipe.close()
        self._pipe = None
        self._close()
        return True

    def _close(self) -> None:
        os.close(self._wakes)
        os.close(self._wake)

    @staticmethod
    def is_process_running(pid: int) -> bool:
        """Whether there is such a process, and we may signal it."""
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        return True

    def register_timers(self, timer_requests: list[FileTimerRequest]) -> None:
        for request in timer_requests:
            if request.expiration_time < 0:
                self._timers.clear(request.worker_pid, request.scope_id)
            else:
                self._timers.set(request.worker_pid, request.scope_id, request.expiration_time, request)

    def clear_timers(self, worker_pids: set[int]) -> None:
        """Those of these processes, and of all that are gone."""
        for pid in self._timers.workers():
            if pid in worker_pids or not self.is_process_running(pid):
                self._timers.forget(pid)

    def get_expired_timers(self, deadline: float) -> dict[int, list[FileTimerRequest]]:
        return self._timers.expired(deadline)

    def get_last_progress_time(self) -> int:
        """When the server last went around, in whole seconds; before the first client, now."""
        return self._last_progress_time if self._client_was_here else int(time.time())

    def _watchdog_loop(self) -> None:
        assert self._pipe is not None, "made at the start, and closed after this"
        while not self._stop_signaled:
            _wait(self._pipe.fileno(), select.POLLIN, self._patience(), self._wakes)
            try:
                self._run_watchdog()
                self._last_progress_time = int(time.time())
            except Exception:
                log.exception("the timer server stumbled, and goes on")

    def _patience(self) -> float:
        deadline = self._timers.deadline()
        wait = self._max_interval if deadline is None else min(self._max_interval, deadline - time.time())
        return max(0.0, wait)

    def _run_watchdog(self) -> None:
        assert self._pipe is not None
        came = self._pipe.requests()
        self._client_was_here |= bool(came)
        self.register_timers([FileTimerRequest(one.pid, one.scope, one.expires, one.signal) for one in came])
        expired = self.get_expired_timers(time.time())
        if not expired:
            return
        told = {pid: [timer.to_json() for timer in timers] for pid, timers in expired.items()}
        log_debug_info_for_expired_timers(self._run_id, told)
        for pid, timers in expired.items():
            self._end_worker(pid, timers)
        self.clear_timers(set(expired))

    def _end_worker(self, pid: int, timers: list[FileTimerRequest]) -> None:
        """The signal is that of the first missed timer that has one."""
        for timer in timers:
            self._tell("timer expired", timer)
            if timer.signal > 0:
                if self._reap_worker(pid, timer.signal):
                    self._tell("kill worker process", timer)
                return
        log.info("pid %d missed its timers, and none of them has a signal", pid)

    def _reap_worker(self, worker_pid: int, signal: int) -> bool:
        return kill(worker_pid, signal)

    def _tell(self, name: str, request: FileTimerRequest | None = None) -> None:
        if self._log_event is not None:
            try:
                self._log_event(name, request)
            except Exception:
                log.exception("log_event failed at %r; the timers go on", name)


def _wait(fd: int, what: int, seconds: float, or_readable: int | None = None) -> None:
    poll = select.poll()  # not select(): a program may have more files than that can count
    poll.register(fd, what)
    if or_readable is not None:
        poll.register(or_readable, select.POLLIN)
    poll.poll(math.ceil(seconds * 1000))


def log_debug_info_for_expired_timers(run_id: str, expired_timers: dict[int, list[str]]) -> None:
    """Which timers were missed, as JSON by pid."""
    if expired_timers:
        log.warning("timers expired in run %s: %s", run_id, expired_timers)
