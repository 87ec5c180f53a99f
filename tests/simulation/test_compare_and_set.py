"""Random schedules of a rendezvous over a blob: none ends badly, and every broken rule is noticed."""

import os
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from ripstop.compat.rendezvous.compare_and_set import Candidate, Formed, Participant, SharedState, Step
from ripstop.model.round import Address
from tests.simulation.compare_and_set_world import World
from tests.simulation.rules import Violation

SCHEDULES = max(200, int(os.environ.get("RIPSTOP_SCHEDULES", "21000")) // 105)  # each as long as a hundred others
LONG = 10_000
MOST = 300  # schedules until a mutant is noticed

Patch = Callable[[pytest.MonkeyPatch], None]


def run(first: int, count: int) -> list[World]:
    worlds = []
    for seed in range(first, first + count):
        worlds.append(World(seed))
        try:
            worlds[-1].run()
        except (Violation, AssertionError) as error:
            raise AssertionError(f"World({seed}).run(): {error}") from error
    return worlds


def test_every_schedule_that_stops_hurting_comes_to_rest() -> None:
    worlds = run(0, SCHEDULES)
    assert sum(len(world.formed) for world in worlds) > SCHEDULES  # they have rounds in them
    assert any(world.store.states[-1].closed for world in worlds)
    assert any(world.store.states[-1].coming for world in worlds)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_many_more_schedules_come_to_rest() -> None:
    run(1_000_000, LONG)


def a_round_forms_while_others_are_in_the_last(patch: pytest.MonkeyPatch) -> None:
    right = Participant._form
    patch.setattr(
        Participant, "_form", lambda member, state: right(member, replace(state, gone=frozenset(state.seats)))
    )


def nobody_beats(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Participant, "_is_due", lambda member, state: False)


def silence_is_never_a_loss(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Participant, "_without_the_lost", lambda member, state: state)


def a_jump_of_the_clock_is_the_others_silence(patch: pytest.MonkeyPatch) -> None:
    def look(member: Participant, now: float) -> None:
        member._time = now

    patch.setattr(Participant, "_look", look)


def the_end_is_not_final(patch: pytest.MonkeyPatch) -> None:
    right = Participant.join

    def join(member: Participant, state: SharedState, store: Address, now: float) -> Step:
        return right(member, replace(state, closed=False), store, now)

    patch.setattr(Participant, "join", join)


def a_node_that_waits_comes_again(patch: pytest.MonkeyPatch) -> None:
    right = Participant._come

    def come(member: Participant, state: SharedState, comer: Candidate) -> SharedState:
        after = right(member, state, comer)
        return replace(after, coming=(*after.coming, comer)) if member._time > 5 and not member.round else after

    patch.setattr(Participant, "_come", come)


def more_than_the_maximum_are_taken(patch: pytest.MonkeyPatch) -> None:
    right = Participant._form

    def form(member: Participant, state: SharedState) -> SharedState:
        after = right(member, state)
        if after.round == state.round:
            return after
        return replace(after, seats=after.seats + tuple(comer.node for comer in after.coming), coming=())

    patch.setattr(Participant, "_form", form)


def ranks_are_dealt_anew(patch: pytest.MonkeyPatch) -> None:
    right = Participant._come
    patch.setattr(Participant, "_come", lambda member, state, comer: right(member, state, replace(comer, rank=None)))


def an_offer_that_was_taken_back_is_used(patch: pytest.MonkeyPatch) -> None:
    right = Participant._enter

    def enter(member: Participant, state: SharedState, store: Address) -> Formed | None:
        assert state.store is not None
        return right(member, state, state.store)

    patch.setattr(Participant, "_enter", enter)


def who_was_left_behind_is_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Participant, "waiting", lambda member, state: len(state.coming))


MUTANTS: list[Patch] = [
    a_round_forms_while_others_are_in_the_last,
    nobody_beats,
    silence_is_never_a_loss,
    a_jump_of_the_clock_is_the_others_silence,
    the_end_is_not_final,
    a_node_that_waits_comes_again,
    more_than_the_maximum_are_taken,
    ranks_are_dealt_anew,
    an_offer_that_was_taken_back_is_used,
    who_was_left_behind_is_not_told,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.__name__ for mutant in MUTANTS])
def test_the_simulation_notices_when(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(Violation):
        for seed in range(MOST):
            World(seed).run()
