"""What a coordinator sends waits for the commit of the round before it."""

from ripstop.coordinator.commit_queue import CommitQueue
from ripstop.model.round import Address, Place
from ripstop.protocol.messages import Assign, StandBy


def assign(round: int, rank: int = 0) -> Assign:
    return Assign(Place(round, rank, 2, rank, 2, 1, 0, 1, Address("a", 1), 0), "")


def test_what_follows_a_round_waits_for_its_commit() -> None:
    queue = CommitQueue[str]()
    assert queue.push("a", StandBy(1, "")) == [("a", StandBy(1, ""))]
    queue.propose(2)
    assert queue.push("a", assign(2)) == []
    queue.propose(3)
    assert queue.push("a", None) == []
    assert queue.commit(2) == [("a", assign(2))]
    assert queue.commit(3) == [("a", None)]
    assert queue.is_empty


def test_a_round_that_another_one_replaces_before_its_commit_is_not_started() -> None:
    queue = CommitQueue[str]()
    queue.propose(2)
    queue.push("a", assign(2))
    queue.propose(3)
    queue.push("a", assign(3))
    (_, first), *rest = queue.commit(3)
    assert isinstance(first, StandBy)
    assert first.round == 2
    assert rest == [("a", assign(2)), ("a", assign(3))]


def test_a_round_that_is_withdrawn_is_not_started_and_blocks_nothing() -> None:
    queue = CommitQueue[str]()
    queue.propose(2)
    queue.push("a", assign(2))
    queue.propose(3)
    queue.push("a", assign(3))
    assert queue.withdraw(2) == [], "round 2 may still be committed"
    assert [type(message) for _, message in queue.commit(2)] == [Assign, StandBy, Assign]
    assert queue.is_empty


def test_a_node_that_hosts_no_store_does_not_learn_of_a_round_that_another_one_replaced() -> None:
    queue = CommitQueue[str]()
    for round in (2, 3):
        queue.propose(round)
        queue.push("a", assign(round))
        queue.push("b", assign(round, rank=1))
    queue.push("b", StandBy(3, "another message"))
    sent = queue.commit(3)
    assert [type(message) for to, message in sent if to == "a"] == [StandBy, Assign, Assign]
    assert [message for to, message in sent if to == "b"] == [assign(3, rank=1), StandBy(3, "another message")]


def test_a_node_without_a_place_in_a_later_round_learns_that_its_round_was_not_committed() -> None:
    queue = CommitQueue[str]()
    queue.propose(2)
    queue.push("b", assign(2, rank=1))
    assert [type(message) for _, message in queue.withdraw(1)] == [StandBy, Assign]
    queue.propose(3)
    queue.push("b", assign(3, rank=1))
    assert queue.commit(3) == [("b", assign(3, rank=1))]
