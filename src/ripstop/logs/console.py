"""Copies what workers write into their files to the console.

Each console (the agent's stdout, its stderr) has a thread of its own, so that a console nobody reads stalls neither
the agent, nor the workers, nor the other console: what waits, waits in the files.  Rules: (1) with a prefix, only whole
lines are written, so no line is torn by another worker's; a carriage return ends a line too, or a progress bar would
show at the end only; (2) without one, bytes are passed on as they come; (3) a console that is gone (a closed pipe, a
full disk) hurts nobody, for the file has it all; (4) nothing polls while the kernel offers inotify; (5) a file that the
user did not ask for never fills up under its writer: disk space is reserved ahead of it, and on a full disk what the
console has already makes way; (6) within a program that has put an object in the place of `sys.stdout` or `sys.stderr`,
as a notebook does, that object is the console: it is given whole lines of text.
"""

import asyncio
import logging
import os
import select
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from msgspec import Struct

from ripstop.model.errors import StartError
from ripstop.system.linux import free_range, reserve_range
from ripstop.system.own_directory import no_follow

if TYPE_CHECKING:
    from ripstop.system.inotify import InotifyWatch

log = logging.getLogger("ripstop.workers")

AHEAD = 1 << 20  # bytes that a worker can write to a reserved file before it is visited again
_EVIDENCE = 1 << 16  # of a reserved file, what stays where the disk is full
_READ = 1 << 18  # one read: large enough to be cheap, small enough not to keep the agent from the interpreter
_END = 1 << 20  # of a fleeting file, what stays on disk at least
_TURN = 1 << 22  # what one file may copy before it is another's turn
_LINE = 1 << 20  # a line longer than this is broken up: memory is finite
_PAUSE_MS = 5  # between two visits, so that a stream of short writes is copied in large blocks
_POLL_MS = 100  # between two visits where there is no inotify


class Console:
    """The files that are being copied, and to which console each.

    `objects` stand in the place of these descriptors (rule 5); None takes nothing.
    """

    def __init__(self, objects: Mapping[int, TextIO | None] | None = None) -> None:
        self._objects = objects or {}
        self._copiers: dict[tuple[int, bool], _Copier] = {}  # by descriptor, and whether its object is meant
        self._followed: dict[Path, tuple[int, bool]] = {}

    def follow(
        self,
        path: Path,
        fd: int,
        prefix: bytes = b"",
        kept: "Kept | None" = None,
        *,
        fleeting: bool = False,
        reserved: bool = False,
        raw: bool = False,
    ) -> None:
        """Copy to `fd` what is appended to `path` from now on; an empty prefix copies bytes as they come.

        A `fleeting` file is there for its end alone: the disk space of what was copied long ago is given back.
        A `reserved` file is a copy of what the console has, and its writer never finds the disk full (rule 5).
        What is `raw` goes to the descriptor also where an object is in its place, as if the worker had it itself.
        """
        to = fd, fd in self._objects and not raw
        if to not in self._copiers:
            self._copiers[to] = _ObjectCopier(fd, self._objects[fd]) if to[1] else _Copier(fd)
        self._followed[path] = to
        self._copiers[to].follow(_Stream(path, prefix, kept, fleeting=fleeting, reserved=reserved, whole_lines=to[1]))

    async def finish(self, paths: Iterable[Path]) -> None:
        """Their writers are gone: returns when all they wrote is on the console.  Others' paths are ignored.

        A console that is not read keeps this waiting, and nothing else.
        """
        copied = [
            _answer(partial(self._copiers[self._followed.pop(path)].finish, path))
            for path in paths
            if path in self._followed
        ]
        for future in copied:
            await future

    async def drain(self) -> None:
        """Finish all that is still followed, and wait for what is being finished."""
        await self.finish(tuple(self._followed))
        for future in [_answer(copier.reach) for copier in self._copiers.values()]:
            await future

    def close(self) -> None:
        """Stop copying; what is unfinished stays in the files."""
        for copier in self._copiers.values():
            copier.close()
        self._copiers.clear()
        self._followed.clear()


