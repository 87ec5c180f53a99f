"""Copies the output of workers from their log files to the console.

Each console (the agent's stdout, its stderr) has its own thread.  So a console that nobody reads blocks neither the
agent, nor the workers, nor the other console: unread output stays in the files.  Rules:

1. With a prefix, only whole lines are written, so that lines of different workers never mix.  A carriage return ends a
   line, too; otherwise a progress bar would appear only at its end.
2. Without a prefix, bytes are copied as they come.  A partial line at the end of a file is written at the second look,
   a few milliseconds later.  So a line that the worker is just writing is rarely divided by one of the agent's own.
3. A console that cannot be written to (a closed pipe, a full disk) is ignored.  The file has all output.
4. Nothing polls where inotify is available.
5. If the user did not ask for a log file, a full disk never makes its worker fail.  Disk space is reserved ahead of the
   writer.  On a full disk, the part that the console has already is freed.
6. If a program has replaced `sys.stdout` or `sys.stderr` by an object, as notebooks do, that object is the console.  It
   gets whole lines of text.
"""

import asyncio
import logging
import os
import select
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

from msgspec import Struct

from ripstop.model.errors import StartError
from ripstop.system.blocking_calls import settle_blocking_call
from ripstop.system.disk_space import free_disk_space, release_reserved_space, reserve_disk_space
from ripstop.system.inotify import GrowthWatch
from ripstop.system.live_line import LiveLine
from ripstop.system.safe_files import no_follow, open_to_append

log = logging.getLogger("ripstop.workers")

MAX_READ_BYTES = 1 << 18  # large enough to be cheap, small enough not to hold Python's lock for long
RESERVED_BYTES = 1 << 20  # that a worker can write to a file with reserved space before the next read
_MIN_KEPT_BYTES_FULL_DISK = 1 << 16  # end of a file with reserved space that stays on a full disk, as evidence
_MIN_KEPT_BYTES = 1 << 20  # end of a file with `keep_end_only` that stays on disk
_MAX_TURN_BYTES = 1 << 22  # copied from one file before the next file's turn
_MAX_LINE_BYTES = 1 << 20  # a longer line is divided, to bound memory
_BATCH_PAUSE_MS = 5  # between two reads, so that many short writes are copied in one block
_POLL_INTERVAL_MS = 100  # without inotify


class Console:
    """The log files that are copied, and the console of each.

    `objects` replace these descriptors (rule 6); output for None is discarded.  `live` is the live line of the terminal
    that is the console, if there is one.
    """

    def __init__(self, objects: Mapping[int, TextIO | None] | None = None, live: LiveLine | None = None) -> None:
        self._objects = objects or {}
        self.live = live
        self._copiers: dict[tuple[int, bool], _ConsoleCopier] = {}  # by descriptor, and whether an object replaces it
        self._followed: dict[Path, tuple[int, bool]] = {}

    def follow(
        self,
        path: Path,
        fd: int,
        prefix: bytes = b"",
        line_filter: "LineFilter | None" = None,
        *,
        keep_end_only: bool = False,
        reserve_space: bool = False,
        ignore_objects: bool = False,
    ) -> None:
        """Copy to `fd` what is appended to `path` from now on; an empty prefix copies bytes as they come.

        `keep_end_only` frees the disk space of output that was copied; only the end of the file stays.
        `reserve_space` is rule 5.
        `ignore_objects` writes to the descriptor even if an object replaces it, as the worker itself would.
        """
        target = fd, fd in self._objects and not ignore_objects
        if target not in self._copiers:
            self._copiers[target] = (
                _ConsoleObjectCopier(fd, self._objects[fd]) if target[1] else _ConsoleCopier(fd, self.live)
            )
        self._followed[path] = target
        prefixer = Prefixer(prefix) if prefix or target[1] else None
        filtered = _ConsoleFilteredFile(line_filter, prefix) if line_filter else None
        self._copiers[target].follow(
            _ConsoleLogFile(path, prefixer, filtered, keep_end_only=keep_end_only, reserve_space=reserve_space)
        )

    async def finish(self, paths: Iterable[Path]) -> None:
        """The writers of these files have ended: wait until the console has all their output.  Ignore other paths.

        A console that nobody reads delays this, and nothing else.
        """
        copied = [
            _console_future(partial(self._copiers[self._followed.pop(path)].finish, path))
            for path in paths
            if path in self._followed
        ]
        for future in copied:
            await future

    async def drain(self) -> None:
        """Finish all files, and wait for files that `finish` has begun."""
        await self.finish(tuple(self._followed))
        for future in [_console_future(copier.call) for copier in self._copiers.values()]:
            await future

    def close(self) -> None:
        """Stop copying; output that was not copied stays in the files."""
        for copier in self._copiers.values():
            copier.close()
        self._copiers.clear()
        self._followed.clear()


