"""Who holds whose copies, and of which commit: transcripts, and a model of jobs that lose a node at any moment."""

import random

import pytest

from ripstop.coordinator.replication_plan import ReplicationPlan, partners
from ripstop.model.round import Address, CommitId
from ripstop.model.status import ReplicationStatus
from ripstop.protocol.messages import Replicate, Replicated


def ring(labels: str) -> list[int]:
    """The group rank of each node's partner."""
    found = partners([label.strip(".") for label in labels], [Address("host", rank) for rank in range(len(labels))])
    return [address.port for address in found if address]


def test_the_next_node_of_the_ring_is_the_partner() -> None:
    assert ring("...") == [1, 2, 0]


def test_a_single_node_has_no_partner() -> None:
    assert partners([""], [Address("host", 1)]) == [None]


def test_no_node_has_a_partner_if_one_takes_no_copies() -> None:
    assert partners(["", ""], [Address("host", 1), None]) == [None, None]


@pytest.mark.parametrize("labels", ["aabb", "aaabbbccc", "abab", "aabbcc", "abcd"])
def test_partners_are_in_another_failure_domain_where_that_is_possible(labels: str) -> None:
    assert all(labels[rank] != labels[partner] for rank, partner in enumerate(ring(labels)))


@pytest.mark.parametrize("labels", ["aab", "aaa", "aaab", "abcabc"])
def test_every_node_holds_the_copies_of_exactly_one_other(labels: str) -> None:
    found = ring(labels)
    assert sorted(found) == list(range(len(labels)))
    assert all(rank != partner for rank, partner in enumerate(found))


AB = {"a", "b"}


def report(newest: int, copied: int = 0, missed: int = 0, round: int = 1) -> Replicated:
    return Replicated(round, "state", newest, copied, missed)


def request(number: int, complete: tuple[int, int] | None = None, round: int = 1) -> Replicate:
    return Replicate(round, "state", number, CommitId(*complete) if complete else None)


def test_a_set_is_chosen_when_all_nodes_have_a_commit_and_the_next_one_when_all_have_copied_it() -> None:
    sets = ReplicationPlan()
    assert sets.on_report("a", report(1), AB, 1.0) == []
    assert sets.on_report("b", report(2), AB, 1.0) == [(None, request(3))]
    assert sets.on_report("a", report(5, copied=3), AB, 1.0) == []
    assert sets.complete("state") is None
    assert sets.on_report("b", report(4, copied=3), AB, 1.0) == [(None, request(6, complete=(1, 3)))]
    assert sets.complete("state") == CommitId(1, 3)
    assert sets.status(3.0) == (ReplicationStatus("state", 1, 3, commits=2, seconds=2.0, bytes=0),)


def test_a_set_that_a_node_missed_is_replaced_by_one_further_ahead() -> None:
    sets = ReplicationPlan()
    sets.on_report("a", report(1), AB, 1.0)
    sets.on_report("b", report(1), AB, 1.0)
    assert sets.on_report("a", report(9, missed=2), AB, 1.0) == [(None, request(11))]
    assert sets.on_report("b", report(9, missed=2), AB, 1.0) == [("b", request(11))]
    assert sets.on_report("b", report(20, missed=11), AB, 1.0) == [(None, request(24))]


def test_a_node_that_reconnects_gets_the_request_again() -> None:
    sets = ReplicationPlan()
    sets.on_report("a", report(1), AB, 1.0)
    sets.on_report("b", report(1), AB, 1.0)
    assert sets.on_report("a", report(1), AB, 1.0) == [("a", request(2))]
    sets.on_report("a", report(2, copied=2), AB, 1.0)
    sets.on_report("b", report(2, copied=2), AB, 1.0)
    assert sets.on_report("b", report(2, copied=2), AB, 1.0) == [("b", request(3, complete=(1, 2)))]


def test_the_complete_set_of_an_older_round_stays_until_the_new_round_has_one() -> None:
    sets = ReplicationPlan()
    for copied in (0, 2):
        for node in "ab":
            sets.on_report(node, report(2, copied), AB, 1.0)
    sets.on_report("a", report(3, round=2), AB, 1.0)
    assert sets.on_report("b", report(3, round=2), AB, 1.0) == [(None, request(4, complete=(1, 2), round=2))]


def test_a_new_coordinator_learns_the_complete_set_or_frees_nothing() -> None:
    sets = ReplicationPlan()
    sets.on_report("a", report(9, copied=7), AB, 1.0)
    assert sets.on_report("b", report(9, copied=7), AB, 1.0) == [(None, request(10, complete=(1, 7)))]
    sets = ReplicationPlan()
    sets.on_report("a", report(9, copied=7), AB, 1.0)
    assert sets.on_report("b", report(9, copied=5), AB, 1.0) == [(None, request(10, complete=None))]


def test_nodes_outside_the_round_and_too_many_states_change_nothing() -> None:
    sets = ReplicationPlan()
    assert sets.on_report("c", report(1), AB, 1.0) == []
    for number in range(100):
        sets.on_report("a", Replicated(1, f"s{number}", 1), {"a"}, 1.0)
    sets.on_report("a", Replicated(1, "x" * 65, 1), {"a"}, 1.0)
    assert len(sets.status(1.0)) == 16
    assert ReplicationPlan().on_report("a", report(2**63 - 1), {"a"}, 1.0) == []


