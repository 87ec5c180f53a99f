"""When the next round forms, and when the live round must change its size or its nodes.  Pure.

Rules: (1) the first round of a job forms when the target number of nodes is ready, or when the minimum has been ready
for the last call; (2) a later round forms as soon as every survivor is ready or lost, or when the minimum has been
ready for `SETTLE_TIMEOUT_S`, and never before the delay of a restart is over; (3) too few ready nodes wait for more
until the join timeout fails the job; (4) no round forms while a node is disconnected; (5) a live round changes only
when its next store has a port.  A job is past its first round as soon as any node reports a round number.
"""

from collections.abc import Collection
from itertools import islice

from msgspec import Struct

from ripstop.coordinator.job_types import JobSettings
from ripstop.coordinator.membership import Membership
from ripstop.coordinator.ranks import Candidate
from ripstop.model.events import RoundEndCause
from ripstop.model.text_formatting import format_ranges

MAX_NAMED = 4  # nodes in one text
SETTLE_TIMEOUT_S = 2.0  # how long a later round waits for nodes that are not ready


class WaitForNodes(Struct, frozen=True):
    reason: str


class GiveUp(Struct, frozen=True):
    """Fail the job: it has too few nodes."""

    reason: str


class ChangeRound(Struct, frozen=True):
    """End the live round and form another."""

    cause: RoundEndCause
    reason: str
    removed: str = ""  # the degraded node that the next round leaves out


class Keep(Struct, frozen=True):
    """Keep the live round; `notice` is for the nodes outside it, if they should get one."""

    notice: str = ""


