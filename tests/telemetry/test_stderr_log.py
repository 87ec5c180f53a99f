"""ripstop's own log lines, as text and as JSON."""

import json
import logging
import os
from collections.abc import Iterator

import pytest

from ripstop.model.config import LogFormat
from ripstop.model.events import EventRecord, FirstStep, WorkersStopping
from ripstop.telemetry.stderr_log import StderrHandler, colored_stderr_line, log_event_to_stderr

RECORD = EventRecord(3, 12.5, "a", WorkersStopping(1, "rank 1 failed"))


@pytest.fixture
def log(request: pytest.FixtureRequest) -> Iterator[logging.Logger]:
    logger = logging.getLogger("ripstop.tests.stderr")
    logger.propagate = False
    yield logger
    logger.handlers.clear()


def written(
    log: logging.Logger, handler: StderrHandler, capfd: pytest.CaptureFixture[str], level: int = logging.INFO
) -> list[str]:
    """The lines of a few messages."""
    log.addHandler(handler)
    log.setLevel(level)
    log_event_to_stderr(log, RECORD)
    log_event_to_stderr(log, EventRecord(4, 13.0, "a", FirstStep(1, 0, 7, 0.5)))
    log.warning("two\nlines \x1b[31m")
    log.removeHandler(handler)
    handler.close()
    return capfd.readouterr().err.splitlines()


def test_text_has_one_event_a_line_and_no_control_characters(
    log: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second, third = written(log, StderrHandler(), capfd)
    assert first.startswith("[ripstop] ") and first.endswith(" I round=1 stopping: rank 1 failed")
    assert second.endswith(" W two") and third == "    lines ?[31m"


def test_json_has_the_event_of_each_line(log: logging.Logger, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = map(json.loads, written(log, StderrHandler(LogFormat.JSON), capfd))
    assert first["time"].endswith("Z") and first["level"] == "info" and first["logger"] == "ripstop.tests.stderr"
    assert first["message"] == "round=1 stopping: rank 1 failed"
    event = {"v": 1, "seq": 3, "at": 12.5, "node": "a", "kind": "workers_stopping", "round": 1, "why": "rank 1 failed"}
    assert first["event"] == event
    assert (second["level"], second["message"], "event" in second) == ("warning", "two\nlines ", False)


def test_json_has_the_traceback_of_an_exception(log: logging.Logger, capfd: pytest.CaptureFixture[str]) -> None:
    handler = StderrHandler(LogFormat.JSON)
    log.addHandler(handler)
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("failed")
    handler.close()
    (line,) = capfd.readouterr().err.splitlines()
    assert json.loads(line)["exception"].endswith("ValueError: no")


def test_debugging_shows_every_event(log: logging.Logger, capfd: pytest.CaptureFixture[str]) -> None:
    lines = written(log, StderrHandler(), capfd, logging.DEBUG)
    assert 'D first_step {"kind":"first_step","round":1,"rank":0,"step":7,"seconds":0.5}' in lines[1]


def test_colours_leave_the_text_as_it_is() -> None:
    line = "[ripstop] 10:00:00.000 W W is a letter"
    shown = colored_stderr_line(line, logging.WARNING)
    assert shown == "\x1b[2m[ripstop] 10:00:00.000\x1b[0m\x1b[33m W W is a letter\x1b[0m"
    assert os.linesep not in shown
    assert (
        colored_stderr_line("[ripstop] 10:00:00.000 I fine", logging.INFO)
        == "\x1b[2m[ripstop] 10:00:00.000\x1b[0m I fine"
    )
