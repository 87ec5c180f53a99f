"""The history of a job: bounded, and it keeps peaks."""

from hypothesis import given
from hypothesis import strategies as st

from ripstop.model.usage import GpuSample, NodeSample, RankSample
from ripstop.telemetry.history import MAX_POINTS, History, Point, history_interval_s, history_point


@given(st.integers(min_value=0, max_value=5 * MAX_POINTS))
def test_a_history_covers_the_whole_job_in_a_bounded_number_of_points(samples: int) -> None:
    history = History()
    for at in range(samples):
        history.add(Point(float(at), goodput=0.5))
    columns = history.columns()
    assert len(columns["at"]) <= MAX_POINTS
    assert columns["at"] == sorted(set(columns["at"]))
    assert columns["at"][:1] == [0.0][:samples]
    if samples:
        assert samples - columns["at"][-1] <= max(1, 2 * samples / MAX_POINTS), "the latest samples are in it"
        assert set(columns["goodput"]) == {0.5}


def test_merged_points_keep_peaks_and_average_the_rest() -> None:
    history = History()
    for at in range(MAX_POINTS):
        history.add(Point(float(at), step_time_p50=at % 2, step_time_p99=9.0 if at == 100 else 1.0, memory=None))
    columns = history.columns()
    assert len(columns["at"]) == MAX_POINTS // 2
    assert max(columns["step_time_p99"]) == 9.0
    assert set(columns["step_time_p50"]) == {0.5}
    assert set(columns["memory"]) == {None}


def test_a_point_has_the_percentiles_of_all_ranks_and_the_peaks_of_memory() -> None:
    ranks = [RankSample(n, 1.0, 100 + n, 1, 1, 0, 5, 1 / (n + 1), 0.1, 5) for n in range(100)]
    silent = RankSample(100, 1.0, 5, 1, 1, 0)
    gpus = (GpuSample(0, 0.5, 10, 40), GpuSample(1, 1.0, 30, 40), GpuSample(2))
    nodes = [NodeSample(1.0, 1, 0.0, 1, tuple(ranks[:50]), gpus), NodeSample(1.0, 1, 0.0, 1, (*ranks[50:], silent))]
    found = history_point(nodes, 0.9, 7.0)
    assert found == Point(7.0, found.step_time_p50, found.step_time_p99, 0.9, 199, 0.75, 0.75)
    assert (round(found.step_time_p50 or 0, 6), round(found.step_time_p99 or 0, 6)) == (50.0, 99.0)
    assert history_point([], None, 1.0) == Point(1.0)


def test_large_jobs_are_sampled_less_often() -> None:
    assert history_interval_s(1) == history_interval_s(1000) == 10.0
    assert history_interval_s(4000) == 40.0
