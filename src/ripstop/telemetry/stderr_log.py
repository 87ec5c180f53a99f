"""ripstop's own log lines, on stderr, as text or as JSON.

A thread writes them, so that a console that nobody reads does not block the agent.  Control characters are removed, so
that text from other processes cannot forge a line.
"""

import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from msgspec import Struct

from ripstop.model.config import LogFormat, LogLevel, OwnLog
from ripstop.model.event_json import to_dict
from ripstop.model.events import EventRecord, event_kind
from ripstop.model.text_formatting import ascii_json, clean, one_line
from ripstop.system.background_writer import BackgroundWriter
from ripstop.system.live_line import LiveLine
from ripstop.system.stderr_terminal import DIM, RESET, has_colors, write_stderr
from ripstop.telemetry.log_lines import log_line

FORMAT = "[ripstop] %(asctime)s.%(msecs)03d %(levelname).1s %(message)s"
COLORS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[31m"}
LEVELS = {
    LogLevel.DEBUG: logging.DEBUG,
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
}


class StderrHandler(logging.Handler):
    """Writes to file descriptor 2; the caller never waits.  `live` is the live line there, if there is one."""

    def __init__(self, form: LogFormat = LogFormat.TEXT, *, colors: bool = False, live: LiveLine | None = None) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(FORMAT, "%H:%M:%S"))
        self._form = form
        self._colors = colors
        self._writer = BackgroundWriter("log", live.write if live else write_stderr, lost=self._dropped_lines)

    def emit(self, record: logging.LogRecord) -> None:
        self._writer.put(self._line(record))

    def close(self) -> None:
        """Wait briefly until all lines are written."""
        self._writer.close()
        super().close()

    def _line(self, record: logging.LogRecord) -> str:
        if self._form is LogFormat.JSON:
            return json_stderr_line(record)
        line = one_line(self.format(record))
        return colored_stderr_line(line, record.levelno) if self._colors else line

    def _dropped_lines(self, lines: int) -> str:
        text = f"{lines} lines were not shown: the console is not being read"
        level = {"levelno": logging.WARNING, "levelname": "WARNING"}
        return self._line(logging.makeLogRecord({"name": "ripstop", "msg": text, **level}))


def log_event_to_stderr(log: logging.Logger, record: EventRecord, level: int = logging.INFO) -> None:
    """Log an event.  One without a line of its own is logged for debugging."""
    if text := log_line(record.event):
        log.log(level, "%s", text, extra={"event": record})
    elif log.isEnabledFor(logging.DEBUG):
        log.debug("%s %s", event_kind(record.event), ascii_json(record.event), extra={"event": record})


def colored_stderr_line(line: str, level: int) -> str:
    """A line of text with a dim time, and the colour of its level.  Further lines have no colour."""
    first, newline, rest = line.partition("\n")
    start, mark, message = first.partition(f" {logging.getLevelName(level)[0]} ")
    color = COLORS.get(level, "")
    return f"{DIM}{start}{RESET}{color}{mark}{message}{RESET if color else ''}{newline}{rest}"


def json_stderr_line(record: logging.LogRecord) -> str:
    """One object: time, level, logger, message, and the event that the line is about."""
    fields: dict[str, Any] = {
        "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{record.msecs:03.0f}Z",
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": clean(record.getMessage()),
    }
    if record.exc_info:
        fields["exception"] = clean(logging.Formatter().formatException(record.exc_info))
    event = getattr(record, "event", None)
    if isinstance(event, EventRecord):
        fields["event"] = to_dict(event)
    return ascii_json(fields)


@contextmanager
def log_to_stderr(
    settings: OwnLog, notes: Iterable[str], *, with_coordinator: bool, live: LiveLine | None = None
) -> Iterator[None]:
    """Log to stderr.  The coordinator of a single node logs only warnings, because the agent logs the same events."""
    log, level = logging.getLogger("ripstop"), LEVELS[settings.level]
    handler = StderrHandler(settings.format, colors=has_colors(os.environ), live=live)
    log.addHandler(handler)
    log.setLevel(level)
    log.propagate = False
    is_repeated = not with_coordinator and level == logging.INFO
    logging.getLogger("ripstop.coordinator").setLevel(logging.WARNING if is_repeated else level)
    for note in notes:
        log.warning("%s", note)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()
        if live is not None:
            live.close()


class StderrLogPrinter(Struct, frozen=True):
    """Prints what follows the log, in the form of the log: the result of `ripstop COMMAND`."""

    command: str
    settings: OwnLog

    def line(self, text: str, level: int, shown: str = "") -> None:
        """Print a line or a block; `shown` is its text for people, without it the line begins with the command."""
        if level < LEVELS[self.settings.level]:
            return
        if self.settings.format is LogFormat.JSON:
            kind = {"levelno": level, "levelname": logging.getLevelName(level)}
            shown = json_stderr_line(logging.makeLogRecord({"name": "ripstop", "msg": "%s", "args": (text,), **kind}))
        with suppress(OSError):  # the console is closed; the files and the exit code matter more
            print(shown or f"ripstop {self.command}: {text}", file=sys.stderr, flush=True)
