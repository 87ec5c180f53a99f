"""Which ranks are stragglers, when they are reported, and what is said about them."""

from collections.abc import Iterable

import pytest

from ripstop.coordinator.stragglers import Stragglers, paces_to_find_stragglers, straggler_hardware_text
from ripstop.model.config import StragglerLimits
from ripstop.model.events import StragglerDetected, StragglerEnded
from ripstop.model.usage import GpuSample, NodeSample, RankSample, StepProfile

LIMITS = StragglerLimits(factor=1.5, seconds=60.0)


def profile(*arrivals: float, period: float = 0.3, waiting: float | None = None, count: int = 1) -> StepProfile:
    return StepProfile(count, period, arrivals, waiting)


def node(at: float, ranks: Iterable[tuple[int, StepProfile | None]], *, round: int = 1, **more: float) -> NodeSample:
    return NodeSample(
        at, round, 0.0, 0, tuple(RankSample(r, 0.0, 0, 1, 1, 0, profile=p) for r, p in ranks), (), (), **more
    )


def feed(stragglers: Stragglers, now: float, late: dict[int, float], *, round: int = 1, ranks: int = 3) -> list[object]:
    """One sample of a node with three ranks; each sample has a new profile."""
    profiles = [(r, profile(0.05 + late.get(r, 0.0), count=int(now))) for r in range(ranks)]
    return list(stragglers.on_samples(round, {"a": node(now, profiles, round=round)}, now))


def test_the_rank_that_enters_collectives_last_is_late() -> None:
    found = paces_to_find_stragglers({0: profile(0.05, 0.1), 1: profile(0.05, 0.1), 2: profile(0.25, 0.3)})
    assert found[2].lateness == pytest.approx(0.2) and found[2].slowdown == pytest.approx(3.0)
    assert (found[0].lateness, found[0].slowdown) == (0.0, 1.0)
    assert (found[0].own_time, found[2].own_time) == (pytest.approx(0.1), pytest.approx(0.3))


def test_of_two_ranks_the_slower_one_is_late() -> None:
    found = paces_to_find_stragglers({0: profile(0.25), 1: profile(0.05)})
    assert found[0].slowdown > 2 and found[1].slowdown == 1


def test_a_rank_that_is_late_once_is_late_even_if_all_wait_for_each_other_afterwards() -> None:
    """The last collective sums the loss: all ranks enter it together."""
    found = paces_to_find_stragglers({0: profile(0.05, 0.29), 1: profile(0.05, 0.29), 2: profile(0.25, 0.29)})
    assert found[2].lateness == pytest.approx(0.2)


def test_on_gpus_the_rank_whose_collectives_take_the_least_time_is_late() -> None:
    found = paces_to_find_stragglers({r: profile(0.01, waiting=0.02 if r == 1 else 0.22) for r in range(4)})
    assert found[1].lateness == pytest.approx(0.2) and found[0].lateness == 0


def test_ranks_with_other_collectives_are_not_compared() -> None:
    assert set(paces_to_find_stragglers({0: profile(0.1, 0.2), 1: profile(0.1, 0.2), 2: profile(0.25)})) == {0, 1}
    assert paces_to_find_stragglers({0: profile(0.1)}) == {}


def test_without_collectives_the_times_of_steps_are_compared() -> None:
    found = paces_to_find_stragglers({0: profile(period=0.1), 1: profile(period=0.1), 2: profile(period=0.3)})
    assert found[2].slowdown == pytest.approx(3.0) and found[0].slowdown == 1


def test_a_rank_that_is_slow_for_the_time_is_reported_once() -> None:
    stragglers = Stragglers(LIMITS)
    found = [event for now in range(10, 200, 10) for event in feed(stragglers, now, {2: 0.2})]
    (event,) = found
    assert isinstance(event, StragglerDetected)
    assert (event.round, event.name, event.ranks, event.seconds) == (1, "a", (2,), 60.0)
    assert event.why.startswith("rank 2 on node a: a step takes 300 ms, 3.0 times as long as the others need (100 ms)")
    (status,) = stragglers.status(200.0)
    assert (status.node, status.ranks, status.seconds) == ("a", (2,), 130.0)


def test_a_rank_that_is_slow_for_a_shorter_time_is_not_reported() -> None:
    stragglers = Stragglers(LIMITS)
    assert [event for now in range(10, 300, 10) for event in feed(stragglers, now, {2: 0.2} if now % 60 else {})] == []


def test_one_old_profile_makes_no_straggler() -> None:
    stragglers = Stragglers(LIMITS)
    ranks = [(0, profile(0.05)), (1, profile(0.25))]
    assert [e for now in range(10, 300, 10) for e in stragglers.on_samples(1, {"a": node(now, ranks)}, now)] == []


def test_a_rank_that_is_fast_again_for_the_time_is_no_straggler() -> None:
    stragglers = Stragglers(LIMITS)
    found = [event for now in range(10, 80, 10) for event in feed(stragglers, now, {2: 0.2})]
    found += [event for now in range(80, 150, 10) for event in feed(stragglers, now, {})]
    assert [type(event) for event in found] == [StragglerDetected, StragglerEnded]
    assert found[1] == StragglerEnded(1, "a", (2,), 70.0, "as fast as its peers again")
    assert stragglers.status(150.0) == ()


def test_the_end_of_a_round_ends_its_stragglers() -> None:
    stragglers = Stragglers(LIMITS)
    for now in range(10, 80, 10):
        feed(stragglers, now, {2: 0.2})
    assert feed(stragglers, 80, {}, round=2) == [StragglerEnded(1, "a", (2,), 10.0, "round 1 has ended")]
    assert stragglers.status(80.0) == ()


def test_small_differences_and_small_steps_are_no_reason() -> None:
    stragglers = Stragglers(LIMITS)
    for now in range(10, 300, 10):
        assert feed(stragglers, now, {2: 0.08}) == []  # 1.36 times
    quick = [(r, profile(0.003 if r else 0.0001, period=0.004, count=n)) for n in range(9) for r in (0, 1)]
    for index in range(0, 18, 2):
        assert stragglers.on_samples(2, {"a": node(0.0, quick[index : index + 2], round=2)}, 300.0 + 10 * index) == []


def test_all_slow_ranks_of_a_node_are_one_event() -> None:
    stragglers = Stragglers(LIMITS)
    found: list[object] = []
    for now in range(10, 100, 10):
        fast = node(now, [(r, profile(0.05, count=now)) for r in range(2)])
        slow = node(now, [(r, profile(0.25, count=now)) for r in (2, 3)])
        found += stragglers.on_samples(1, {"a": fast, "b": slow}, now)
    (event,) = found
    assert isinstance(event, StragglerDetected) and (event.name, event.ranks) == ("b", (2, 3))


def test_the_evidence_names_throttled_gpus_steal_and_load() -> None:
    slow = GpuSample(
        3, memory_used=70 << 30, memory_total=80 << 30, clock=345, clock_max=1980, throttled=("power brake",)
    )
    sample = NodeSample(20.0, 1, 0.0, 0, (), (GpuSample(0, clock=1980, clock_max=1980), slow), (), 3.25, 7.0)
    assert straggler_hardware_text(sample, (10.0, 5.0)) == (
        "GPU 3: 345 of 1980 MHz, throttled by power brake, 70.0 GiB of 80.0 GiB in use, "
        "CPU steal 20 %, load 3.2 per CPU"
    )
    healthy = NodeSample(20.0, 1, 0.0, 0, (), (GpuSample(0, clock=1980, clock_max=1980),))
    assert straggler_hardware_text(healthy, None) == "no GPU is throttled"
