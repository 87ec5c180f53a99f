"""Reads workers' log files for others: the last lines, a piece, and the word that there is more.

What is read is text, however a worker wrote: bytes that are no UTF-8 are replaced, and a character that is only half
there waits for its rest.  Files may be emptied at their front (`console.py`): what is gone is passed over.
"""

import asyncio
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ripstop.workers.inotify import Watch

PIECE = 24 * 1024  # bytes: as JSON within JSON, at most seven times as much
BLOCK = 64 * 1024
FARTHEST = 4 << 20  # bytes from the end in which last lines are looked for
LOOK_AGAIN = 0.25  # seconds, where there is no inotify


@dataclass(frozen=True, slots=True)
class Piece:
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


def read(path: Path, offset: int) -> Piece:
    """The next piece from there; from the end, if the file is shorter."""
    with path.open("rb", buffering=0) as file:
        fd = file.fileno()
        size = os.fstat(fd).st_size
        offset = min(offset, size)
        with suppress(OSError):  # no data from here on
            offset = os.lseek(fd, offset, os.SEEK_DATA)
        data = os.pread(fd, PIECE, offset)
    data = data[: len(data) - _half_a_character(data)]
    return Piece(offset, offset + len(data), size, data.decode("utf-8", "replace"))


async def grown(path: Path, size: int, patience: float) -> None:
    """Wait until a file is larger than that, but not longer than so many seconds."""
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()
    with path.open("rb", buffering=0) as file:
        watch = _watch(file.fileno())
        if watch is not None:
            loop.add_reader(watch.fileno(), changed.set)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    while os.fstat(file.fileno()).st_size <= size:
                        if watch is None:
                            await asyncio.sleep(LOOK_AGAIN)
                            continue
                        await changed.wait()
                        changed.clear()
                        if watch.changed():
                            watch.arm(file.fileno())
        finally:
            if watch is not None:
                loop.remove_reader(watch.fileno())
                watch.close()


def _watch(fd: int) -> "Watch | None":
    """None where the kernel has none left for this user."""
    from ripstop.workers.inotify import Watch  # ctypes: only where somebody follows

    try:
        watch = Watch()
    except OSError:
        return None
    try:
        watch.arm(fd)
    except OSError:
        watch.close()
        return None
    return watch


def _half_a_character(data: bytes) -> int:
    """How many bytes at the end are the beginning of a character whose rest is not there."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue  # within a character
        length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return back if back < length else 0
    return 0
