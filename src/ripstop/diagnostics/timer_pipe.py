"""The named pipe on which workers set timers, and the agent's watch on it.

Torch's `FileTimerClient` opens it, writes a line (`diagnostics/timers.py`) and closes it.  Rules: (1) the pipe is this
user's alone, and nothing that is no pipe is ever replaced by one; (2) what is in the pipe when a deadline comes counts:
a timer that was cleared in time is not missed; (3) every size is bounded, and a line that is no request is said once;
(4) a deadline is counted down by the clock that nobody sets, from the moment the request is read; (5) who a pid is, and
what becomes of it, is the driver's affair.
"""

import asyncio
import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from ripstop.diagnostics.evidence import signal_name
from ripstop.diagnostics.timers import Request, Timers, read_request
from ripstop.model.errors import UsageError
from ripstop.model.text import clean, truncate_bytes

log = logging.getLogger("ripstop.workers")

MOST = 10_000  # timers of a node
_CHUNK = 1 << 16  # what a pipe holds
_CHUNKS = 16  # at a time: other things want to be done too
_SHOWN = 5  # scopes in a message


class Pipe:
    """The reading end.  UsageError where there can be none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rest = b""
        self._skipping = False  # the rest of a line that is too long
        self._complained = False
        examine(str(path), path)
        try:
            with suppress(FileNotFoundError):
                path.unlink()  # a pipe that nobody reads
            os.mkfifo(path, 0o600)
            # for writing too: so the pipe has no end when the last worker closes it
            self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(f"{path}: no pipe for timers can be made ({error.strerror}); name another place") from None

    def fileno(self) -> int:
        return self._fd

    def requests(self) -> list[Request]:
        """What has come in since; does not wait."""
        data = b""
        for _ in range(_CHUNKS):
            try:
                data += os.read(self._fd, _CHUNK)
            except BlockingIOError:
                break
        *lines, rest = (self._rest + data).split(b"\n")
        if self._skipping and lines:
            lines, self._skipping = lines[1:], False
        if len(rest) > _CHUNK:
            self._skipping = True
            self._complain("a line is too long")
        self._rest = b"" if self._skipping else rest
        return [request for line in lines if (request := self._read(line)) is not None]

    def close(self) -> None:
        os.close(self._fd)
        with suppress(OSError):
            self._path.unlink()

    def _read(self, line: bytes) -> Request | None:
        try:
            return read_request(line)
        except ValueError as error:
            self._complain(str(error))
            return None

    def _complain(self, why: str) -> None:
        if not self._complained:
            self._complained = True
            log.warning("%s: what is no timer request is passed over: %s", self._path, truncate_bytes(clean(why), 200))


def examine(name: str, path: Path) -> None:
    """UsageError if no pipe can be at this path; `name` is what the user calls it."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        folder = path.parent
        if not folder.is_dir():
            raise UsageError(f"{name}: {folder} is no directory; make it, or name another place") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"{name}: {folder} cannot be written to; name another place") from None
        return
    except OSError as error:
        raise UsageError(f"{name}: no pipe can be there ({error.strerror}); name another place") from None
    if not stat.S_ISFIFO(mode):
        raise UsageError(f"{name}: is there and no pipe, and is not replaced by one; name another place")
    if in_use(path):
        raise UsageError(f"{name}: another agent reads this pipe; name another place")


def in_use(path: Path) -> bool:
    """Whether somebody reads this pipe."""
    try:
        if not stat.S_ISFIFO(path.stat().st_mode):
            return False
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True


class Missed(Struct, frozen=True):
    """A timer that was not cleared in time: it had `seconds` when it was read, and wants this signal (0: none)."""

    scope: str
    seconds: float
    signal: int


def reason(missed: Sequence[Missed]) -> tuple[str, int]:
    """What to say of a worker that missed these, in words that can travel, and the signal that it is to get.

    That is the first that one of them names; 0 is none.
    """
    timers = [f"{truncate_bytes(clean(timer.scope), 200)!r} ({timer.seconds:.1f} s)" for timer in missed[:_SHOWN]]
    more = f" and {len(missed) - _SHOWN} more" if len(missed) > _SHOWN else ""
    what = f"{'timer' if len(missed) == 1 else 'timers'} expired: {', '.join(timers)}{more}"
    signum = next((timer.signal for timer in missed if timer.signal), 0)
    return f"{what}; {f'ripstop sent {signal_name(signum)}' if signum else 'no signal was asked for'}", signum


class Watchdog:
    """Reads the pipe in the running event loop.

    `on_missed` is told, once, which process has missed timers, what to say of that, and the signal for it (0: none).
    """

    def __init__(self, path: Path, on_missed: Callable[[int, str, int], None]) -> None:
        self._pipe = Pipe(path)
        self._on_missed = on_missed
        self._timers: Timers[int, Missed] = Timers()
        self._full = False
        self._loop = asyncio.get_running_loop()
        self._alarm: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._pipe.fileno(), self._look)

    def new_round(self) -> None:
        """What was set until now is a matter of the past: its workers are gone."""
        self._pipe.requests()
        self._timers = Timers()
        self._arm()

    def close(self) -> None:
        self._loop.remove_reader(self._pipe.fileno())
        if self._alarm is not None:
            self._alarm.cancel()
        self._pipe.close()

    def _look(self) -> None:
        for request in self._pipe.requests():
            self._take(request)
        for pid, missed in self._timers.expired(self._loop.time()).items():
            self._timers.forget(pid)
            self._on_missed(pid, *reason(missed))
        self._arm()

    def _take(self, request: Request) -> None:
        if request.expires < 0:
            self._timers.clear(request.pid, request.scope)
        elif len(self._timers) < MOST or (request.pid, request.scope) in self._timers:
            seconds = request.expires - time.time()
            timer = Missed(request.scope, seconds, request.signal)
            self._timers.set(request.pid, request.scope, self._loop.time() + seconds, timer)
        elif not self._full:
            self._full = True
            log.warning("there are %d timers already; more have no effect", MOST)

    def _arm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        when = self._timers.deadline()
        if when is not None:
            self._alarm = self._loop.call_at(when, self._look)