def _console_future(request: Callable[[Callable[[], None]], None]) -> "asyncio.Future[None]":
    """A future that is done when another thread calls the function that `request` gets."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def call() -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle_blocking_call, future, None)

    request(call)
    return future


class LineFilter(Struct, frozen=True):
    """Lines that contain one of these words are appended to this file, too."""

    path: Path
    words: tuple[bytes, ...]


class Prefixer:
    """Divides a stream into whole lines and adds a prefix to each: to all, or to those with one of the `words`."""

    def __init__(self, prefix: bytes, words: tuple[bytes, ...] = ()) -> None:
        self._prefix = prefix
        self._words = words
        self._rest = b""
        self._after_return = False

    def feed(self, data: bytes) -> bytes:
        """The lines that are complete now."""
        if not data:
            return b""
        if self._after_return and data.startswith(b"\n"):  # the second half of a divided "\r\n"
            data = data[1:]
        self._after_return = data.endswith(b"\r")
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        end = data.rfind(b"\n")
        if end < 0:
            self._rest += data
            return self.end() if len(self._rest) > _MAX_LINE_BYTES else b""
        lines, self._rest = self._rest + data[:end], data[end + 1 :]
        return self._prefixed(lines)

    def end(self) -> bytes:
        """The last line, with a newline, if it is not empty."""
        line, self._rest = self._rest, b""
        return self._prefixed(line) if line else b""

    def _prefixed(self, lines: bytes) -> bytes:
        if self._words:
            selected = [line for line in lines.split(b"\n") if any(word in line for word in self._words)]
            if not selected:
                return b""
            lines = b"\n".join(selected)
        return self._prefix + lines.replace(b"\n", b"\n" + self._prefix) + b"\n"


class _ConsoleLogFile:
    """A worker's log file, the position up to which it was copied, and how its output is changed on the way."""

    def __init__(
        self,
        path: Path,
        prefixer: Prefixer | None,
        filtered: "_ConsoleFilteredFile | None",
        *,
        keep_end_only: bool,
        reserve_space: bool,
    ) -> None:
        access = os.O_RDWR if keep_end_only or reserve_space else os.O_RDONLY
        self.path = path
        self.fd = os.open(path, access | no_follow(path) | os.O_CLOEXEC | os.O_NONBLOCK)
        self.found_disk_full = False
        self.holds_partial_line = False  # at the end of the file, until the next look
        self.position = os.fstat(self.fd).st_size  # only what is appended from now on is copied
        self._prefixer = prefixer
        self._filtered = filtered
        self._keep_end_only = keep_end_only
        self._freed_until = self.position
        self._reserved_until = self.position + RESERVED_BYTES if reserve_space else None

    def unread(self) -> int:
        """Bytes after the position.  A truncated file (logrotate) is read again, and its reserved space is free."""
        try:
            size = os.fstat(self.fd).st_size
        except OSError:  # the file system was unmounted, or its server failed
            return 0
        if size < self.position:
            self.position = self._freed_until = 0
            if self._reserved_until is not None:
                self._reserved_until = 0
        return size - self.position

    def next_output(self) -> tuple[bytes, bool]:
        """What to write to the console, and whether there was anything to read."""
        data = self._read()
        was_read = bool(data)
        if self._prefixer is None:
            data = self._without_partial_line(data)
        if self._keep_end_only and self.position - self._freed_until > 2 * _MIN_KEPT_BYTES:
            self._freed_until = free_disk_space(self.fd, self._freed_until, self.position - _MIN_KEPT_BYTES)
        if self._reserved_until is not None and self.position + RESERVED_BYTES // 2 > self._reserved_until:
            self._reserved_until = self._reserve()
        if self._filtered:
            self._filtered.feed(data)
        return (self._prefixer.feed(data) if self._prefixer else data), was_read

    def _without_partial_line(self, data: bytes) -> bytes:
        """The whole lines of a block (rule 2); the next block begins with the rest."""
        end, is_full = data.rfind(b"\n") + 1, len(data) == MAX_READ_BYTES
        if not end and (is_full or self.holds_partial_line):
            end = len(data)
        self.holds_partial_line = end < len(data) and not is_full
        self.position -= len(data) - end
        return data[:end]

    def _read(self) -> bytes:
        """The next bytes, at most `MAX_READ_BYTES`; empty at the end of the file."""
        try:
            data = os.pread(self.fd, MAX_READ_BYTES, self.position)
            if not data and (unread := self.unread()):
                data = os.pread(self.fd, min(unread, MAX_READ_BYTES), self.position)
        except OSError:
            return b""
        self.position += len(data)
        return data

    def _reserve(self) -> int:
        """Reserve disk space after the end of the file; return the position up to which there is space."""
        start = self.position + self.unread()
        end = start + RESERVED_BYTES
        if reserve_disk_space(self.fd, start, end):
            return end
        self.found_disk_full = True
        self._freed_until = free_disk_space(self.fd, self._freed_until, self.position - _MIN_KEPT_BYTES_FULL_DISK)
        return end if reserve_disk_space(self.fd, start, end) else self.position

    def end(self) -> bytes:
        """What to write to the console after all output was read."""
        if self._filtered:
            self._filtered.end()
        return self._prefixer.end() if self._prefixer else b""

    def close(self) -> None:
        if self._reserved_until is not None:
            with suppress(OSError):
                release_reserved_space(self.fd, 2 * RESERVED_BYTES)
        os.close(self.fd)
        if self._filtered:
            self._filtered.close()