def _answer(ask: Callable[[Callable[[], None]], None]) -> "asyncio.Future[None]":
    """A future that is done when the other thread calls the function that `ask` hands to it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def resolve() -> None:
        if not future.done():
            future.set_result(None)

    def call() -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(resolve)

    ask(call)
    return future


class Kept(Struct, frozen=True):
    """Lines that hold one of these words also go to the end of this file."""

    path: Path
    words: tuple[bytes, ...]


class Prefixer:
    """Turns pieces of a stream into whole lines with a prefix each: all, or those that hold one of the `words`."""

    def __init__(self, prefix: bytes, words: tuple[bytes, ...] = ()) -> None:
        self._prefix = prefix
        self._words = words
        self._rest = b""
        self._after_return = False

    def feed(self, data: bytes) -> bytes:
        """The lines that are complete now."""
        if not data:
            return b""
        if self._after_return and data.startswith(b"\n"):  # the second half of a "\r\n" that was cut in two
            data = data[1:]
        self._after_return = data.endswith(b"\r")
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        end = data.rfind(b"\n")
        if end < 0:
            self._rest += data
            return self.end() if len(self._rest) > _LINE else b""
        lines, self._rest = self._rest + data[:end], data[end + 1 :]
        return self._prefixed(lines)

    def end(self) -> bytes:
        """The last line, if it is not empty, with the end it never got."""
        line, self._rest = self._rest, b""
        return self._prefixed(line) if line else b""

    def _prefixed(self, lines: bytes) -> bytes:
        if self._words:
            kept = [line for line in lines.split(b"\n") if any(word in line for word in self._words)]
            if not kept:
                return b""
            lines = b"\n".join(kept)
        return self._prefix + lines.replace(b"\n", b"\n" + self._prefix) + b"\n"


class _Stream:
    """One file and how far it has been copied."""

    def __init__(
        self,
        path: Path,
        prefix: bytes,
        kept: Kept | None,
        *,
        fleeting: bool = False,
        reserved: bool = False,
        whole_lines: bool = False,
    ) -> None:
        self.path = path
        access = os.O_RDWR if fleeting or reserved else os.O_RDONLY
        self.fd = os.open(path, access | no_follow(path) | os.O_CLOEXEC | os.O_NONBLOCK)
        self._position = self._freed = os.fstat(self.fd).st_size  # read up to here, emptied up to there
        self._fleeting = fleeting
        self._reserved = self._position + AHEAD if reserved else None  # up to where there is disk space
        self.found_disk_full = False
        self._lines = Prefixer(prefix) if prefix or whole_lines else None
        self._keeper = _Keeper(kept, prefix) if kept else None

    def read(self) -> tuple[bytes, bool]:
        """What to write next, and whether there was anything to read."""
        data = self._next()
        self._position += len(data)
        if self._fleeting and self._position - self._freed > 2 * _END:
            self._freed = free_range(self.fd, self._freed, self._position - _END)
        if self._reserved is not None and self._position + AHEAD // 2 > self._reserved:
            self._reserved = self._reserve()
        if self._keeper:
            self._keeper.feed(data)
        return (self._lines.feed(data) if self._lines else data), bool(data)

    def _reserve(self) -> int:
        """Up to where there is disk space now."""
        start = self._position + self.left()
        if reserve_range(self.fd, start, start + AHEAD):
            return start + AHEAD
        self.found_disk_full = True
        self._freed = free_range(self.fd, self._freed, self._position - _EVIDENCE)
        return start + AHEAD if reserve_range(self.fd, start, start + AHEAD) else self._position

    def end(self) -> bytes:
        if self._keeper:
            self._keeper.end()
        return self._lines.end() if self._lines else b""

    def close(self) -> None:
        if self._reserved is not None:
            with suppress(OSError):
                os.ftruncate(self.fd, os.fstat(self.fd).st_size)  # what was reserved beyond its end is free again
        os.close(self.fd)
        if self._keeper:
            self._keeper.close()

    def left(self) -> int:
        """How much there is to read now."""
        try:
            size = os.fstat(self.fd).st_size
        except OSError:
            return 0  # a file system that went away has nothing more to say
        if size < self._position:
            self._position = 0  # truncated by someone: what is there now is new
        return size - self._position

    def _next(self) -> bytes:
        try:
            return os.pread(self.fd, _READ, self._position) or os.pread(self.fd, self.left(), self._position)
        except OSError:
            return b""


class _Keeper:
    """Writes one stream's share of a file that several streams append to, whole lines at a time."""

    def __init__(self, kept: Kept, prefix: bytes) -> None:
        self._fd = os.open(
            kept.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | no_follow(kept.path) | os.O_CLOEXEC, 0o666
        )
        self._lines = Prefixer(prefix, kept.words)

    def feed(self, data: bytes) -> None:
        self._write(self._lines.feed(data))

    def end(self) -> None:
        self._write(self._lines.end())

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, lines: bytes) -> None:
        with suppress(OSError):  # a full disk: the worker's own file has them, as far as it could
            while lines:
                lines = lines[os.write(self._fd, lines) :]


