"""Where a node stands: is it in the round, could it be, must it be?  Functions from what is known to the answer.  Pure.

Rules: (1) a node stands in exactly one way (`Eligibility`); (2) who is unhealthy, or in quarantine (`quarantine.py`),
is in
the reserve: in a round only while the job has too few others; (3) an unhealthy node may lose its place when it stays so
until everybody has looked at its health again, and does not share its trouble with most of the round: then the cause is
likely none of theirs; one in quarantine may lose it at once; (4) an unhealthy node outside the round is given no place
before it is healthy.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from operator import itemgetter

from msgspec import Struct

from ripstop.model.round import Node, Place

LOOK = 30.0  # seconds that a node's look at its health may take, if it looks no oftener


class Member(Struct):
    """A node the job knows."""

    node: Node
    ready: bool = False
    port: int = 0  # offered for a store; 0: none now
    served: int = 0  # the last round whose store was put on a port of this connection
    problems: tuple[str, ...] = ()  # why it is unhealthy
    since: float = 0.0  # when it became so
    health_interval: float = 0.0  # seconds between two looks

    def recheck(self) -> float:
        """Within so many seconds it has begun a look at its health and come to its end, whenever the last one was."""
        return 2 * self.health_interval + min(self.health_interval, LOOK)


class Eligibility(Enum):
    """What a node is good for."""

    ABLE = auto()  # ready, here, not leaving and in no trouble: it could be in a round
    RESERVE = auto()  # the same but in trouble: it is in a round only if it must be
    UNREADY = auto()  # it may become one of these: it warms up, or its connection closed
    OUT = auto()  # not to be counted on: it is leaving, or gone, or waits until it is healthy


def eligibility_of(
    member: Member | None, *, inside: bool, leaving: bool, absent: bool, quarantined: bool
) -> Eligibility:
    """Where a node stands, inside the round or not."""
    if member is None or leaving or (member.problems and not inside):
        return Eligibility.OUT
    if absent or not member.ready:
        return Eligibility.UNREADY
    return Eligibility.RESERVE if member.problems or quarantined else Eligibility.ABLE


# nodes in trouble -----------------------------------------------------------------------------------------------------


class DegradedNodes(Struct, frozen=True):
    """What follows for the reserve from how everybody stands."""

    needed: dict[str, None]  # those that have a place all the same, by rank
    needed_inside: int  # how many of these are in the round
    shared: bool  # most of the round is unhealthy, which is likely nobody's own fault
    dispensable: list[tuple[float, str]]  # the others in the round, and when they may lose their place; the first first

    def replaceable(self, now: float) -> str | None:
        """A node of the round without which the job is better off."""
        return self.dispensable[0][1] if self.dispensable and now >= self.dispensable[0][0] else None

    def next_after(self, now: float) -> list[float]:
        """When the next one may lose its place, if there is one."""
        later = bisect_right(self.dispensable, now, key=itemgetter(0))
        return [when for when, _ in self.dispensable[later : later + 1]]


NOBODY = DegradedNodes({}, 0, False, [])


def assess_degraded(
    reserve: Iterable[str], able: int, least: int, members: Mapping[str, Member], places: Mapping[str, Place]
) -> DegradedNodes:
    """Whom the job needs, or keeps, of its reserve; so many others are able, and at least so many are to be."""
    inside = sorted((n for n in reserve if n in places), key=lambda n: places[n].group_rank)
    benched = [n for n in reserve if n not in places]
    unhealthy = sum(bool(members[n].problems) for n in inside)
    shared = unhealthy > 1 and 2 * unhealthy > len(places)
    short = max(0, least - able)
    if shared:
        short = max(short, len(inside))
    needed = dict.fromkeys([*inside, *benched][:short])
    recheck = max((member.recheck() for n in places if (member := members.get(n))), default=0.0)
    dispensable = sorted((_may_go(members[n], recheck), n) for n in inside if n not in needed)
    return DegradedNodes(needed, min(short, len(inside)), shared, dispensable)


def _may_go(member: Member, recheck: float) -> float:
    """When a node in trouble may lose its place: at once if it is in quarantine."""
    return member.since + recheck if member.problems else 0.0
