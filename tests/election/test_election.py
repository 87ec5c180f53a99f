"""The election as transcripts, and against a model of etcd that loses and delays replies and ends leases on time."""

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
)
from ripstop.election.records import read_leader_record, write_leader_record
from ripstop.model.errors import ProtocolError
from ripstop.model.round import Address

HERE = Leader(Address("10.0.0.1", 4000), "a", revision=7)
THERE = Leader(Address("10.0.0.2", 4000), "b", revision=9)


def leading() -> Election:
    election = Election()
    election.on(NoLeader(), 0.0)
    election.on(Elected(HERE, requested_at=0.0, ttl=4.0), 0.1)
    return election


def test_without_a_leader_an_agent_campaigns_and_the_winner_leads_and_follows_itself() -> None:
    election = Election()
    assert election.on(NoLeader(), 0.0) == [Campaign()]
    assert election.on(Elected(HERE, requested_at=0.0, ttl=4.0), 0.1) == [Lead(HERE), Follow(HERE)]
    assert election.is_leader(3.5)


def test_a_leader_is_followed_once() -> None:
    election = Election()
    assert election.on(LeaderKnown(THERE), 0.0) == [Follow(THERE)]
    assert election.on(LeaderKnown(THERE), 1.0) == []


def test_a_leader_that_is_elected_again_is_followed_again() -> None:
    election = Election()
    election.on(LeaderKnown(THERE), 0.0)
    again = Leader(THERE.address, THERE.node, revision=12)
    assert election.on(LeaderKnown(again), 1.0) == [Follow(again)]


def test_leadership_ends_before_its_lease_can_end_in_etcd() -> None:
    election = leading()
    assert election.deadline() == pytest.approx(3.6)
    assert not election.is_leader(3.6)
    assert election.on(Tick(), 3.6) == [StepDown("its lease was not renewed in time")]
    assert election.deadline() is None


def test_a_renewal_counts_from_its_request() -> None:
    election = leading()
    assert election.on(Renewed(requested_at=1.0, ttl=4.0), 3.0) == []
    assert election.deadline() == pytest.approx(4.6)


def test_a_renewal_after_the_end_of_leadership_is_ignored() -> None:
    election = leading()
    assert election.on(Renewed(requested_at=3.0, ttl=4.0), 3.7) == [StepDown("its lease was not renewed in time")]
    assert not election.is_leader(3.7)


def test_an_agent_that_is_elected_too_late_does_not_lead() -> None:
    election = Election()
    election.on(NoLeader(), 0.0)
    assert election.on(Elected(HERE, requested_at=0.0, ttl=4.0), 3.9) == [
        StepDown("it was elected too late for its lease")
    ]
    assert not election.is_leader(3.9)


def test_a_lease_that_expired_in_etcd_ends_leadership() -> None:
    assert leading().on(Expired(), 1.0) == [StepDown("its lease has ended in etcd")]


def test_another_leader_ends_the_own_leadership() -> None:
    assert leading().on(LeaderKnown(THERE), 1.0) == [StepDown("node b was elected"), Follow(THERE)]


def test_a_deleted_key_ends_leadership_and_starts_a_campaign() -> None:
    assert leading().on(NoLeader(), 1.0) == [StepDown("its key was deleted from etcd"), Campaign()]


def test_a_written_leader_is_read_back() -> None:
    assert read_leader_record(write_leader_record("jöb", HERE.address, "a"), "jöb", 7) == HERE


@pytest.mark.parametrize(
    ("text", "error"),
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
def test_a_foreign_key_is_not_followed(text: str, error: str) -> None:
    with pytest.raises(ProtocolError, match=error):
        read_leader_record(text, "job", 1)


# a model of etcd ------------------------------------------------------------------------------------------------------

TTL = 4.0


@dataclass
class Model:
    """One key, and leases that end exactly at their deadline."""

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
    """One agent: its election, the lease of its candidacy, and the replies that it has not received yet."""

    name: str
    election: Election = field(default_factory=Election)
    lease: int = 0
    requested_at: float = 0.0
    replies: list[tuple[str, float]] = field(default_factory=list)

    def handle(self, event: object, now: float, etcd: Model, lost: bool, fresh: int) -> None:
        for command in self.election.on(event, now):  # type: ignore[arg-type]
            if isinstance(command, Campaign):
                if self.lease not in etcd.leases:
                    self.lease, self.requested_at = fresh, now
                    etcd.grant(fresh, now)
                etcd.create(self.lease, self.name)
                if not lost:
                    self.read(now, etcd, lost, fresh)
            elif isinstance(command, StepDown):
                self.lease = 0  # the agent drops the lease; etcd may still have it

    def read(self, now: float, etcd: Model, lost: bool, fresh: int) -> None:
        if etcd.key is None:
            self.handle(NoLeader(), now, etcd, lost, fresh)
        elif etcd.key[0] == self.lease:
            if not self.election.is_leader(now):
                self.handle(Elected(etcd.key[1], self.requested_at, TTL), now, etcd, lost, fresh)
        else:
            self.handle(LeaderKnown(etcd.key[1]), now, etcd, lost, fresh)


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["read", "renew", "reply", "tick"]), st.booleans(), st.floats(0, 2.5)),
    min_size=30,
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_there_is_at_most_one_leader_when_replies_are_lost_or_late(
    steps: list[tuple[int, str, bool, float]],
) -> None:
    etcd, actors, now = Model(), [Actor(name) for name in "abc"], 0.0
    for number, (index, action, lost, pause) in enumerate(steps, start=1):
        now += pause
        etcd.advance(now)
        actor = actors[index]
        match action:
            case "read":
                actor.read(now, etcd, lost, fresh=number)
            case "renew" if actor.lease in etcd.leases:
                etcd.leases[actor.lease] = now + TTL
                if not lost:
                    actor.replies.append(("renewed", now))
            case "reply" if actor.replies:
                actor.handle(Renewed(actor.replies.pop(0)[1], TTL), now, etcd, lost, fresh=number)
            case "tick":
                actor.handle(Tick(), now, etcd, lost, fresh=number)
        leaders = [a.name for a in actors if a.election.is_leader(now)]
        assert len(leaders) <= 1
        if leaders and etcd.key is not None:
            assert leaders == [etcd.key[1].node]
