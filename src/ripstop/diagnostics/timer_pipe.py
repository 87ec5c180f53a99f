"""The named pipe on which workers set timers, and the agent's watchdog that reads it.

Torch's `FileTimerClient` opens the pipe, writes a line and closes it.  The line is a request in torch's format: JSON
with `pid`, `scope_id`, `expiration_time` (negative: clear) and `signal`.  Rules:

1. Only this user can access the pipe.  A file that is not a pipe is never replaced.
2. Requests that are in the pipe when a deadline comes are processed first, so a timer that was cleared in time is not
   missed.
3. Every size is bounded.  A line that is not a request is logged once.
4. A deadline is measured by the monotonic clock, from the time at which the request is read.
5. The driver maps pids to workers and decides what happens to them.
"""

import asyncio
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from ripstop.diagnostics.timer_table import Timers
from ripstop.model.errors import UsageError
from ripstop.model.text_formatting import clean, signal_name, truncate_bytes

log = logging.getLogger("ripstop.workers")

MAX_TIMERS = 10_000  # of a node
_PIPE_BYTES = 1 << 16  # the capacity of a pipe
_MAX_READS = 16  # at a time, so that the event loop is not blocked
_MAX_SHOWN_TIMERS = 5
_MAX_SIGNAL = 64
_MAX_SCOPE_CHARS = 4096  # the longest line that a pipe writes atomically
_MAX_PID = 1 << 31


class Request(Struct, frozen=True):
    """`expires` is wall-clock time, or negative to clear the timer; `signal` 0: do not kill the worker."""

    pid: int
    scope: str
    expires: float
    signal: int = 0


def parse_timer_pipe_line(line: bytes) -> Request:
    """Parse a line of the pipe.  Raises ValueError with the reason."""
    try:
        fields = json.loads(line)
        pid, scope, expires, signum = (fields[name] for name in ("pid", "scope_id", "expiration_time", "signal"))
        expires = float(expires) if type(expires) in (int, float) else None
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if type(pid) is not int or not 1 < pid < _MAX_PID:
        raise ValueError(f"pid={pid!r}: not a process id")
    if not isinstance(scope, str) or len(scope) > _MAX_SCOPE_CHARS:
        raise ValueError(f"scope_id: not a string of at most {_MAX_SCOPE_CHARS} characters")
    if expires is None or expires != expires:
        raise ValueError("expiration_time: not a time")
    if type(signum) is not int or signum > _MAX_SIGNAL:
        raise ValueError(f"signal={signum!r}: not a signal")
    return Request(pid, scope, expires, max(0, signum))


class Pipe:
    """The reading end of the pipe.  Raises UsageError if it cannot be created."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rest = b""
        self._skipping = False  # inside a line that is too long
        self._problem_logged = False
        check_pipe_path(str(path), path)
        try:
            with suppress(FileNotFoundError):
                path.unlink()  # left over: no process reads it
            os.mkfifo(path, 0o600)
            # also for writing, so that there is no end of file when the last worker closes the pipe
            self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(
                f"{path}: the pipe for timers cannot be created ({error.strerror}); choose another path"
            ) from None

    def fileno(self) -> int:
        return self._fd

    def requests(self) -> list[Request]:
        """The requests received since the last call.  Does not wait."""
        data = b""
        for _ in range(_MAX_READS):
            try:
                data += os.read(self._fd, _PIPE_BYTES)
            except BlockingIOError:
                break
        *lines, rest = (self._rest + data).split(b"\n")
        if self._skipping and lines:
            lines, self._skipping = lines[1:], False
        if len(rest) > _PIPE_BYTES:
            self._skipping = True
            self._log_problem("a line is too long")
        self._rest = b"" if self._skipping else rest
        return [request for line in lines if (request := self._read(line)) is not None]

    def close(self) -> None:
        os.close(self._fd)
        with suppress(OSError):
            self._path.unlink()

    def _read(self, line: bytes) -> Request | None:
        try:
            return parse_timer_pipe_line(line)
        except ValueError as error:
            self._log_problem(str(error))
            return None

    def _log_problem(self, why: str) -> None:
        if not self._problem_logged:
            self._problem_logged = True
            log.warning(
                "%s: ignoring a line that is not a timer request: %s", self._path, truncate_bytes(clean(why), 200)
            )


def check_pipe_path(name: str, path: Path) -> None:
    """Raise UsageError if the pipe cannot be created here; `name` is the path in the error message."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        folder = path.parent
        if not folder.is_dir():
            raise UsageError(f"{name}: {folder} is not a directory; create it, or choose another path") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"{name}: {folder} is not writable; choose another path") from None
        return
    except OSError as error:
        raise UsageError(f"{name}: a pipe cannot be created there ({error.strerror}); choose another path") from None
    if not stat.S_ISFIFO(mode):
        raise UsageError(f"{name}: exists and is not a pipe; choose another path")
    if is_pipe_in_use(path):
        raise UsageError(f"{name}: another agent uses this pipe; choose another path")


