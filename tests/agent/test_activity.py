"""What a node does, as one line for people."""

import pytest

from ripstop.agent.activity import Activity, ActivityKind, describe, next_line_after, progress_text
from ripstop.diagnostics.progress import Commits, WorkerProgress

WHO = "1 of at least 2 nodes ready, 1 missing; fails in 588 s; ready: a"


@pytest.mark.parametrize(
    ("activity", "seconds", "line"),
    [
        (Activity(ActivityKind.WARMING_UP, "importing"), 3.9, "warming up, 3 s: importing"),
        (
            Activity(ActivityKind.CONNECTING, "node0:29400: connection refused", 600.0),
            75.0,
            "waiting for the coordinator, 1 min 15 s of 10 min: node0:29400: connection refused",
        ),
        (
            Activity(ActivityKind.UNHEALTHY, "nvlink 2 is down", 600.0),
            0.0,
            "unhealthy, 0 s of 10 min: nvlink 2 is down",
        ),
        (Activity(ActivityKind.GATHERING, WHO), 12.0, f"waiting, 12 s: {WHO}"),
        (Activity(ActivityKind.WAITING, "spare: all taken"), 12.0, "spare: all taken; 12 s so far"),
        (Activity(ActivityKind.WAITING), 12.0, "without a place; 12 s so far"),
        (Activity(ActivityKind.TRAINING, "step 7", round=2), 4000.0, "round 2, 1 h 6 min: step 7"),
        (Activity(ActivityKind.TRAINING, round=2), 4000.0, ""),
        (Activity(ActivityKind.STOPPING, "rank 3", 30.0, 1), 8.0, "stopping the workers, 8 s of 30 s: rank 3"),
        (Activity(ActivityKind.CLOSING, "other nodes still train"), 9.0, "ending, 9 s: other nodes still train"),
    ],
)
def test_an_activity_is_one_line(activity: Activity, seconds: float, line: str) -> None:
    assert describe(activity, seconds) == line


def test_an_activity_is_logged_less_and_less_often_but_at_least_every_ten_minutes() -> None:
    due, times = 0.0, []
    for _ in range(8):
        due = next_line_after(ActivityKind.WAITING, due)
        times.append(due)
    assert times == [30, 60, 120, 240, 480, 960, 1560, 2160]
    assert next_line_after(ActivityKind.STOPPING, 0.0) == 5.0, "within the time that workers have to stop"
    assert next_line_after(ActivityKind.WAITING, 100.0) == 120.0, "a late timer skips a line"


def progress(
    step: int | None, rate: float = 0.0, *, step_age: float = 0.0, commit: float | None = None
) -> WorkerProgress:
    commits = Commits(1, 0.0, 0, 0.0) if commit is not None else None
    return WorkerProgress(step, rate, 0.0, 1, step_age, commits, commit)


def test_progress_is_that_of_the_rank_that_is_furthest_behind() -> None:
    workers = {0: progress(120, 3.4), 1: progress(118, 3.2, commit=12.0), 2: progress(None)}
    assert progress_text(workers) == "step 118, 3.3 steps/s, last commit 12 s ago"


def test_slow_steps_and_silence_are_named() -> None:
    assert progress_text({0: progress(5, 0.25)}) == "step 5, 4.0 s/step"
    assert progress_text({0: progress(5, 0.25, step_age=39.0)}) == "step 5, 4.0 s/step"
    assert progress_text({0: progress(5, 0.25, step_age=100.0)}) == "step 5, 4.0 s/step, no step for 1 min 40 s"


def test_a_script_that_reports_no_steps_has_no_progress() -> None:
    assert progress_text({}) == ""
    assert progress_text({0: progress(None)}) == ""
