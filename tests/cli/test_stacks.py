"""What `ripstop stacks` shows."""

from typing import Any

from ripstop.cli.commands.stacks import render_stacks


def stack(rank: int, **more: Any) -> dict[str, Any]:
    return {
        "node": "a",
        "rank": rank,
        "pid": 70 + rank,
        "state": "S",
        "source": "py-spy",
        "stack": "thread Main",
    } | more


def progress(entered: int, pending: int) -> dict[str, Any]:
    operation = {"op": "all_reduce", "size": "4 Float", "p2p": False}
    return {"group": "gloo:0", "label": "", "entered": entered, "pending": pending} | operation


def test_stacks_are_shown_with_the_collectives_that_workers_are_in() -> None:
    stacks = [stack(1, collectives=[progress(3, 0)]), stack(0, collectives=[progress(4, 4)])]
    assert render_stacks({"stacks": stacks, "unanswered": []}) == [
        "rank 0 on a pid=70 state=S source=py-spy",
        "  thread Main",
        "  flight recorder: in all_reduce #4",
        "rank 1 on a pid=71 state=S source=py-spy",
        "  thread Main",
        "  flight recorder: in no collective; the last was all_reduce #3",
        "flight recorder: rank 0 is in all_reduce #4, not entered by rank 1 (last: all_reduce #3)",
    ]


def test_the_reason_for_missing_recorders_is_shown_once_for_all_ranks() -> None:
    none = "none: the worker was not forked with torch loaded"
    stacks = [stack(2, recorder=none), stack(1, recorder="none: the worker did not answer"), stack(0, recorder=none)]
    shown = render_stacks({"stacks": stacks, "unanswered": [{"node": "b", "why": "gone"}]})
    assert shown[-3:] == [
        f"flight recorder of ranks 0,2: {none}",
        "flight recorder of rank 1: none: the worker did not answer",
        "node b did not reply: gone",
    ]
    assert not any("flight" in line for line in shown[:-3])


def test_nothing_is_shown_for_workers_without_a_recorder() -> None:
    assert render_stacks({"stacks": [stack(0)], "unanswered": []}) == [
        "rank 0 on a pid=70 state=S source=py-spy",
        "  thread Main",
    ]