def is_pipe_in_use(path: Path) -> bool:
    """Whether another process reads this pipe."""
    try:
        if not stat.S_ISFIFO(path.stat().st_mode):
            return False
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True


class ExpiredTimer(Struct, frozen=True):
    """A timer that was not cleared within `seconds` after its request was read; `signal` 0: none requested."""

    scope: str
    seconds: float
    signal: int


def timer_pipe_watchdog_reason(expired: Sequence[ExpiredTimer]) -> tuple[str, int]:
    """A message for the expired timers of a worker, and the first signal that one of them requests (0: none)."""
    timers = [
        f"{truncate_bytes(clean(timer.scope), 200)!r} ({timer.seconds:.1f} s)" for timer in expired[:_MAX_SHOWN_TIMERS]
    ]
    more = f" and {len(expired) - _MAX_SHOWN_TIMERS} more" if len(expired) > _MAX_SHOWN_TIMERS else ""
    what = f"{'timer' if len(expired) == 1 else 'timers'} expired: {', '.join(timers)}{more}"
    signum = next((timer.signal for timer in expired if timer.signal), 0)
    return f"{what}; {f'ripstop sent {signal_name(signum)}' if signum else 'no signal was requested'}", signum


class TimerPipeWatchdog:
    """Reads the pipe in the running event loop.

    `on_expired` is called once for each process whose timers expire: with pid, message and signal (0: none).
    """

    def __init__(self, path: Path, on_expired: Callable[[int, str, int], None]) -> None:
        self._pipe = Pipe(path)
        self._on_expired = on_expired
        self._timers: Timers[int, ExpiredTimer] = Timers()
        self._limit_logged = False
        self._loop = asyncio.get_running_loop()
        self._timer_handle: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._pipe.fileno(), self._process)

    def new_round(self) -> None:
        """Discard all timers: the workers that set them have ended."""
        self._pipe.requests()
        self._timers = Timers()
        self._arm()

    def close(self) -> None:
        self._loop.remove_reader(self._pipe.fileno())
        if self._timer_handle is not None:
            self._timer_handle.cancel()
        self._pipe.close()

    def _process(self) -> None:
        for request in self._pipe.requests():
            self._apply(request)
        for pid, expired in self._timers.expired(self._loop.time()).items():
            self._timers.forget(pid)
            self._on_expired(pid, *timer_pipe_watchdog_reason(expired))
        self._arm()

    def _apply(self, request: Request) -> None:
        if request.expires < 0:
            self._timers.clear(request.pid, request.scope)
        elif len(self._timers) < MAX_TIMERS or (request.pid, request.scope) in self._timers:
            seconds = request.expires - time.time()
            timer = ExpiredTimer(request.scope, seconds, request.signal)
            self._timers.set(request.pid, request.scope, self._loop.time() + seconds, timer)
        elif not self._limit_logged:
            self._limit_logged = True
            log.warning("%d timers are set, which is the limit; additional timers have no effect", MAX_TIMERS)

    def _arm(self) -> None:
        if self._timer_handle is not None:
            self._timer_handle.cancel()
            self._timer_handle = None
        when = self._timers.deadline()
        if when is not None:
            self._timer_handle = self._loop.call_at(when, self._process)
