"""Reads workers' log files for others: the last lines, a piece, and the word that there is more.

What is read is text, however a worker wrote: bytes that are no UTF-8 are replaced, and a character that is only half
there waits for its rest.  Files may be emptied at their front (`console.py`): what is gone is passed over.

However many wait for a file to grow, it is opened and watched once.  A file server may hang: no file is touched in the
event loop.
"""

import asyncio
import os
import threading
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from ripstop.system.blocking_calls import run_in_daemon_thread, settle

if TYPE_CHECKING:
    from ripstop.system.inotify import InotifyWatch

PIECE = 24 * 1024  # bytes: as JSON within JSON, at most seven times as much
BLOCK = 64 * 1024
FARTHEST = 4 << 20  # bytes from the end in which last lines are looked for
LOOK_AGAIN = 0.25  # seconds, where there is no inotify


class LogChunk(Struct, frozen=True):
    """The text of a file between two offsets, and the size of the file."""

    offset: int
    next: int
    size: int
    text: str


def last_lines(path: Path, lines: int) -> int:
    """Where the last so many lines of a file begin."""
    with path.open("rb", buffering=0) as file:
        size = at = os.fstat(file.fileno()).st_size
        found = 0
        while lines and at > max(0, size - FARTHEST):
            start = max(0, at - BLOCK)
            block = os.pread(file.fileno(), at - start, start)
            end = len(block)
            while (newline := block.rfind(b"\n", 0, end)) >= 0:
                end = newline
                if start + newline + 1 < size:  # the last line's own end begins no other
                    found += 1
                    if found == lines:
                        return start + newline + 1
            at = start
        return at if lines else size


def read(path: Path, offset: int, *, finished: bool = False) -> LogChunk:
    """The next piece from there; from the end, if the file is shorter.  To a `finished` file nothing is added."""
    with path.open("rb", buffering=0) as file:
        fd = file.fileno()
        size = os.fstat(fd).st_size
        offset = min(offset, size)
        with suppress(OSError):  # no data from here on
            offset = os.lseek(fd, offset, os.SEEK_DATA)
        data = os.pread(fd, PIECE, offset)
    if not finished or offset + len(data) < size:
        data = data[: len(data) - _half_a_character(data)]
    return LogChunk(offset, offset + len(data), size, data.decode("utf-8", "replace"))


_followed: dict[tuple[asyncio.AbstractEventLoop, Path], "_Followed"] = {}


async def grown(path: Path, size: int, patience: float, over: asyncio.Future[None] | None = None) -> None:
    """Wait until a file is larger than that, but not longer than so many seconds, nor than until it is `over`."""
    key = (asyncio.get_running_loop(), path)
    file = _followed.get(key)
    if file is None:
        file = _followed[key] = _Followed(path)
    try:
        await file.larger_than(size, patience, over)
    finally:
        if not file.waiting and _followed.get(key) is file:
            del _followed[key]
            file.close()


class _Followed:
    """A file for which somebody waits."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._size = -1  # not known yet
        self._written = asyncio.Event()
        self._following = self._loop.create_task(self._follow())
        self.waiting: dict[asyncio.Future[None], int] = {}  # for more than so many bytes

    async def larger_than(self, size: int, patience: float, over: asyncio.Future[None] | None) -> None:
        if self._size > size:
            return
        enough: asyncio.Future[None] = self._loop.create_future()
        self.waiting[enough] = size
        try:
            ends = [enough, self._following, *([over] if over is not None else [])]
            await asyncio.wait(ends, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self.waiting[enough]
        if self._following.done() and not self._following.cancelled():
            self._following.result()  # raises what went wrong

    def close(self) -> None:
        if not self._following.cancel() and not self._following.cancelled():
            self._following.exception()  # nobody is left to hear it

    async def _follow(self) -> None:
        file = _File(self._path)
        try:
            while True:
                self._size = await run_in_daemon_thread(file.measure)
                for enough, size in self.waiting.items():
                    if self._size > size:
                        settle(enough, None)
                await self._change(file.watch)
        finally:
            file.close()

    async def _change(self, watch: "InotifyWatch | None") -> None:
        if watch is None:
            await asyncio.sleep(LOOK_AGAIN)
            return
        self._written.clear()
        self._loop.add_reader(watch.fileno(), self._written.set)
        try:
            await self._written.wait()
        finally:
            self._loop.remove_reader(watch.fileno())
        watch.changed()


class _File:
    """An open file; `watch` gives a word at its next change.  Whoever measures it has it until that comes back."""

    def __init__(self, path: Path) -> None:
        self.watch: InotifyWatch | None = None
        self._path = path
        self._file: FileIO | None = None
        self._lock = threading.Lock()
        self._busy = False
        self._closed = False

    def measure(self) -> int:
        """Its size; what is written after this is a change.  For a thread."""
        self._busy = True
        try:
            if self._file is None:
                self._file = self._path.open("rb", buffering=0)
                self.watch = _watch()
            if self.watch is not None:
                try:
                    self.watch.arm(self._file.fileno())
                except OSError:  # the user's watches are used up
                    self.watch.close()
                    self.watch = None
            return os.fstat(self._file.fileno()).st_size
        finally:
            with self._lock:
                self._busy = False
                if self._closed:
                    self._release()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if not self._busy:
                self._release()

    def _release(self) -> None:
        for held in (self.watch, self._file):
            if held is not None:
                held.close()
        self.watch = self._file = None


def _watch() -> "InotifyWatch | None":
    """None where the kernel has none left for this user."""
    from ripstop.system.inotify import InotifyWatch  # ctypes: only where somebody follows

    try:
        return InotifyWatch()
    except OSError:
        return None


def _half_a_character(data: bytes) -> int:
    """How many bytes at the end are the beginning of a character whose rest is not there."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue  # within a character
        length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return back if back < length else 0
    return 0
