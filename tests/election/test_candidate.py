"""Voters, candidates and searches as transcripts."""

from typing import Any

from ripstop.election.candidate import Announce, Candidate, CandidateCommand, Lead, SendTo, StepDown
from ripstop.election.search import RECHECK_DELAY_S, RETRY_DELAY_S, Search
from ripstop.election.voter import Accept, Reply, Voter, VoterCommand
from ripstop.model.electorate import Electorate, first_electorate
from ripstop.model.round import Address
from ripstop.protocol.messages import Follow, LeaderElected, Promise, Redirect, Renew, Renewed, RequestPromise

LEASE = 10.0
FIRST = first_electorate(["a:1", "b:1", "c:1"])
THREE = Electorate(3, 7, 5, ("a", "b", "c"))


def ask_promise(voter: Voter, epoch: int, node: str, now: float) -> list[VoterCommand]:
    return voter.on(RequestPromise(epoch, 1, node), now)


def promised(replies: list[VoterCommand]) -> bool:
    return any(isinstance(reply, Reply) and isinstance(reply.message, Promise) for reply in replies)


# the voter ------------------------------------------------------------------------------------------------------------


def test_a_voter_promises_an_epoch_to_one_candidate_and_never_a_lower_one() -> None:
    voter = Voter(FIRST, LEASE)
    assert promised(ask_promise(voter, 5, "a", 0.0))
    assert promised(ask_promise(voter, 5, "a", 1.0)), "it may be asked again"
    late = 1.0 + LEASE
    assert ask_promise(voter, 5, "b", late) == [Reply(Follow(5, "a", FIRST))]
    assert ask_promise(voter, 4, "b", late) == [Reply(Follow(5, "a", FIRST))]
    assert voter.on(LeaderElected(4, "b"), late) == [Reply(Follow(5, "a", FIRST))]
    assert voter.on(Renew(4, 1), late) == []
    assert promised(ask_promise(voter, 6, "b", late))


def test_a_bound_voter_promises_to_nobody_else_and_asks_again_when_it_is_free() -> None:
    voter = Voter(FIRST, LEASE)
    ask_promise(voter, 5, "a", 0.0)
    voter.on(LeaderElected(5, "a"), 0.0)
    voter.on(Renew(5, 2, THREE), 4.0)
    assert ask_promise(voter, 6, "b", 13.9) == []
    assert voter.deadline() == 14.0
    assert voter.on_tick(13.9) == []
    assert voter.on_tick(14.0) == [Reply(Follow(5, "a", THREE))]
    assert voter.deadline() is None
    assert ask_promise(voter, 6, "b", 14.1) == [Reply(Promise(6, 1, THREE, former="a"))]


def test_the_coordinator_that_a_voter_is_bound_to_may_ask_for_a_higher_epoch() -> None:
    voter = Voter(FIRST, LEASE)
    ask_promise(voter, 5, "a", 0.0)
    assert promised(ask_promise(voter, 9, "a", 0.1))


def test_a_coordinator_whose_process_has_ended_binds_nobody() -> None:
    voter = Voter(FIRST, LEASE)
    voter.on(LeaderElected(5, "a"), 0.0)
    voter.on(Renew(5, 1, THREE), 0.0)
    voter.on_silent("a")
    assert ask_promise(voter, 6, "b", 1.0) == [], "silence alone frees nobody"
    voter.on_gone("a")
    assert ask_promise(voter, 6, "b", 1.0) == [Reply(Promise(6, 1, THREE, former="a", is_lost=True))]


def test_a_voter_keeps_the_newest_electorate() -> None:
    voter = Voter(FIRST, LEASE)
    voter.on(LeaderElected(5, "a"), 0.0)
    assert voter.on(Renew(5, 1, THREE), 0.0) == [Reply(Renewed(5, 1))]
    voter.on(Renew(5, 2, FIRST), 0.0)
    assert voter.electorate == THREE


