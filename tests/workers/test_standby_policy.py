"""When standbys are made, taken and discarded: transcripts, and rules that hold for every order of events."""

from hypothesis import given
from hypothesis import strategies as st

from ripstop.workers.standby_policy import (
    MAKE_DELAY_S,
    MAX_FAILURES,
    WARM_UP_TIMEOUT_S,
    Declined,
    Discard,
    FirstStep,
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


RANKS = st.integers(0, 2)
EVENTS = st.one_of(
    st.sampled_from([Idle(), RoundStarted(), FirstStep(), RoundStopping(), Unavailable(), Tick()]),
    st.builds(WarmedUp, RANKS),
    st.builds(StandbyFailed, RANKS, st.just("why")),
    st.builds(Declined, RANKS),
    st.builds(Taken, RANKS),
)


@given(st.lists(st.tuples(EVENTS, st.floats(0.0, 60.0)), max_size=60))
def test_in_any_order_of_events_the_processes_match_the_states(story: list[tuple[StandbyEvent, float]]) -> None:
    """No rank ever has two processes or a lost one, and nothing is made while workers stop or start."""
    policy, now = StandbyPolicy(3), 0.0
    processes: set[int] = set()  # as a driver has them
    may_make = False
    failures = dict.fromkeys(range(3), 0)
    for event, pause in story:
        now += pause
        match event:
            case Idle() | RoundStarted():
                may_make = True
            case RoundStopping() | Unavailable():
                may_make = False
            case WarmedUp(rank) | StandbyFailed(rank) | Taken(rank) | Declined(rank) if rank not in processes:
                continue  # a driver reports only processes that it has
            case Taken(rank) if policy.states[rank] is not State.READY:
                continue
            case Declined(rank) if policy.states[rank] is not State.WARMING:
                continue
            case Taken(rank) | Declined(rank):
                processes.discard(rank)
            case WarmedUp(rank):
                failures[rank] = 0
        for command in policy.on(event, now):
            match command:
                case Make(rank):
                    assert may_make and rank not in processes and failures[rank] < MAX_FAILURES
                    processes.add(rank)
                case Discard(rank):
                    processes.remove(rank)
                case ReportFailure(rank, _, is_final):
                    failures[rank] += 1
                    assert is_final == (failures[rank] >= MAX_FAILURES)
        live = {rank for rank, state in policy.states.items() if state in (State.WARMING, State.READY)}
        assert live == processes
        deadline = policy.deadline()
        assert deadline is None or deadline > now
