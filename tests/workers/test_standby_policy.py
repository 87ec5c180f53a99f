"""When standbys are made, taken and discarded: transcripts, and rules that hold for every order of events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ripstop.model.config import StandbyUntil
from ripstop.workers.standby_policy import (
    MAKE_DELAY_S,
    MAX_FAILURES,
    RUN_AHEAD_DELAY_S,
    RUN_AHEAD_TIMEOUT_S,
    WARM_UP_TIMEOUT_S,
    Declined,
    Discard,
    FirstStep,
    FunctionCalled,
    Idle,
    Make,
    ReportFailure,
    RoundStarted,
    RoundStopping,
    StandbyEvent,
    StandbyFailed,
    StandbyPolicy,
    State,
    Taken,
    Tick,
    Unavailable,
    WarmedUp,
    WorkerStarting,
)


def running(count: int) -> StandbyPolicy:
    """The policy of a node whose round has reported its first step."""
    policy = StandbyPolicy(count)
    assert policy.on(RoundStarted(), 0.0) == []
    assert policy.on(FirstStep(), 1.0) == [Make(rank) for rank in range(count)]
    return policy


def test_standbys_are_made_at_the_first_step():
    policy = running(2)
    assert policy.on(FirstStep(), 2.0) == []
    assert policy.on(WarmedUp(0), 3.0) == []
    assert policy.states == {0: State.READY, 1: State.WARMING}


def test_without_steps_standbys_are_made_a_few_seconds_after_the_start():
    policy = StandbyPolicy(1)
    assert policy.on(RoundStarted(), 10.0) == []
    assert policy.deadline() == 10.0 + MAKE_DELAY_S
    assert policy.on(Tick(), 10.0 + MAKE_DELAY_S) == [Make(0)]


def test_a_node_without_a_round_makes_its_standbys_too():
    policy = StandbyPolicy(1)
    assert policy.on(Idle(), 0.0) == []
    assert policy.on(Tick(), MAKE_DELAY_S) == [Make(0)]


def test_none_is_made_while_workers_stop_and_start():
    policy = StandbyPolicy(1)
    policy.on(RoundStarted(), 0.0)
    policy.on(RoundStopping(), 1.0)
    assert policy.deadline() is None
    assert policy.on(FirstStep(), 2.0) == policy.on(Tick(), 99.0) == []
    policy.on(RoundStarted(), 100.0)
    assert policy.on(FirstStep(), 101.0) == [Make(0)]


def test_a_taken_standby_is_replaced_in_the_next_round():
    policy = running(1)
    policy.on(WarmedUp(0), 2.0)
    policy.on(RoundStopping(), 3.0)
    assert policy.on(Taken(0), 4.0) == []
    policy.on(RoundStarted(), 4.0)
    assert policy.on(FirstStep(), 5.0) == [Make(0)]


def test_a_failed_standby_is_not_replaced_in_its_round_and_after_three_failures_never():
    policy = running(1)
    for number in range(1, MAX_FAILURES + 1):
        is_final = number == MAX_FAILURES
        report = ReportFailure(0, "bad", is_final, is_news=number in (1, MAX_FAILURES))
        assert policy.on(StandbyFailed(0, "bad"), 2.0) == [Discard(0), report]
        assert policy.on(FirstStep(), 3.0) == []
        policy.on(RoundStarted(), 4.0)
        assert policy.on(FirstStep(), 5.0) == ([] if is_final else [Make(0)])
    assert policy.states == {0: State.GIVEN_UP}


def test_a_failure_of_all_ranks_is_news_once():
    policy = running(3)
    reports = [command for rank in range(3) for command in policy.on(StandbyFailed(rank, "bad"), 2.0)]
    assert [each.is_news for each in reports if isinstance(each, ReportFailure)] == [True, False, False]


def test_a_standby_that_was_ready_resets_the_count():
    policy = running(1)
    for _ in range(2 * MAX_FAILURES):
        policy.on(WarmedUp(0), 2.0)
        assert policy.on(StandbyFailed(0, "killed"), 3.0) == [Discard(0), ReportFailure(0, "killed", False, True)]
        policy.on(RoundStarted(), 4.0)
        assert policy.on(FirstStep(), 5.0) == [Make(0)]


def test_a_warm_up_that_takes_too_long_is_ended():
    policy = running(1)
    assert policy.deadline() == 1.0 + WARM_UP_TIMEOUT_S
    assert policy.on(Tick(), 1.0 + WARM_UP_TIMEOUT_S) == [Discard(0), ReportFailure(0, "", False, True)]
    assert policy.on(WarmedUp(0), 200.0) == []
    assert policy.states == {0: State.FAILED}


def test_a_declined_standby_is_considered_again_in_the_next_round():
    policy = running(1)
    assert policy.on(Declined(0), 2.0) == []
    assert policy.on(Tick(), 99.0) == []
    policy.on(RoundStarted(), 100.0)
    assert policy.on(FirstStep(), 101.0) == [Make(0)]


def test_without_a_zygote_there_are_none():
    policy = running(2)
    policy.on(WarmedUp(0), 2.0)
    assert policy.on(Unavailable(), 3.0) == [Discard(0), Discard(1)]
    policy.on(RoundStarted(), 4.0)
    assert policy.on(FirstStep(), 5.0) == []
    assert policy.deadline() is None


def test_a_failure_at_the_deadline_does_not_delay_what_is_due() -> None:
    policy = running(2)
    policy.on(WarmedUp(0), 2.0)
    policy.on(WarmedUp(1), 2.0)
    policy.on(Taken(1), 3.0)
    policy.on(Idle(), 4.0)
    due = policy.deadline()
    assert due is not None
    assert Make(1) in policy.on(StandbyFailed(0, "why"), due)
    assert policy.deadline() > due


# standbys that run the script -----------------------------------------------------------------------------------------

ELASTIC = StandbyUntil.ELASTIC


def running_ahead() -> StandbyPolicy:
    policy = StandbyPolicy(1, ELASTIC)
    policy.on(RoundStarted(), 0.0)
    policy.on(FunctionCalled(0), 0.0)
    assert policy.on(FirstStep(), 1.0) == [Make(0, ELASTIC)]
    return policy


def test_standbys_that_run_the_script_do_not_run_it_beside_workers_that_start() -> None:
    policy = StandbyPolicy(1, ELASTIC)
    policy.on(RoundStarted(), 0.0)
    policy.on(FunctionCalled(0), 0.0)
    assert policy.deadline() == RUN_AHEAD_DELAY_S
    assert policy.on(Tick(), RUN_AHEAD_DELAY_S) == [Make(0, ELASTIC)]


def test_where_no_worker_calls_the_function_no_standby_runs_the_script() -> None:
    policy = StandbyPolicy(1, ELASTIC)
    for start in (0.0, 1000.0):
        policy.on(RoundStarted(), start)
        assert policy.on(FirstStep(), start + 1.0) == []
        assert policy.on(Tick(), start + RUN_AHEAD_DELAY_S) == [Make(0)]
        policy.on(WarmedUp(0), start + 100.0)
        assert policy.on(FirstStep(), start + 101.0) == []
        assert policy.deadline() is None
        policy.on(RoundStopping(), start + 102.0)
        policy.on(Taken(0), start + 102.0)


def test_only_the_local_ranks_whose_worker_has_called_the_function_run_the_script() -> None:
    policy = StandbyPolicy(2, ELASTIC)
    policy.on(RoundStarted(), 0.0)
    policy.on(FunctionCalled(1), 1.0)
    policy.on(FunctionCalled(2), 1.0)  # it has no standby
    assert policy.on(FirstStep(), 2.0) == [Make(0), Make(1, ELASTIC)]


@pytest.mark.parametrize("is_ready", [True, False], ids=["ready", "warming"])
def test_a_late_call_of_the_function_changes_the_kind_when_it_disturbs_least(is_ready: bool) -> None:
    policy = StandbyPolicy(1, ELASTIC)
    policy.on(RoundStarted(), 0.0)
    assert policy.on(Tick(), RUN_AHEAD_DELAY_S) == [Make(0)]
    if is_ready:
        policy.on(WarmedUp(0), 70.0)
        assert policy.on(FunctionCalled(0), 80.0) == []
        assert policy.deadline() == 80.0 + RUN_AHEAD_DELAY_S
        assert policy.on(FirstStep(), 81.0) == [Discard(0), Make(0, ELASTIC)]
    else:
        assert policy.on(FunctionCalled(0), 80.0) == policy.on(FirstStep(), 81.0) == []
        assert policy.on(WarmedUp(0), 82.0) == [Discard(0), Make(0, ELASTIC)]


def test_a_new_worker_has_to_call_the_function_again_and_a_kept_one_has_not() -> None:
    policy = StandbyPolicy(2, ELASTIC)
    for rank in (0, 1):
        policy.on(FunctionCalled(rank), 0.0)
    policy.on(RoundStopping(), 1.0)
    policy.on(WorkerStarting(1), 2.0)
    policy.on(RoundStarted(), 3.0)
    assert policy.on(FirstStep(), 4.0) == [Make(0, ELASTIC), Make(1)]


def test_a_node_without_a_round_has_no_rank_to_run_the_script_with() -> None:
    policy = StandbyPolicy(1, ELASTIC)
    policy.on(Idle(), 0.0)
    assert policy.on(Tick(), MAKE_DELAY_S) == [Make(0)]
    policy.on(WarmedUp(0), 6.0)
    policy.on(Taken(0), 7.0)
    policy.on(RoundStarted(), 7.0)
    policy.on(FunctionCalled(0), 7.0)
    assert policy.on(FirstStep(), 8.0) == [Make(0, ELASTIC)]


def test_if_the_script_fails_the_other_kind_takes_its_place_in_this_round_and_after_three_failures_always() -> None:
    policy, now = running_ahead(), 1.0
    for number in range(1, MAX_FAILURES + 1):
        is_final = number == MAX_FAILURES
        report = ReportFailure(0, "bad", is_final, number in (1, MAX_FAILURES), ELASTIC)
        now += 1.0
        assert policy.on(StandbyFailed(0, "bad"), now) == [Discard(0), report, Make(0)]
        policy.on(WarmedUp(0), now)
        policy.on(RoundStopping(), now)
        policy.on(Taken(0), now)
        policy.on(RoundStarted(), now)
        assert policy.on(FirstStep(), now) == [Make(0) if is_final else Make(0, ELASTIC)]


def test_a_failure_while_workers_stop_makes_nothing_and_the_next_round_tries_again() -> None:
    policy = running_ahead()
    policy.on(RoundStopping(), 2.0)
    assert policy.on(StandbyFailed(0, "bad"), 3.0) == [Discard(0), ReportFailure(0, "bad", False, True, ELASTIC)]
    policy.on(RoundStarted(), 4.0)
    assert policy.on(FirstStep(), 5.0) == [Make(0, ELASTIC)]


def test_a_script_that_takes_too_long_is_ended_and_the_other_kind_has_its_own_time() -> None:
    policy = running_ahead()
    assert policy.deadline() == 1.0 + RUN_AHEAD_TIMEOUT_S
    now = 1.0 + RUN_AHEAD_TIMEOUT_S
    assert policy.on(Tick(), now) == [Discard(0), ReportFailure(0, "", False, True, ELASTIC), Make(0)]
    assert policy.deadline() == now + WARM_UP_TIMEOUT_S


def test_one_that_was_ready_resets_the_count_of_its_kind_only() -> None:
    policy, now = running_ahead(), 1.0
    for _ in range(2 * MAX_FAILURES):
        policy.on(WarmedUp(0), now)
        policy.on(StandbyFailed(0, "killed"), now)
        policy.on(WarmedUp(0), now)
        policy.on(Taken(0), now)
        policy.on(RoundStarted(), now)
        assert policy.on(FirstStep(), now) == [Make(0, ELASTIC)]


# any order ------------------------------------------------------------------------------------------------------------

RANKS = st.integers(0, 2)
EVENTS = st.one_of(
    st.sampled_from([Idle(), RoundStarted(), FirstStep(), RoundStopping(), Unavailable(), Tick()]),
    st.builds(WarmedUp, RANKS),
    st.builds(WorkerStarting, RANKS),
    st.builds(FunctionCalled, RANKS),
    st.builds(StandbyFailed, RANKS, st.just("why")),
    st.builds(Declined, RANKS),
    st.builds(Taken, RANKS),
)


@given(st.lists(st.tuples(EVENTS, st.floats(0.0, 60.0)), max_size=60), st.sampled_from(StandbyUntil))
def test_in_any_order_of_events_the_processes_match_the_states(
    story: list[tuple[StandbyEvent, float]], until: StandbyUntil
) -> None:
    """No rank ever has two processes or a lost one, and nothing is made while workers stop or start."""
    policy, now = StandbyPolicy(3, until), 0.0
    processes: set[int] = set()  # as a driver has them
    may_make = False
    called: set[int] = set()
    failures = {(rank, kind): 0 for rank in range(3) for kind in StandbyUntil}
    for event, pause in story:
        now += pause
        match event:
            case Idle() | RoundStarted():
                may_make = True
            case RoundStopping() | Unavailable():
                may_make = False
            case WorkerStarting(rank):
                called.discard(rank)
            case FunctionCalled(rank):
                called.add(rank)
            case WarmedUp(rank) | StandbyFailed(rank) | Taken(rank) | Declined(rank) if rank not in processes:
                continue  # a driver reports only processes that it has
            case Taken(rank) if policy.states[rank] is not State.READY:
                continue
            case Declined(rank) if policy.states[rank] is not State.WARMING:
                continue
            case Taken(rank) | Declined(rank):
                processes.discard(rank)
            case WarmedUp(rank):
                failures[rank, policy.untils[rank]] = 0
        for command in policy.on(event, now):
            match command:
                case Make(rank, kind):
                    assert may_make and rank not in processes and failures[rank, kind] < MAX_FAILURES
                    assert kind is StandbyUntil.SCRIPT or (kind is until and rank in called)
                    processes.add(rank)
                case Discard(rank):
                    processes.remove(rank)
                case ReportFailure(rank, _, is_final, _, kind):
                    failures[rank, kind] += 1
                    assert is_final == (failures[rank, kind] >= MAX_FAILURES)
        live = {rank for rank, state in policy.states.items() if state in (State.WARMING, State.READY)}
        assert live == processes
        deadline = policy.deadline()
        assert deadline is None or deadline > now