class Formation:
    """The target size of a job, and the time limits of its next round."""

    def __init__(self, settings: JobSettings, membership: Membership, now: float) -> None:
        self.target = settings.max_nodes if settings.target is None else settings.target
        self.highest_round = 0  # the highest round number that any node reported
        self._is_scaled = False  # an operator set the target
        self._quorum_since: float | None = None  # since when enough nodes are ready
        self._not_before = now  # the end of a restart's delay
        self._settings = settings
        self._membership = membership

    def scale(self, nodes: int) -> None:
        self.target, self._is_scaled = nodes, True

    @property
    def operator_target(self) -> int | None:
        """The size that an operator set."""
        return self.target if self._is_scaled else None

    def adopt_size(self, size: int) -> None:
        """Raise the target to the size of a recovered round: an operator may have scaled the job before."""
        if not self._is_scaled:
            self.target = max(self.target, min(size, self._settings.max_nodes))

    def start_gathering(self, not_before: float) -> None:
        self._not_before = not_before
        self._quorum_since = None

    def next_step(
        self, round: int, gathering_since: float, reason: str, now: float
    ) -> list[Candidate] | WaitForNodes | GiveUp:
        """The nodes of the next round if it forms now; `round` is the last one and `reason` why it ended."""
        members, ready = self._membership, self._membership.ready_count()
        least, join_timeout = self._settings.min_nodes, self._settings.timing.join
        if ready < least:
            self._quorum_since = None
            if now < gathering_since + join_timeout:
                at_least = "at least " if least < self._settings.max_nodes else ""
                return WaitForNodes(f"{ready} of {at_least}{least} nodes are ready, waiting for more ({reason})")
            unhealthy = members.first_unhealthy()
            detail = f"; node {unhealthy} is {members.unfit_reason(unhealthy)}" if unhealthy else ""
            need = f"{least} nodes are needed and {ready} ready after {join_timeout:g} s{detail}"
            return GiveUp(f"{need} ({reason}); start more, or raise join_timeout")
        if self._quorum_since is None:
            self._quorum_since = now
            if not self.highest_round:
                members.notify_all_again()  # the last call starts
        if now < self._not_before:
            return WaitForNodes(reason)
        left = self._quorum_since + self._time_for_more() - now
        is_complete = left <= 0 or members.is_complete(self.target, first=round == 0)
        if members.liveness.disconnected or not is_complete:
            return WaitForNodes(self._waiting_for_more(ready, left, reason))
        return members.candidates(self.target)

    def _time_for_more(self) -> float:
        """How long a sufficient number of nodes waits for more."""
        return SETTLE_TIMEOUT_S if self.highest_round else self._settings.timing.last_call

    def _waiting_for_more(self, ready: int, left: float, reason: str) -> str:
        if self.highest_round:
            return f"{ready} nodes are ready, waiting {max(0.0, left):.1f} s for others ({reason})"
        return (
            f"{ready} of {self.target} nodes are ready; the first round waits {left:.0f} s for more "
            "(to change that: --rdzv-conf=last_call_timeout=SECONDS on the coordinator's node)"
        )

    def wait_text(self, gathering_since: float, now: float) -> str:
        """How many nodes are ready and missing, when the wait ends, and which nodes these are, for a person."""
        members, settings, ready = self._membership, self._settings, self._membership.ready_count()
        unready = [name for name in members.members if name not in members.eligible]
        if ready >= settings.min_nodes and self._quorum_since is not None:
            needed, least = self.target, ""
            end, ends_at = "starts", max(self._not_before, self._quorum_since + self._time_for_more())
        else:
            needed, least = settings.min_nodes, "at least " if settings.min_nodes < settings.max_nodes else ""
            end, ends_at = "fails", gathering_since + settings.timing.join
        counts = [f"{ready} of {least}{needed} nodes ready", *([f"{len(unready)} not ready"] if unready else [])]
        present = {member.node.requested_rank for member in members.members.values()}
        if settings.fixed_ranks and len(present) < settings.max_nodes:
            absent = [rank for rank in range(settings.max_nodes) if rank not in present]
            counts.append(f"{'nodes' if absent[1:] else 'node'} {format_ranges(absent)} missing")
        elif needed > len(members.members):
            counts.append(f"{needed - len(members.members)} missing")
        parts = [", ".join(counts), f"{end} in {max(0.0, ends_at - now):.0f} s"]
        for label, names in (("ready", members.eligible), ("not ready", unready)):
            parts += [f"{label}: {_formation_node_names(names)}"] if names else []
        return "; ".join(parts)

    def resize(self, now: float, *, is_finishing: bool) -> ChangeRound | Keep:
        """Whether the live round changes its size or its nodes now."""
        members, size = self._membership, len(self._membership.places)
        if members.not_ready_in_round:
            return Keep()  # each of these nodes soon returns or is lost
        if size > self.target:
            return ChangeRound(RoundEndCause.SCALED, f"scaled down to {self.target} nodes")
        node = None if is_finishing else members.assess_degraded().replaceable(now)
        if node and members.has_port_for_next_store():
            return ChangeRound(RoundEndCause.NODE_UNFIT, f"node {node} is {members.unfit_reason(node)}", node)
        if not members.waiting:
            return Keep("spare")
        if size >= self.target:
            return Keep(f"spare: all {self.target} places are taken")
        if is_finishing:
            return Keep("spare: the job is about to finish")
        first, since = next(iter(members.waiting.items()))
        if members.warming_up and now < since + SETTLE_TIMEOUT_S:
            return Keep()  # one new round for all nodes that become ready soon
        if not members.has_port_for_next_store():
            return Keep()
        return ChangeRound(RoundEndCause.NODE_JOINED, f"node {first} joined")

    def gathering_deadlines(self, gathering_since: float) -> list[float]:
        if self._quorum_since is None:
            return [gathering_since + self._settings.timing.join]
        return [self._quorum_since + self._time_for_more(), self._not_before]

    def resize_deadlines(self, now: float) -> list[float]:
        settled = [since + SETTLE_TIMEOUT_S for since in islice(self._membership.waiting.values(), 1)]
        return settled + self._membership.assess_degraded().next_after(now)


def _formation_node_names(nodes: Collection[str]) -> str:
    more = len(nodes) - MAX_NAMED
    return ", ".join((*islice(nodes, MAX_NAMED), *((f"{more} more",) if more > 0 else ())))
