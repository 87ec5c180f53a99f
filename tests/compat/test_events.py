"""Events beside torch's: the same names, calls and text, and handlers by name."""

import json
import logging
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.elastic.events as torch_events
import torch.distributed.elastic.events.handlers as torch_handlers

from ripstop.compat import events
from tests.compat.signatures import taken_by_both

KINDS = {"torch": torch_events, "ripstop": events}


class Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Handlers and loggers are a process's; the next test wants torch's names alone."""
    places = [
        (torch_handlers._log_handlers, torch_events._events_loggers),
        (events._log_handlers, events._events_loggers),
    ]
    before = [dict(handlers) for handlers, _ in places]
    yield
    for (handlers, loggers), kept in zip(places, before, strict=True):
        handlers.clear()
        handlers.update(kept)
        for logger in loggers.values():
            logger.handlers.clear()
        loggers.clear()


@pytest.mark.parametrize(
    "name", [name for name in events.__all__ if name not in ("EventMetadataValue", "EventSource", "NodeState")]
)
def test_the_signatures_are_torchs(name: str) -> None:
    taken_by_both(getattr(torch_events, name), getattr(events, name))


def test_the_enumerations_are_torchs() -> None:
    for name in ("EventSource", "NodeState"):
        assert [(m.name, m.value) for m in getattr(events, name)] == [
            (m.name, m.value) for m in getattr(torch_events, name)
        ]
    assert events.EventMetadataValue == torch_events.EventMetadataValue


def test_an_event_serializes_as_torchs_does_and_deserializes() -> None:
    facts: dict[str, Any] = {"rank": 1, "why": "ü", "ok": True, "none": None, "ratio": 0.5}
    one = events.Event("name", events.EventSource.WORKER, 17, facts)
    other = torch_events.Event("name", torch_events.EventSource.WORKER, 17, facts)
    assert str(one) == one.serialize() == other.serialize()
    assert events.Event.deserialize(other.serialize()) == one == events.Event.deserialize(one)
    assert torch_events.Event.deserialize(one.serialize()) == other
    step = {"name": "n", "run_id": "r", "message": "m", "hostname": "h", "pid": 3, "rank": 2}
    mine = events.RdzvEvent(**step, node_state=events.NodeState.RUNNING)
    theirs = torch_events.RdzvEvent(**step, node_state=torch_events.NodeState.RUNNING)
    assert str(mine) == theirs.serialize()
    assert events.RdzvEvent.deserialize(theirs.serialize()) == mine == events.RdzvEvent.deserialize(mine)


@pytest.mark.parametrize("kind", KINDS)
def test_events_go_to_the_handler_that_is_named(kind: str) -> None:
    module: Any = KINDS[kind]
    handlers = torch_handlers._log_handlers if kind == "torch" else events._log_handlers
    handlers["mine"] = collector = Collector()
    event = module.Event("e", module.EventSource.AGENT)
    module.record(event)
    module.record(event, "null")
    module.record(event, "mine")
    assert [json.loads(line)["name"] for line in collector.seen] == ["e"]
    assert isinstance(module.get_logging_handler(), logging.NullHandler)
    assert isinstance(module.get_logging_handler("dynamic_rendezvous"), logging.NullHandler)
    assert type(module.get_logging_handler("console")) is logging.StreamHandler
    with pytest.raises(KeyError):
        module.get_logging_handler("nobody's")


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_a_rendezvous_is_recorded_with_its_file_and_function(kind: str) -> None:
    module: Any = KINDS[kind]
    handlers = torch_handlers._log_handlers if kind == "torch" else events._log_handlers
    module.construct_and_record_rdzv_event("run", "nobody listens", module.NodeState.RUNNING)
    handlers["dynamic_rendezvous"] = collector = Collector()
    module.construct_and_record_rdzv_event("run", "went on", module.NodeState.RUNNING, hostname="h", pid=5, rank=1)
    try:
        raise KeyError("lost")
    except KeyError:
        module.construct_and_record_rdzv_event("run", "failed", module.NodeState.FAILED, name="mine", hostname="h")
    first, second = (json.loads(line) for line in collector.seen)
    place = "test_events.py:test_a_step_of_a_rendezvous_is_recorded_with_its_file_and_function"
    assert (first["name"], first["message"], first["pid"], first["rank"], first["error_trace"]) == (
        place,
        "went on",
        5,
        1,
        "",
    )
    assert second["name"] == "test_events.py:mine" and "KeyError: 'lost'" in second["error_trace"]


def plugin(folder: Path, name: str, source: str) -> None:
    """An installed distribution with an event handler."""
    module = f"{name}_events_plugin"
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {module}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[torchrun.event_handlers]\n{name} = {module}:make\n")


def test_a_handler_may_be_an_installed_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    plugin(tmp_path, "filed", f"import logging\ndef make(): return logging.FileHandler({str(tmp_path / 'events')!r})\n")
    plugin(tmp_path, "wrong", "def make(): return 7\n")
    events.record(events.Event("e", events.EventSource.AGENT), "filed")
    assert json.loads((tmp_path / "events").read_text())["name"] == "e"
    with pytest.raises(TypeError, match=r"gives a int, and not a logging\.Handler"):
        events.get_logging_handler("wrong")


def test_a_handler_that_blocks_does_not_keep_the_program_from_its_end() -> None:
    source = """
    import logging, threading
    from ripstop.compat import events
    from ripstop.compat.launcher import event_thread

    class Blocked(logging.Handler):
        def emit(self, record):
            begun.set()
            threading.Event().wait()

    begun, event_thread.CLOSE_TIMEOUT_S = threading.Event(), 0.1
    events._log_handlers["blocked"] = Blocked()
    thread = event_thread.EventThread("blocked")
    thread.put("event")
    begun.wait()
    thread.close()
    """
    words = [sys.executable, "-c", textwrap.dedent(source)]
    end = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert "the event handler blocked was not done at the end" in end.stderr


def test_a_handler_that_torchs_module_was_given_is_known_here_too() -> None:
    torch_handlers._log_handlers["theirs"] = collector = Collector()
    events.record(events.Event("e", events.EventSource.AGENT), "theirs")
    assert len(collector.seen) == 1
