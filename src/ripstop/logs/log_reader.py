"""Reads the log files of workers for the API: the last lines, the next chunk, and waiting for more.

Rules: (1) the result is text: bytes that are not UTF-8 are replaced, and an incomplete character at the end is left for
the next chunk; (2) holes at the front of a file, which `console.py` makes to free disk space, are skipped; (3) a file
is opened and watched once, however many callers wait for it; (4) no file is accessed in the event loop, because a file
server may hang.
"""

import asyncio
import os
import threading
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from ripstop.system.blocking_calls import run_in_daemon_thread, settle
from ripstop.system.inotify import GrowthWatch

MAX_CHUNK_BYTES = 24 * 1024  # as JSON within JSON, at most seven times as much
BLOCK_BYTES = 64 * 1024
MAX_TAIL_BYTES = 4 << 20  # from the end, in which the last lines are searched
POLL_INTERVAL_S = 0.25  # without inotify


class LogChunk(Struct, frozen=True):
    """The text of a file between two offsets, and the size of the file when the reading began."""

    offset: int
    next: int
    size: int
    text: str


def find_last_lines(path: Path, lines: int) -> tuple[int, int]:
    """The offset at which the last `lines` lines of a file begin, and the size of the file at that moment."""
    with path.open("rb", buffering=0) as file:
        size = at = os.fstat(file.fileno()).st_size
        found = 0
        while lines and at > max(0, size - MAX_TAIL_BYTES):
            start = max(0, at - BLOCK_BYTES)
            block = os.pread(file.fileno(), at - start, start)
            end = len(block)
            while (newline := block.rfind(b"\n", 0, end)) >= 0:
                end = newline
                if start + newline + 1 < size:  # no line begins after the last newline
                    found += 1
                    if found == lines:
                        return start + newline + 1, size
            at = start
        return at if lines else size, size


def read_log_chunk(path: Path, offset: int, until: int | None = None, *, finished: bool = False) -> LogChunk:
    """The chunk at this offset, or at the end if the file is shorter.

    `until`: ignore what comes after this offset.  `finished`: no process writes to the file.
    """
    with path.open("rb", buffering=0) as file:
        fd = file.fileno()
        size = os.fstat(fd).st_size
        size = size if until is None else min(size, until)
        offset = min(offset, size)
        with suppress(OSError):  # no data after the offset
            offset = os.lseek(fd, offset, os.SEEK_DATA)
        data = os.pread(fd, min(MAX_CHUNK_BYTES, max(0, size - offset)), offset)
    if not finished or offset + len(data) < size:
        data = data[: len(data) - _incomplete_character(data)]
    return LogChunk(offset, offset + len(data), size, data.decode("utf-8", "replace"))


def _incomplete_character(data: bytes) -> int:
    """The number of bytes at the end that begin a character which is not complete."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue  # within a character
        length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return back if back < length else 0
    return 0


# waiting for more -----------------------------------------------------------------------------------------------------

_waits: dict[tuple[asyncio.AbstractEventLoop, Path], "_LogGrowthWait"] = {}


async def wait_for_larger_log(
    path: Path, size: int, timeout: float, finished: asyncio.Future[None] | None = None
) -> None:
    """Wait until a file is larger than `size`, until the timeout, or until `finished` is done."""
    key = (asyncio.get_running_loop(), path)
    wait = _waits.get(key)
    if wait is None:
        wait = _waits[key] = _LogGrowthWait(path)
    try:
        await wait.larger_than(size, timeout, finished)
    finally:
        if not wait.sizes and _waits.get(key) is wait:
            del _waits[key]
            wait.close()


class _LogGrowthWait:
    """Watches one file for all callers that wait for it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._size = -1  # not known yet
        self._task = self._loop.create_task(self._follow())
        self.sizes: dict[asyncio.Future[None], int] = {}  # that callers wait to be exceeded

    async def larger_than(self, size: int, timeout: float, finished: asyncio.Future[None] | None) -> None:
        if self._size > size:
            return
        exceeded: asyncio.Future[None] = self._loop.create_future()
        self.sizes[exceeded] = size
        try:
            ends = [exceeded, self._task, *([finished] if finished is not None else [])]
            await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self.sizes[exceeded]
        if self._task.done() and not self._task.cancelled():
            self._task.result()  # raises its error

    def close(self) -> None:
        if not self._task.cancel() and not self._task.cancelled():
            self._task.exception()  # mark it as retrieved: no caller waits for it

    async def _follow(self) -> None:
        file = _LogReaderFile(self._path)
        try:
            while True:
                self._size = await run_in_daemon_thread(file.arm_and_measure)
                for exceeded, size in self.sizes.items():
                    if self._size > size:
                        settle(exceeded, None)
                await self._next_write(file)
        finally:
            file.close()

    async def _next_write(self, file: "_LogReaderFile") -> None:
        assert file.watch is not None, "measured, and closed by this task only"
        notifications = file.watch.fileno()
        if file.watch.needs_polling or notifications is None:
            await asyncio.sleep(POLL_INTERVAL_S)
            return
        written = asyncio.Event()
        self._loop.add_reader(notifications, written.set)
        try:
            await written.wait()
        finally:
            self._loop.remove_reader(notifications)
        file.watch.grown()


class _LogReaderFile:
    """A file that is opened in a thread, and closed when neither the thread nor the event loop uses it."""

    def __init__(self, path: Path) -> None:
        self.watch: GrowthWatch | None = None
        self._path = path
        self._fd: int | None = None
        self._lock = threading.Lock()
        self._in_use = False
        self._closed = False

    def arm_and_measure(self) -> int:
        """The size of the file; `watch` reports what is written after this.  Called in a thread."""
        self._in_use = True
        try:
            if self._fd is None:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            self.watch = self.watch or GrowthWatch()
            self.watch.arm(self._fd)
            return os.fstat(self._fd).st_size
        finally:
            with self._lock:
                self._in_use = False
                if self._closed:
                    self._release()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if not self._in_use:
                self._release()

    def _release(self) -> None:
        if self.watch is not None:
            self.watch.close()
        if self._fd is not None:
            os.close(self._fd)
        self.watch = self._fd = None
