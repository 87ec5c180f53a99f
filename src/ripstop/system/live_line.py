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

from ripstop.model.text_formatting import truncate_columns
from ripstop.system.background_writer import BackgroundWriter
from ripstop.system.blocking_calls import settle_blocking_call
from ripstop.system.stderr_terminal import DIM, RESET, is_terminal, terminal_width, write_stderr

HIDE_TIMEOUT_S = 1.0  # for a stopped terminal
MARGIN = 3  # columns that stay free: the terminal shows a pressed Ctrl-C there
ERASE = b"\r\x1b[K"
PREFIX = "[ripstop] "


def can_show(environ: Mapping[str, str]) -> bool:
    """Whether stderr can have a live line.  The reader of a pipe at stdout may write to the same terminal."""
    try:
        mode = os.fstat(1).st_mode
    except OSError:
        mode = 0
    return is_terminal(environ) and not (S_ISFIFO(mode) or S_ISSOCK(mode))


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
        self._on_drawn.append(lambda: loop.call_soon_threadsafe(settle_blocking_call, erased, None))
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
        text = self._text if _is_live_line_in_foreground() else ""
        self._is_drawn = bool(text)
        if not text:
            return b""
        line = truncate_columns(PREFIX + text, terminal_width() - MARGIN)
        return (f"{DIM}{line}{RESET}" if self._colors else line).encode("utf-8", "replace")


def _is_live_line_in_foreground() -> bool:
    try:
        return os.tcgetpgrp(2) == os.getpgrp()
    except OSError:  # not the terminal of this session: no shell uses it
        return True
