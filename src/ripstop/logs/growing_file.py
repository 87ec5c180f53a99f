"""Reads files while other processes append to them.  Shared by the console copier and the followers of logs.

How to follow a file: (1) `GrowthWatch.arm(fd)`; (2) read to the end; (3) wait until `GrowthWatch.grown()` returns the
descriptor; start again.  Data written after (1) is reported by (3), so none is missed.
"""

import os
from pathlib import Path

MAX_READ_BYTES = 1 << 18  # large enough to be cheap, small enough not to hold Python's lock for long


class GrowingFile:
    """An open file and the position up to which it was read."""

    def __init__(self, path: Path | str, flags: int = os.O_RDONLY, *, from_end: bool = False) -> None:
        self.fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
        self.position = self.size() if from_end else 0

    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def unread(self) -> int:
        """Bytes after the position.  A truncated file is read again from its start."""
        try:
            size = self.size()
        except OSError:  # the file system was unmounted, or its server failed
            return 0
        if size < self.position:
            self.position = 0
        return size - self.position

    def read(self) -> bytes:
        """The next bytes, at most `MAX_READ_BYTES`; empty at the end of the file."""
        try:
            data = os.pread(self.fd, MAX_READ_BYTES, self.position)
            if not data and (unread := self.unread()):
                data = os.pread(self.fd, min(unread, MAX_READ_BYTES), self.position)
        except OSError:
            return b""
        self.position += len(data)
        return data

    def close(self) -> None:
        os.close(self.fd)


class GrowthWatch:
    """Reports which open files were written to: with inotify, or, where inotify is not available, by polling.

    `fileno()` is readable when an armed file was written to; None without inotify.  While `needs_polling` is true, the
    caller must call `grown()` at an interval of its choice.
    """

    def __init__(self) -> None:
        from ripstop.system.inotify import InotifyWatch  # loads ctypes, which agents without followers do not need

        self._polled: set[int] = set()
        try:
            self._inotify: InotifyWatch | None = InotifyWatch()
        except OSError:  # the user's limit of inotify instances is reached
            self._inotify = None

    def fileno(self) -> int | None:
        return self._inotify.fileno() if self._inotify else None

    @property
    def needs_polling(self) -> bool:
        return bool(self._polled)

    def arm(self, fd: int) -> None:
        """Report the next write to this file."""
        self._polled.add(fd)
        if self._inotify:
            try:
                self._inotify.arm(fd)
            except OSError:  # the user's limit of inotify watches is reached
                return
            self._polled.discard(fd)

    def disarm(self, fd: int) -> None:
        self._polled.discard(fd)
        if self._inotify:
            self._inotify.disarm(fd)

    def grown(self) -> set[int]:
        """The files that were written to since `arm`, and all polled files.  Does not wait."""
        return self._polled | (self._inotify.changed() if self._inotify else set())

    def close(self) -> None:
        if self._inotify:
            self._inotify.close()
