"""How long an agent waits at a candidate."""

from ripstop.election.search import SHORT_WAIT, Search

LEASE_S = 2.0


def test_an_agent_that_has_promised_its_vote_waits_a_little_longer_once() -> None:
    search = Search(3, LEASE_S)
    search.waiting_time(is_first_election=False)
    search.on_promised()
    assert search.extra_wait() == SHORT_WAIT * LEASE_S
    search.on_promised()  # the candidate asks again
    assert search.extra_wait() == 0.0


def test_a_promise_to_one_candidate_is_no_reason_to_wait_at_the_next() -> None:
    search = Search(3, LEASE_S)
    search.waiting_time(is_first_election=False)
    search.on_promised()
    search.on_failed()
    search.waiting_time(is_first_election=False)
    assert search.extra_wait() == 0.0
