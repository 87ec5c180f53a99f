"""The election as transcripts, and against a model of etcd that loses answers, delays them and ends leases on time."""

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ripstop.election.election import (
    Campaign,
    Elected,
    Election,
    Expired,
    Follow,
    Lead,
    Leader,
    LeaderKnown,
    NoLeader,
    Renewed,
    StepDown,
    Tick,
    read_leader,
    write_leader,
)
from ripstop.model.errors import ProtocolError
from ripstop.model.round import Address

HERE = Leader(Address("10.0.0.1", 4000), "a", revision=7)
THERE = Leader(Address("10.0.0.2", 4000), "b", revision=9)


def leading() -> Election:
    election = Election()
    election.on(NoLeader(), 0.0)
    election.on(Elected(HERE, asked=0.0, ttl=4.0), 0.1)
    return election


def test_who_finds_no_coordinator_campaigns_and_who_wins_leads_and_follows_itself() -> None:
    election = Election()
    assert election.on(NoLeader(), 0.0) == [Campaign()]
    assert election.on(Elected(HERE, asked=0.0, ttl=4.0), 0.1) == [Lead(HERE), Follow(HERE)]
    assert election.in_office(3.5)


def test_a_coordinator_is_followed_once_however_often_it_is_seen() -> None:
    election = Election()
    assert election.on(LeaderKnown(THERE), 0.0) == [Follow(THERE)]
    assert election.on(LeaderKnown(THERE), 1.0) == []


def test_a_coordinator_elected_again_is_followed_again() -> None:
    election = Election()
    election.on(LeaderKnown(THERE), 0.0)
    again = Leader(THERE.address, THERE.node, revision=12)
    assert election.on(LeaderKnown(again), 1.0) == [Follow(again)]


def test_an_office_ends_before_its_lease_can_end_in_etcd() -> None:
    election = leading()
    assert election.deadline() == pytest.approx(3.6)
    assert not election.in_office(3.6)
    assert election.on(Tick(), 3.6) == [StepDown("its lease was not renewed in time")]
    assert election.deadline() is None


def test_a_renewal_counts_from_when_it_was_asked_for() -> None:
    election = leading()
    assert election.on(Renewed(asked=1.0, ttl=4.0), 3.0) == []
    assert election.deadline() == pytest.approx(4.6)


def test_a_renewal_that_is_answered_after_the_end_revives_nothing() -> None:
    election = leading()
    assert election.on(Renewed(asked=3.0, ttl=4.0), 3.7) == [StepDown("its lease was not renewed in time")]
    assert not election.in_office(3.7)


def test_winning_too_late_is_not_winning() -> None:
    election = Election()
    election.on(NoLeader(), 0.0)
    assert election.on(Elected(HERE, asked=0.0, ttl=4.0), 3.9) == [StepDown("it was elected too late for its lease")]
    assert not election.in_office(3.9)


def test_a_lease_that_etcd_does_not_know_ends_the_office() -> None:
    assert leading().on(Expired(), 1.0) == [StepDown("its lease has ended in etcd")]


def test_another_in_office_ends_ones_own() -> None:
    assert leading().on(LeaderKnown(THERE), 1.0) == [StepDown("node b was elected"), Follow(THERE)]


def test_a_deleted_key_ends_the_office_and_begins_a_campaign() -> None:
    assert leading().on(NoLeader(), 1.0) == [StepDown("its key is gone from etcd"), Campaign()]


def test_what_is_written_is_read_back() -> None:
    assert read_leader(write_leader("jöb", HERE.address, "a"), "jöb", 7) == HERE


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "not written by ripstop"),
        ("[]", "not written by ripstop"),
        ("[" * 4000, "not written by ripstop"),
        (json.dumps({"ripstop": 1, "run_id": "job", "host": "", "port": 1, "node": "a"}), "not written by ripstop"),
        (json.dumps({"ripstop": 1, "run_id": "job", "host": "h", "port": 0, "node": "a"}), "not written by ripstop"),
        (json.dumps({"ripstop": 2}), "another version of ripstop \\(2, this one writes 1\\)"),
        (json.dumps({"ripstop": 1, "run_id": "other"}), "for job 'other', not for 'job'"),
    ],
)
def test_what_others_wrote_is_not_followed(text: str, word: str) -> None:
    with pytest.raises(ProtocolError, match=word):
        read_leader(text, "job", 1)


# a model of etcd ------------------------------------------------------------------------------------------------------

TTL = 4.0


@dataclass
class Model:
    """One key, and leases that end exactly when they should: no earlier and no later than etcd's promise."""

    revision: int = 1
    leases: dict[int, float] = field(default_factory=dict)  # until when
    key: tuple[int, Leader] | None = None  # lease and value

    def advance(self, now: float) -> None:
        self.leases = {lease: until for lease, until in self.leases.items() if until > now}
        if self.key is not None and self.key[0] not in self.leases:
            self.key = None

    def grant(self, lease: int, now: float) -> None:
        self.leases[lease] = now + TTL

    def create(self, lease: int, node: str) -> None:
        if self.key is None and lease in self.leases:
            self.revision += 1
            self.key = (lease, Leader(Address(node, 1), node, self.revision))


@dataclass
class Actor:
    """One agent: its election, the lease it stands with, and answers that are still on their way to it."""

    name: str
    election: Election = field(default_factory=Election)
    lease: int = 0
    asked: float = 0.0
    answers: list[tuple[str, float]] = field(default_factory=list)

    def feed(self, event: object, now: float, etcd: Model, lost: bool, fresh: int) -> None:
        for command in self.election.on(event, now):  # type: ignore[arg-type]
            if isinstance(command, Campaign):
                if self.lease not in etcd.leases:
                    self.lease, self.asked = fresh, now
                    etcd.grant(fresh, now)
                etcd.create(self.lease, self.name)
                if not lost:
                    self.look(now, etcd, lost, fresh)
            elif isinstance(command, StepDown):
                self.lease = 0  # what it was told of that lease is forgotten; etcd may not have heard of it yet

    def look(self, now: float, etcd: Model, lost: bool, fresh: int) -> None:
        if etcd.key is None:
            self.feed(NoLeader(), now, etcd, lost, fresh)
        elif etcd.key[0] == self.lease:
            if not self.election.in_office(now):
                self.feed(Elected(etcd.key[1], self.asked, TTL), now, etcd, lost, fresh)
        else:
            self.feed(LeaderKnown(etcd.key[1]), now, etcd, lost, fresh)


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["look", "ask", "answer", "tick"]), st.booleans(), st.floats(0, 2.5)),
    min_size=30,
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_nobody_decides_beside_another_whatever_is_lost_late_or_frozen(
    steps: list[tuple[int, str, bool, float]],
) -> None:
    etcd, actors, now = Model(), [Actor(name) for name in "abc"], 0.0
    for number, (who, what, lost, pause) in enumerate(steps, start=1):
        now += pause
        etcd.advance(now)
        actor = actors[who]
        match what:
            case "look":
                actor.look(now, etcd, lost, fresh=number)
            case "ask" if actor.lease in etcd.leases:
                etcd.leases[actor.lease] = now + TTL
                if not lost:
                    actor.answers.append(("renewed", now))
            case "answer" if actor.answers:
                actor.feed(Renewed(actor.answers.pop(0)[1], TTL), now, etcd, lost, fresh=number)
            case "tick":
                actor.feed(Tick(), now, etcd, lost, fresh=number)
        offices = [a.name for a in actors if a.election.in_office(now)]
        assert len(offices) <= 1
        if offices and etcd.key is not None:
            assert offices == [etcd.key[1].node]