class _Copier:
    """One console, its files, and the thread that copies them.

    Only the thread touches the streams; orders reach it through a queue and a pipe that wakes it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._piece = select.PIPE_BUF if _is_pipe(fd) else _TURN
        self._orders: deque[Callable[[], None]] = deque()
        self._streams: dict[int, _Stream] = {}
        self._unread: set[int] = set()  # to be visited without waiting for a word
        self._unwatched: set[int] = set()  # for which no word will come
        self._watch: InotifyWatch | None = None
        self._closed = False
        self._said_full = False
        self._alarm, self._bell = os.pipe()
        os.set_blocking(self._alarm, False)
        os.set_blocking(self._bell, False)
        self._thread = threading.Thread(target=self._run, name=f"console-{fd}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            os.close(self._alarm)
            os.close(self._bell)
            raise StartError(
                "copying workers' output to the console needs a thread, and the system has none left; "
                "raise `ulimit -u`, or the container's limit on processes."
            ) from error

    # called by the agent

    def follow(self, stream: _Stream) -> None:
        self._order(lambda: self._begin(stream))

    def finish(self, path: Path, done: Callable[[], None]) -> None:
        self._order(lambda: self._end(path, done))

    def reach(self, done: Callable[[], None]) -> None:
        """Call back when all earlier orders are carried out."""
        self._order(done)

    def close(self) -> None:
        """At last.  The pipe is closed on this side: the thread may obey before it hears the bell."""
        self._order(self._stop)
        self._thread.join(timeout=1.0)  # one that is stuck at its console ends with the process
        if not self._thread.is_alive():
            os.close(self._alarm)
            os.close(self._bell)

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        with suppress(BlockingIOError):  # it has rung often enough
            os.write(self._bell, b"!")

    # the thread

    def _run(self) -> None:
        from ripstop.system.inotify import InotifyWatch  # here, so that loading ctypes does not delay the agent

        words, pause = select.poll(), select.poll()
        words.register(self._alarm, select.POLLIN)
        pause.register(self._alarm, select.POLLIN)
        try:
            self._watch = InotifyWatch()
            words.register(self._watch, select.POLLIN)
        except OSError:
            pass  # every file is in `_unwatched` then
        while not self._closed:
            pause.poll(_PAUSE_MS)
            words.poll(0 if self._unread else _POLL_MS if self._unwatched else None)
            self._obey()
            self._visit()
        for fd in tuple(self._streams):
            self._forget(fd)
        if self._watch:
            self._watch.close()

    def _obey(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._alarm, 65536)
        while self._orders:
            self._orders.popleft()()

    def _begin(self, stream: _Stream) -> None:
        self._streams[stream.fd] = stream
        self._unread.add(stream.fd)

    def _end(self, path: Path, done: Callable[[], None]) -> None:
        for stream in [stream for stream in self._streams.values() if stream.path == path]:
            self._copy(stream, stream.left())  # not to the end of time: its orphans may still be writing
            self._write(stream.end())
            self._forget(stream.fd)
        done()

    def _stop(self) -> None:
        self._closed = True

    def _forget(self, fd: int) -> None:
        if self._watch:
            self._watch.disarm(fd)
        self._unread.discard(fd)
        self._unwatched.discard(fd)
        self._streams.pop(fd).close()

    def _visit(self) -> None:
        changed = self._unread | self._unwatched | (self._watch.changed() if self._watch else set())
        self._unread = set()
        for fd in sorted(changed):
            self._arm(fd)
            self._copy(self._streams[fd], _TURN)

    def _arm(self, fd: int) -> None:
        self._unwatched.add(fd)
        if self._watch:
            with suppress(OSError):
                self._watch.arm(fd)
                self._unwatched.discard(fd)

    def _copy(self, stream: _Stream, limit: int) -> None:
        while limit > 0:
            lines, more = stream.read()
            if not more:
                return
            if stream.found_disk_full and not self._said_full:
                self._said_full = True
                log.warning("the disk of %s is full: only the console has all that workers write", stream.path)
            self._write(lines)
            limit -= _READ
        self._unread.add(stream.fd)

    def _write(self, data: bytes) -> None:
        view, at = memoryview(data), 0
        while at < len(data):
            end = _whole_lines(data, at, self._piece)
            try:
                at += os.write(self._fd, view[at:end])
            except BlockingIOError:  # someone who shares the console has made it non-blocking
                room = select.poll()
                room.register(self._fd, select.POLLOUT)
                room.poll()
            except OSError:
                return  # rule 3


class _ObjectCopier(_Copier):
    """One whose console is an object of this program."""

    def __init__(self, fd: int, target: TextIO | None) -> None:
        self._target = target
        super().__init__(fd)

    def _write(self, data: bytes) -> None:
        if data and self._target is not None:
            with suppress(Exception):  # rule 3: it may be closed, or not be able to write this
                self._target.write(data.decode("utf-8", "replace"))
                self._target.flush()


def _is_pipe(fd: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False  # rule 3


def _whole_lines(data: bytes, at: int, size: int) -> int:
    """Where to end a piece of about `size` bytes: a pipe takes no more than that in one piece from several writers."""
    if len(data) - at <= size:
        return len(data)
    end = data.rfind(b"\n", at, at + size)
    if end < 0:
        end = data.find(b"\n", at + size)
    return end + 1 if end >= 0 else len(data)