# the candidate --------------------------------------------------------------------------------------------------------


class ThreeVoters:
    """The candidate a with the agents a, b and c, which answer when they are told to."""

    def __init__(self, electorate: Electorate = THREE) -> None:
        self.candidate = Candidate("a", Voter(electorate, LEASE), LEASE)
        self.out: list[CandidateCommand] = []
        self.now = 0.0

    def does(self, commands: list[CandidateCommand]) -> list[CandidateCommand]:
        self.out += commands
        return commands

    def follows(self, *nodes: str, epoch: int = 3, to: str = "x", electorate: Electorate | None = None) -> None:
        for node in nodes:
            follow = Follow(epoch, to, electorate or self.candidate.electorate, f"{node}:1")
            self.does(self.candidate.on_message(node, follow, self.now))

    def last(self, node: str, kind: type) -> Any:
        found = [c.message for c in self.out if isinstance(c, SendTo) and c.node == node]
        return next(message for message in reversed(found) if isinstance(message, kind))

    def promises(self, *nodes: str, **more: Any) -> list[CandidateCommand]:
        out = []
        for node in nodes:
            asked = self.last(node, RequestPromise)
            promise = Promise(asked.epoch, asked.number, self.candidate.electorate, **more)
            out += self.does(self.candidate.on_message(node, promise, self.now))
        return out

    def renews(self, *nodes: str) -> list[CandidateCommand]:
        out = []
        for node in nodes:
            asked = self.last(node, Renew)
            out += self.does(self.candidate.on_message(node, Renewed(asked.epoch, asked.number), self.now))
        return out

    def elected(self) -> "ThreeVoters":
        self.follows("a", "b")
        self.promises("a", "b")
        assert self.candidate.is_leader
        return self


def test_a_candidate_is_elected_by_more_than_half_of_the_voters() -> None:
    job = ThreeVoters()
    job.follows("a")
    assert not job.out
    job.follows("b")
    assert job.last("b", RequestPromise).epoch == 4
    assert job.promises("a", former="c") == []
    assert job.promises("b", former="c", is_lost=True)[0] == Lead(4, 5, former="c", is_lost=False)
    assert job.last("a", LeaderElected) == LeaderElected(4, "a")
    assert job.candidate.electorate == Electorate(4, 8, 5, ("a", "b", "c"))


def test_before_the_first_round_all_addresses_elect_and_a_majority_keeps_the_leader() -> None:
    job = ThreeVoters(FIRST)
    job.follows("a", "b")
    assert not job.out
    assert job.candidate.missing() == ["c:1"]
    job.follows("c")
    job.promises("a", "b")
    assert not job.candidate.is_leader
    job.promises("c")
    assert job.candidate.is_leader
    job.now = 8.0
    job.does(job.candidate.on_tick(8.0))
    job.renews("a", "b")
    assert job.candidate.holds_leadership(16.9) and not job.candidate.holds_leadership(17.0)


def test_a_leadership_counts_from_the_request_and_ends_before_the_lease() -> None:
    job = ThreeVoters().elected()
    job.now = 5.0
    job.does(job.candidate.on_tick(5.0))
    job.now = 7.0
    job.renews("b")
    assert job.candidate.holds_leadership(8.9) and not job.candidate.holds_leadership(9.0), "a majority is two"
    job.renews("a")
    assert job.candidate.holds_leadership(13.9) and not job.candidate.holds_leadership(14.0)
    assert job.candidate.on_tick(14.0) == [StepDown("most voters did not renew their promises in time")]


def test_a_round_is_announced_when_both_electorates_have_confirmed_it() -> None:
    job = ThreeVoters().elected()
    job.renews("a", "b")
    job.follows("d", "e", epoch=0)
    job.does(job.candidate.propose(6, ["c", "d", "e"], 1.0))
    assert job.candidate.electorate.outgoing == (), "the new voters are not bound yet"
    job.renews("d", "e")
    assert job.candidate.electorate.outgoing == ("a", "b", "c") and job.candidate.holds_leadership(1.0)
    assert job.renews("d", "e") == [], "a majority of the new voters alone"
    assert job.renews("a") == []
    assert job.renews("b")[0] == Announce(6)
    assert job.candidate.electorate.outgoing == () and not job.candidate.is_settled
    job.renews("d", "e")
    assert job.candidate.is_settled


