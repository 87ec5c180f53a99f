"""Our own log lines, on stderr.

A thread of its own writes them, so that a console nobody reads stops neither signals nor heartbeats nor restarts.
Words that came from elsewhere cannot forge a line: control characters are taken out.
"""

import logging
import os

from ripstop.model.text import one_line
from ripstop.system.background_writer import BackgroundWriter

FORMAT = "[ripstop] %(asctime)s.%(msecs)03d %(levelname).1s %(message)s"


class StderrHandler(logging.Handler):
    """Writes to file descriptor 2 without ever making the caller wait."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(FORMAT, "%H:%M:%S"))
        self._lines = BackgroundWriter("log", _write, lost=_not_shown)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.put(one_line(self.format(record)))

    def close(self) -> None:
        """Waits, briefly, until what was said is written."""
        self._lines.close()
        super().close()


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(2, data) :]


def _not_shown(lines: int) -> str:
    return f"[ripstop] {lines} lines were not shown: the console is not being read"
