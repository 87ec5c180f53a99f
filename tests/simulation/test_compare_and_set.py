"""Random schedules of a compare-and-set rendezvous: none violates a rule, and every mutant does."""

import os
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from ripstop.compat.rendezvous.compare_and_set import Candidate, Formed, Participant, SharedState, Step
from ripstop.model.round import Address
from tests.simulation.compare_and_set_world import World
from tests.simulation.rules import Violation

SCHEDULES = max(200, int(os.environ.get("RIPSTOP_SCHEDULES", "21000")) // 105)  # each takes as long as a hundred others
LONG = 10_000
MAX_SCHEDULES = 300  # until a mutant violates a rule

Patch = Callable[[pytest.MonkeyPatch], None]


def run(first: int, count: int) -> list[World]:
    worlds = []
    for seed in range(first, first + count):
        worlds.append(World(seed))
        try:
            worlds[-1].run()
        except Exception as error:
            raise AssertionError(f"World({seed}).run(): {error}") from error
    return worlds


def test_every_schedule_comes_to_rest_after_its_faults() -> None:
    worlds = run(0, SCHEDULES)
    assert sum(len(world.formed) for world in worlds) > SCHEDULES  # rounds form
    assert any(world.store.states[-1].closed for world in worlds)
    assert any(world.store.states[-1].coming for world in worlds)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_many_more_schedules_come_to_rest() -> None:
    run(1_000_000, LONG)


def a_round_forms_while_nodes_are_in_the_last_one(patch: pytest.MonkeyPatch) -> None:
    original = Participant._form
    patch.setattr(
        Participant, "_form", lambda member, state: original(member, replace(state, gone=frozenset(state.seats)))
    )


def no_node_sends_heartbeats(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Participant, "_is_due", lambda member, state: False)


def a_silent_node_is_never_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Participant, "_without_the_lost", lambda member, state: state)


def a_clock_jump_counts_as_silence(patch: pytest.MonkeyPatch) -> None:
    def look(member: Participant, now: float) -> None:
        member._time = now

    patch.setattr(Participant, "_look", look)


def a_closed_rendezvous_reopens(patch: pytest.MonkeyPatch) -> None:
    original = Participant.join

    def join(member: Participant, state: SharedState, store: Address, now: float) -> Step:
        return original(member, replace(state, closed=False), store, now)

    patch.setattr(Participant, "join", join)


def a_waiting_node_joins_twice(patch: pytest.MonkeyPatch) -> None:
    original = Participant._come

    def come(member: Participant, state: SharedState, comer: Candidate) -> SharedState:
        after = original(member, state, comer)
        return replace(after, coming=(*after.coming, comer)) if member._time > 5 and not member.round else after

    patch.setattr(Participant, "_come", come)


def a_round_exceeds_the_maximum(patch: pytest.MonkeyPatch) -> None:
    original = Participant._form

    def form(member: Participant, state: SharedState) -> SharedState:
        after = original(member, state)
        if after.round == state.round:
            return after
        return replace(after, seats=after.seats + tuple(comer.node for comer in after.coming), coming=())

    patch.setattr(Participant, "_form", form)


def survivors_lose_their_ranks(patch: pytest.MonkeyPatch) -> None:
    original = Participant._come
    patch.setattr(Participant, "_come", lambda member, state, comer: original(member, state, replace(comer, rank=None)))


def a_withdrawn_port_is_used(patch: pytest.MonkeyPatch) -> None:
    original = Participant._enter

    def enter(member: Participant, state: SharedState, store: Address) -> Formed | None:
        assert state.store is not None
        return original(member, state, state.store)

    patch.setattr(Participant, "_enter", enter)


def a_waiting_spare_is_counted_as_new(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Participant, "waiting", lambda member, state: len(state.coming))


MUTANTS: list[Patch] = [
    a_round_forms_while_nodes_are_in_the_last_one,
    no_node_sends_heartbeats,
    a_silent_node_is_never_lost,
    a_clock_jump_counts_as_silence,
    a_closed_rendezvous_reopens,
    a_waiting_node_joins_twice,
    a_round_exceeds_the_maximum,
    survivors_lose_their_ranks,
    a_withdrawn_port_is_used,
    a_waiting_spare_is_counted_as_new,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.__name__ for mutant in MUTANTS])
def test_a_rule_is_violated_when(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(Violation):
        for seed in range(MAX_SCHEDULES):
            World(seed).run()