def test_names_that_no_node_reports_neither_add_up_nor_stop_copies_of_real_states() -> None:
    sets = ReplicationPlan()
    sets.on_report("a", report(2, copied=1), {"a"}, 1.0)
    for round in range(1, 4):
        asked = [sets.request(round, f"{round} {number}", 1) for number in range(16)]
        assert [each for each in asked[15:] if each] == [] and len(sets.status(1.0)) == 16
        assert sets.on_report("a", report(3, round=round + 1), {"a"}, 1.0) != []
        assert sets.on_report("a", Replicated(round + 1, f"new {round}", 1), {"a"}, 1.0) != []
    assert sets.complete("state") == CommitId(1, 1)


# a model of a job -----------------------------------------------------------------------------------------------------


class Model:
    """Nodes that commit, copy sets to their partners and exchange messages, in any order of steps.

    Each node has one rank.  It keeps its newest two commits, and those that the coordinator's last request names.
    """

    def __init__(self, nodes: int, rng: random.Random) -> None:
        self.rng, self.names = rng, [f"n{rank}" for rank in range(nodes)]
        self.partner = dict(zip(self.names, [*self.names[1:], self.names[0]], strict=True))
        self.slow = rng.choice(self.names)  # a node whose messages take long
        self.sets = ReplicationPlan()
        self.newest = dict.fromkeys(self.names, 0)
        self.own: dict[str, set[int]] = {name: set() for name in self.names}
        self.copies: dict[str, set[int]] = {name: set() for name in self.names}  # held by the partner of this node
        self.request: dict[str, Replicate | None] = dict.fromkeys(self.names)
        self.to_coordinator: list[tuple[str, Replicated]] = []
        self.to_nodes: dict[str, list[Replicate]] = {name: [] for name in self.names}
        self.is_reported: dict[str, bool] = dict.fromkeys(self.names, False)
        self.settled: dict[str, int] = dict.fromkeys(self.names, 0)  # the last set that was copied or missed

    def held(self, name: str) -> set[int]:
        request = self.request[name]
        return set() if request is None else {request.number, request.complete.number if request.complete else 0}

    def step(self) -> None:
        name = self.rng.choice(self.names)
        self.rng.choice([self.commit, self.commit, self.commit, self.copy, self.coordinate, self.receive])(name)

    def commit(self, name: str) -> None:
        if self.newest[name] > min(self.newest.values()):
            return  # a collective lies between two commits
        self.newest[name] += 1
        recent = {self.newest[name], self.newest[name] - 1}
        self.own[name] = {n for n in self.own[name] | recent if n in recent | self.held(name) and n > 0}
        if not self.is_reported[name]:
            self.is_reported[name] = True
            self.report(name)

    def copy(self, name: str) -> None:
        request = self.request[name]
        if request is None or request.number == self.settled[name] or self.newest[name] < request.number:
            return
        self.settled[name] = request.number
        if request.number in self.own[name]:
            self.copies[name].add(request.number)
            self.report(name, copied=request.number)
        else:
            self.report(name, copied=max(self.copies[name], default=0), missed=request.number)

    def report(self, name: str, copied: int = 0, missed: int = 0) -> None:
        self.to_coordinator.append((name, Replicated(1, "state", self.newest[name], copied, missed)))

    def coordinate(self, _: str) -> None:
        if self.to_coordinator:
            name, message = self.to_coordinator.pop(0)
            for to, answer in self.sets.on_report(name, message, self.names, 1.0):
                for receiver in self.names if to is None else [to]:
                    self.to_nodes[receiver].append(answer)

    def receive(self, name: str) -> None:
        if self.to_nodes[name] and (name != self.slow or self.rng.random() < 0.2):
            request = self.request[name] = self.to_nodes[name].pop(0)
            if request.complete:
                source = next(other for other, partner in self.partner.items() if partner == name)
                self.copies[source] = {n for n in self.copies[source] if n >= request.complete.number}

    def newest_after_the_loss_of(self, lost: str) -> int:
        """The newest commit that the other nodes can restore, 0 if there is none."""
        parts = []
        for name in self.names:
            own = self.own[name] if name != lost else set()
            parts.append(own | (self.copies[name] if self.partner[name] != lost else set()))
        return max(set.intersection(*parts), default=0)


@pytest.mark.parametrize("seed", range(40))
def test_after_the_first_complete_set_the_loss_of_any_node_at_any_moment_leaves_a_common_commit(seed: int) -> None:
    rng = random.Random(seed)
    model, completed = Model(rng.randint(2, 5), rng), set()
    for _ in range(4000):
        model.step()
        complete = found.number if (found := model.sets.complete("state")) else 0
        completed.add(complete)
        for lost in model.names:
            assert model.newest_after_the_loss_of(lost) >= complete
    assert len(completed) > 2, "sets must go on completing"
