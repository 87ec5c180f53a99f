"""Where the time of steps goes: profiles from the entries of torch's flight recorder, and when they are taken."""

from itertools import pairwise
from typing import Any

import pytest

from ripstop.train.step_profile import Entries, StepProfile, StepProfiler, measure_step_profile

MS = 1_000_000  # nanoseconds


def entry(at_ms: float, duration_ms: float | None = None, *, p2p: bool = False) -> dict[str, Any]:
    timed = {} if duration_ms is None else {"duration_ms": duration_ms}
    return {"time_created_ns": int(at_ms * MS), "is_p2p": p2p, **timed}


def starts(*at_ms: float) -> list[int]:
    return [int(at * MS) for at in at_ms]


def test_a_profile_has_the_medians_of_the_steps() -> None:
    entries = [entry(at) for at in (30, 90, 140, 190, 260, 290)]  # the third step is late
    assert measure_step_profile(starts(0, 100, 200, 300), entries) == StepProfile(
        0.1, pytest.approx([0.04, 0.09]), None
    )


def test_steps_with_another_number_of_collectives_do_not_count() -> None:
    entries = [entry(at) for at in (30, 130, 230, 240, 250, 330)]
    found = measure_step_profile(starts(0, 100, 200, 300, 400), entries)
    assert found is not None and found.arrivals == pytest.approx([0.03])


def test_the_time_of_collectives_on_the_gpu_is_their_sum_in_a_step() -> None:
    entries = [entry(at, 20.0) for at in (30, 40, 130, 140, 230, 240)]
    found = measure_step_profile(starts(0, 100, 200, 300), entries)
    assert found is not None and found.waiting == pytest.approx(0.04)


def test_of_many_collectives_a_few_are_reported_with_the_first_and_the_last() -> None:
    entries = [entry(100 * step + at) for step in range(3) for at in range(1, 91)]
    found = measure_step_profile(starts(0, 100, 200, 300), entries)
    assert found is not None and len(found.arrivals) == 8
    assert (found.arrivals[0], found.arrivals[-1]) == (pytest.approx(0.001), pytest.approx(0.09))


def test_steps_without_collectives_have_only_a_time() -> None:
    assert measure_step_profile(starts(0, 100, 200, 300), []) == StepProfile(0.1, [], None)


def test_a_worker_with_point_to_point_messages_has_no_profile() -> None:
    assert measure_step_profile(starts(0, 100, 200, 300), [entry(30), entry(130), entry(230, p2p=True)]) is None


class Clock:
    """Steps of 0.1 s; reading the recorder takes `cost`."""

    def __init__(self, cost: float) -> None:
        self.now = 0.0
        self.cost = cost
        self.reads: list[float] = []
        self.profiler = StepProfiler(self.read, lambda: int(self.now * 1e9), lambda: self.now)

    def read(self) -> Entries:
        self.reads.append(self.now)
        self.now += self.cost
        return []

    def train(self, steps: range) -> list[int]:
        """The steps at which a profile was taken."""
        taken = []
        for step in steps:
            self.now += 0.1
            if self.profiler.on_heartbeat(step):
                taken.append(step)
        return taken


def test_all_ranks_take_profiles_at_the_same_steps_wherever_they_start() -> None:
    assert Clock(0.001).train(range(1, 100)) == [16, 32, 48, 64, 80, 96]
    assert Clock(0.0001).train(range(37, 100)) == [48, 64, 80, 96]


def test_an_expensive_recorder_is_read_rarely() -> None:
    clock = Clock(0.05)
    clock.train(range(1, 2000))
    gaps = [later - earlier for earlier, later in pairwise(clock.reads)]
    assert gaps and min(gaps[1:]) >= 25


def test_a_worker_that_reports_every_tenth_step_has_no_profile() -> None:
    assert Clock(0.001).train(range(0, 2000, 10)) == []


def test_commits_count_as_steps_only_in_a_script_without_heartbeats() -> None:
    clock = Clock(0.001)

    def commits(steps: range) -> list[int]:
        taken = []
        for step in steps:
            clock.now += 0.1
            if clock.profiler.on_commit(step):
                taken.append(step)
        return taken

    assert commits(range(1, 40)) == [16, 32]
    clock.profiler.on_heartbeat(40)
    assert commits(range(41, 200)) == []
