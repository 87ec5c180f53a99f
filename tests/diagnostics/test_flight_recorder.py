"""How far ranks are in their collectives."""

import json
from typing import Any

import pytest

from ripstop.diagnostics.flight_recorder import flight_recorder_progress, flight_recorder_text, parse_flight_recorder
from ripstop.diagnostics.hang_analysis import describe_hang_position
from ripstop.model.failure import CollectiveProgress


def entry(number: int, op: str = "gloo:all_reduce", done: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "process_group": ["0", "default_pg"],
        "profiling_name": op,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "input_sizes": [[2, 3], [4]],
        "input_dtypes": ["Float", "Float"],
        "state": "scheduled",
        "retired": done,
    } | more


def stood(*entries: dict[str, Any], recorder: str = "fr", **more: Any) -> tuple[CollectiveProgress, ...]:
    recording = parse_flight_recorder(json.dumps({recorder: {"entries": entries} | more}))
    assert recording is not None
    return flight_recorder_progress(recording)


# one rank -------------------------------------------------------------------------------------------------------------


def test_a_rank_is_in_the_oldest_collective_that_it_has_not_left() -> None:
    (found,) = stood(entry(1), entry(2, done=False), entry(3, "gloo:broadcast", done=False))
    assert found == CollectiveProgress("gloo:0", "", 3, 2, "all_reduce", "10 Float")
    assert describe_hang_position([found]) == "in all_reduce #2"


def test_a_rank_outside_of_collectives_is_at_its_latest() -> None:
    found = stood(entry(1), entry(2, "gloo:barrier", input_sizes=[], input_dtypes=[]))
    assert found == (CollectiveProgress("gloo:0", "", 2, 0, "barrier", ""),)
    assert describe_hang_position(found) == "in no collective; the last was barrier #2"
    assert describe_hang_position(()) == "no collective yet"


def test_collectives_of_nccl_before_a_completed_one_are_over() -> None:
    part = entry(1, "nccl:all_reduce", done=False)  # of a batch, and never marked
    (found,) = stood(part, entry(2, "nccl:coalesced", done=False, state="completed"), recorder="nccl")
    assert (found.entered, found.pending) == (2, 0)
    (found,) = stood(entry(1, done=False), entry(2))  # gloo's may overtake each other
    assert found.pending == 1


def test_a_batch_ends_with_its_last_part() -> None:
    parts = [entry(1, "nccl:send 0->1", done=False), entry(1, "nccl:coalesced", state="started", done=False)]
    (found,) = stood(*parts, recorder="nccl")
    assert (found.op, found.pending) == ("coalesced", 1)


def test_groups_and_messages_between_two_ranks_are_numbered_separately() -> None:
    message = entry(7, "nccl:recv 0<-1", done=False, is_p2p=True, p2p_seq_id=5)
    mine = entry(1, "nccl:all_reduce", process_group=["1", "mine"])
    unused = {"2": {"name": "2", "desc": "undefined", "ranks": "[0, 1]"}, "": {"desc": ""}}
    found = stood(entry(7, "nccl:all_reduce"), mine, message, recorder="nccl", pg_config=unused)
    assert [(one.group, one.label, one.entered, one.pending, one.p2p) for one in found] == [
        ("nccl:0", "", 5, 5, True),
        ("nccl:0", "", 7, 0, False),
        ("nccl:1", "mine", 1, 0, False),
        ("nccl:2", "2", 0, 0, False),
    ]
    assert describe_hang_position(found) == "in recv 0<-1 #5"


def test_the_default_group_and_pending_groups_are_never_left_out() -> None:
    many = [entry(1, process_group=[str(n), f"g{n}"], done=n != 3) for n in range(1, 40)]
    found = stood(entry(1), *many)
    assert [one.label for one in found] == ["", "g3", "g39", "g38", "g37", "g36", "g35", "g34"]


@pytest.mark.parametrize(
    "odd",
    [
        {},
        [],
        None,
        {"process_group": 3},
        entry(-1),
        entry(2**64),
        entry(1) | {"process_group": ["0"]},
        entry(1) | {"profiling_name": None},
    ],
)
def test_an_invalid_entry_is_skipped(odd: Any) -> None:
    assert stood(odd, entry(1)) == stood(entry(1))


@pytest.mark.parametrize("text", ["", "no", "[]", "3", "[" * 100_000])
def test_other_text_is_no_recording(text: str) -> None:
    assert parse_flight_recorder(text) is None


@pytest.mark.parametrize(
    "text", ["{}", '{"fr": 3}', '{"fr": {"entries": 3, "pg_config": 3}}', '{"else": {"entries": []}}']
)
def test_an_empty_recorder_is_valid(text: str) -> None:
    recording = parse_flight_recorder(text)
    assert recording is not None and flight_recorder_progress(recording) == ()
    assert flight_recorder_text(recording) == "nothing is recorded"


def test_the_text_shows_the_latest_entries_and_counts_the_others() -> None:
    strange = entry(30, "gloo:evil\x1b[31m\n", done=False, input_sizes=3)
    recording = parse_flight_recorder(json.dumps({"fr": {"entries": [*(entry(n) for n in range(1, 30)), strange]}}))
    assert recording is not None
    lines = flight_recorder_text(recording).splitlines()
    assert (lines[0], lines[1], len(lines)) == ("… 10 before", "all_reduce #11, 10 Float: completed", 21)
    assert lines[-1] == "evil #30, no data: scheduled"


@pytest.mark.parametrize("sizes", ["[[Infinity]]", "[[NaN]]", f"[[{'9' * 4000}, {'9' * 4000}]]", "[[null]]", "7"])
def test_invalid_sizes_are_skipped(sizes: str) -> None:
    text = json.dumps({"fr": {"entries": [entry(1, input_sizes=0)]}}).replace(
        '"input_sizes": 0', f'"input_sizes": {sizes}'
    )
    recording = parse_flight_recorder(text)
    assert recording is not None and "no data" in flight_recorder_text(recording)
