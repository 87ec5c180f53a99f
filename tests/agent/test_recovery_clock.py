"""The phases of a recovery, from the times that an agent noted."""

from ripstop.agent.recovery_clock import MIN_WAIT_S, RecoveryClock
from ripstop.model.events import Recovered


def test_each_second_of_a_recovery_belongs_to_one_phase() -> None:
    clock = RecoveryClock(failed_at=10.0, detected_at=11.0, decided_at=13.0, stopped_at=16.0)
    recovered = clock.finish(2, requested_at=20.0, now=25.0)
    assert recovered == Recovered(2, detect=1.0, decide=2.0, stop=3.0, wait=4.0, start=5.0)


def test_a_round_that_is_requested_before_the_workers_have_stopped_needs_no_wait() -> None:
    clock = RecoveryClock(failed_at=10.0, detected_at=10.0, decided_at=11.0, stopped_at=13.0)
    recovered = clock.finish(2, requested_at=12.0, now=14.0)
    assert recovered == Recovered(2, detect=0.0, decide=1.0, stop=2.0, wait=0.0, start=1.0)


def test_the_time_of_the_agent_itself_is_no_wait() -> None:
    clock = RecoveryClock(failed_at=10.0, detected_at=10.0, decided_at=10.0, stopped_at=10.0)
    recovered = clock.finish(2, requested_at=10.0 + MIN_WAIT_S / 2, now=11.0)
    assert recovered == Recovered(2, detect=0.0, decide=0.0, stop=0.0, wait=0.0, start=1.0)


def test_workers_that_go_on_in_place_are_not_stopped_and_do_not_wait() -> None:
    clock = RecoveryClock(failed_at=10.0, detected_at=10.0, decided_at=11.0)
    recovered = clock.finish(2, requested_at=11.0, now=12.0, kept=3)
    assert recovered == Recovered(2, detect=0.0, decide=1.0, stop=0.0, wait=0.0, start=1.0, kept=3)
