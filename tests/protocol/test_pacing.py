"""How the size of a job changes the pace of its messages."""

import pytest

from ripstop.protocol.pacing import LARGE_JOB_NODES, ask_after_s, heartbeat_interval_s, silence_timeout_s

LEASE_S = 3.0


@pytest.mark.parametrize(("nodes", "is_elected"), [(1, False), (LARGE_JOB_NODES, False), (1, True), (10_000, True)])
def test_in_a_small_or_elected_job_every_heartbeat_asks_for_an_answer(nodes: int, is_elected: bool) -> None:
    assert ask_after_s(LEASE_S, nodes, is_elected=is_elected) == 0.0
    assert silence_timeout_s(LEASE_S, nodes, is_elected=is_elected) == LEASE_S


def test_a_node_of_a_large_job_asks_rarely_and_waits_at_least_a_lease_for_the_answer() -> None:
    ask_after = ask_after_s(LEASE_S, LARGE_JOB_NODES + 1, is_elected=False)
    interval = heartbeat_interval_s(LEASE_S, LARGE_JOB_NODES + 1)
    asks_at_the_latest = ask_after + interval
    assert ask_after >= 5 * interval
    assert silence_timeout_s(LEASE_S, LARGE_JOB_NODES + 1, is_elected=False) >= asks_at_the_latest + LEASE_S