def test_a_successor_changes_nothing_before_the_pending_electorate_is_its_own() -> None:
    pending = Electorate(3, 7, 5, ("a", "b", "d"), outgoing=("a", "b", "c"))
    job = ThreeVoters(pending).elected()
    assert job.candidate.propose(6, ["a", "b"], 1.0) == []
    assert job.renews("a") == []
    assert job.candidate.electorate.round == 5 and not job.candidate.is_settled
    job.renews("b")  # a majority of both: now the inherited round is its own
    job.renews("a", "b")
    assert job.candidate.electorate == Electorate(4, 10, 6, ("a", "b"), outgoing=("a", "b", "d"))


def test_a_pending_electorate_needs_a_majority_of_the_voters_before_it() -> None:
    pending = Electorate(3, 7, 5, ("a", "b", "d"), outgoing=("c", "e", "f"))
    job = ThreeVoters(pending)
    job.follows("a", "b", "d")
    assert not job.out
    job.follows("c", "e")
    job.promises("a", "b", "d")
    assert not job.candidate.is_leader
    job.promises("c", "e")
    assert job.candidate.is_leader


def test_a_round_is_withdrawn_unless_its_change_has_begun() -> None:
    job = ThreeVoters().elected()
    job.renews("a", "b")
    job.does(job.candidate.propose(6, ["a", "d"], job.now))
    assert not job.candidate.is_settled, "d has not renewed the leadership"
    assert job.candidate.withdraw() == 5
    assert job.candidate.is_settled
    job.does(job.candidate.propose(7, ["a", "b"], job.now))
    assert job.candidate.withdraw() == 7


def test_a_voter_that_cannot_promise_the_epoch_is_not_asked_for_it_again_and_again() -> None:
    job = ThreeVoters()
    job.follows("a", "b")
    job.candidate.on_disconnected("a")
    follow = Follow(9, "x", THREE, "b:1")
    assert job.candidate.on_message("b", follow, 0.0) == []


def test_a_candidate_that_cannot_be_elected_any_more_binds_nobody_until_the_voters_return() -> None:
    job = ThreeVoters()
    job.follows("a", "b")
    job.promises("a")
    job.candidate.on_disconnected("b")
    assert job.candidate.on_tick(LEASE / 4) == []
    assert job.candidate.deadline() is None
    job.follows("b")
    assert job.last("a", RequestPromise).epoch == job.last("b", RequestPromise).epoch == 4
    job.promises("a", "b")
    assert job.candidate.is_leader


def test_a_node_that_leaves_is_no_voter_any_more() -> None:
    job = ThreeVoters().elected()
    job.follows("c")
    job.renews("a", "b")
    job.does(job.candidate.on_left("c", 1.0))
    job.does(job.candidate.on_left("b", 1.0))
    assert job.candidate.electorate.voters == ("a",)
    job.renews("a")
    assert job.candidate.is_settled, "the last one needs nobody else"
    assert job.candidate.on_left("a", 2.0) == []


def test_a_coordinator_that_meets_a_higher_epoch_asks_for_a_higher_one_and_stays() -> None:
    job = ThreeVoters().elected()
    job.follows("c", epoch=9, to="z")
    assert job.last("b", RequestPromise).epoch == 10
    assert job.candidate.holds_leadership(0.0)
    assert not any(isinstance(c, Lead) for c in job.promises("a", "c"))
    assert job.candidate.epoch == 10 and job.last("c", LeaderElected) == LeaderElected(10, "a")


