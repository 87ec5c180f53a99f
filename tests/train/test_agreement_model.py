"""Every interleaving of commits, collectives and kills of a small job: what all ranks had is restored, whole, by all.

Ranks take turns in every possible order, and a kill of the whole round may come at any moment.  The model uses the
real `agree`, `next_slot` and `slots_newest_last`.  A commit's content says in which attempt of the job it was made, so
ranks that restore different contents are noticed even if numbers agree.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from ripstop.train import agreement, buffer_slots
from ripstop.train.agreement import (
    AgreementOffer,
    Commit,
    Compare,
    Digests,
    Holding,
    Restore,
    Start,
)
from ripstop.train.buffer_slots import BLOCKING_BUFFERS, OVERLAPPED_BUFFERS

MAX_KILLS = {2: 2, 3: 1}  # by the number of ranks
MAX_COMMITS = 4  # in one round


@dataclass(frozen=True)
class Written:
    commit: Commit
    whole: bool = True


@dataclass(frozen=True)
class Rank:
    slots: tuple[tuple[int, Written | None], ...] = ()  # None: the stamp is cleared
    order: tuple[int, ...] = ()  # oldest first
    number: int = 0  # of the newest commit
    entered: int = 0  # collectives of this round
    committed: int = 0  # commits of this round that have been started
    copying: int | None = None  # the slot that is being filled


@dataclass(frozen=True)
class World:
    ranks: tuple[Rank, ...]
    round: int = 1
    safe: Commit | None = None  # the newest commit that all ranks have had


class Lost(AssertionError):
    """A commit that all ranks had is not restored, or not whole."""


class Model:
    def __init__(self, size: int, buffers: int, *, overlapped: bool, collective: bool = True) -> None:
        self.size, self.buffers, self.overlapped, self.collective = size, buffers, overlapped, collective

    def explore(self) -> int:
        """Visit all reachable states; return how many there are."""
        first = World(tuple(Rank() for _ in range(self.size)))
        seen, todo = {first}, [first]
        while todo:
            world = todo.pop()
            for after in self.successors(world):
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        return len(seen)

    def successors(self, world: World) -> Iterator[World]:
        for number, rank in enumerate(world.ranks):
            for after in self.moves(world, rank):
                ranks = (*world.ranks[:number], after, *world.ranks[number + 1 :])
                yield self.noted(replace(world, ranks=ranks))
        if world.round <= MAX_KILLS[self.size]:
            yield self.killed(world)

    def moves(self, world: World, rank: Rank) -> Iterator[Rank]:
        """What one rank can do next: step = collective, then commit."""
        others_entered = min(other.entered for other in world.ranks)
        is_out = (
            not self.collective or rank.entered <= others_entered
        )  # all have entered the collective that it entered
        if rank.copying is not None:
            yield self.finished(world, rank)
        if rank.entered == rank.committed < MAX_COMMITS and (self.overlapped or rank.copying is None):
            yield replace(rank, entered=rank.entered + 1)
        elif rank.entered > rank.committed and is_out and rank.copying is None:  # the optimizer's step waits for a copy
            yield self.started(world, rank)

    def started(self, world: World, rank: Rank) -> Rank:
        slot = buffer_slots.next_slot(rank.order, self.buffers)
        order = tuple(buffer_slots.slots_newest_last(rank.order, slot))
        return replace(
            rank,
            slots=_put(rank.slots, slot, self.when_started(world, rank, dict(rank.slots).get(slot))),
            order=order,
            committed=rank.committed + 1,
            copying=slot,
        )

    def when_started(self, world: World, rank: Rank, old: Written | None) -> Written | None:
        return None  # the stamp is cleared first

    def finished(self, world: World, rank: Rank) -> Rank:
        assert rank.copying is not None
        written = Written(Commit(world.round, rank.number + 1, self.size))
        return replace(rank, slots=_put(rank.slots, rank.copying, written), number=rank.number + 1, copying=None)

    def noted(self, world: World) -> World:
        common = set.intersection(*({c for _, c in rank.slots if c and c.whole} for rank in world.ranks))
        newest = max((written.commit for written in common), default=None)
        return replace(world, safe=newest or world.safe)

    def killed(self, world: World) -> World:
        """All ranks die now, and the next round restores."""
        if any(written and not written.whole for rank in world.ranks for _, written in rank.slots):
            raise Lost(f"a buffer claims to have a commit that is not whole: {world}")
        found = decide([_offers(rank, number) for number, rank in enumerate(world.ranks)])
        if found != world.safe:
            raise Lost(f"all ranks had {world.safe}, and they agree on {found}: {world}")
        ranks = []
        for rank in world.ranks:
            slot = next((slot for slot, written in rank.slots if written and written.commit == found), None)
            if found and (slot is None or dict(rank.slots)[slot] != Written(found)):
                raise Lost(f"{rank} cannot restore {found}")
            order = tuple(buffer_slots.slots_newest_last(sorted(slot for slot, _ in rank.slots), slot))
            ranks.append(Rank(rank.slots, order, found.number if found else 0))
        return World(tuple(ranks), world.round + 1, found)


class Freeing(Model):
    """Buffers of ranks that have left a node are freed only if all ranks have a newer commit."""

    def successors(self, world: World) -> Iterator[World]:
        if any(buffer_slots.may_free_slots_of_others(rank.committed) for rank in world.ranks):
            for rank in world.ranks:
                if not any(written and written.commit.round == world.round for _, written in rank.slots):
                    raise Lost(f"{rank} has no commit of this round, and another rank frees older ones: {world}")
        return super().successors(world)


class NodeLost(Model):
    """A kill may also take the memory of one node, which has one rank."""

    def killed(self, world: World) -> World:
        for lost in range(self.size):
            ranks = tuple(Rank() if number == lost else rank for number, rank in enumerate(world.ranks))
            if found := decide([_offers(rank, number) for number, rank in enumerate(ranks)]):
                raise Lost(f"restored {found} without the shard of rank {lost}: {world}")
            found = decide([_offers(rank, number, is_replicated=True) for number, rank in enumerate(ranks)])
            if world.safe is not None and (found is None or found < world.safe):
                raise Lost(f"all ranks had {world.safe}, and they agree on {found}: {world}")
            held = [written for rank in ranks for _, written in rank.slots if written and written.commit == found]
            if found and Written(found) not in held:
                raise Lost(f"{found} is not whole: {world}")
        return super().killed(world)


def _put(slots: tuple[tuple[int, Written | None], ...], slot: int, written: Written | None):
    return tuple(sorted({**dict(slots), slot: written}.items()))


def _offers(rank: Rank, number: int, *, is_replicated: bool = False) -> list[AgreementOffer]:
    return [AgreementOffer(written.commit, number, is_replicated) for _, written in rank.slots if written is not None]


def decide(offers: Sequence[Sequence[AgreementOffer]], digests: Digests = ()) -> Commit | None:
    """What ranks on nodes of their own restore."""
    steps = agreement.agree([Holding(number, own) for number, own in enumerate(offers)])
    try:
        next(steps)
        steps.send(digests)
    except StopIteration as end:
        return end.value.commit if isinstance(end.value, Restore) else None
    raise AssertionError("asks twice for digests that are equal")


@pytest.mark.parametrize("size", [2, 3])
def test_two_buffers_are_enough_if_commit_waits_for_the_copy(size: int) -> None:
    assert Model(size, BLOCKING_BUFFERS, overlapped=False).explore() > 1000


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_three_buffers_are_enough_if_the_copy_continues_during_the_next_step(size: int) -> None:
    assert Model(size, OVERLAPPED_BUFFERS, overlapped=True).explore() > 1000


def test_two_buffers_are_not_enough_if_the_copy_continues_during_the_next_step() -> None:
    with pytest.raises(Lost):
        Model(2, BLOCKING_BUFFERS, overlapped=True).explore()


def test_one_buffer_is_never_enough() -> None:
    with pytest.raises(Lost):
        Model(2, 1, overlapped=False).explore()


def test_without_a_collective_between_commits_no_number_of_buffers_is_enough() -> None:
    with pytest.raises(Lost):
        Model(2, OVERLAPPED_BUFFERS, overlapped=False, collective=False).explore()


@pytest.mark.parametrize("overlapped", [False, True])
def test_the_loss_of_a_node_costs_no_commit_of_replicated_state_and_is_noticed_for_other_state(
    overlapped: bool,
) -> None:
    buffers = OVERLAPPED_BUFFERS if overlapped else BLOCKING_BUFFERS
    assert NodeLost(2, buffers, overlapped=overlapped).explore() > 1000


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("overlapped", [False, True])
def test_buffers_of_ranks_that_left_are_freed_when_all_ranks_have_a_commit_of_the_new_round(
    size: int, overlapped: bool
) -> None:
    assert Freeing(size, OVERLAPPED_BUFFERS if overlapped else BLOCKING_BUFFERS, overlapped=overlapped).explore() > 1000


@pytest.mark.parametrize("early", [1, 2])
def test_buffers_of_ranks_that_left_are_not_freed_earlier(early: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not buffer_slots.may_free_slots_of_others(early)
    monkeypatch.setattr(buffer_slots, "may_free_slots_of_others", lambda commits: commits >= early)
    with pytest.raises(Lost):
        Freeing(2, OVERLAPPED_BUFFERS, overlapped=True).explore()


Patch = Callable[[pytest.MonkeyPatch], None]


def the_newest_is_overwritten(patch: pytest.MonkeyPatch) -> None:
    right = buffer_slots.next_slot
    patch.setattr(buffer_slots, "next_slot", lambda slots, n: slots[-1] if len(slots) == n else right(slots, n))


def a_restored_commit_is_overwritten_first(patch: pytest.MonkeyPatch) -> None:
    right = buffer_slots.slots_newest_last

    def slots_newest_last(slots: Sequence[int], newest: int | None) -> list[int]:
        is_restore = list(slots) == sorted(slots)
        return right(slots, newest)[::-1] if is_restore and len(slots) > 1 else right(slots, newest)

    patch.setattr(buffer_slots, "slots_newest_last", slots_newest_last)


def a_commit_is_complete_before_its_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Model,
        "when_started",
        lambda model, world, rank, old: Written(Commit(world.round, rank.number + 1, model.size), whole=False),
    )


def the_old_stamp_stays_while_its_commit_is_overwritten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Model, "when_started", lambda model, world, rank, old: old and replace(old, whole=False))


def mutant_agree(choose: Callable[[list[set[Commit]]], Commit | None]) -> Patch:
    def agree(holdings: Sequence[Holding]) -> Generator[Compare, Digests, Restore | Start]:
        chosen = choose([{offer.commit for offer in holding.offers} for holding in holdings])
        return Restore(chosen) if chosen else Start()
        yield

    return lambda patch: patch.setattr(agreement, "agree", agree)


def numbers_alone_identify_a_commit(patch: pytest.MonkeyPatch) -> None:
    def choose(held: list[set[Commit]]) -> Commit | None:
        number = max(set.intersection(*({commit.number for commit in own} for own in held)), default=None)
        return max((commit for own in held for commit in own if commit.number == number), default=None)

    mutant_agree(choose)(patch)


def some_ranks_are_enough(patch: pytest.MonkeyPatch) -> None:
    mutant_agree(lambda held: max(set.union(*held), default=None))(patch)


def the_oldest_common_commit_is_chosen(patch: pytest.MonkeyPatch) -> None:
    mutant_agree(lambda held: min(set.intersection(*held), default=None))(patch)


MUTANTS: list[Patch] = [
    the_newest_is_overwritten,
    a_restored_commit_is_overwritten_first,
    a_commit_is_complete_before_its_copy,
    the_old_stamp_stays_while_its_commit_is_overwritten,
    numbers_alone_identify_a_commit,
    some_ranks_are_enough,
    the_oldest_common_commit_is_chosen,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
@pytest.mark.parametrize("overlapped", [False, True])
def test_a_broken_rule_is_found(mutant: Patch, overlapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(Lost):
        Model(2, OVERLAPPED_BUFFERS if overlapped else BLOCKING_BUFFERS, overlapped=overlapped).explore()
