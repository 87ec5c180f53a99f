"""Our own log lines, on stderr.

A thread of its own writes them, so that a console nobody reads stops neither signals nor heartbeats nor restarts; when
too many lines wait, new ones are dropped and counted.  Words that came from elsewhere cannot forge a line: control
characters are taken out.
"""

import logging
import os
import queue
import threading

FORMAT = "[ripstop] %(asctime)s.%(msecs)03d %(levelname).1s %(message)s"
WAITING = 4096  # lines that may wait
GOODBYE = 2.0  # seconds for the last ones
_CONTROLS = {code: "?" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


class Stderr(logging.Handler):
    """Writes to file descriptor 2 without ever making the caller wait."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(FORMAT, "%H:%M:%S"))
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() >= WAITING:
            self._dropped += 1
            return
        if self._dropped:
            self._lines.put(f"[ripstop] {self._dropped} lines were not shown: the console is not being read\n")
            self._dropped = 0
        self._lines.put(one_line(self.format(record)) + "\n")

    def close(self) -> None:
        """Waits, briefly, until what was said is written."""
        self._lines.put(None)
        self._thread.join(GOODBYE)
        super().close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            data = line.encode("utf-8", "backslashreplace")
            try:
                while data:
                    data = data[os.write(2, data) :]
            except OSError:
                continue  # a console that is gone hurts nobody


def one_line(text: str) -> str:
    """A text that can only be itself: without control characters, and with further lines indented."""
    return text.translate(_CONTROLS).replace("\n", "\n    ")
