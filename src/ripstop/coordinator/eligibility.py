"""Which nodes may join the job, which the next round may contain, and which degraded nodes may stay in it.  Pure.

Rules for rounds: (1) every node has exactly one `Eligibility`; (2) an unhealthy node, or one in quarantine
(`quarantine.py`), is degraded: a round contains it only while the job has too few other nodes; (3) an unhealthy node
loses its place when it is still unhealthy after every node has checked its health again, unless most nodes of the round
are unhealthy (then the cause is probably external); a node in quarantine loses its place at once; (4) an unhealthy node
outside the round gets no place before it is healthy.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from operator import itemgetter

from msgspec import Struct

from ripstop.coordinator.job_types import JobSettings
from ripstop.model.config import MAX_SLOTS
from ripstop.model.round import Node, Place
from ripstop.protocol.limits import MAX_NAME, invalid_name
from ripstop.protocol.messages import Join

MAX_HEALTH_CHECK_S = 30.0  # the longest time that a node's health check may take


class Member(Struct):
    """A node of the job."""

    node: Node
    ready: bool = False
    port: int = 0  # offered for a store; 0: none
    served: int = 0  # the last round whose store used a port offered over this connection
    problems: tuple[str, ...] = ()  # why the node is unhealthy
    unhealthy_since: float = 0.0
    health_interval: float = 0.0  # seconds between two health checks

    def recheck_time(self) -> float:
        """Seconds in which the node has started and finished a health check, whenever the last one was."""
        return 2 * self.health_interval + min(self.health_interval, MAX_HEALTH_CHECK_S)


class Eligibility(Enum):
    """Whether the next round may contain a node."""

    ELIGIBLE = auto()  # ready, connected, not leaving, not degraded
    DEGRADED = auto()  # like ELIGIBLE, but unhealthy or in quarantine
    NOT_READY = auto()  # still warming up, or disconnected
    INELIGIBLE = auto()  # leaving, lost, or unhealthy outside the round


def eligibility_of(
    member: Member | None, *, in_round: bool, leaving: bool, disconnected: bool, quarantined: bool
) -> Eligibility:
    if member is None or leaving or (member.problems and not in_round):
        return Eligibility.INELIGIBLE
    if disconnected or not member.ready:
        return Eligibility.NOT_READY
    return Eligibility.DEGRADED if member.problems or quarantined else Eligibility.ELIGIBLE


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


def assess_degraded(
    degraded: Iterable[str], eligible: int, min_nodes: int, members: Mapping[str, Member], places: Mapping[str, Place]
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
    removable = sorted((_removable_from(members[n], recheck_time), n) for n in inside if n not in needed)
    return DegradedNodes(needed, min(short, len(inside)), is_common, removable)


def _removable_from(member: Member, recheck_time: float) -> float:
    """A node in quarantine is removable at once."""
    return member.unhealthy_since + recheck_time if member.problems else 0.0


# joining --------------------------------------------------------------------------------------------------------------


def rejection_reason(node: str, join: Join, settings: JobSettings, staying: Iterable[Node]) -> str:
    """Why the node cannot join the nodes that stay in the job; empty when it can."""
    low, high = settings.min_nodes, settings.max_nodes
    if (low, high) != (join.min_nodes, join.max_nodes):
        return (
            f"--nnodes must be the same on every node: this job has {low}:{high}, "
            f"node {node} has {join.min_nodes}:{join.max_nodes}; start it with --nnodes={low}:{high}"
        )
    if join.rank_by is not settings.rank_by:
        return (
            f"--rdzv-conf rank_by must be the same on every node: this job has {settings.rank_by}, "
            f"node {node} has {join.rank_by}; start it with --rdzv-conf=rank_by={settings.rank_by}"
        )
    if join.node.id != node:
        return f"a node must join under its own name: {node} joined as {join.node.id[:80]!r}; restart the agent"
    if not 1 <= join.node.slots <= MAX_SLOTS:
        return f"a node has 1 to {MAX_SLOTS} workers, node {node} has {join.node.slots}; change --nproc-per-node"
    if what := invalid_name(join.node, join.held):
        return f"a name is text of at most {MAX_NAME} characters, the {what} of node {node} is not; change it"
    return _rank_rejection_reason(join.node, high, staying) if settings.fixed_ranks else ""


def _rank_rejection_reason(node: Node, nodes: int, staying: Iterable[Node]) -> str:
    """In a static job every node requests a different rank."""
    rank = node.requested_rank
    if rank is None or not 0 <= rank < nodes:
        return f"a static job needs --node-rank from 0 to {nodes - 1} on every node, node {node.id} has {rank}"
    taken = next((other.id for other in staying if other.requested_rank == rank and other.id != node.id), None)
    return f"--node-rank={rank} is taken by node {taken}; use each rank once" if taken is not None else ""
