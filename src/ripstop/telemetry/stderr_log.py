"""ripstop's own log lines, on stderr.

A thread writes them, so that a console that nobody reads does not block the agent.  Control characters are removed, so
that text from other processes cannot forge a line.
"""

import logging
import os

from ripstop.model.text_formatting import one_line
from ripstop.system.background_writer import BackgroundWriter

FORMAT = "[ripstop] %(asctime)s.%(msecs)03d %(levelname).1s %(message)s"


class StderrHandler(logging.Handler):
    """Writes to file descriptor 2; the caller never waits."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(FORMAT, "%H:%M:%S"))
        self._writer = BackgroundWriter("log", _write, lost=_dropped_lines)

    def emit(self, record: logging.LogRecord) -> None:
        self._writer.put(one_line(self.format(record)))

    def close(self) -> None:
        """Wait briefly until all lines are written."""
        self._writer.close()
        super().close()


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(2, data) :]


def _dropped_lines(lines: int) -> str:
    return f"[ripstop] {lines} lines were not shown: the console is not being read"
