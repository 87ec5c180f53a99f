"""Lines that a thread of its own writes, so that whoever has something to say never waits for a disk or a console.

When too many lines wait, new ones are dropped and counted.  What cannot be written hurts nobody.  Where the system has
no thread left, whoever has something to say writes it.
"""

import queue
import threading
from collections.abc import Callable

WAITING = 4096  # lines that may wait
GOODBYE = 2.0  # seconds for the last ones


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
        self._lost = lost  # a line that says how many are missing
        self._failed = failed
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False

    def put(self, line: str) -> None:
        """Have a line written, soon; it comes without its end."""
        if self._lines.qsize() >= WAITING:
            self._dropped += 1
            return
        if self._dropped and self._lost is not None:
            self._lines.put(self._lost(self._dropped))
        self._dropped = 0
        self._lines.put(line)
        if not self._started:
            try:
                self._thread.start()
                self._started = True
            except RuntimeError:  # no thread is left
                self._write_next(self._lines.get())

    def close(self) -> bool:
        """Waits, briefly, until what was said is written; whether it is."""
        if self._started:
            self._lines.put(None)
            self._thread.join(GOODBYE)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write_next(line)

    def _write_next(self, line: str | None) -> None:
        try:
            self._write(f"{line}\n".encode("utf-8", "backslashreplace"))
        except OSError as error:
            if self._failed is not None:
                self._failed(error)
