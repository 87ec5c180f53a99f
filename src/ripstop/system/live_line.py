"""A line at a terminal that is updated in place, below the lines that scroll.

Rules: (1) everything that this process writes to the terminal goes through `write` or `suspended`, which erase the line
first and draw it again afterwards; (2) the line is shown only while no other process writes to the terminal: `hide`
returns when it is erased; (3) nothing is drawn while a shell runs this process in the background; (4) a thread draws,
so that a stopped terminal (Ctrl-S) does not block the agent; (5) a line that another process has begun and not ended is
not overwritten.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from stat import S_ISFIFO, S_ISSOCK

from ripstop.model.text_formatting import one_line
from ripstop.system.background_writer import BackgroundWriter
from ripstop.system.blocking_calls import settle

HIDE_TIMEOUT_S = 1.0  # for a stopped terminal
DEFAULT_WIDTH = 80
MARGIN = 3  # columns that stay free: the terminal shows a pressed Ctrl-C there
ERASE = b"\r\x1b[K"
PREFIX = "[ripstop] "
DIM, RESET = "\x1b[2m", "\x1b[0m"


def is_terminal(environ: Mapping[str, str]) -> bool:
    """Whether stderr is a terminal that understands escape sequences."""
    return os.isatty(2) and environ.get("TERM", "dumb") != "dumb"


def has_colors(environ: Mapping[str, str]) -> bool:
    """Whether stderr may have colours; see no-color.org."""
    return is_terminal(environ) and not environ.get("NO_COLOR")


def can_show(environ: Mapping[str, str]) -> bool:
    """Whether stderr can have a live line.  The reader of a pipe at stdout may write to the same terminal."""
    return is_terminal(environ) and not _is_pipe(1)


class LiveLine:
    """The live line of stderr.  `show` and `hide` are called in the event loop."""

    def __init__(self, *, colors: bool) -> None:
        self._colors = colors
        self._text = ""  # to show; empty: none
        self._is_drawn = False
        self._lock = threading.Lock()  # for the terminal
        self._on_drawn: list[Callable[[], object]] = []
        self._thread = BackgroundWriter("live line", self._draw)
        self._is_requested = False  # that the thread draws

    def show(self, text: str) -> None:
        if text != self._text:
            self._text = text
            self._request()

    async def hide(self) -> None:
        """Return when the line is erased, or the terminal is stopped."""
        self._text = ""
        loop = asyncio.get_running_loop()
        erased: asyncio.Future[None] = loop.create_future()
        self._on_drawn.append(lambda: loop.call_soon_threadsafe(settle, erased, None))
        self._request()
        await asyncio.wait([erased], timeout=HIDE_TIMEOUT_S)

    def write(self, data: bytes) -> None:
        """Write whole lines to stderr; called in any thread."""
        with self._lock:
            write_stderr(self._erasure() + data + self._drawing())

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let the caller write whole lines to the terminal; in any thread."""
        with self._lock:
            with suppress(OSError):  # the terminal is gone
                if self._is_drawn:
                    write_stderr(ERASE)
                self._is_drawn = False
            yield
            with suppress(OSError):
                write_stderr(self._drawing())

    def close(self) -> None:
        self._text = ""
        self._request()
        self._thread.close()

    def _request(self) -> None:
        if not self._is_requested:
            self._is_requested = True
            self._thread.put("")

    def _draw(self, _: bytes) -> None:
        self._is_requested = False
        waiting, self._on_drawn = self._on_drawn, []
        with self._lock, suppress(OSError):  # the terminal is gone
            if self._text or self._is_drawn:
                write_stderr(self._erasure() + self._drawing())
        for call in waiting:
            with suppress(RuntimeError):  # the loop is closed
                call()

    def _erasure(self) -> bytes:
        """Brings the cursor to the start of an empty line.

        As many spaces as the terminal is wide end a line that another process has begun.  At the start of a line, the
        cursor stays in this line, because a terminal wraps only before the next character.
        """
        return ERASE if self._is_drawn else b" " * terminal_width() + ERASE

    def _drawing(self) -> bytes:
        text = self._text if _is_foreground() else ""
        self._is_drawn = bool(text)
        if not text:
            return b""
        line = cut(PREFIX + text, terminal_width() - MARGIN)
        return (f"{DIM}{line}{RESET}" if self._colors else line).encode("utf-8", "replace")


def cut(text: str, width: int) -> str:
    """The beginning of a text on one line, in at most `width` columns."""
    text = one_line(" ".join(text.split()))
    if sum(map(_columns, text)) <= width:
        return text
    used = 1  # for the ellipsis
    for end, character in enumerate(text):
        used += _columns(character)
        if used > width:
            return f"{text[:end]}…"
    return text


def _columns(character: str) -> int:
    """At least the columns that a terminal uses for this character; wide ones begin at U+1100."""
    return 2 if character >= "\u1100" and character not in "…–’" else 1


def terminal_width() -> int:
    """Of stderr."""
    try:
        return os.get_terminal_size(2).columns or DEFAULT_WIDTH
    except OSError:
        return DEFAULT_WIDTH


def _is_foreground() -> bool:
    try:
        return os.tcgetpgrp(2) == os.getpgrp()
    except OSError:  # not the terminal of this session: no shell uses it
        return True


def _is_pipe(fd: int) -> bool:
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return False
    return S_ISFIFO(mode) or S_ISSOCK(mode)


def write_stderr(data: bytes) -> None:
    while data:
        data = data[os.write(2, data) :]
