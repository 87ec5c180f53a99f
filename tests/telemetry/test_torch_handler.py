"""An event handler in its own process does not affect the agent."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ripstop.telemetry import torch_handler
from ripstop.telemetry.torch_handler import EventHandler
from ripstop.workers.processes import Children

DEADLINE_S = 120.0

Start = Callable[[str], EventHandler]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a handler whose `make` is in this source; `OUT` is a file of its own."""
    monkeypatch.setattr(torch_handler, "CLOSE_TIMEOUT_S", DEADLINE_S)  # the process may take seconds to start
    made: list[EventHandler] = []

    def start(source: str) -> EventHandler:
        module = "events_plugin_of_a_test"
        (tmp_path / f"{module}.py").write_text(f"import logging, os, time\nOUT = {str(tmp_path / 'out')!r}\n{source}")
        info = tmp_path / f"{module}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {module}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[torchrun.event_handlers]\nmine = {module}:make\n")
        made.append(EventHandler("mine", os.environ | {"PYTHONPATH": str(tmp_path)}, Children()))
        return made[-1]

    yield start
    for handler in made:
        assert not Path(f"/proc/{handler._pid}").exists(), "close() leaves nothing behind"


def handler(emit: str) -> str:
    return f"class make(logging.Handler):\n    def emit(self, record):\n        {emit}\n"


def wait_for(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_handler_gets_all_events_before_it_is_closed(start: Start, tmp_path: Path) -> None:
    made = start("def make(): return logging.FileHandler(OUT)")
    lines = [f'{{"name": "{n}", "text": "{"x" * 5000}"}}' for n in range(20)]
    for line in lines:
        made.put(line)
    made.close()
    assert (tmp_path / "out").read_text().splitlines() == lines


def test_a_handler_that_raises_gets_the_next_event(
    start: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = start(handler("print(record.getMessage(), file=open(OUT, 'a')); raise ValueError('no route')"))
    made.put("one"), made.put("two")
    made.close()
    assert (tmp_path / "out").read_text() == "one\ntwo\n"
    assert capfd.readouterr().err.count("the event handler mine failed: ValueError: no route") == 1


def test_a_handler_that_blocks_loses_events_and_is_killed(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_handler, "CLOSE_TIMEOUT_S", 0.1)
    made = start(handler("time.sleep(600)"))
    for _ in range(2000):
        made.put("x" * 1000)
    made.close()
    assert caplog.text.count("the event handler mine is too slow and loses events; the job continues") == 1


def test_a_handler_that_crashes_is_logged_once(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    made = start(handler("os._exit(3)"))
    made.put("one")

    def heard_of() -> bool:
        made.put("more")
        return "cannot be reached" in caplog.text

    wait_for(heard_of)
    made.put("still more")
    made.close()
    assert caplog.text.count("the event handler mine") == 1


def test_a_handler_that_cannot_be_loaded_is_logged(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    made = start("raise ImportError('a library is missing')")
    made.close()
    assert "the event handler mine failed: ImportError: a library is missing" in capfd.readouterr().err
