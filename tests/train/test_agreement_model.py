"""Every interleaving of commits, collectives and kills of a small job: what all ranks had is restored, whole, by all.

Ranks take turns in every possible order, and a kill of the whole round may come at any moment.  The model uses the
real `agree`, `next_slot` and `newest_last`.  A commit's content says in which attempt of the job it was made, so ranks
that restore different contents are noticed even if numbers agree.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from ripstop.train import agreement
from ripstop.train.agreement import BLOCKING_BUFFERS, OVERLAPPED_BUFFERS, Decision, Offer, Outcome

MAX_KILLS = {2: 2, 3: 1}  # by the number of ranks
MAX_COMMITS = 4  # in one round


@dataclass(frozen=True)
class Commit:
    offer: Offer
    whole: bool = True


@dataclass(frozen=True)
class Rank:
    slots: tuple[tuple[int, Commit | None], ...] = ()  # None: the stamp is cleared
    order: tuple[int, ...] = ()  # oldest first
    number: int = 0  # of the newest commit
    entered: int = 0  # collectives of this round
    committed: int = 0  # commits of this round that have been started
    copying: int | None = None  # the slot that is being filled


@dataclass(frozen=True)
class World:
    ranks: tuple[Rank, ...]
    round: int = 1
    safe: Offer | None = None  # the newest commit that all ranks have had


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
        slot = agreement.next_slot(rank.order, self.buffers)
        order = tuple(agreement.newest_last(rank.order, slot))
        return replace(
            rank,
            slots=_put(rank.slots, slot, self.when_started(world, rank)),
            order=order,
            committed=rank.committed + 1,
            copying=slot,
        )

    def when_started(self, world: World, rank: Rank) -> Commit | None:
        return None  # the stamp is cleared first

    def finished(self, world: World, rank: Rank) -> Rank:
        assert rank.copying is not None
        offer = Offer(world.round, rank.number + 1, self.size)
        return replace(rank, slots=_put(rank.slots, rank.copying, Commit(offer)), number=rank.number + 1, copying=None)

    def noted(self, world: World) -> World:
        common = set.intersection(*({c for _, c in rank.slots if c and c.whole} for rank in world.ranks))
        newest = max((commit.offer for commit in common), default=None)
        return replace(world, safe=newest or world.safe)

    def killed(self, world: World) -> World:
        """All ranks die now, and the next round restores."""
        decision = agreement.agree([_offers(rank) for rank in world.ranks])
        if decision.commit != world.safe:
            raise Lost(f"all ranks had {world.safe}, and they agree on {decision}: {world}")
        ranks = []
        for rank in world.ranks:
            slot = next((slot for slot, found in rank.slots if found and found.offer == decision.commit), None)
            if decision.commit and (slot is None or dict(rank.slots)[slot] != Commit(decision.commit)):
                raise Lost(f"{rank} cannot restore {decision.commit}")
            order = tuple(agreement.newest_last(sorted(slot for slot, _ in rank.slots), slot))
            ranks.append(Rank(rank.slots, order, decision.commit.number if decision.commit else 0))
        return World(tuple(ranks), world.round + 1, decision.commit)


def _put(slots: tuple[tuple[int, Commit | None], ...], slot: int, commit: Commit | None):
    return tuple(sorted({**dict(slots), slot: commit}.items()))


def _offers(rank: Rank) -> list[Offer]:
    return [commit.offer for _, commit in rank.slots if commit is not None]


@pytest.mark.parametrize("size", [2, 3])
def test_two_buffers_are_enough_if_commit_waits_for_the_copy(size: int) -> None:
    assert Model(size, BLOCKING_BUFFERS, overlapped=False).explore() > 1000


@pytest.mark.parametrize("size", [2, 3])
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


Patch = Callable[[pytest.MonkeyPatch], None]


def the_newest_is_overwritten(patch: pytest.MonkeyPatch) -> None:
    right = agreement.next_slot
    patch.setattr(agreement, "next_slot", lambda slots, n: slots[-1] if len(slots) == n else right(slots, n))


def a_restored_commit_is_overwritten_first(patch: pytest.MonkeyPatch) -> None:
    right = agreement.newest_last

    def newest_last(slots: Sequence[int], newest: int | None) -> list[int]:
        is_restore = list(slots) == sorted(slots)
        return right(slots, newest)[::-1] if is_restore and len(slots) > 1 else right(slots, newest)

    patch.setattr(agreement, "newest_last", newest_last)


def a_commit_is_complete_before_its_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Model,
        "when_started",
        lambda model, world, rank: Commit(Offer(world.round, rank.number + 1, model.size), whole=False),
    )


def numbers_alone_identify_a_commit(patch: pytest.MonkeyPatch) -> None:
    def agree(offers: Sequence[Sequence[Offer]]) -> Decision:
        numbers = set.intersection(*({offer.number for offer in own} for own in offers))
        if not numbers:
            return Decision(Outcome.NONE_IN_COMMON)
        return Decision(Outcome.RESTORE, max(offer for own in offers for offer in own if offer.number == max(numbers)))

    patch.setattr(agreement, "agree", agree)


def some_ranks_are_enough(patch: pytest.MonkeyPatch) -> None:
    def agree(offers: Sequence[Sequence[Offer]]) -> Decision:
        every = [offer for own in offers for offer in own]
        return Decision(Outcome.RESTORE, max(every)) if every else Decision(Outcome.NO_COMMITS)

    patch.setattr(agreement, "agree", agree)


def the_oldest_common_commit_is_chosen(patch: pytest.MonkeyPatch) -> None:
    right = agreement.agree

    def agree(offers: Sequence[Sequence[Offer]]) -> Decision:
        common = set.intersection(*map(set, offers))
        return Decision(Outcome.RESTORE, min(common)) if common else right(offers)

    patch.setattr(agreement, "agree", agree)


MUTANTS: list[Patch] = [
    the_newest_is_overwritten,
    a_restored_commit_is_overwritten_first,
    a_commit_is_complete_before_its_copy,
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
