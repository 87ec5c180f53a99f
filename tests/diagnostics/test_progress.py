"""Who makes progress, by what is reported and by what can be seen."""

import pytest

from ripstop.diagnostics.progress import ActivitySample, Progress, Stuck, WorkerProgress

STACK = "step (train.py:3)"


def silent(progress: Progress, until: float, *, step: float = 2.5, rank: int = 0, cpu: float = 1.0) -> None:
    """It was at work before it was first seen, and is not since."""
    now = step
    while now <= until:
        due = progress.due(now)
        progress.look(rank, ActivitySample(100, cpu, STACK if due.get(rank) else ""), now)
        now += step


def test_who_reports_and_goes_on_reporting_does_not_hang() -> None:
    progress = Progress(1, 10.0, now=0.0)
    for now in range(0, 100, 9):
        progress.beat(0, now, now + 1, float(now))
        assert progress.stuck(now + 8.9) == {}


def test_who_has_reported_and_is_silent_for_the_timeout_hangs() -> None:
    progress = Progress(2, 10.0, now=0.0)
    progress.beat(0, None, 1, 3.0)
    progress.beat(1, None, 1, 5.0)
    assert progress.deadline() == 13.0
    assert progress.stuck(12.9) == {}
    assert progress.stuck(13.0) == {0: Stuck(10.0, "no heartbeat")}


def test_who_never_reports_is_looked_at_four_times_in_a_timeout() -> None:
    progress = Progress(1, 10.0, now=0.0)
    assert progress.deadline() == 2.5
    assert progress.due(2.4) == {}
    assert progress.due(2.5) == {0: False}
    progress.look(0, ActivitySample(0, 0.0), 2.5)
    assert progress.deadline() == 5.0
    assert progress.due(5.0) == {0: True}  # idle for half the time: now its stack matters


def test_who_writes_nothing_uses_no_cpu_and_stands_still_hangs() -> None:
    progress = Progress(1, 10.0, now=0.0)
    silent(progress, 10.0)
    assert progress.stuck(10.0) == {}  # it was at work until it was first seen
    silent(progress, 12.5)
    assert progress.stuck(12.5) == {0: Stuck(10.0, "no output, no CPU time, the same stack")}


@pytest.mark.parametrize(
    "sign",
    [
        ActivitySample(101, 1.0, STACK),
        ActivitySample(100, 1.1, STACK),
        ActivitySample(100, 1.0, "other (train.py:4)"),
        ActivitySample(100, 1.0, STACK, ready=True),
    ],
)
def test_any_sign_of_life_starts_the_time_anew(sign: ActivitySample) -> None:
    progress = Progress(1, 10.0, now=0.0)
    silent(progress, 10.0)
    progress.look(0, sign, 12.5)
    assert progress.stuck(12.5) == {}
    assert progress.idle(0, 12.5) == 0.0


def test_a_time_in_which_nobody_could_be_seen_counts_against_nobody() -> None:
    progress = Progress(2, 10.0, now=0.0)
    progress.beat(1, None, 1, 1.0)
    silent(progress, 10.0)
    progress.excuse(100.0)
    assert (progress.stuck(100.0), progress.deadline()) == ({}, 102.5)
    assert progress.paces(100.0)[1].age == 99.0
    assert progress.stuck(110.0) == {1: Stuck(109.0, "no heartbeat")}


def test_a_little_cpu_time_is_none() -> None:
    progress = Progress(1, 10.0, now=0.0)
    silent(progress, 10.0)
    progress.look(0, ActivitySample(100, 1.02, STACK), 12.5)
    assert progress.stuck(12.5) != {}


def test_who_shows_no_stack_is_not_taken_to_hang() -> None:
    progress = Progress(1, 10.0, now=0.0)
    for now in (2.5, 5.0, 7.5, 10.0, 12.5, 15.0):
        progress.look(0, ActivitySample(0, 0.0, ""), now)
    assert progress.stuck(15.0) == {}


def test_who_cannot_be_seen_is_not_taken_to_hang_and_is_looked_for_later() -> None:
    progress = Progress(1, 10.0, now=0.0)
    silent(progress, 10.0)
    progress.unseen(0, 12.5)
    assert progress.stuck(12.5) == {}
    assert progress.deadline() == 15.0


def test_who_reports_is_no_longer_looked_at() -> None:
    progress = Progress(1, 10.0, now=0.0)
    progress.beat(0, 1, 1, 1.0)
    assert progress.due(5.0) == {}


def test_who_has_ended_neither_hangs_nor_is_waited_for() -> None:
    progress = Progress(1, 10.0, now=0.0)
    progress.beat(0, 7, 1, 1.0)
    progress.gone(0)
    assert progress.stuck(100.0) == {}
    assert progress.deadline() is None
    assert progress.stepped()[0].last == 7
    progress.beat(0, 8, 2, 100.0)
    assert progress.stepped()[0].last == 7


def test_without_a_timeout_nobody_hangs_and_paces_are_known_all_the_same() -> None:
    progress = Progress(2, 0.0, now=0.0)
    assert (progress.deadline(), progress.due(100.0)) == (None, {})
    progress.beat(0, 10, 1, 1.0)
    progress.beat(0, 14, 5, 3.0)
    assert progress.stuck(1e6) == {}
    assert progress.paces(4.0) == {0: WorkerProgress(14, 2.0, 1.0, 5)}
    stride = progress.stepped()[0]
    assert (stride.first, stride.last, stride.seconds) == (10, 14, 2.0)


def test_a_rate_follows_the_latest_steps_smoothly() -> None:
    progress = Progress(1, 0.0, now=0.0)
    for second in range(50):
        progress.beat(0, 2 * second if second < 20 else 20 + second, second + 1, float(second))
    assert progress.paces(49.0)[0].rate == pytest.approx(1.0, rel=0.01)
