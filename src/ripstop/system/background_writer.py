"""A thread that writes lines, so that callers never wait for a disk or a console.

When the queue is full, new lines are dropped and counted.  Write errors never reach the caller.  If no thread can be
started, the caller writes.  When lines come fast, the thread lets some of them gather before it wakes up again: a
thread that wakes up for each line takes the interpreter's lock from the caller each time.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

MAX_QUEUED_LINES = 4096
FLUSH_TIMEOUT_S = 2.0
BURST_LINES = 64  # in `BURST_S`: lines come fast
BURST_S = 0.5
GATHER_S = 0.02


class BackgroundWriter:
    """`write` is called in the thread, with one line at a time; its `OSError`s go to `failed`."""

    def __init__(
        self,
        name: str,
        write: Callable[[bytes], None],
        *,
        lost: Callable[[int], str] | None = None,
        failed: Callable[[OSError], None] | None = None,
    ) -> None:
        self._write = write
        self._lost = lost  # makes the line that reports the number of dropped lines
        self._failed = failed
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._dropped = 0
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False
        self._start_lock = threading.RLock()  # a signal handler may put a line meanwhile

    def put(self, line: str) -> None:
        """Queue a line, without its newline."""
        if self._lines.qsize() >= MAX_QUEUED_LINES:
            self._dropped += 1
            return
        if self._dropped and self._lost is not None:
            self._lines.put(self._lost(self._dropped))
        self._dropped = 0
        self._lines.put(line)
        if not self._started:
            with self._start_lock:
                self._start()

    def _start(self) -> None:
        if self._started:  # by another thread
            return
        try:
            self._thread.start()
            self._started = True
        except RuntimeError:  # no more threads available
            with suppress(queue.Empty):
                while True:
                    self._write_next(self._lines.get_nowait())

    def close(self) -> bool:
        """Wait up to FLUSH_TIMEOUT_S for the queued lines; return whether all are written."""
        if self._started:
            self._is_closing.set()
            self._lines.put(None)
            self._thread.join(FLUSH_TIMEOUT_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        written: deque[float] = deque([0.0] * BURST_LINES, maxlen=BURST_LINES)  # when, the oldest first
        while (line := self._lines.get()) is not None:
            self._write_next(line)
            written.append(time.monotonic())
            if written[-1] - written[0] < BURST_S and self._lines.empty():
                self._is_closing.wait(GATHER_S)

    def _write_next(self, line: str | None) -> None:
        try:
            self._write(f"{line}\n".encode("utf-8", "backslashreplace"))
        except OSError as error:
            if self._failed is not None:
                self._failed(error)
