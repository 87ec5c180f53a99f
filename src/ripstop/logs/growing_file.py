"""Reads a file while other processes append to it.  Shared by the console copier and the followers of logs."""

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
