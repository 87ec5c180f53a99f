"""Which workers hang, by their heartbeats and by their activity."""

import pytest

from ripstop.diagnostics.progress import (
    ActivitySample,
    Commits,
    HungWorker,
    ProgressTracker,
    WorkerProgress,
    worker_progress_text,
)

STACK = "step (train.py:3)"


def silent(progress: ProgressTracker, until: float, *, step: float = 2.5, rank: int = 0, cpu: float = 1.0) -> None:
    """The worker was active before its first sample, and is inactive afterwards."""
    now = step
    while now <= until:
        due = progress.due_samples(now)
        progress.on_sample(rank, ActivitySample(100, cpu, STACK if due.get(rank) else ""), now)
        now += step


def test_a_worker_that_sends_heartbeats_does_not_hang() -> None:
    progress = ProgressTracker(1, 10.0, now=0.0)
    for now in range(0, 100, 9):
        progress.on_heartbeat(0, now, now + 1, float(now))
        assert progress.hung_workers(now + 8.9) == {}


def test_a_worker_that_stops_sending_heartbeats_hangs_after_the_timeout() -> None:
    progress = ProgressTracker(2, 10.0, now=0.0)
    progress.on_heartbeat(0, None, 1, 3.0)
    progress.on_heartbeat(1, None, 1, 5.0)
    assert progress.next_check() == 13.0
    assert progress.hung_workers(12.9) == {}
    assert progress.hung_workers(13.0) == {0: HungWorker(10.0, "no heartbeat")}


def test_a_worker_without_heartbeats_is_sampled_four_times_in_the_timeout() -> None:
    progress = ProgressTracker(1, 10.0, now=0.0)
    assert progress.next_check() == 2.5
    assert progress.due_samples(2.4) == {}
    assert progress.due_samples(2.5) == {0: False}
    progress.on_sample(0, ActivitySample(0, 0.0), 2.5)
    assert progress.next_check() == 5.0
    assert progress.due_samples(5.0) == {0: True}  # inactive for half of the timeout: the sample includes the stack


def test_a_worker_without_output_cpu_time_and_stack_changes_hangs() -> None:
    progress = ProgressTracker(1, 10.0, now=0.0)
    silent(progress, 10.0)
    assert progress.hung_workers(10.0) == {}  # it was active until its first sample
    silent(progress, 12.5)
    assert progress.hung_workers(12.5) == {0: HungWorker(10.0, "no output, no CPU time, the same stack")}


@pytest.mark.parametrize(
    "sample",
    [
        ActivitySample(101, 1.0, STACK),
        ActivitySample(100, 1.1, STACK),
        ActivitySample(100, 1.0, "other (train.py:4)"),
        ActivitySample(100, 1.0, STACK, is_runnable=True),
    ],
)
def test_any_activity_starts_the_timeout_again(sample: ActivitySample) -> None:
    progress = ProgressTracker(1, 10.0, now=0.0)
    silent(progress, 10.0)
    progress.on_sample(0, sample, 12.5)
    assert progress.hung_workers(12.5) == {}
    assert progress.idle_seconds(0, 12.5) == 0.0


def test_if_nothing_could_be_observed_all_timeouts_start_again() -> None:
    progress = ProgressTracker(2, 10.0, now=0.0)
    progress.on_heartbeat(1, None, 1, 1.0)
    silent(progress, 10.0)
    progress.restart_timeouts(100.0)
    assert (progress.hung_workers(100.0), progress.next_check()) == ({}, 102.5)
    assert progress.worker_progress(100.0)[1].age == 99.0
    assert progress.hung_workers(110.0) == {1: HungWorker(109.0, "no heartbeat")}


def test_little_cpu_time_is_no_activity() -> None:
    progress = ProgressTracker(1, 10.0, now=0.0)
    silent(progress, 10.0)
    progress.on_sample(0, ActivitySample(100, 1.02, STACK), 12.5)
    assert progress.hung_workers(12.5) != {}


def test_a_worker_without_a_stack_does_not_hang() -> None:
    progress = ProgressTracker(1, 10.0, now=0.0)
    for now in (2.5, 5.0, 7.5, 10.0, 12.5, 15.0):
        progress.on_sample(0, ActivitySample(0, 0.0, ""), now)
    assert progress.hung_workers(15.0) == {}


def test_a_worker_that_cannot_be_sampled_does_not_hang_and_is_sampled_later() -> None:
    progress = ProgressTracker(1, 10.0, now=0.0)
    silent(progress, 10.0)
    progress.on_sample_failed(0, 12.5)
    assert progress.hung_workers(12.5) == {}
    assert progress.next_check() == 15.0


