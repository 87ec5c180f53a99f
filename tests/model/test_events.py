"""Entries as lines, files and journals."""

import os
import resource
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields

from ripstop.model import events
from ripstop.model.events import (
    AgentMessage,
    EventRecord,
    NodeJoined,
    RoundEnded,
    WorkersStarted,
    from_json,
    kind,
    parse,
    to_json,
)
from ripstop.telemetry.event_file import EventFile
from ripstop.telemetry.journal import MAX_RECORDS, Journal


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
        st.builds(cls, **{field.name: values(field.type) for field in fields(cls)}) for cls in get_args(events.Event)
    )


@given(every_event(), st.integers(1, 2**40), st.floats(0, 2e9), st.text(max_size=50))
def test_every_event_comes_back_from_its_line(event: Any, seq: int, at: float, node: str) -> None:
    entry = EventRecord(seq, at, node, event)
    line = to_json(entry)
    assert "\n" not in line
    assert from_json(line) == entry


@given(st.text())
def test_a_line_that_is_no_entry_is_passed_over(text: str) -> None:
    assert from_json(text) is None


def test_a_field_of_another_type_is_no_entry() -> None:
    line = to_json(EventRecord(1, 2.0, "a", NodeJoined("a", "h", 4)))
    assert from_json(line.replace('"slots":4', '"slots":"4"')) is None


@pytest.mark.parametrize("slots", [str(1 << 63), str(10**400), "NaN", "1e400"])
def test_a_number_that_is_too_large_is_no_entry(slots: str) -> None:
    line = to_json(EventRecord(1, 2.0, "a", NodeJoined("a", "h", 4)))
    assert from_json(line.replace('"slots":4', f'"slots":{slots}')) is None
    for field in ('"at":2.0', '"seq":1'):
        assert parse(line.replace(field, f"{field.rpartition(':')[0]}:{slots}")) is None


def test_half_a_pair_of_surrogates_is_no_entry_and_is_never_written() -> None:
    entry = EventRecord(1, 2.0, "a", NodeJoined("a", "h\ud800", 4))
    found = from_json(to_json(entry))
    assert found is not None and found.event == NodeJoined("a", "h?", 4)
    assert from_json(to_json(entry).replace('"h?"', '"h\\ud800"')) is None
    assert parse(to_json(entry).replace('"node":"a"', '"node":"\\udfff"')) is None


def test_a_kind_that_is_not_known_here_is_still_read() -> None:
    record = parse('{"v":1,"seq":1,"at":2.0,"node":"","kind":"from_the_future","x":[1]}')
    assert record is not None and record["x"] == [1]


def test_kinds_are_written_in_snake_case() -> None:
    assert kind(RoundEnded(1, "operator", "x", 0.0)) == "round_ended"


def test_long_texts_are_cut() -> None:
    entry = from_json(to_json(EventRecord(1, 2.0, "a", AgentMessage("x" * 5000))))
    assert entry is not None and isinstance(entry.event, AgentMessage)
    assert len(entry.event.text) == events.MAX_TEXT and entry.event.text.endswith("…")


def written(path: Path, *said: str) -> None:
    file = EventFile(path)
    for i, text in enumerate(said, 1):
        file.add(EventRecord(i, 1.0, "a", AgentMessage(text)))
    file.close()


def test_a_file_torn_by_a_crash_is_still_read_and_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    written(path, "one", "two")
    os.truncate(path, path.stat().st_size - 10)
    written(path, "three")
    with path.open() as file:
        said = [record["text"] for line in file if (record := parse(line))]
    assert said == ["one", "three"]


def test_a_full_disk_loses_events_and_nothing_else(tmp_path: Path, caplog: Any) -> None:
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
        assert [record["seq"] for line in lines if (record := parse(line))] == [1]
    assert sum("cannot be written" in record.message for record in caplog.records) == 1


def test_a_journal_takes_what_is_told_again_once() -> None:
    seen: list[EventRecord] = []
    journal = Journal([seen.append])
    entries = [EventRecord(i, 1.0, "a", AgentMessage(str(i))) for i in (1, 2)]
    journal.record(AgentMessage("mine"), 1.0)
    assert [journal.take(entry) for entry in (*entries, *entries)] == [True, True, False, False]
    assert [entry.seq for entry in seen] == [1, 1, 2]
    assert [number for number, _ in journal.since(1)] == [2, 3]


def test_a_journal_keeps_the_latest() -> None:
    journal = Journal()
    for _ in range(MAX_RECORDS + 5):
        journal.record(AgentMessage("x"), 1.0)
    assert [number for number, _ in journal.since(0)][:1] == [6]
    assert journal.since(MAX_RECORDS + 4)[0][0] == MAX_RECORDS + 5


def test_a_journal_keeps_so_many_bytes_however_long_its_entries_are() -> None:
    journal = Journal()
    pids = tuple(range(100_000))
    for number in range(100):
        journal.take(EventRecord(number + 1, 1.0, "a", WorkersStarted(1, 0, 1, 0, pids, 1.0, 1.0, "x" * 1_000_000)))
    kept = [number for number, _ in journal.since(0)]
    assert 1 < len(kept) < 40
    assert kept[-1] == journal.count == 100
