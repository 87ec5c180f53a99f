"""Which buffers of a node a commit may overwrite.  Pure.

How many buffers a rank needs (`tests/train/test_agreement_model.py`): a collective lies between two commits of a rank.
-   If `commit` returns when the copy is done, two are enough.  A rank that overwrites n-1 with n+1 has passed the
    collective of step n+1, which its peers entered after they had finished n.
-   If the copy continues during the next step, peers may enter that collective while they still copy n.  So n-1 must
    stay while n+1 is written: three buffers.
"""

from collections.abc import Collection, Sequence

BLOCKING_BUFFERS = 2
OVERLAPPED_BUFFERS = 3


def may_free_slots_of_others(commits: int) -> bool:
    """Whether all ranks have a commit of this round.  `commits` is the number of this rank's commits since its restore.

    This rank has begun its commit n after a collective that its peers entered when commit n-2 was complete.  No rank
    then needs what this node holds of ranks that have left it.
    """
    return commits >= OVERLAPPED_BUFFERS


def next_slot(slots: Sequence[int], buffers: int, held: Collection[int] = ()) -> int:
    """The slot of the next commit: the one whose commit is oldest, or a new one.  `slots` are oldest first.

    `held` slots are not overwritten: their commits are saved to disk, or are copied to another node, or were.
    """
    free = [slot for slot in slots[: max(0, len(slots) - buffers + 1)] if slot not in held]
    return free[0] if free else min(set(range(len(slots) + 1)) - set(slots))


def slots_newest_last(slots: Sequence[int], newest: int | None) -> list[int]:
    """The order of slots after this one was written or restored; all others may be overwritten before it."""
    return [*(slot for slot in slots if slot != newest), *([] if newest is None else [newest])]
