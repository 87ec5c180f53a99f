"""Random schedules of succession, and no violation; and a change to any rule is caught.

`RIPSTOP_SUCCESSIONS=100000 pytest tests/simulation/test_succession.py` runs more schedules, from
`RIPSTOP_SUCCESSIONS_FROM` on.  A violation names its seed and the command that replays it.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from ripstop.election import candidate as candidate_module
from ripstop.election.candidate import Announce, Candidate
from ripstop.election.search import Search
from ripstop.election.voter import Voter
from ripstop.model.electorate import Electorate, count
from ripstop.protocol.messages import Canvass, Follow, Promise
from tests.simulation import succession_world
from tests.simulation.rules import Violation
from tests.simulation.succession_world import MIXES, SuccessionWorld, check

SCHEDULES = int(os.environ.get("RIPSTOP_SUCCESSIONS", "1600"))
FIRST = int(os.environ.get("RIPSTOP_SUCCESSIONS_FROM", "0"))
PARTS = 4
LONG = 100_000
LONG_PARTS = 20
MAX_SCHEDULES = 4000  # in which a mutant is caught

Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.timeout(0 if SCHEDULES > 20_000 else 300)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_schedule_has_one_coordinator_and_comes_to_rest(part: int) -> None:
    size = SCHEDULES // PARTS
    for seed in range(FIRST + part * size, FIRST + (part + 1) * size):
        check(seed)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(LONG_PARTS))
def test_many_more_schedules_have_one_coordinator(part: int) -> None:
    size = LONG // LONG_PARTS
    for seed in range(1_000_000 + part * size, 1_000_000 + (part + 1) * size):
        check(seed)


def test_a_seed_is_a_schedule() -> None:
    transcripts: list[list[str]] = [[], []]
    for lines in transcripts:
        SuccessionWorld(5, lines.append).run()
    assert transcripts[0] == transcripts[1]
    assert len(transcripts[0]) > 50


@pytest.mark.parametrize("mix", range(len(MIXES)), ids=[mix.name for mix in MIXES])
def test_schedules_of_every_mix_elect_successors_and_commit_rounds(mix: int) -> None:
    offices = rounds = 0
    for seed in range(mix, 60 * len(MIXES), len(MIXES)):
        world = SuccessionWorld(seed)
        world.run()
        offices += world.offices
        rounds += len(world.announced)
    assert offices >= 60
    assert rounds >= 40


# Rules that others cover are tested in tests/election/test_candidate.py.
# mutants --------------------------------------------------------------------------------------------------------------


def a_promise_binds_nobody(patch: pytest.MonkeyPatch) -> None:
    original = Voter._on_canvass

    def on_canvass(voter: Voter, epoch: int, number: int, node: str, now: float) -> Any:
        voter._bound_until = float("-inf")
        return original(voter, epoch, number, node, now)

    patch.setattr(Voter, "_on_canvass", on_canvass)


def a_voter_forgets_the_electorate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Voter, "learn", lambda voter, electorate: None)


def a_candidate_does_not_tell_its_own_voter(patch: pytest.MonkeyPatch) -> None:
    def learn(candidate: Candidate, electorate: Electorate) -> None:
        candidate.electorate = electorate
        if candidate.in_office:
            candidate._extend_office()

    patch.setattr(Candidate, "_learn", learn)


def a_restarted_agent_counts_as_the_old_one(patch: pytest.MonkeyPatch) -> None:
    original = succession_world.Process.__init__

    def init(process: Any, name: str, *args: Any) -> None:
        original(process, name.partition(".")[0], *args)

    patch.setattr(succession_world.Process, "__init__", init)


def half_of_the_voters_is_a_majority(patch: pytest.MonkeyPatch) -> None:
    def has_majority(electorate: Electorate, present: Any) -> bool:
        both = filter(None, (electorate.voters, electorate.outgoing))
        return all(2 * count(voters, present) >= len(voters) for voters in both)

    patch.setattr(Electorate, "has_majority", has_majority)


def the_outgoing_voters_are_not_asked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Electorate,
        "has_majority",
        lambda electorate, present: 2 * count(electorate.voters, present) > len(electorate.voters),
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


def an_office_has_no_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Candidate, "_extend_office", lambda candidate: setattr(candidate, "_office_end", float("inf")))


def an_office_lasts_longer_than_its_promises(patch: pytest.MonkeyPatch) -> None:
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
        lambda candidate, follow: 0 if candidate.in_office else original(candidate, follow),
    )


def a_bound_voter_is_not_asked_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Voter, "on_tick", lambda voter, now: [])
    patch.setattr(candidate_module, "RENEWALS_A_LEASE", 0.001)


def agents_never_leave_a_candidate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Search, "waiting_time", lambda search: 1e9)


def a_candidate_keeps_its_epoch(patch: pytest.MonkeyPatch) -> None:
    original = Candidate._ask

    def ask(candidate: Candidate, node: str, now: float) -> Any:
        return [
            replace(command, message=replace(command.message, epoch=1))
            if isinstance(command.message, Canvass)
            else command
            for command in original(candidate, node, now)
        ]

    patch.setattr(Candidate, "_ask", ask)


MUTANTS: dict[Patch, int] = {  # and a schedule that catches it, tried first
    a_promise_binds_nobody: 511,
    a_voter_forgets_the_electorate: 1281,
    a_candidate_does_not_tell_its_own_voter: 576,
    a_restarted_agent_counts_as_the_old_one: 102,
    half_of_the_voters_is_a_majority: 12,
    the_outgoing_voters_are_not_asked: 511,
    a_majority_of_the_addresses_starts_a_job: 30,
    a_candidate_ignores_what_voters_know: 1281,
    a_round_is_announced_before_it_is_committed: 79,
    an_office_has_no_end: 12,
    an_office_lasts_longer_than_its_promises: 50,
    a_renewal_counts_from_its_reply: 1497,
    a_coordinator_ignores_higher_epochs: 16,
    a_bound_voter_is_not_asked_again: 1,
    agents_never_leave_a_candidate: 3,
    a_candidate_keeps_its_epoch: 4,
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.__name__ for mutant in MUTANTS])
def test_a_rule_is_violated_when(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(Violation):
        for seed in (MUTANTS[mutant], *range(MAX_SCHEDULES)):
            SuccessionWorld(seed).run()
