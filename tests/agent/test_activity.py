"""What a node does, as one line for people."""

import pytest

from ripstop.agent.activity import Activity, ActivityKind, describe_activity, next_activity_line_after

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
    assert describe_activity(activity, seconds) == line


def test_an_activity_is_logged_less_and_less_often_but_at_least_every_ten_minutes() -> None:
    due, times = 0.0, []
    for _ in range(8):
        due = next_activity_line_after(ActivityKind.WAITING, due)
        times.append(due)
    assert times == [30, 60, 120, 240, 480, 960, 1560, 2160]
    assert next_activity_line_after(ActivityKind.STOPPING, 0.0) == 5.0, "within the time that workers have to stop"
    assert next_activity_line_after(ActivityKind.WAITING, 100.0) == 120.0, "a late timer skips a line"
