"""torch.distributed.elastic.multiprocessing.tail_log: copies log files to a stream.

`logs/console.py` does the same for descriptors.  Rules: (1) only complete lines are written, each with its header, so
no line is mixed with another; the last line gets a line end if it has none; (2) inotify reports changes; only files
that do not exist yet are polled; (3) if the destination fails, copying stops and an error is logged: the files are
complete.
"""

import logging
import os
import select
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread
from typing import TextIO

from ripstop.logs.console import Prefixer
from ripstop.system.inotify import GrowthWatch

__all__ = ["TailLog", "tail_logfile"]

_READ_BYTES = 1 << 18
_PAUSE_MS = 5  # between two reads, so that many short writes are copied in large blocks

log = logging.getLogger(__name__)


def _tail_every_line(_: str) -> bool:
    return True


class _Tail:
    """One log file and how far it has been copied."""

    def __init__(self, header: str, path: str, line_filter: Callable[[str], bool]) -> None:
        self._path = path
        self._fd: int | None = None
        self._header = header
        self._filter = line_filter
        self._position = 0
        self._lines = Prefixer(os.fsencode(header) if line_filter is _tail_every_line else b"")

    def open(self, watch: GrowthWatch | None = None) -> bool:
        """Open the file if it exists by now, and watch it; whether it exists."""
        if self._fd is None:
            with suppress(FileNotFoundError):
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd is not None and watch is not None:
            watch.arm(self._fd)
        return self._fd is not None

    def copy(self, target: TextIO) -> None:
        """Copy up to the file's present size: a file may grow for ever."""
        if self._fd is None:
            return
        size = os.fstat(self._fd).st_size
        if size < self._position:
            self._position = 0  # the file was truncated: its content is new
        while self._position < size and (data := os.pread(self._fd, _READ_BYTES, self._position)):
            self._position += len(data)
            self._write(self._lines.feed(data), target)

    def finish(self, target: TextIO) -> None:
        """Copy the rest, and a last line without a line end."""
        self.open()
        self.copy(target)
        self._write(self._lines.end(), target)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _write(self, lines: bytes, target: TextIO) -> None:
        text = lines.decode("utf-8", "replace")
        if self._filter is not _tail_every_line:
            complete = (line + "\n" for line in text.split("\n")[:-1])
            text = "".join(self._header + line for line in complete if self._filter(line))
        if text:
            target.write(text)
            target.flush()


def tail_logfile(
    header: str,
    file: str,
    dst: TextIO,
    finished: Event,
    interval_sec: float,
    log_line_filter: Callable[[str], bool] | None = None,
) -> None:
    """Copy one file every `interval_sec` until `finished` is set, and then to its end."""
    tail = _Tail(header, file, log_line_filter or _tail_every_line)
    try:
        while not finished.is_set():
            tail.open()
            tail.copy(dst)
            finished.wait(interval_sec)
        tail.finish(dst)
    finally:
        tail.close()


class TailLog:
    """Copies log files to a stream, each line with the header `[{name}{rank}]:` or the rank's own prefix.

    The files may be created later.  `stop` returns when everything that was written before is copied.
    """

    def __init__(
        self,
        name: str,
        log_files: dict[int, str],
        dst: TextIO,
        log_line_prefixes: dict[int, str] | None = None,
        interval_sec: float = 0.1,
        log_line_filter: Callable[[str], bool] = _tail_every_line,
    ) -> None:
        prefixes = log_line_prefixes or {}
        self._name = name
        self._dst = dst
        self._interval = interval_sec
        self._tails = [
            _Tail(prefixes.get(rank, f"[{name}{rank}]:"), path, log_line_filter) for rank, path in log_files.items()
        ]
        self._thread: Thread | None = None
        self._stop_fd: int | None = None  # a pipe that wakes the thread
        self._stopped = False

    def start(self) -> "TailLog":
        if self._tails and self._dst and self._thread is None:
            stop, self._stop_fd = os.pipe()
            self._thread = Thread(target=self._run, args=(stop,), name=f"TailLog_{self._name}", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        if self._thread is not None and self._stop_fd is not None:
            with suppress(BrokenPipeError):  # the thread has ended already
                os.write(self._stop_fd, b"\n")  # closing is not enough: a forked child may have a copy
            os.close(self._stop_fd)
            self._stop_fd = None
            self._thread.join()
        self._stopped = True

    def stopped(self) -> bool:
        return self._stopped

    def _run(self, stop: int) -> None:
        watch = GrowthWatch()
        try:
            self._follow(stop, watch)
        except Exception as error:
            log.error("the output of %s is not copied any more, its log files are complete: %s", self._name, error)
        finally:
            for tail in self._tails:
                tail.close()
            watch.close()
            os.close(stop)

    def _follow(self, stop: int, watch: GrowthWatch) -> None:
        changes, stopped = select.poll(), select.poll()
        for poll in (changes, stopped):
            poll.register(stop, select.POLLIN)
        if (notifications := watch.fileno()) is not None:
            changes.register(notifications, select.POLLIN)
        while not stopped.poll(_PAUSE_MS):
            watch.grown()  # read events that were received
            exist = [tail.open(watch) for tail in self._tails]
            for tail in self._tails:
                tail.copy(self._dst)
            changes.poll(None if all(exist) and not watch.needs_polling else self._interval * 1000)
        for tail in self._tails:
            tail.finish(self._dst)
