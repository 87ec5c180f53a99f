"""How far ranks are in their collectives, and which ranks the others wait for."""

import json
from typing import Any

import pytest

from ripstop.diagnostics.flight_recorder import as_text, from_torch, group_progress, in_words, odd_ones, position
from ripstop.diagnostics.stacks import in_words as hang_in_words
from ripstop.diagnostics.stacks import odd_ones as odd_in_a_hang
from ripstop.model.failure import CollectiveProgress, Hang


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
    recording = from_torch(json.dumps({recorder: {"entries": entries} | more}))
    assert recording is not None
    return group_progress(recording)


# one rank -------------------------------------------------------------------------------------------------------------


def test_a_rank_is_in_the_oldest_collective_that_it_has_not_left() -> None:
    (found,) = stood(entry(1), entry(2, done=False), entry(3, "gloo:broadcast", done=False))
    assert found == CollectiveProgress("gloo:0", "", 3, 2, "all_reduce", "10 Float")
    assert position([found]) == "in all_reduce #2"


def test_a_rank_outside_of_collectives_is_at_its_latest() -> None:
    found = stood(entry(1), entry(2, "gloo:barrier", input_sizes=[], input_dtypes=[]))
    assert found == (CollectiveProgress("gloo:0", "", 2, 0, "barrier", ""),)
    assert position(found) == "in no collective; the last was barrier #2"
    assert position(()) == "no collective yet"


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
    assert position(found) == "in recv 0<-1 #5"


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
    assert from_torch(text) is None


@pytest.mark.parametrize(
    "text", ["{}", '{"fr": 3}', '{"fr": {"entries": 3, "pg_config": 3}}', '{"else": {"entries": []}}']
)
def test_an_empty_recorder_is_valid(text: str) -> None:
    recording = from_torch(text)
    assert recording is not None and group_progress(recording) == ()
    assert as_text(recording) == "nothing is recorded"


def test_the_text_shows_the_latest_entries_and_counts_the_others() -> None:
    strange = entry(30, "gloo:evil\x1b[31m\n", done=False, input_sizes=3)
    recording = from_torch(json.dumps({"fr": {"entries": [*(entry(n) for n in range(1, 30)), strange]}}))
    assert recording is not None
    lines = as_text(recording).splitlines()
    assert (lines[0], lines[1], len(lines)) == ("… 10 before", "all_reduce #11, 10 Float: completed", 21)
    assert lines[-1] == "evil #30, no data: scheduled"


@pytest.mark.parametrize("sizes", ["[[Infinity]]", "[[NaN]]", f"[[{'9' * 4000}, {'9' * 4000}]]", "[[null]]", "7"])
def test_invalid_sizes_are_skipped(sizes: str) -> None:
    text = json.dumps({"fr": {"entries": [entry(1, input_sizes=0)]}}).replace(
        '"input_sizes": 0', f'"input_sizes": {sizes}'
    )
    recording = from_torch(text)
    assert recording is not None and "no data" in as_text(recording)


# all ranks together ---------------------------------------------------------------------------------------------------


def inside(number: int, op: str = "all_reduce", size: str = "4 Float", group: str = "") -> CollectiveProgress:
    return CollectiveProgress(f"nccl:{group}", group, number + 1, number, op, size)


def done(number: int, op: str = "all_reduce", group: str = "") -> CollectiveProgress:
    return CollectiveProgress(f"nccl:{group}", group, number, 0, op, "4 Float")


MESSAGE = CollectiveProgress("nccl:", "", 3, 3, "recv 1<-0", "4 Float", p2p=True)


