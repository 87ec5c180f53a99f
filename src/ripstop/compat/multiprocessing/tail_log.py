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
from ripstop.logs.growing_file import GrowingFile, GrowthWatch

__all__ = ["TailLog", "tail_logfile"]

_PAUSE_MS = 5  # between two reads, so that many short writes are copied in large blocks

log = logging.getLogger(__name__)


class _Tail:
    """One log file, opened when it exists, and how its lines are changed on the way to the stream."""

    def __init__(self, header: str, path: str, line_filter: Callable[[str], bool] | None) -> None:
        self.file: GrowingFile | None = None
        self._path = path
        self._header = header
        self._filter = line_filter
        self._lines = Prefixer(b"" if line_filter else os.fsencode(header))

    def open(self) -> GrowingFile | None:
        if self.file is None:
            with suppress(FileNotFoundError):
                self.file = GrowingFile(self._path)
        return self.file

    def copy(self, target: TextIO) -> None:
        """Copy up to the file's present size: a file may grow for ever."""
        unread = self.file.unread() if self.file else 0
        while self.file and unread > 0 and (data := self.file.read()):
            unread -= len(data)
            self._write(self._lines.feed(data), target)

    def finish(self, target: TextIO) -> None:
        """Copy the rest, and a last line without a line end."""
        self.open()
        self.copy(target)
        self._write(self._lines.end(), target)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()

    def _write(self, lines: bytes, target: TextIO) -> None:
        text = lines.decode("utf-8", "replace")
        if self._filter is not None:
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
    tail = _Tail(header, file, log_line_filter)
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
        log_line_filter: Callable[[str], bool] | None = None,
    ) -> None:
        prefixes = log_line_prefixes or {}
        self._name = name
        self._dst = dst
        self._interval = interval_sec
        self._tails = [
            _Tail(prefixes.get(rank, f"[{name}{rank}]:"), path, log_line_filter) for rank, path in log_files.items()
        ]
        self._thread: Thread | None = None
        self._stop_fd = -1  # readable when the thread is to end
        self._stopped = False

    def start(self) -> "TailLog":
        if self._tails and self._dst and self._thread is None:
            self._stop_fd = os.eventfd(0)
            self._thread = Thread(target=self._run, name=f"TailLog_{self._name}", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        if self._thread is not None and not self._stopped:
            os.eventfd_write(self._stop_fd, 1)
            self._thread.join()
            os.close(self._stop_fd)
        self._stopped = True

    def stopped(self) -> bool:
        return self._stopped

    def _run(self) -> None:
        watch = GrowthWatch()
        try:
            self._follow(watch)
        except Exception as error:
            log.error("the output of %s is not copied any more, its log files are complete: %s", self._name, error)
        finally:
            for tail in self._tails:
                tail.close()
            watch.close()

    def _follow(self, watch: GrowthWatch) -> None:
        changes, stopped = select.poll(), select.poll()
        changes.register(self._stop_fd, select.POLLIN)
        stopped.register(self._stop_fd, select.POLLIN)
        if (notifications := watch.fileno()) is not None:
            changes.register(notifications, select.POLLIN)
        while not stopped.poll(_PAUSE_MS):
            watch.grown()  # all files are read, so it does not matter which
            files = [tail.open() for tail in self._tails]
            for file in filter(None, files):
                watch.arm(file.fd)
            for tail in self._tails:
                tail.copy(self._dst)
            changes.poll(None if all(files) and not watch.needs_polling else self._interval * 1000)
        for tail in self._tails:
            tail.finish(self._dst)
