"""Which commit the ranks of a new round restore.  Pure.

Each rank offers the complete commits that it can have.  Rank 0 decides for all: the newest commit that every rank
offers.  A commit is identified by its round and number: after a fall-back to commit 9, a later round writes another
commit 10, and a rank that still has the old one must not mix it with the new one of its peers.

How many buffers a rank needs (`tests/train/test_agreement_model.py`): a collective lies between two commits of a rank.
-   If `commit` returns when the copy is done, two are enough.  A rank that overwrites n-1 with n+1 has passed the
    collective of step n+1, which its peers entered after they had finished n.
-   If the copy continues during the next step, peers may enter that collective while they still copy n.  So n-1 must
    stay while n+1 is written: three buffers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

BLOCKING_BUFFERS = 2
OVERLAPPED_BUFFERS = 3


@dataclass(frozen=True, slots=True, order=True)
class Offer:
    """A complete commit that a rank can have, and the number of ranks that took part in it."""

    round: int
    number: int
    world_size: int


class Outcome(Enum):
    RESTORE = "restore"
    NO_COMMITS = "no rank has a commit"
    SOME_WITHOUT = "some ranks have no commit"
    NONE_IN_COMMON = "the ranks have no commit in common"
    OTHER_WORLD_SIZE = "the commits are of another number of ranks"


@dataclass(frozen=True, slots=True)
class Decision:
    """`commit` is set if it is to be restored; otherwise `ranks` are those that prevent it."""

    outcome: Outcome
    commit: Offer | None = None
    ranks: tuple[int, ...] = ()


def agree(offers: Sequence[Sequence[Offer]]) -> Decision:
    """Decide from what each rank offers, in the order of ranks."""
    world_size = len(offers)
    if not any(offers):
        return Decision(Outcome.NO_COMMITS)
    fitting = [{offer for offer in own if offer.world_size == world_size} for own in offers]
    if common := set.intersection(*fitting):
        return Decision(Outcome.RESTORE, max(common))
    if any(own and not fits for own, fits in zip(offers, fitting, strict=True)):
        others = tuple(rank for rank, own in enumerate(offers) if own and not fitting[rank])
        return Decision(Outcome.OTHER_WORLD_SIZE, ranks=others)
    if without := tuple(rank for rank, own in enumerate(offers) if not own):
        return Decision(Outcome.SOME_WITHOUT, ranks=without)
    return Decision(Outcome.NONE_IN_COMMON)


def next_slot(slots: Sequence[int], buffers: int) -> int:
    """The slot of the next commit: a new one, or the one whose commit is oldest.  `slots` are oldest first."""
    return len(slots) if len(slots) < buffers else slots[0]


def newest_last(slots: Sequence[int], newest: int | None) -> list[int]:
    """The order of slots after this one was written or restored; all others may be overwritten before it."""
    return [*(slot for slot in slots if slot != newest), *([] if newest is None else [newest])]
