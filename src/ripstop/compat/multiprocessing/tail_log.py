"""torch.distributed.elastic.multiprocessing.tail_log: what is written into log files is copied to a stream.

The sibling of `logs/console.py` for destinations that are Python objects.  Rules: (1) only whole lines are written,
each with its header, a block of lines at a time, so no line is torn by another's; the last one gets the end it never
got; (2) nothing polls while the kernel offers inotify, except for a file that is not there yet; (3) a destination that
fails is left alone after a word to the log: the files have it all.
"""

import logging
import os
import select
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import Event, Thread
from typing import TextIO

from ripstop.logs.console import Prefixer
from ripstop.system.inotify import InotifyWatch

__all__ = ["TailLog", "tail_logfile"]

_READ = 1 << 18
_PAUSE_MS = 5  # between two visits, so that a stream of short writes is copied in large blocks

log = logging.getLogger(__name__)


def _every_line(_: str) -> bool:
    return True


class _Tail:
    """One log file and how far it has been copied."""

    def __init__(self, header: str, path: str, wanted: Callable[[str], bool]) -> None:
        self.path = path
        self.fd: int | None = None
        self._header = header
        self._wanted = wanted
        self._position = 0
        self._lines = Prefixer(os.fsencode(header) if wanted is _every_line else b"")

    def open(self) -> bool:
        """Whether the file is there by now."""
        if self.fd is None:
            with suppress(FileNotFoundError):
                self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        return self.fd is not None

    def copy(self, target: TextIO) -> None:
        """Copy what is in the file now; not to the end of time: someone may write for ever."""
        if self.fd is None:
            return
        size = os.fstat(self.fd).st_size
        if size < self._position:
            self._position = 0  # emptied by someone: what is there now is new
        while self._position < size and (data := os.pread(self.fd, _READ, self._position)):
            self._position += len(data)
            self._write(self._lines.feed(data), target)

    def end(self, target: TextIO) -> None:
        """Its writers are gone."""
        self.copy(target)
        self._write(self._lines.end(), target)

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def _write(self, lines: bytes, target: TextIO) -> None:
        text = lines.decode("utf-8", "replace")
        if self._wanted is not _every_line:
            kept = (line + "\n" for line in text.split("\n")[:-1])
            text = "".join(self._header + line for line in kept if self._wanted(line))
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
    """Copy one file, looking every `interval_sec`, until `finished` is set; then to its end."""
    tail = _Tail(header, file, log_line_filter or _every_line)
    try:
        while not finished.is_set():
            if tail.open():
                tail.copy(dst)
            finished.wait(interval_sec)
        if tail.open():
            tail.end(dst)
    finally:
        tail.close()


class TailLog:
    """Copies log files to a stream, each line with the header `[{name}{rank}]:` or the rank's own prefix.

    The files may come into being later.  `stop` returns when all that was written until then is copied.
    """

    def __init__(
        self,
        name: str,
        log_files: dict[int, str],
        dst: TextIO,
        log_line_prefixes: dict[int, str] | None = None,
        interval_sec: float = 0.1,
        log_line_filter: Callable[[str], bool] = _every_line,
    ) -> None:
        prefixes = log_line_prefixes or {}
        self._name = name
        self._dst = dst
        self._interval = interval_sec
        self._tails = [
            _Tail(prefixes.get(rank, f"[{name}{rank}]:"), path, log_line_filter) for rank, path in log_files.items()
        ]
        self._thread: Thread | None = None
        self._bell: int | None = None
        self._stopped = False

    def start(self) -> "TailLog":
        if self._tails and self._dst and self._thread is None:
            alarm, self._bell = os.pipe()
            self._thread = Thread(target=self._run, args=(alarm,), name=f"TailLog_{self._name}", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        if self._thread is not None and self._bell is not None:
            with suppress(BrokenPipeError):  # it has stopped by itself
                os.write(self._bell, b"!")  # not its closing, for a forked child may have a copy
            os.close(self._bell)
            self._bell = None
            self._thread.join()
        self._stopped = True

    def stopped(self) -> bool:
        return self._stopped

    def _run(self, alarm: int) -> None:
        watch = _watch()
        try:
            self._follow(alarm, watch)
        except Exception as error:
            log.error("output of %s is not copied any more, it is in its files: %s", self._name, error)
        finally:
            for tail in self._tails:
                tail.close()
            if watch is not None:
                watch.close()
            os.close(alarm)

    def _follow(self, alarm: int, watch: InotifyWatch | None) -> None:
        news, stop = select.poll(), select.poll()
        for poll in (news, stop):
            poll.register(alarm, select.POLLIN)
        if watch is not None:
            news.register(watch, select.POLLIN)
        absent, changed = list(self._tails), list[_Tail]()
        while True:
            here = [tail for tail in absent if tail.open()]
            absent = [tail for tail in absent if tail not in here]
            unwatched = [tail for tail in {*here, *changed} if not _arm(watch, tail)]
            self._copy({*here, *changed})
            news.poll(self._interval * 1000 if absent or unwatched else None)
            if stop.poll(_PAUSE_MS):
                break
            words = watch.changed() if watch is not None else set[int]()
            changed = [*unwatched, *(tail for tail in self._tails if tail.fd in words)]
        for tail in self._tails:
            tail.open()
            tail.end(self._dst)

    def _copy(self, tails: Iterable[_Tail]) -> None:
        for tail in tails:
            tail.copy(self._dst)


def _watch() -> InotifyWatch | None:
    try:
        return InotifyWatch()
    except OSError:
        return None


def _arm(watch: InotifyWatch | None, tail: _Tail) -> bool:
    """Whether a word will come when the file is written to."""
    if watch is None or tail.fd is None:
        return False
    try:
        watch.arm(tail.fd)
    except OSError:
        return False
    return True