def test_a_coordinator_steps_down_when_a_node_knows_a_newer_one() -> None:
    job = ThreeVoters().elected()
    newer = Electorate(6, 1, 9, ("b", "c", "d"))
    job.follows("c", epoch=6, to="b", electorate=newer)
    assert job.out[-1] == StepDown("node c knows a newer coordinator")
    assert job.candidate.electorate == newer


def test_a_candidate_that_follows_a_coordinator_redirects_and_asks_nobody() -> None:
    job = ThreeVoters()
    job.does(job.candidate.on_leader(Address("b", 1), 0.0))
    job.follows("a", "b", "c")
    assert job.out == [SendTo(node, Redirect(Address("b", 1))) for node in "abc"]
    assert job.does(job.candidate.on_leader(None, 1.0)) and job.last("c", RequestPromise).epoch == 4


def test_a_promise_counts_from_its_own_request() -> None:
    job = ThreeVoters()
    job.follows("a", "b")
    old = job.last("b", RequestPromise)
    job.now = 8.0
    job.does(job.candidate.on_tick(8.0))
    job.promises("a")
    job.does(job.candidate.on_message("b", Promise(old.epoch, old.number, THREE), 8.0))
    assert job.candidate.holds_leadership(8.9) and not job.candidate.holds_leadership(9.0)


# the search -----------------------------------------------------------------------------------------------------------


def test_all_who_lost_a_coordinator_meet_at_the_first_other_address() -> None:
    search = Search(3, LEASE)
    search.on_accepted()
    search.on_lost(is_silent=True)
    assert search.target == 1
    search.on_accepted()
    search.on_lost(is_silent=True)
    assert search.target == 0


def test_a_coordinator_that_closed_the_connection_is_tried_again_first() -> None:
    search = Search(3, LEASE)
    search.on_accepted()
    search.on_lost(is_silent=False)
    assert search.target == 0
    assert search.on_failed(is_closed=True) == RECHECK_DELAY_S
    assert search.target == 0, "its process may be ending"
    search.on_failed(is_closed=True)
    assert search.target == 1


def test_an_agent_gives_a_candidate_a_lease_to_lose_the_silent_coordinator_too() -> None:
    search = Search(3, LEASE)
    search.on_accepted()
    search.on_lost(is_silent=True)
    assert search.on_redirected(0) == LEASE
    assert search.on_redirected(0) == 0.0, "it waits once"


def test_an_agent_waits_long_at_one_candidate_and_longer_at_the_others_with_every_turn() -> None:
    search, waits = Search(2, LEASE), list[tuple[float, float]]()
    for _ in range(7):
        first = search.waiting_time(is_first_election=False)
        search.on_failed()
        waits.append((first / LEASE, search.waiting_time(is_first_election=False) / LEASE))
        search.on_failed()
    assert waits == [(2.0, 0.2), (2.0, 0.4), (2.0, 0.8), (2.0, 1.6), (2.0, 2.0), (2.0, 0.2), (2.0, 0.4)]
    assert search.waiting_time(is_first_election=False) == 2.0 * LEASE
    assert search.waiting_time(is_first_election=True) == 0.2 * LEASE, "all must meet at one candidate"
    search.on_accepted()
    search.on_lost(is_silent=True)
    search.waiting_time(is_first_election=False)
    assert search.waiting_time(is_first_election=False) == 0.2 * LEASE


def test_redirects_in_circles_are_delayed() -> None:
    search = Search(2, LEASE)
    delays = [search.on_redirected(target) for target in (1, 0, 1, 0, 1)]
    assert delays[:2] == [0.0, 0.0]
    assert all(delay >= RETRY_DELAY_S for delay in delays[3:])


def test_an_agent_is_accepted_only_by_a_coordinator() -> None:
    voter = Voter(FIRST, LEASE)
    assert Accept() not in ask_promise(voter, 1, "a", 0.0)
    assert voter.on(LeaderElected(1, "a"), 0.0) == [Accept()]
