"""Writes event records to a file, one line of JSON each: `events.jsonl`.

Rules: (1) a line is one write to a file opened for appending, so that lines of several writers do not mix; (2) a thread
writes, so that a slow disk does not delay the job; (3) a write error, such as a full disk, is logged once, and once
more when writing succeeds again; the lines in between are lost; (4) after an incomplete line, the next record starts on
a new line.
"""

import errno
import logging
import os
from pathlib import Path

from ripstop.model.event_json import to_json
from ripstop.model.events import EventRecord
from ripstop.system.background_writer import BackgroundWriter

log = logging.getLogger("ripstop.telemetry")

NODE_EVENTS = "events.jsonl"  # events of one agent
JOB_EVENTS = "job-events.jsonl"  # events of the whole job, written by its coordinator


class EventFile:
    """Appends to `path`, which is created with the first record."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._is_line_incomplete = False
        self._problem_logged = False
        self.is_used = False
        self._writer = BackgroundWriter("events", self._write, failed=self._log_problem)

    def add(self, record: EventRecord) -> None:
        """Write the record soon; does not wait."""
        self.is_used = True
        self._writer.put(to_json(record))

    def close(self) -> None:
        """Wait briefly for records that are not written yet."""
        if self._writer.close() and self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _write(self, data: bytes) -> None:
        if self._fd is None:
            self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            self._is_line_incomplete = _ends_incomplete(self._fd)
        data = b"\n" + data if self._is_line_incomplete else data
        self._is_line_incomplete = os.write(self._fd, data) < len(data)
        if self._is_line_incomplete:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._problem_logged:
            self._problem_logged = False
            log.info("events are written to %s again", self._path)

    def _log_problem(self, error: OSError) -> None:
        if not self._problem_logged:
            self._problem_logged = True
            log.warning("events cannot be written to %s: %s; the job continues", self._path, error.strerror)


def _ends_incomplete(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"
