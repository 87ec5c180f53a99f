"""What a coordinator sends waits for the commit of the round before it."""

from ripstop.coordinator.commit_queue import CommitQueue
from ripstop.model.round import Address, Place
from ripstop.protocol.messages import Assign, StandBy


def assign(round: int) -> Assign:
    return Assign(Place(round, 0, 1, 0, 1, 1, 0, 1, Address("a", 1), 0), "")


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
