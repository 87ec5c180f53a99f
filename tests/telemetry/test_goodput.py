"""Goodput compared with a model that records every step."""

from dataclasses import dataclass
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from ripstop.model.events import AgentMessage, Event, EventRecord, FirstStep, JobClosed, StepsDone
from ripstop.telemetry import goodput
from ripstop.telemetry.goodput import Goodput

NODES = ("a", "b")  # the ranks 0 and 1


@dataclass(frozen=True, slots=True)
class Round:
    """Steps `first` to `first + more` of `step` seconds each, after `start` seconds."""

    first: int
    more: int
    step: float
    start: float
    reported: tuple[bool, bool]  # which nodes report its end


@st.composite
def jobs(draw: st.DrawFn) -> list[Round]:
    rounds: list[Round] = []
    reached = 0
    for _ in range(draw(st.integers(1, 6))):
        first = draw(st.integers(0, reached + 1))
        more = draw(st.integers(0, 6))
        times = st.floats(0.01, 10)
        reported = draw(st.sampled_from([(True, True), (True, False), (False, True)]))
        rounds.append(Round(first, more, draw(times), draw(times), reported))
        reached = first + more
    return rounds


def entries(rounds: list[Round]) -> tuple[list[EventRecord], float]:
    """The records of these rounds, in order, and the end time; the job begins at 100."""
    events: list[tuple[float, str, Event]] = [(100.0, "", AgentMessage("the job begins"))]
    now = 100.0
    for number, round in enumerate(rounds, 1):
        now += round.start
        events += [(now, node, FirstStep(number, rank, round.first, round.start)) for rank, node in enumerate(NODES)]
        now += round.more * round.step
        for rank, node in enumerate(NODES):
            if round.reported[rank]:
                last = round.first + round.more
                events.append((now, node, StepsDone(number, rank, round.first, last, round.more * round.step)))
    return [EventRecord(i, at, node, event) for i, (at, node, event) in enumerate(events, 1)], now


def naive(rounds: list[Round]) -> tuple[float, float, int]:
    """A round that begins at a step loses that step and all later ones of earlier rounds."""
    done: dict[int, float] = {}
    lost, times = 0.0, 0
    for round in rounds:
        for undone in [step for step in done if step >= round.first]:
            lost += done.pop(undone)
            times += 1
        for step in range(round.first + 1, round.first + round.more + 1):
            done[step] = round.step
    return sum(done.values()), lost, times


@given(jobs(), st.randoms())
def test_goodput_equals_a_model_of_every_step(rounds: list[Round], random: Random) -> None:
    records, end = entries(rounds)
    random.shuffle(records)
    measured = Goodput()
    for entry in records:
        measured.on(entry)
    spent = measured.spent(end)
    kept, lost, times = naive(rounds)
    assert (spent.kept, spent.lost, spent.steps_lost) == (approx(kept), approx(lost), times)
    assert spent.wall == approx(end - 100)
    assert spent.ratio == approx(kept / (end - 100))


def test_a_repeated_first_step_is_no_loss_but_the_steps_after_it_are() -> None:
    measured = Goodput()
    measured.on(EventRecord(1, 10.0, "", AgentMessage("the job begins")))
    for at, event in (
        (10.0, FirstStep(1, 0, 1, 1.0)),
        (20.0, StepsDone(1, 0, 1, 11, 10.0)),
        (25.0, FirstStep(2, 0, 7, 1.0)),  # a checkpoint of step 6
    ):
        measured.on(EventRecord(1, at, "a", event))
    spent = measured.spent(30.0)
    assert (spent.kept, spent.lost, spent.steps_lost, spent.wall) == (5.0, 5.0, 5, 20.0)


def test_a_running_round_counts_up_to_its_last_observed_step() -> None:
    measured = Goodput()
    measured.on(EventRecord(1, 100.0, "", AgentMessage("the job begins")))
    measured.on(EventRecord(1, 100.0, "a", FirstStep(1, 0, 5, 1.0)))
    measured.on_step(1, "a", 0, 15, 105.0)
    assert measured.spent(110.0).kept == 5.0
    measured.on_step(1, "b", 1, 30, 109.0)  # not the rank whose first step is known
    measured.on_step(2, "a", 0, 30, 109.0)  # not a round that has begun
    assert measured.spent(110.0).kept == 5.0
    measured.on(EventRecord(2, 108.0, "a", StepsDone(1, 0, 5, 20, 8.0)))
    assert measured.spent(110.0).kept == 8.0
    measured.on(EventRecord(3, 110.0, "", JobClosed("succeeded", "", 1, 0)))
    assert measured.spent(500.0).wall == 10.0


def test_the_lowest_rank_of_the_latest_round_is_the_reporter_until_the_end_is_reported() -> None:
    measured = Goodput()
    assert measured.reporter is None
    measured.on(EventRecord(1, 100.0, "b", FirstStep(1, 1, 5, 1.0)))
    assert measured.reporter == ("b", 1)
    measured.on(EventRecord(1, 101.0, "a", FirstStep(1, 0, 5, 1.0)))
    assert measured.reporter == ("a", 0)
    measured.on(EventRecord(2, 108.0, "a", StepsDone(1, 0, 5, 20, 8.0)))
    assert measured.reporter is None
    measured.on(EventRecord(2, 110.0, "b", FirstStep(2, 0, 21, 1.0)))
    assert measured.reporter == ("b", 0)


def test_steps_that_start_again_within_a_round_are_ignored() -> None:
    measured = Goodput()
    measured.on(EventRecord(1, 100.0, "a", StepsDone(1, 0, 50, 3, 8.0)))
    spent = measured.spent(200.0)
    assert (spent.kept, spent.lost, spent.steps_lost) == (0.0, 0.0, 0)


def test_a_wrong_clock_of_a_node_does_not_change_the_start_of_the_job() -> None:
    measured = Goodput()
    measured.on(EventRecord(1, 1e9, "", AgentMessage("the job begins")))
    measured.on(EventRecord(1, 0.0, "a", AgentMessage("it is 1970 here")))
    assert measured.spent(1e9 + 10.0).wall == 10.0


def test_without_steps_there_is_no_goodput() -> None:
    measured = Goodput()
    measured.on(EventRecord(1, 100.0, "", AgentMessage("x")))
    assert not measured.has_steps
    assert measured.spent(100.0).ratio == 0.0


def test_the_totals_of_old_rounds_are_final() -> None:
    measured = Goodput()
    for number in range(1, goodput.MAX_OPEN_ROUNDS + 101):
        first = 10 * number
        measured.on(EventRecord(2 * number, float(first), "a", StepsDone(number, 0, first, first + 9, 9.0)))
    measured.on(EventRecord(1, 1.0, "a", StepsDone(1, 0, 10, 19, 1e9)))  # repeated, much too late
    assert measured.spent(1e6).kept == 9.0 * (goodput.MAX_OPEN_ROUNDS + 100)


def test_steps_after_the_restored_commit_are_lost_and_committed_ones_are_not() -> None:
    for restored, lost in ((20, 5), (25, 0)):  # commits every ten steps, and after every step
        job = Goodput()
        for seq, (at, event) in enumerate(
            [
                (100.0, FirstStep(1, 0, 1, 1.0)),
                (124.0, StepsDone(1, 0, 1, 25, 24.0)),
                (130.0, FirstStep(2, 0, restored + 1, 1.0)),
            ]
        ):
            job.on(EventRecord(seq, at, "a", event))
        spent = job.spent(130.0)
        assert (spent.steps_lost, spent.kept, spent.lost) == (lost, approx(24.0 - lost), approx(float(lost)))
