"""The live line of a terminal, and the lines above it."""

import asyncio
import fcntl
import os
import re
import struct
import termios
from typing import Self

import pytest

from ripstop.system.live_line import LiveLine, can_show
from ripstop.system.stderr_terminal import has_colors

WIDTH = 40


class Terminal:
    """A pseudo-terminal in place of stderr, and what a person would see on it.

    A test enters it itself: pytest replaces stderr between a fixture and the test.
    """

    def __enter__(self) -> Self:
        self._stderr = os.dup(2)
        self._reader, self.fd = os.openpty()
        os.set_blocking(self._reader, False)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("4H", 24, WIDTH, 0, 0))
        self._data = b""
        os.dup2(self.fd, 2)
        return self

    def __exit__(self, *_: object) -> None:
        os.dup2(self._stderr, 2)
        for fd in (self._stderr, self._reader, self.fd):
            os.close(fd)

    def lines(self) -> list[str]:
        try:
            while data := os.read(self._reader, 65536):
                self._data += data
        except BlockingIOError:
            pass
        return screen(self._data.decode())


def screen(text: str) -> list[str]:
    """Interpret the little that is written: characters, returns, new lines, erasures; lines wrap at the width."""
    rows, column = [[" "] * WIDTH], 0
    for token in re.findall(r"\x1b\[[\d;]*[A-Za-z]|.", text, re.DOTALL):
        match token:
            case "\r":
                column = 0
            case "\n":
                rows.append([" "] * WIDTH)
            case "\x1b[K":
                rows[-1][column:] = [" "] * (WIDTH - column)
            case _ if token.startswith("\x1b"):
                pass  # a colour
            case _:
                if column == WIDTH:  # a terminal wraps before the next character
                    rows.append([" "] * WIDTH)
                    column = 0
                rows[-1][column] = token
                column += 1
    return ["".join(row).rstrip() for row in rows]


def shown(live: LiveLine, text: str) -> None:
    """Show the text, and wait until it is drawn."""

    async def show() -> None:
        live.show(text)
        drawn = asyncio.get_running_loop().create_future()
        live._on_drawn.append(lambda: drawn.get_loop().call_soon_threadsafe(drawn.set_result, None))
        live._request()
        await asyncio.wait_for(drawn, 120)

    asyncio.run(show())


def test_the_line_is_replaced_in_place_and_lines_are_written_above_it() -> None:
    with Terminal() as terminal:
        live = LiveLine(colors=True)
        shown(live, "waiting for 1 s")
        assert terminal.lines() == ["[ripstop] waiting for 1 s"]
        shown(live, "waiting")
        assert terminal.lines() == ["[ripstop] waiting"]
        live.write(b"one\ntwo\n")
        assert terminal.lines() == ["one", "two", "[ripstop] waiting"]
        with live.suspended():
            os.write(2, b"three\n")
        assert terminal.lines() == ["one", "two", "three", "[ripstop] waiting"]
        asyncio.run(live.hide())
        assert terminal.lines() == ["one", "two", "three", ""]
        live.close()


@pytest.mark.parametrize("begun", ["", "x", "loss: 1.25", "y" * (WIDTH - 1), "z" * WIDTH])
def test_a_line_that_a_worker_has_begun_is_kept(begun: str) -> None:
    with Terminal() as terminal:
        live = LiveLine(colors=False)
        os.write(2, begun.encode())
        live.write(b"log\n")
        assert terminal.lines() == [*([begun] if begun else []), "log", ""]
        os.write(2, begun.encode())
        shown(live, "waiting")
        assert terminal.lines() == [
            *([begun] if begun else []),
            "log",
            *([begun] if begun else []),
            "[ripstop] waiting",
        ]
        live.close()
        assert terminal.lines()[-1] == ""


def test_the_line_never_wraps() -> None:
    with Terminal() as terminal:
        live = LiveLine(colors=False)
        for text in ("a" * 200, "漢" * 200, "two\nlines\x1b[31m\x07" * 9):
            shown(live, text)
            (line,) = terminal.lines()
            assert line.endswith("…")
        live.close()


def test_a_stopped_terminal_delays_hiding_by_a_second_at_most() -> None:
    with Terminal() as terminal:
        live = LiveLine(colors=False)
        shown(live, "waiting")
        termios.tcflow(terminal.fd, termios.TCOOFF)
        asyncio.run(asyncio.wait_for(live.hide(), 120))
        termios.tcflow(terminal.fd, termios.TCOON)
        live.close()
        assert terminal.lines() == [""]


def test_colours_and_the_live_line_need_a_terminal() -> None:
    with Terminal() as terminal:
        xterm = {"TERM": "xterm"}
        assert has_colors(xterm)
        assert has_colors({**xterm, "NO_COLOR": ""})
        assert not has_colors({**xterm, "NO_COLOR": "1"})
        assert not has_colors({"TERM": "dumb"}) and not has_colors({})
        stdout = os.dup(1)
        reader, writer = os.pipe()
        try:
            os.dup2(terminal.fd, 1)
            assert can_show(xterm) and not can_show({"TERM": "dumb"})
            os.dup2(writer, 1)
            assert not can_show(xterm), "what reads the pipe may write to the same terminal"
            os.dup2(writer, 2)
            assert not has_colors(xterm)
        finally:
            os.dup2(stdout, 1)
            for fd in (stdout, reader, writer):
                os.close(fd)
