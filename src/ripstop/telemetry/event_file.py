"""A file of entries, one line of JSON each: `events.jsonl`.

Rules: (1) a line is one write to a file opened for appending, so that several writers do not tear each other's lines;
(2) it is written in a thread: a slow or hung disk keeps nobody from training; (3) a disk that is full is said once,
and again when lines can be written: what is lost is this file's, never the job's; (4) after a torn line the next one
begins on a line of its own.
"""

import errno
import logging
import os
from pathlib import Path

from ripstop.model.events import EventRecord, to_json
from ripstop.system.background_writer import BackgroundWriter

log = logging.getLogger("ripstop.telemetry")

OF_NODE = "events.jsonl"  # what one agent saw
OF_JOB = "job-events.jsonl"  # what its coordinator saw and was told; where the coordinator is


class EventFile:
    """Appends to `path`, which is made with its first entry."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._torn = False
        self._troubled = False
        self._lines = BackgroundWriter("events", self._write, failed=self._say)

    def add(self, entry: EventRecord) -> None:
        """Have an entry written, soon."""
        self._lines.put(to_json(entry))

    def close(self) -> None:
        """Waits, briefly, for what is not yet written."""
        if self._lines.close() and self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _write(self, data: bytes) -> None:
        if self._fd is None:
            self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            self._torn = _ends_torn(self._fd)
        data = b"\n" + data if self._torn else data
        self._torn = os.write(self._fd, data) < len(data)
        if self._torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._troubled:
            self._troubled = False
            log.info("events are written to %s again", self._path)

    def _say(self, error: OSError) -> None:
        if not self._troubled:
            self._troubled = True
            log.warning("events cannot be written to %s: %s; the job goes on without them", self._path, error.strerror)


def _ends_torn(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"
