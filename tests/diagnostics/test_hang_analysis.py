"""The suspect ranks of a hang, from stacks and from torch's flight recorder."""

import pytest

from ripstop.diagnostics.failure_ranking import rank_failures, root_cause
from ripstop.diagnostics.failure_report import render_failure_report
from ripstop.diagnostics.hang_analysis import (
    describe_hangs,
    describe_hung_collectives,
    suspect_ranks,
    suspects_in_collectives,
)
from ripstop.model.failure import CollectiveProgress, Failure, Hang, JobEnd
from ripstop.model.round import Outcome


def waiting(call: str = "all_reduce", where: str = "train.py:41", state: str = "S") -> Hang:
    return Hang(90.0, "no heartbeat", call, where, True, state)


def busy(call: str = "load_batch", where: str = "data.py:17", state: str = "S") -> Hang:
    return Hang(90.0, "no heartbeat", call, where, False, state)


def inspected(seconds: float, where: str = "data.py:17") -> Hang:
    """A rank that was inspected because others hang."""
    return Hang(seconds, "", "load_batch", where, False, "S")


@pytest.mark.parametrize(
    ("hangs", "suspects"),
    [
        ([waiting(), waiting(), busy(), waiting()], {2}),
        ([waiting(), busy()], {1}),
        ([busy(), busy(), waiting(), busy()], {0, 1, 3}),  # one was early, the others never came
        ([waiting(), waiting(), waiting("broadcast", "train.py:60")], {2}),
        ([busy(), busy("step", "train.py:3"), busy()], {1}),
        ([waiting(), waiting(state="T"), waiting()], {1}),
        ([waiting(), busy(where=""), busy()], {2}),  # nothing is known of rank 1
        ([waiting(), waiting("broadcast", "train.py:60")], set()),
        ([waiting(), waiting()], set()),
        ([inspected(0.1), busy("step", "train.py:3")], {1}),
        ([inspected(89.9), busy("step", "train.py:3")], set()),  # it hangs too, and was inspected a moment too early
        ([busy(), busy("step", "train.py:3")], set()),
        ([inspected(0.1), busy()], {1}),  # all are at one place, and only rank 1 makes no progress
        ([inspected(89.9), busy(), inspected(89.8)], set()),
        ([inspected(89.9), busy(), inspected(0.0, where="")], set()),  # nothing is known of rank 2
        ([busy(), busy()], set()),
        ([busy()], set()),
        ([], set()),
    ],
)
def test_the_suspect_ranks_are_those_that_the_others_wait_for(hangs: list[Hang], suspects: set[int]) -> None:
    assert suspect_ranks(dict(enumerate(hangs))) == suspects


def test_a_hang_in_words_has_the_location_of_every_rank() -> None:
    hangs = dict(enumerate([waiting(), waiting(), busy(), waiting()]))
    assert describe_hangs(hangs) == "ranks 0,1,3 wait in all_reduce (train.py:41); rank 2 is in load_batch (data.py:17)"


def test_many_ranks_are_shown_as_ranges_and_many_locations_are_counted() -> None:
    hangs = dict(enumerate([waiting()] * 1000 + [busy(where=f"data.py:{line}") for line in range(9)]))
    text = describe_hangs(hangs)
    assert text.startswith("ranks 0-999 wait in all_reduce (train.py:41); rank 1006 is in load_batch (data.py:6); ")
    assert text.endswith("; 6 more elsewhere")


def test_a_stopped_process_is_reported_as_stopped() -> None:
    assert describe_hangs({3: busy(state="T")}) == "rank 3 is in load_batch (data.py:17), stopped by a signal"


def hung(rank: int, hang: Hang, at: float = 100.0) -> Failure:
    return Failure(rank, 0, 1, "host", at, pid=70 + rank, message="m", traceback="thread Main\n  f (x.py:1)", hang=hang)


def test_the_report_of_a_hang_names_the_suspect_and_shows_its_stack() -> None:
    failures = (hung(0, waiting(), 99.0), hung(1, waiting(), 98.0), hung(2, busy(), 100.0))
    cause = root_cause(failures)
    assert cause is not None and cause.rank == 2
    text = render_failure_report(JobEnd("job", Outcome.FAILED, "it hangs", 1, 0, failures))
    assert "hang: ranks 0,1 wait in all_reduce (train.py:41); rank 2 is in load_batch (data.py:17)" in text
    assert "root cause: rank 2 on host" in text
    assert "how      made no progress for 90 s (no heartbeat)" in text
    assert "  stack\n    thread Main\n      f (x.py:1)\n" in text


def test_a_worker_that_died_comes_before_workers_that_wait() -> None:
    death = Failure(5, 0, 1, "host", 101.0, exitcode=1, message="ValueError: no", traceback="ValueError: no")
    assert [f.rank for f in rank_failures([hung(0, waiting()), hung(1, waiting()), death])] == [5, 0, 1]


# flight recorder ------------------------------------------------------------------------------------------------------


def inside(number: int, op: str = "all_reduce", size: str = "4 Float", group: str = "") -> CollectiveProgress:
    return CollectiveProgress(f"nccl:{group}", group, number + 1, number, op, size)


def done(number: int, op: str = "all_reduce", group: str = "") -> CollectiveProgress:
    return CollectiveProgress(f"nccl:{group}", group, number, 0, op, "4 Float")


MESSAGE = CollectiveProgress("nccl:", "", 3, 3, "recv 1<-0", "4 Float", p2p=True)


@pytest.mark.parametrize(
    ("ranks", "suspects", "text"),
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
def test_the_suspects_have_not_entered_the_collective(
    ranks: list[list[CollectiveProgress]], suspects: set[int], text: str
) -> None:
    recorded = dict(enumerate(ranks))
    assert suspects_in_collectives(recorded) == suspects
    assert describe_hung_collectives(recorded) == text


def test_groups_with_a_suspect_come_first_and_the_rest_are_counted() -> None:
    ranks = {n: [inside(3, group=f"g{n // 2}")] for n in range(20)} | {21: [done(2, group="g7")]}
    text = describe_hung_collectives(ranks)
    assert text.startswith(
        "ranks 14,15 are in all_reduce #3 of group g7, not entered by rank 21 (last: all_reduce #2); "
    )
    assert text.endswith("; 7 more groups")
    assert describe_hung_collectives({n: [inside(3, f"op{n}")] for n in range(9)}).endswith(", 6 more kinds")


# with stacks ----------------------------------------------------------------------------------------------------------


def hang(
    collectives: list[CollectiveProgress] | None, waits: bool, call: str = "synchronize", state: str = "S"
) -> Hang:
    return Hang(
        9.0, "no heartbeat", call, "train.py:3", waits, state, "", None if collectives is None else tuple(collectives)
    )


def test_the_recorder_shows_the_suspect_where_stacks_do_not() -> None:
    hangs = {0: hang([inside(42)], False), 1: hang([done(41)], False), 2: hang([inside(42)], False)}
    assert suspect_ranks(hangs) == {1}
    assert describe_hangs(hangs) == (
        "ranks 0-2 are in synchronize (train.py:3); "
        "flight recorder: ranks 0,2 are in all_reduce #42, not entered by rank 1 (last: all_reduce #41)"
    )


@pytest.mark.parametrize(
    ("hangs", "suspects"),
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
def test_without_recorders_the_stacks_decide(hangs: list[Hang], suspects: set[int]) -> None:
    assert suspect_ranks(dict(enumerate(hangs))) == suspects
