"""How many failures a job may have."""

from hypothesis import given
from hypothesis import strategies as st

from ripstop.coordinator.restart_budget import (
    EARLY_FAILURE_S,
    Cause,
    RestartBudget,
    budget_cause,
    is_early_for_restart_budget,
)
from ripstop.model.config import Budget
from ripstop.model.failure import Failure, Hang


def test_the_budget_is_spent_one_restart_a_failure() -> None:
    restarts = RestartBudget(Budget(max_restarts=2))
    assert [restarts.charge(t, early=False).allowed for t in (100.0, 200.0, 300.0)] == [True, True, False]
    assert restarts.used == 2


def test_the_reason_counts_what_is_spent() -> None:
    restarts = RestartBudget(Budget(max_restarts=1))
    assert restarts.charge(1.0, early=False).why == "restart 1 of 1"
    assert restarts.charge(2.0, early=False).why == "1 of 1 restarts are used"


def test_without_restarts_the_first_failure_is_not_allowed() -> None:
    decision = RestartBudget(Budget()).charge(1.0, early=False)
    assert not decision.allowed
    assert decision.why == "no restart is allowed (--max-restarts=0)"


def test_a_charge_older_than_the_window_no_longer_counts() -> None:
    restarts = RestartBudget(Budget(max_restarts=1, window=3600.0))
    assert restarts.charge(0.0, early=False).allowed
    assert not restarts.charge(3599.0, early=False).allowed
    assert restarts.charge(3600.0, early=False).allowed


def test_a_failure_beyond_the_budget_is_not_charged() -> None:
    restarts = RestartBudget(Budget(max_restarts=1, window=100.0))
    restarts.charge(0.0, early=False)
    restarts.charge(50.0, early=False)
    assert restarts.charge(100.0, early=False).allowed


def test_repeated_early_failures_wait_longer_and_longer() -> None:
    restarts = RestartBudget(Budget(max_restarts=9, backoff=5.0))
    assert [restarts.charge(float(t), early=True).delay for t in range(7)] == [0.0, 0.0, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_failure_that_is_not_early_resets_the_backoff() -> None:
    restarts = RestartBudget(Budget(max_restarts=9))
    assert [restarts.charge(0.0, early=early).delay for early in (True, True, True, False, True)] == [
        0.0,
        0.0,
        1.0,
        0.0,
        0.0,
    ]


def test_a_failure_after_progress_or_some_seconds_is_not_early() -> None:
    assert is_early_for_restart_budget(EARLY_FAILURE_S / 2, progressed=False)
    assert not is_early_for_restart_budget(EARLY_FAILURE_S / 2, progressed=True)
    assert not is_early_for_restart_budget(EARLY_FAILURE_S, progressed=False)


def test_without_backoff_every_restart_is_immediate() -> None:
    restarts = RestartBudget(Budget(max_restarts=9, backoff=0.0))
    assert {restarts.charge(float(t), early=True).delay for t in range(9)} == {0.0}


def test_a_refund_gives_the_restart_back_but_the_count_of_restarts_never_falls() -> None:
    restarts = RestartBudget(Budget(max_restarts=1))
    restarts.charge(1.0, early=False)
    restarts.refund()
    assert restarts.charge(2.0, early=False).allowed
    assert restarts.used == 2


def test_a_refund_without_a_charge_changes_nothing() -> None:
    restarts = RestartBudget(Budget(max_restarts=1))
    restarts.refund()
    assert restarts.charge(1.0, early=False).allowed
    assert not restarts.charge(2.0, early=False).allowed


def test_restarts_of_an_earlier_coordinator_are_spent() -> None:
    assert not RestartBudget(Budget(max_restarts=3), used=3, now=50.0).charge(60.0, early=False).allowed


def test_restarts_of_an_earlier_coordinator_expire_after_one_window() -> None:
    restarts = RestartBudget(Budget(max_restarts=3, window=100.0), used=9, now=50.0)
    assert not restarts.charge(149.0, early=False).allowed
    assert restarts.charge(150.0, early=False).allowed


@given(
    limit=st.integers(0, 5),
    window=st.sampled_from([0.0, 10.0, 100.0]),
    steps=st.lists(st.tuples(st.floats(0, 30), st.booleans()), max_size=60),
)
def test_no_window_ever_holds_more_charges_than_allowed(
    limit: int, window: float, steps: list[tuple[float, bool]]
) -> None:
    restarts, now, charges = RestartBudget(Budget(limit, window)), 0.0, list[float]()
    for wait, refund in steps:
        now += wait
        if refund and charges:
            restarts.refund()
            charges.pop()
        elif restarts.charge(now, early=False).allowed:
            charges.append(now)
        for start in charges:
            assert sum(start <= at < (start + window if window else float("inf")) for at in charges) <= limit


def test_hangs_have_their_own_budget() -> None:
    restarts = RestartBudget(Budget(max_restarts=1, max_infra_restarts=1, infra_window=100.0))
    assert restarts.charge(0.0, Cause.INFRASTRUCTURE, early=False).why == "infrastructure restart 1 of 1 in 100 s"
    assert not restarts.charge(99.0, Cause.INFRASTRUCTURE, early=False).allowed
    assert restarts.charge(99.0, early=False).allowed
    assert restarts.charge(100.0, Cause.INFRASTRUCTURE, early=False).allowed
    assert restarts.used == 3


def test_a_round_with_only_hangs_is_charged_to_the_infrastructure_budget() -> None:
    hang = Failure(0, 0, 1, "h", 1.0, hang=Hang(9.0, "no heartbeat", "", "", False, "S"))
    death = Failure(1, 1, 1, "h", 1.0, exitcode=1)
    assert budget_cause([hang]) is Cause.INFRASTRUCTURE
    assert budget_cause([hang, death]) is budget_cause([death]) is budget_cause([]) is Cause.APPLICATION
