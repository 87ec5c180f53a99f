"""How the size of a job changes the pace of its messages."""

import pytest

from ripstop.protocol.pacing import LARGE_JOB_NODES, answers_every, heartbeat_interval_s, silence_timeout_s

LEASE_S = 3.0


@pytest.mark.parametrize("nodes", [1, LARGE_JOB_NODES])
@pytest.mark.parametrize("is_elected", [False, True])
def test_a_small_job_answers_every_heartbeat(nodes: int, is_elected: bool) -> None:
    assert answers_every(nodes, is_elected=is_elected) == 1


def test_an_elected_coordinator_answers_every_heartbeat() -> None:
    assert answers_every(10_000, is_elected=True) == 1


def test_if_all_heartbeats_are_answered_a_silent_lease_is_a_loss() -> None:
    assert silence_timeout_s(LEASE_S, heartbeat_interval_s(LEASE_S, 1), answers_every=1) == LEASE_S


def test_a_large_job_waits_for_the_next_answer_and_a_lease() -> None:
    every = answers_every(LARGE_JOB_NODES + 1, is_elected=False)
    interval = heartbeat_interval_s(LEASE_S, LARGE_JOB_NODES + 1)
    assert every > 1
    assert silence_timeout_s(LEASE_S, interval, every) >= every * interval + LEASE_S / 2
