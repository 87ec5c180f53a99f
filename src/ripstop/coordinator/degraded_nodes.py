"""Which degraded nodes (unhealthy, or in quarantine) a job needs, and which it can replace.  Pure.

`membership.py` has the rules.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING

from msgspec import Struct

from ripstop.model.round import Place

if TYPE_CHECKING:
    from ripstop.coordinator.membership import Member


class DegradedNodes(Struct, frozen=True):
    """Which degraded nodes the job needs, and which it can replace."""

    needed: dict[str, None]  # nodes that get a place in spite of their state, by rank
    needed_in_round: int  # how many of them are in the round
    is_common: bool  # most nodes of the round are unhealthy: the cause is probably external
    removable: list[tuple[float, str]]  # the other nodes in the round, by the time from which they may be removed

    def replaceable(self, now: float) -> str | None:
        """A node that the round should lose now."""
        return self.removable[0][1] if self.removable and now >= self.removable[0][0] else None

    def next_after(self, now: float) -> list[float]:
        """When the next node becomes replaceable, if there is one."""
        later = bisect_right(self.removable, now, key=itemgetter(0))
        return [when for when, _ in self.removable[later : later + 1]]


NO_DEGRADED_NODES = DegradedNodes({}, 0, False, [])


def classify_degraded_nodes(
    degraded: Iterable[str], eligible: int, min_nodes: int, members: Mapping[str, "Member"], places: Mapping[str, Place]
) -> DegradedNodes:
    """Which degraded nodes a job with this many eligible nodes needs."""
    inside = sorted((n for n in degraded if n in places), key=lambda n: places[n].group_rank)
    outside = [n for n in degraded if n not in places]
    unhealthy = sum(bool(members[n].problems) for n in inside)
    is_common = unhealthy > 1 and 2 * unhealthy > len(places)
    short = max(0, min_nodes - eligible)
    if is_common:
        short = max(short, len(inside))
    needed = dict.fromkeys([*inside, *outside][:short])
    recheck_time = max((member.recheck_time() for n in places if (member := members.get(n))), default=0.0)
    removable = sorted(
        (members[n].unhealthy_since + recheck_time if members[n].problems else 0.0, n)  # quarantine: at once
        for n in inside
        if n not in needed
    )
    return DegradedNodes(needed, min(short, len(inside)), is_common, removable)
