"""Succession: what the schedules reach, and mutants of its rules.  `test_schedules.py` runs the schedules."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from ripstop.coordinator.commit_queue import CommitQueue
from ripstop.coordinator.job_memory import JobMemory
from ripstop.election import candidate as candidate_module
from ripstop.election import search as search_module
from ripstop.election.candidate import Announce, Candidate
from ripstop.election.search import Search
from ripstop.election.voter import Reply, Voter
from ripstop.model.electorate import Electorate, count_in_electorate
from ripstop.protocol.messages import Follow, LeaderElected, Promise, Renew, Renewed, RequestPromise
from tests.simulation import succession_job_world, succession_world
from tests.simulation.adversary_world import AdversaryWorld
from tests.simulation.handover_world import HandoverWorld
from tests.simulation.partition_world import PartitionWorld
from tests.simulation.rules import Violation
from tests.simulation.succession_job_world import SuccessionJobWorld
from tests.simulation.succession_world import MIXES, SuccessionWorld

MAX_SCHEDULES = 3_000  # in which a mutant is caught

FIXED = (  # schedules that once had two coordinators, did not come to rest, or started a round that was not committed
    *((succession_world.check, seed) for seed in (76, 1_257, 3_000_225, 3_001_280)),
    *((succession_job_world.check, seed) for seed in (25, 1_130, 1_558)),
)

Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(("check", "seed"), FIXED)
def test_schedules_of_fixed_defects_come_to_rest(check: Callable[[int], None], seed: int) -> None:
    check(seed)


def test_a_seed_is_a_schedule() -> None:
    transcripts: list[list[str]] = [[], []]
    for lines in transcripts:
        SuccessionWorld(5, lines.append).run()
    assert transcripts[0] == transcripts[1]
    assert len(transcripts[0]) > 50


@pytest.mark.parametrize("world", (SuccessionWorld, SuccessionJobWorld))
def test_schedules_of_every_mix_elect_successors_and_commit_rounds(world: type[SuccessionWorld]) -> None:
    elections, rounds = Counter[str](), Counter[str]()
    reached = Counter[str]()
    for seed in range(20 * len(MIXES)):
        schedule = world(seed)
        schedule.run()
        elections[schedule.mix.name] += schedule.elections
        rounds[schedule.mix.name] += len(schedule.announced)
        reached += schedule.reached
    assert min(elections.values()) >= 10
    assert min(rounds.values()) >= 5
    assert [fault for fault in REACHED if not reached[fault]] == []


REACHED = (  # faults that had an effect
    "blocked",
    "blocked in one direction",
    "blocked in part",
    "clock of a bound voter jumps",
    "clock of a coordinator jumps",
    "coordinator dies",
    "successor dies before it is settled",
    "leave",
    "join",
    "message arrives twice or late",
    "message of a connection that was left",
    "paused process resumes with messages",
)


# mutants --------------------------------------------------------------------------------------------------------------


def a_lower_epoch_is_promised(patch: pytest.MonkeyPatch) -> None:
    original = Voter._on_promise_request

    def on_promise_request(voter: Voter, epoch: int, number: int, node: str, now: float) -> Any:
        voter.promised = min(voter.promised, epoch - 1)
        return original(voter, epoch, number, node, now)

    patch.setattr(Voter, "_on_promise_request", on_promise_request)


def an_epoch_is_promised_twice(patch: pytest.MonkeyPatch) -> None:
    original = Voter._on_promise_request

    def on_promise_request(voter: Voter, epoch: int, number: int, node: str, now: float) -> Any:
        if epoch == voter.promised and now >= voter._bound_until:
            voter.promised_to = node
        return original(voter, epoch, number, node, now)

    patch.setattr(Voter, "_on_promise_request", on_promise_request)


def a_coordinator_of_a_lower_epoch_is_followed(patch: pytest.MonkeyPatch) -> None:
    original = Voter.on

    def on(voter: Voter, message: Any, now: float) -> Any:
        if isinstance(message, LeaderElected) and message.epoch < voter.promised:
            voter.promised, voter.promised_to = message.epoch, message.node
        return original(voter, message, now)

    patch.setattr(Voter, "on", on)


def a_leadership_of_a_lower_epoch_is_renewed(patch: pytest.MonkeyPatch) -> None:
    original = Voter.on

    def on(voter: Voter, message: Any, now: float) -> Any:
        if isinstance(message, Renew) and message.epoch < voter.promised:
            return [Reply(Renewed(message.epoch, message.number))]
        return original(voter, message, now)

    patch.setattr(Voter, "on", on)


def a_renewal_binds_nobody(patch: pytest.MonkeyPatch) -> None:
    original = Voter.on

    def on(voter: Voter, message: Any, now: float) -> Any:
        before = voter._bound_until
        out = original(voter, message, now)
        if isinstance(message, Renew):
            voter._bound_until = before
        return out

    patch.setattr(Voter, "on", on)


def a_voter_takes_older_electorates(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Voter, "learn", lambda voter, electorate: setattr(voter, "electorate", electorate))


def changes_in_an_epoch_are_not_newer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Electorate, "version", property(lambda electorate: (electorate.epoch, 0)))


def a_round_that_is_over_is_not_withdrawn(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Candidate, "withdraw", lambda candidate: 1 << 60)


def a_round_is_sent_before_it_is_committed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CommitQueue, "propose", lambda queue, round: None)


def a_round_that_was_not_committed_starts(patch: pytest.MonkeyPatch) -> None:
    def abandon(queue: Any, rounds: set[int]) -> None:
        for round in rounds:
            queue._waiting.remove(round)

    patch.setattr(CommitQueue, "_abandon", abandon)


def the_memory_is_not_sent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JobMemory, "send_if_changed", lambda memory, job, now: None)


def an_older_memory_wins(patch: pytest.MonkeyPatch) -> None:
    original = JobMemory.restore

    def restore(memory: JobMemory, job: Any, message: Any, now: float) -> None:
        memory._serial = -1
        original(memory, job, message, now)

    patch.setattr(JobMemory, "restore", restore)


def a_successor_ignores_the_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JobMemory, "restore", lambda memory, job, message, now: None)


def a_promise_binds_nobody(patch: pytest.MonkeyPatch) -> None:
    original = Voter._on_promise_request

    def on_promise_request(voter: Voter, epoch: int, number: int, node: str, now: float) -> Any:
        voter._bound_until = float("-inf")
        return original(voter, epoch, number, node, now)

    patch.setattr(Voter, "_on_promise_request", on_promise_request)


def a_voter_forgets_the_electorate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Voter, "learn", lambda voter, electorate: None)


def a_candidate_does_not_tell_its_own_voter(patch: pytest.MonkeyPatch) -> None:
    def learn(candidate: Candidate, electorate: Electorate) -> None:
        candidate.electorate = electorate
        if candidate.is_leader:
            candidate._extend_leadership()

    patch.setattr(Candidate, "_learn", learn)


def a_restarted_agent_counts_as_the_old_one(patch: pytest.MonkeyPatch) -> None:
    original = succession_world.Process.__init__

    def init(process: Any, name: str, *args: Any) -> None:
        original(process, name.partition(".")[0], *args)

    patch.setattr(succession_world.Process, "__init__", init)


def half_of_the_voters_is_a_majority(patch: pytest.MonkeyPatch) -> None:
    def has_majority(electorate: Electorate, present: Any) -> bool:
        both = filter(None, (electorate.voters, electorate.outgoing))
        return all(2 * count_in_electorate(voters, present) >= len(voters) for voters in both)

    patch.setattr(Electorate, "has_majority", has_majority)


def the_outgoing_voters_are_not_asked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Electorate,
        "has_majority",
        lambda electorate, present: 2 * count_in_electorate(electorate.voters, present) > len(electorate.voters),
    )


def a_majority_of_the_addresses_starts_a_job(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Electorate, "can_elect", Electorate.has_majority)


def a_candidate_ignores_what_voters_know(patch: pytest.MonkeyPatch) -> None:
    original = Candidate.on_message

    def on_message(candidate: Candidate, node: str, message: Any, now: float) -> Any:
        if isinstance(message, Follow | Promise) and message.electorate.version > candidate.electorate.version:
            message = replace(message, electorate=candidate.electorate)
        return original(candidate, node, message, now)

    patch.setattr(Candidate, "on_message", on_message)


def a_round_is_announced_before_it_is_committed(patch: pytest.MonkeyPatch) -> None:
    original = Candidate._settle

    def settle(candidate: Candidate, now: float) -> Any:
        out = original(candidate, now)
        if candidate.electorate.round > candidate._announced:
            candidate._announced = candidate.electorate.round
            out.append(Announce(candidate.electorate.round))
        return out

    patch.setattr(Candidate, "_settle", settle)


def a_candidate_with_a_coordinator_asks_for_promises(patch: pytest.MonkeyPatch) -> None:
    original = Candidate.on_leader
    patch.setattr(Candidate, "on_leader", lambda candidate, address, now: original(candidate, None, now))


def a_successor_changes_what_it_has_not_confirmed(patch: pytest.MonkeyPatch) -> None:
    original = Candidate._become_leader

    def become_leader(candidate: Candidate, now: float) -> Any:
        out = original(candidate, now)
        candidate._is_settled = candidate.is_leader
        return out

    patch.setattr(Candidate, "_become_leader", become_leader)


def two_changes_are_pending(patch: pytest.MonkeyPatch) -> None:
    original = Candidate._settle

    def settle(candidate: Candidate, now: float) -> Any:
        candidate._is_settled |= candidate._proposal is not None and candidate.electorate.epoch == candidate.epoch
        return original(candidate, now)

    patch.setattr(Candidate, "_settle", settle)


def a_change_begins_without_its_voters(patch: pytest.MonkeyPatch) -> None:
    original = Candidate._settle

    def settle(candidate: Candidate, now: float) -> Any:
        if candidate._proposal and candidate._is_settled:
            candidate._renewed_at |= dict.fromkeys(candidate._proposal[1], now)
        return original(candidate, now)

    patch.setattr(Candidate, "_settle", settle)


def a_node_that_has_left_stays_a_voter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Candidate, "on_left", lambda candidate, node, now: [])


def a_node_that_is_lost_is_no_voter_any_more(patch: pytest.MonkeyPatch) -> None:
    original = Candidate.on_disconnected

    def on_disconnected(candidate: Candidate, node: str) -> None:
        original(candidate, node)
        candidate.on_left(node, candidate._next_request)

    patch.setattr(Candidate, "on_disconnected", on_disconnected)


def a_coordinator_ignores_a_newer_one(patch: pytest.MonkeyPatch) -> None:
    original = Candidate._step_down

    def step_down(candidate: Candidate, why: str) -> Any:
        return [] if "knows a newer" in why else original(candidate, why)

    patch.setattr(Candidate, "_step_down", step_down)


def a_leadership_has_no_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Candidate, "_extend_leadership", lambda candidate: setattr(candidate, "_leadership_end", float("inf"))
    )


def a_leadership_lasts_longer_than_its_promises(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(candidate_module, "LEASE_MARGIN", -0.1)


def a_renewal_counts_from_its_reply(patch: pytest.MonkeyPatch) -> None:
    original = Candidate.on_message

    def on_message(candidate: Candidate, node: str, message: Any, now: float) -> Any:
        if (number := getattr(message, "number", None)) in candidate._requests:
            candidate._requests[number] = (now, candidate._requests[number][1])
        return original(candidate, node, message, now)

    patch.setattr(Candidate, "on_message", on_message)


def a_coordinator_ignores_higher_epochs(patch: pytest.MonkeyPatch) -> None:
    original = Candidate._least_epoch
    patch.setattr(
        Candidate,
        "_least_epoch",
        lambda candidate, follow: 0 if candidate.is_leader else original(candidate, follow),
    )


def a_bound_voter_is_not_asked_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Voter, "on_tick", lambda voter, now: [])
    patch.setattr(candidate_module, "RENEWALS_A_LEASE", 0.001)


def agents_never_leave_a_candidate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Search, "waiting_time", lambda search, is_first_election: 1e9)


def agents_stay_a_short_time_at_all_candidates_but_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(search_module, "GROWING_TURNS", 1)


def a_candidate_that_cannot_be_elected_any_more_goes_on_asking(patch: pytest.MonkeyPatch) -> None:
    original = Candidate._stop_requests

    def stop_requests(candidate: Candidate) -> None:
        if candidate.is_leader or candidate._leader is not None or candidate._is_electable():
            original(candidate)

    patch.setattr(Candidate, "_stop_requests", stop_requests)


def a_candidate_keeps_its_epoch(patch: pytest.MonkeyPatch) -> None:
    original = Candidate._ask

    def ask(candidate: Candidate, node: str, now: float) -> Any:
        return [
            replace(command, message=replace(command.message, epoch=1))
            if isinstance(command.message, RequestPromise)
            else command
            for command in original(candidate, node, now)
        ]

    patch.setattr(Candidate, "_ask", ask)


MUTANTS: dict[Patch, tuple[Callable[[int], Any], int]] = {  # its world, and a schedule that catches it, tried first
    a_lower_epoch_is_promised: (AdversaryWorld, 47),
    an_epoch_is_promised_twice: (AdversaryWorld, 57),
    a_coordinator_of_a_lower_epoch_is_followed: (AdversaryWorld, 390),
    a_leadership_of_a_lower_epoch_is_renewed: (AdversaryWorld, 9),
    a_voter_takes_older_electorates: (AdversaryWorld, 20),
    a_voter_forgets_the_electorate: (AdversaryWorld, 1),
    changes_in_an_epoch_are_not_newer: (AdversaryWorld, 1),
    a_candidate_ignores_what_voters_know: (AdversaryWorld, 1),
    a_candidate_does_not_tell_its_own_voter: (AdversaryWorld, 0),
    a_successor_changes_what_it_has_not_confirmed: (AdversaryWorld, 0),
    a_round_is_announced_before_it_is_committed: (AdversaryWorld, 17),
    two_changes_are_pending: (AdversaryWorld, 721),
    the_outgoing_voters_are_not_asked: (AdversaryWorld, 163),
    a_node_that_has_left_stays_a_voter: (AdversaryWorld, 6),
    a_coordinator_ignores_a_newer_one: (AdversaryWorld, 19),
    a_node_that_is_lost_is_no_voter_any_more: (SuccessionWorld, 75),
    a_candidate_with_a_coordinator_asks_for_promises: (SuccessionWorld, 1257),
    a_change_begins_without_its_voters: (SuccessionWorld, 408),
    a_promise_binds_nobody: (HandoverWorld, 8),
    a_renewal_binds_nobody: (HandoverWorld, 8),
    a_restarted_agent_counts_as_the_old_one: (SuccessionWorld, 59),
    half_of_the_voters_is_a_majority: (SuccessionWorld, 57),
    a_majority_of_the_addresses_starts_a_job: (SuccessionWorld, 442),
    a_leadership_has_no_end: (SuccessionWorld, 29),
    a_leadership_lasts_longer_than_its_promises: (HandoverWorld, 8),
    a_renewal_counts_from_its_reply: (HandoverWorld, 8),
    a_coordinator_ignores_higher_epochs: (SuccessionWorld, 105),
    a_bound_voter_is_not_asked_again: (SuccessionWorld, 1),
    agents_never_leave_a_candidate: (SuccessionWorld, 3),
    a_candidate_that_cannot_be_elected_any_more_goes_on_asking: (PartitionWorld, 0),
    agents_stay_a_short_time_at_all_candidates_but_one: (PartitionWorld, 1),
    a_candidate_keeps_its_epoch: (SuccessionWorld, 4),
    a_round_that_is_over_is_not_withdrawn: (SuccessionJobWorld, 118),
    a_round_is_sent_before_it_is_committed: (SuccessionJobWorld, 0),
    a_round_that_was_not_committed_starts: (SuccessionJobWorld, 86),
    the_memory_is_not_sent: (SuccessionJobWorld, 5),
    an_older_memory_wins: (SuccessionJobWorld, 5),
    a_successor_ignores_the_memory: (SuccessionJobWorld, 23),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.__name__ for mutant in MUTANTS])
def test_a_rule_is_violated_when(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    world, seed = MUTANTS[mutant]
    with pytest.raises(Violation):
        for each in (seed, *range(MAX_SCHEDULES)):
            world(each).run()