@pytest.mark.parametrize(
    ("ranks", "odd", "text"),
    [
        (
            [[inside(42)], [done(41, "broadcast")], [inside(42)]],
            {1},
            "ranks 0,2 are in all_reduce #42, not entered by rank 1 (last: broadcast #41)",
        ),
        (  # it never came to any, and is in the default group all the same
            [[inside(1)], []],
            {1},
            "rank 0 is in all_reduce #1, not entered by rank 1 (last: none)",
        ),
        (  # a rank ahead of the others waits, too
            [[inside(42)], [done(41)], [inside(43)]],
            {1},
            "rank 0 is in all_reduce #42, not entered by rank 1 (last: all_reduce #41)",
        ),
        (
            [[inside(9)], [inside(9)], [inside(9, "broadcast")]],
            {2},
            "#9 is not the same for all: ranks 0,1 are in all_reduce of 4 Float, rank 2 is in broadcast of 4 Float",
        ),
        (
            [[inside(9)], [inside(9, size="5 Float")]],
            set(),
            "#9 is not the same for all: rank 0 is in all_reduce of 4 Float, rank 1 is in all_reduce of 5 Float",
        ),
        (  # to each its own
            [[inside(9, "all_gather")], [inside(9, "all_gather", "5 Float")]],
            set(),
            "ranks 0,1 are in all_gather #9, and no rank is missing",
        ),
        ([[inside(9)], [inside(9)]], set(), "ranks 0,1 are in all_reduce #9, and no rank is missing"),
        ([[inside(9)], [done(9)]], set(), "rank 0 is in all_reduce #9"),
        ([[done(9)], [done(9)]], set(), ""),
        ([[], []], set(), ""),
        ([], set(), ""),
        (  # 0 waits for 1, and 1 for 2
            [[inside(5)], [done(4), inside(2, group="b")], [done(4), done(1, group="b")]],
            {2},
            "rank 0 is in all_reduce #5, not entered by ranks 1,2 (last: all_reduce #4); "
            "rank 1 is in all_reduce #2 of group b, not entered by rank 2 (last: all_reduce #1)",
        ),
        (  # each in what the other has not entered
            [[inside(5, group="a"), done(1, group="b")], [done(4, group="a"), inside(2, group="b")]],
            set(),
            "rank 0 is in all_reduce #5 of group a, not entered by rank 1 (last: all_reduce #4); "
            "rank 1 is in all_reduce #2 of group b, not entered by rank 0 (last: all_reduce #1)",
        ),
        (  # it is unknown whether 2 is in that group
            [[inside(5, group="a")], [done(4, group="a")], [done(7)]],
            {1},
            "rank 0 is in all_reduce #5 of group a, not entered by rank 1 (last: all_reduce #4)",
        ),
        (
            [[inside(5)], [MESSAGE, done(4)], [done(4)]],
            {2},
            "rank 0 is in all_reduce #5, not entered by ranks 1,2 (last: all_reduce #4); rank 1 is in recv 1<-0",
        ),
    ],
)
def test_the_odd_ranks_have_not_entered_the_collective(
    ranks: list[list[CollectiveProgress]], odd: set[int], text: str
) -> None:
    recorded = dict(enumerate(ranks))
    assert odd_ones(recorded) == odd
    assert in_words(recorded) == text


def test_groups_with_an_odd_rank_come_first_and_the_rest_are_counted() -> None:
    ranks = {n: [inside(3, group=f"g{n // 2}")] for n in range(20)} | {21: [done(2, group="g7")]}
    text = in_words(ranks)
    assert text.startswith(
        "ranks 14,15 are in all_reduce #3 of group g7, not entered by rank 21 (last: all_reduce #2); "
    )
    assert text.endswith("; 7 more groups")
    assert in_words({n: [inside(3, f"op{n}")] for n in range(9)}).endswith(", 6 more kinds")


# with stacks ----------------------------------------------------------------------------------------------------------


def hang(standings: list[CollectiveProgress] | None, waits: bool, call: str = "synchronize", state: str = "S") -> Hang:
    return Hang(
        9.0, "no heartbeat", call, "train.py:3", waits, state, "", None if standings is None else tuple(standings)
    )


def test_the_recorder_shows_the_odd_rank_where_stacks_do_not() -> None:
    hangs = {0: hang([inside(42)], False), 1: hang([done(41)], False), 2: hang([inside(42)], False)}
    assert odd_in_a_hang(hangs) == {1}
    assert hang_in_words(hangs) == (
        "ranks 0-2 are in synchronize (train.py:3); "
        "flight recorder: ranks 0,2 are in all_reduce #42, not entered by rank 1 (last: all_reduce #41)"
    )


@pytest.mark.parametrize(
    ("hangs", "odd"),
    [
        (
            [hang([inside(5)], True), hang([done(4)], True), hang([done(4)], False)],
            {2},
        ),  # 1 waits for what no one records
        ([hang([inside(5)], True), hang([inside(5)], True), hang([done(4)], False, state="T")], {2}),
        ([hang([inside(5)], True), hang(None, False)], {1}),  # it did not reply
        ([hang([inside(5)], True), hang([inside(5)], False)], {1}),  # only the stacks differ
        ([hang(None, True), hang(None, False)], {1}),
    ],
)
def test_without_recorders_the_stacks_decide(hangs: list[Hang], odd: set[int]) -> None:
    assert odd_in_a_hang(dict(enumerate(hangs))) == odd
