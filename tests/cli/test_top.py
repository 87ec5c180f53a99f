"""`ripstop top` without a terminal: what it shows of a job, and its screens."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ripstop.api.page_files
from ripstop.cli import main
from ripstop.cli.top import screen
from ripstop.cli.top.job_view import (
    SILENT_S,
    SILENT_STEPS,
    STRAGGLER,
    JobView,
    Level,
    RankState,
    job_view,
    job_view_verdict,
)
from ripstop.cli.top.screen import Selection, overview_screen, screen_rows, text_screen


def status(nodes: int = 2, slots: int = 4, **more: Any) -> dict[str, Any]:
    found = [
        {
            "name": f"gpu{n}",
            "host": f"10.0.0.{n}",
            "slots": slots,
            "state": "running",
            "first_rank": n * slots,
            "unfit": "",
            "pids": list(range(100 + n * slots, 100 + (n + 1) * slots)),
        }
        for n in range(nodes)
    ]
    job = {"run_id": "job", "phase": "running", "why": "first round", "seconds": 75.0, "round": 1, "goodput": 0.93}
    budget = {"max_restarts": 3, "charged": 1, "world_size": nodes * slots}
    return job | budget | {"nodes": found, "stragglers": []} | more


def usage(ranks: int = 8, **columns: list[Any]) -> dict[str, Any]:
    same: dict[str, list[Any]] = {"own_time": [None] * ranks, "step": [10] * ranks}
    same |= {"step_time": [0.2] * ranks, "age": [0.1] * ranks, "memory": [1 << 30] * ranks}
    return {
        "at": 100.0,
        "round": 1,
        "checkpoint_at": 90.0,
        "checkpoint_step": 5,
        "ranks": {"rank": list(range(ranks))} | same | columns,
    }


def text_of(lines: list[screen.Line]) -> str:
    return "\n".join("".join(text for text, _ in line) for line in lines)


def test_ranks_are_silent_stragglers_failed_or_starting() -> None:
    columns = {"age": [0.1, 0.1, 60.0, *[0.1] * 5], "step_time": [0.2, 0.4, *[0.2] * 6]}
    job = status()
    job["nodes"][1]["pids"] = [104, 105, 106]
    found = job_view(job, usage(**columns), {4: RankState.FAILED})
    states = {rank.rank: rank.state for rank in found.ranks if rank.state is not RankState.RUNNING}
    assert states == {1: "straggler", 2: "silent", 4: "failed", 7: "starting"}
    assert job_view_verdict(found) == (Level.BAD, "rank 4: failed; rank 2: silent; rank 1: straggler")


def test_usage_of_another_round_is_not_shown() -> None:
    found = job_view(status(round=2), usage(), {})
    assert found.median is None and all(rank.step is None for rank in found.ranks)


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        ({}, Level.OK, "running fine"),
        ({"phase": "gathering", "why": "waiting for 1 node"}, Level.WARN, "gathering: waiting for 1 node"),
        ({"charged": 3}, Level.WARN, "the restart budget is spent"),
    ],
)
def test_the_verdict_is_one_line(changes: dict[str, Any], level: Level, text: str) -> None:
    assert job_view_verdict(job_view(status(**changes), usage(), {})) == (level, text)


def test_a_lost_connection_and_the_end_are_verdicts() -> None:
    assert job_view_verdict(job_view(status(), None, {}, problem="refused")) == (Level.BAD, "no connection: refused")
    assert job_view_verdict(job_view(status(), None, {}, problem="x", outcome="succeeded: all done"))[0] is Level.OK


def test_the_rules_are_those_of_the_page() -> None:
    source = (Path(ripstop.api.page_files.__file__).parent / "page" / "model.js").read_text()
    numbers = dict(re.findall(r"const (SILENT_S|SILENT_STEPS|STRAGGLER) = ([\d.]+)", source))
    assert {name: float(value) for name, value in numbers.items()} == {
        "SILENT_S": SILENT_S,
        "SILENT_STEPS": SILENT_STEPS,
        "STRAGGLER": STRAGGLER,
    }


def test_ranks_are_sorted_and_filtered() -> None:
    job = job_view(status(), usage(step_time=[0.2] * 7 + [0.9], memory=[1, 9, *[2] * 6]), {})

    def ranks(**chosen: str) -> list[int]:
        return [rank.rank for rank in screen_rows(job, Selection(**chosen))]

    assert ranks(sort="step time")[0] == 7
    assert ranks(sort="memory")[0] == 1
    assert ranks(filter="gpu1 5-9") == [5, 6, 7]
    assert ranks(filter="106") == [6]
    assert ranks(filter="strag") == [7]


def test_the_overview_of_a_small_terminal_has_everything() -> None:
    events = tuple(f"12:00:0{n}.000 gpu0: event {n}" for n in range(9))
    job = job_view(status(), usage(step_time=[0.2] * 7 + [0.9]), {}, events=events, rounds=("    1  first round",))
    text = text_of(overview_screen(job, Selection(), 80, 24))
    for part in ("round 1", "goodput 93%", "5 steps/s", "checkpoint 10 s ago", "2 of 3 restarts left"):
        assert part in text
    assert "■■■■ ■■■s" in text
    assert "rank 7: straggler" in text and "0.90 s" in text
    assert "first round" in text and "event 8" in text and "? help" in text


@given(
    nodes=st.integers(0, 60),
    slots=st.sampled_from([1, 3, 8, 80]),
    width=st.integers(screen.MIN_WIDTH, 250),
    height=st.integers(screen.MIN_HEIGHT, 80),
    chosen=st.builds(Selection, rank=st.integers(0, 9000), sort=st.sampled_from(list(screen.SORTS)), filter=st.text()),
    events=st.lists(st.text(), max_size=30),
)
def test_a_screen_has_exactly_the_size_of_the_terminal(
    nodes: int, slots: int, width: int, height: int, chosen: Selection, events: list[str]
) -> None:
    job: JobView = job_view(status(nodes, slots), usage(nodes * slots), {}, events=tuple(events), rounds=tuple(events))
    for lines in (overview_screen(job, chosen, width, height), text_screen("log", events, None, width, height)):
        assert len(lines) == height
        assert all(sum(len(text) for text, _ in line) <= width for line in lines)


def test_it_needs_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == 2
    assert "must be a terminal" in capsys.readouterr().err