class _ConsoleFilteredFile:
    """Appends the selected lines of one log file to a file that several log files share."""

    def __init__(self, line_filter: LineFilter, prefix: bytes) -> None:
        self._fd = open_to_append(line_filter.path)
        self._prefixer = Prefixer(prefix, line_filter.words)

    def feed(self, data: bytes) -> None:
        self._write(self._prefixer.feed(data))

    def end(self) -> None:
        self._write(self._prefixer.end())

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, lines: bytes) -> None:
        with suppress(OSError):  # a full disk: the worker's own file may have them
            while lines:
                lines = lines[os.write(self._fd, lines) :]


class _ConsoleCopier:
    """The thread that copies log files to one console.

    Only the thread uses the files.  Others send it calls through a queue, and wake it through a pipe.
    """

    def __init__(self, fd: int, live: LiveLine | None = None) -> None:
        self._fd = fd
        self._live = live if os.isatty(fd) else None
        self._max_write_bytes = select.PIPE_BUF if _is_console_pipe(fd) else _MAX_TURN_BYTES
        self._calls: deque[Callable[[], None]] = deque()
        self._files: dict[int, _ConsoleLogFile] = {}
        self._unread: set[int] = set()  # descriptors of files that have more to read now
        self._watch: GrowthWatch
        self._closed = False
        self._disk_full_logged = False
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._thread = threading.Thread(target=self._run, name=f"console-{fd}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            os.close(self._wake_reader)
            os.close(self._wake_writer)
            raise StartError(
                "copying workers' output to the console needs a thread, and the system has none left; "
                "raise `ulimit -u`, or the container's limit on processes."
            ) from error

    # called by the agent

    def follow(self, file: _ConsoleLogFile) -> None:
        self.call(lambda: self._add(file))

    def finish(self, path: Path, done: Callable[[], None]) -> None:
        self.call(lambda: self._finish(path, done))

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in the thread, after all earlier ones."""
        self._calls.append(function)
        with suppress(BlockingIOError):  # the pipe is full: the thread will wake up
            os.write(self._wake_writer, b"!")

    def close(self) -> None:
        """The pipe is closed here and not by the thread, which may end before `call` has written to it."""
        self.call(self._stop)
        self._thread.join(timeout=1.0)  # a thread blocked by its console ends with the process
        if not self._thread.is_alive():
            os.close(self._wake_reader)
            os.close(self._wake_writer)

    # the thread

    def _run(self) -> None:
        self._watch = GrowthWatch()
        growth, pause = select.poll(), select.poll()
        growth.register(self._wake_reader, select.POLLIN)
        pause.register(self._wake_reader, select.POLLIN)
        if (notifications := self._watch.fileno()) is not None:
            growth.register(notifications, select.POLLIN)
        while not self._closed:
            pause.poll(_BATCH_PAUSE_MS)
            growth.poll(0 if self._unread else _POLL_INTERVAL_MS if self._watch.needs_polling else None)
            self._run_calls()
            self._copy_grown()
        for fd in tuple(self._files):
            self._remove(fd)
        self._watch.close()

    def _run_calls(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_reader, 65536)
        while self._calls:
            self._calls.popleft()()

    def _add(self, file: _ConsoleLogFile) -> None:
        self._files[file.fd] = file
        self._unread.add(file.fd)

    def _finish(self, path: Path, done: Callable[[], None]) -> None:
        for file in [file for file in self._files.values() if file.path == path]:
            for _ in range(2):  # the second time for a partial line
                self._copy(file, file.unread())  # bounded: orphans of the worker may still write
            self._write_lines(file.end())
            self._remove(file.fd)
        done()

    def _stop(self) -> None:
        self._closed = True

    def _remove(self, fd: int) -> None:
        self._watch.disarm(fd)
        self._unread.discard(fd)
        self._files.pop(fd).close()

    def _copy_grown(self) -> None:
        grown, self._unread = self._unread | self._watch.grown(), set()
        for fd in sorted(grown):
            self._watch.arm(fd)
            self._copy(self._files[fd], _MAX_TURN_BYTES)

    def _copy(self, file: _ConsoleLogFile, limit: int) -> None:
        while limit > 0:
            began = file.position
            output, was_read = file.next_output()
            if not was_read:
                return
            if file.found_disk_full and not self._disk_full_logged:
                self._disk_full_logged = True
                log.warning("the disk of %s is full: only the console has the complete output of workers", file.path)
            self._write_lines(output)
            if file.holds_partial_line:
                break
            limit -= max(1, file.position - began)  # a truncated file begins again
        self._unread.add(file.fd)

    def _write_lines(self, data: bytes) -> None:
        with self._live.suspended() if self._live is not None and data else nullcontext():
            self._write(data)

    def _write(self, data: bytes) -> None:
        view, at = memoryview(data), 0
        while at < len(data):
            end = _end_of_console_write(data, at, self._max_write_bytes)
            try:
                at += os.write(self._fd, view[at:end])
            except BlockingIOError:  # another process that shares the console made it non-blocking
                writable = select.poll()
                writable.register(self._fd, select.POLLOUT)
                writable.poll()
            except OSError:
                return  # rule 3


class _ConsoleObjectCopier(_ConsoleCopier):
    """Copies to an object of this program (rule 6)."""

    def __init__(self, fd: int, target: TextIO | None) -> None:
        self._target = target
        super().__init__(fd)

    def _write(self, data: bytes) -> None:
        if data and self._target is not None:
            with suppress(Exception):  # rule 3
                self._target.write(data.decode("utf-8", "replace"))
                self._target.flush()


def _is_console_pipe(fd: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False  # rule 3


def _end_of_console_write(data: bytes, at: int, size: int) -> int:
    """The end of a write of about `size` bytes.  Writes of several processes to a pipe mix above PIPE_BUF bytes."""
    if len(data) - at <= size:
        return len(data)
    end = data.rfind(b"\n", at, at + size)
    if end < 0:
        end = data.find(b"\n", at + size)
    return end + 1 if end >= 0 else len(data)
