"""A compare-and-set rendezvous: what the schedules reach, and every broken rule is found."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from ripstop.compat.rendezvous.compare_and_set import (
    Candidate,
    CompareAndSetParticipant,
    CompareAndSetState,
    Formed,
    Step,
    StoreAddress,
)
from tests.simulation.compare_and_set_world import CompareAndSetWorld
from tests.simulation.rules import Violation

SCHEDULES = 100  # the others are in `test_schedules.py`
MAX_SCHEDULES = 300  # until a mutant is found

Patch = Callable[[pytest.MonkeyPatch], None]


def test_schedules_form_rounds_and_reach_every_kind_of_rest() -> None:
    worlds = [CompareAndSetWorld(seed) for seed in range(SCHEDULES)]
    for world in worlds:
        world.run()
    assert sum(len(world.formed) for world in worlds) > SCHEDULES  # rounds form
    assert any(world.store.states[-1].closed for world in worlds)
    assert any(world.store.states[-1].candidates for world in worlds)


def a_round_forms_while_others_are_in_the_last(patch: pytest.MonkeyPatch) -> None:
    right = CompareAndSetParticipant._with_next_round
    patch.setattr(
        CompareAndSetParticipant,
        "_with_next_round",
        lambda member, state: right(member, replace(state, departed=frozenset(state.members))),
    )


def no_node_writes_heartbeats(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CompareAndSetParticipant, "_is_heartbeat_due", lambda member, state: False)


def silent_nodes_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CompareAndSetParticipant, "_without_lost_nodes", lambda member, state: state)


def a_clock_jump_counts_as_silence_of_others(patch: pytest.MonkeyPatch) -> None:
    def advance_time(member: CompareAndSetParticipant, now: float) -> None:
        member._time = now

    patch.setattr(CompareAndSetParticipant, "_advance_time", advance_time)


def closing_is_not_final(patch: pytest.MonkeyPatch) -> None:
    right = CompareAndSetParticipant.join

    def join(member: CompareAndSetParticipant, state: CompareAndSetState, store: StoreAddress, now: float) -> Step:
        return right(member, replace(state, closed=False), store, now)

    patch.setattr(CompareAndSetParticipant, "join", join)


def a_waiting_node_joins_twice(patch: pytest.MonkeyPatch) -> None:
    right = CompareAndSetParticipant._with_candidate

    def with_candidate(
        member: CompareAndSetParticipant, state: CompareAndSetState, candidate: Candidate
    ) -> CompareAndSetState:
        after = right(member, state, candidate)
        return (
            replace(after, candidates=(*after.candidates, candidate))
            if member._time > 5 and not member.round
            else after
        )

    patch.setattr(CompareAndSetParticipant, "_with_candidate", with_candidate)


def more_than_max_nodes_form_a_round(patch: pytest.MonkeyPatch) -> None:
    right = CompareAndSetParticipant._with_next_round

    def with_next_round(member: CompareAndSetParticipant, state: CompareAndSetState) -> CompareAndSetState:
        after = right(member, state)
        if after.round == state.round:
            return after
        return replace(
            after, members=after.members + tuple(candidate.node for candidate in after.candidates), candidates=()
        )

    patch.setattr(CompareAndSetParticipant, "_with_next_round", with_next_round)


def survivors_lose_their_ranks(patch: pytest.MonkeyPatch) -> None:
    right = CompareAndSetParticipant._with_candidate
    patch.setattr(
        CompareAndSetParticipant,
        "_with_candidate",
        lambda member, state, candidate: right(member, state, replace(candidate, rank=None)),
    )


def an_outdated_store_address_is_used(patch: pytest.MonkeyPatch) -> None:
    right = CompareAndSetParticipant._enter

    def enter(member: CompareAndSetParticipant, state: CompareAndSetState, store: StoreAddress) -> Formed | None:
        assert state.store is not None
        return right(member, state, state.store)

    patch.setattr(CompareAndSetParticipant, "_enter", enter)


def a_removed_node_does_not_notice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CompareAndSetParticipant, "waiting", lambda member, state: len(state.candidates))


MUTANTS: list[Patch] = [
    a_round_forms_while_others_are_in_the_last,
    no_node_writes_heartbeats,
    silent_nodes_stay,
    a_clock_jump_counts_as_silence_of_others,
    closing_is_not_final,
    a_waiting_node_joins_twice,
    more_than_max_nodes_form_a_round,
    survivors_lose_their_ranks,
    an_outdated_store_address_is_used,
    a_removed_node_does_not_notice,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.__name__ for mutant in MUTANTS])
def test_the_simulation_finds_that(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises((Violation, AssertionError, KeyError, StopIteration)):
        for seed in range(MAX_SCHEDULES):
            CompareAndSetWorld(seed).run()
