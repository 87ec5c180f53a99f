"""Event records as JSON lines, in files and in the journal."""

import json
import os
import resource
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ripstop.model import events
from ripstop.model.event_json import from_json, to_dict, to_json
from ripstop.model.events import (
    AgentMessage,
    EventRecord,
    NodeJoined,
    NodeUnhealthy,
    RoundEnded,
    WorkersStarted,
    event_kind,
)
from ripstop.telemetry.event_file import EventFile
from ripstop.telemetry.journal import MAX_RECORDS, Journal
from ripstop.telemetry.log_lines import log_line


def values(expected: Any) -> st.SearchStrategy[Any]:
    scalars: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**62), 2**62),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(max_size=200),
        bool: st.booleans(),
    }
    return scalars[expected] if expected in scalars else st.lists(scalars[get_args(expected)[0]]).map(tuple)


def every_event() -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(cls, **{name: values(hint) for name, hint in get_type_hints(cls).items()})
        for cls in get_args(events.Event)
    )


@given(every_event(), st.integers(1, 2**40), st.floats(0, 2e9), st.text(max_size=50))
def test_every_event_survives_encoding_and_decoding(event: Any, seq: int, at: float, node: str) -> None:
    entry = EventRecord(seq, at, node, event)
    line = to_json(entry)
    assert "\n" not in line
    assert from_json(line) == entry


@given(st.text())
def test_a_line_that_is_not_an_event_record_is_none(text: str) -> None:
    assert from_json(text) is None


def test_a_line_with_a_field_of_another_type_is_none() -> None:
    line = to_json(EventRecord(1, 2.0, "a", NodeJoined("a", "h", 4)))
    assert from_json(line.replace('"slots":4', '"slots":"4"')) is None


@pytest.mark.parametrize("slots", [str(1 << 63), str(10**400), "NaN", "1e400"])
def test_a_line_with_a_number_out_of_range_is_none(slots: str) -> None:
    line = to_json(EventRecord(1, 2.0, "a", NodeJoined("a", "h", 4)))
    assert from_json(line.replace('"slots":4', f'"slots":{slots}')) is None
    for field in ('"at":2.0', '"seq":1'):
        assert from_json(line.replace(field, f"{field.rpartition(':')[0]}:{slots}")) is None


def test_lone_surrogates_are_never_written_and_a_line_with_one_is_none() -> None:
    entry = EventRecord(1, 2.0, "a", NodeJoined("a", "h\ud800", 4))
    found = from_json(to_json(entry))
    assert found is not None and found.event == NodeJoined("a", "h?", 4)
    assert from_json(to_json(entry).replace('"h?"', '"h\\ud800"')) is None
    assert from_json(to_json(entry).replace('"node":"a"', '"node":"\\udfff"')) is None


def test_lone_surrogates_in_a_list_are_replaced() -> None:
    found = from_json(to_json(EventRecord(1, 2.0, "a", NodeUnhealthy("a", ("disk \udcff",)))))
    assert found is not None and found.event == NodeUnhealthy("a", ("disk ?",))


def test_an_unknown_kind_is_none() -> None:
    assert from_json('{"v":1,"seq":1,"at":2.0,"node":"","kind":"from_the_future","x":[1]}') is None


def test_an_unknown_field_of_a_newer_version_is_ignored() -> None:
    entry = EventRecord(1, 2.0, "a", NodeJoined("a", "h", 4))
    assert from_json(to_json(entry).replace('"v":1', '"v":2,"zone":{"x":[1]}')) == entry


def test_a_line_is_ascii_and_begins_with_the_header() -> None:
    entry = EventRecord(1, 2.5, "a", NodeJoined("a", "hôte", 4))
    assert to_json(entry) == (
        '{"v":1,"seq":1,"at":2.5,"node":"a","kind":"node_joined","name":"a","host":"h\\u00f4te","slots":4}'
    )
    assert to_dict(entry) == json.loads(to_json(entry))


def test_kinds_are_in_snake_case() -> None:
    assert event_kind(RoundEnded(1, "operator", "x", 0.0)) == "round_ended"


def test_long_texts_are_truncated() -> None:
    entry = from_json(to_json(EventRecord(1, 2.0, "a", AgentMessage("x" * 5000))))
    assert entry is not None and isinstance(entry.event, AgentMessage)
    assert len(entry.event.text) == events.MAX_TEXT and entry.event.text.endswith("…")


def write_events(path: Path, *texts: str) -> None:
    file = EventFile(path)
    for i, text in enumerate(texts, 1):
        file.add(EventRecord(i, 1.0, "a", AgentMessage(text)))
    file.close()


def test_a_file_truncated_by_a_crash_is_still_readable_and_writable(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_events(path, "one", "two")
    os.truncate(path, path.stat().st_size - 10)
    write_events(path, "three")
    with path.open() as file:
        found = [record.event for line in file if (record := from_json(line))]
    assert found == [AgentMessage("one"), AgentMessage("three")]


def test_a_full_disk_loses_events_only(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "events.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = EventFile(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150, hard))  # Python ignores SIGXFSZ: writes beyond it fail
    try:
        for i in range(1, 6):
            file.add(EventRecord(i, 1.0, "a", AgentMessage("0123456789")))
        file.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with path.open() as lines:
        assert [record.seq for line in lines if (record := from_json(line))] == [1]
    assert sum("cannot be written" in record.message for record in caplog.records) == 1


def test_a_journal_ignores_repeated_records() -> None:
    seen: list[EventRecord] = []
    journal = Journal([seen.append])
    entries = [EventRecord(i, 1.0, "a", AgentMessage(str(i))) for i in (1, 2)]
    journal.record(AgentMessage("mine"), 1.0)
    assert [journal.take(entry) for entry in (*entries, *entries)] == [True, True, False, False]
    assert [entry.seq for entry in seen] == [1, 1, 2]
    assert [number for number, _ in journal.since(1)] == [2, 3]


def test_a_journal_keeps_the_latest_records() -> None:
    journal = Journal()
    for _ in range(MAX_RECORDS + 5):
        journal.record(AgentMessage("x"), 1.0)
    assert [number for number, _ in journal.since(0)][:1] == [6]
    assert journal.since(MAX_RECORDS + 4)[0][0] == MAX_RECORDS + 5


def test_a_journal_is_bounded_in_bytes() -> None:
    journal = Journal()
    pids = tuple(range(100_000))
    for number in range(100):
        journal.take(EventRecord(number + 1, 1.0, "a", WorkersStarted(1, 0, 1, 0, pids, 1.0, 1.0, "x" * 1_000_000)))
    kept = [number for number, _ in journal.since(0)]
    assert 1 < len(kept) < 40
    assert kept[-1] == journal.count == 100


@given(every_event())
def test_every_event_has_a_log_line_or_none(event: Any) -> None:
    assert isinstance(log_line(event), str)