def test_a_worker_with_heartbeats_is_not_sampled() -> None:
    progress = ProgressTracker(1, 10.0, now=0.0)
    progress.on_heartbeat(0, 1, 1, 1.0)
    assert progress.due_samples(5.0) == {}


def test_a_worker_that_has_ended_does_not_hang() -> None:
    progress = ProgressTracker(1, 10.0, now=0.0)
    progress.on_heartbeat(0, 7, 1, 1.0)
    progress.remove(0)
    assert progress.hung_workers(100.0) == {}
    assert progress.next_check() is None
    assert progress.step_ranges()[0].last == 7
    progress.on_heartbeat(0, 8, 2, 100.0)
    assert progress.step_ranges()[0].last == 7


def test_without_a_timeout_no_worker_hangs_and_heartbeats_are_counted() -> None:
    progress = ProgressTracker(2, 0.0, now=0.0)
    assert (progress.next_check(), progress.due_samples(100.0)) == (None, {})
    progress.on_heartbeat(0, 10, 1, 1.0)
    progress.on_heartbeat(0, 14, 5, 3.0)
    assert progress.hung_workers(1e6) == {}
    assert progress.worker_progress(4.0) == {0: WorkerProgress(14, 2.0, 1.0, 5, 1.0)}
    steps = progress.step_ranges()[0]
    assert (steps.first, steps.last, steps.seconds) == (10, 14, 2.0)


def test_the_rate_is_a_moving_average_of_the_latest_steps() -> None:
    progress = ProgressTracker(1, 0.0, now=0.0)
    for second in range(50):
        progress.on_heartbeat(0, 2 * second if second < 20 else 20 + second, second + 1, float(second))
    assert progress.worker_progress(49.0)[0].rate == pytest.approx(1.0, rel=0.01)


def test_a_commit_is_progress_but_no_heartbeat() -> None:
    progress = ProgressTracker(1, 10.0, now=0.0)
    progress.on_commit(0, 5, Commits(1, 0.1, 1000, at=0.5), 1.0)
    progress.on_commit(0, 9, commits := Commits(3, 0.2, 1000, at=2.5), 3.0)
    assert progress.worker_progress(4.0) == {0: WorkerProgress(9, 2.0, None, None, 1.0, commits, 1.5)}
    steps = progress.step_ranges()[0]
    assert (steps.first, steps.last, steps.seconds) == (5, 9, 2.0)
    assert progress.hung_workers(100.0) == {}  # a script that commits rarely does not hang
    assert progress.due_samples(3.0) == {0: False}


def test_the_steps_of_heartbeats_count_before_those_of_commits() -> None:
    progress = ProgressTracker(1, 10.0, now=0.0)
    progress.on_heartbeat(0, 100, 1, 1.0)
    progress.on_commit(0, 3, Commits(3, 0.1, 1000, at=2.0), 2.0)
    assert progress.worker_progress(2.0)[0].step == 100
    assert progress.worker_progress(2.0)[0].commit_age == 0.0


def test_calls_that_commit_nothing_have_no_age() -> None:
    progress = ProgressTracker(1, 10.0, now=0.0)
    progress.on_commit(0, 3, Commits(0, 0.0, 0, at=2.0), 2.0)
    found = progress.worker_progress(2.0)[0]
    assert (found.step, found.commits, found.commit_age) == (3, None, None)


def progress(
    step: int | None, rate: float = 0.0, *, step_age: float = 0.0, commit: float | None = None
) -> WorkerProgress:
    commits = Commits(1, 0.0, 0, 0.0) if commit is not None else None
    return WorkerProgress(step, rate, 0.0, 1, step_age, commits, commit)


def test_progress_is_that_of_the_rank_that_is_furthest_behind() -> None:
    workers = {0: progress(120, 3.4), 1: progress(118, 3.2, commit=12.0), 2: progress(None)}
    assert worker_progress_text(workers) == "step 118, 3.3 steps/s, last commit 12 s ago"


def test_slow_steps_and_silence_are_named() -> None:
    assert worker_progress_text({0: progress(5, 0.25)}) == "step 5, 4.0 s/step"
    assert worker_progress_text({0: progress(5, 0.25, step_age=39.0)}) == "step 5, 4.0 s/step"
    assert worker_progress_text({0: progress(5, 0.25, step_age=100.0)}) == "step 5, 4.0 s/step, no step for 1 min 40 s"


def test_a_script_that_reports_no_steps_has_no_progress() -> None:
    assert worker_progress_text({}) == ""
    assert worker_progress_text({0: progress(None)}) == ""
