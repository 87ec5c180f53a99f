"""The nodes of a job and their eligibility for the next round (`eligibility.py`).  Pure.

Every change to a node or to the round's places is a method here.  Each method updates the sets below, so that no
decision iterates over all nodes, and returns the events to record.  `job.py` decides what a change means for the round.
"""

from ripstop.coordinator.eligibility import (
    NO_DEGRADED_NODES,
    DegradedNodes,
    Eligibility,
    Member,
    assess_degraded,
    eligibility_of,
)
from ripstop.coordinator.job_types import JobSettings
from ripstop.coordinator.liveness import Liveness
from ripstop.coordinator.quarantine import Quarantine
from ripstop.coordinator.ranks import Candidate
from ripstop.model.events import Event, NodeHealthy, NodeJoined, NodeQuarantined, NodeReleased, NodeUnhealthy
from ripstop.model.round import Address, Node, Place
from ripstop.protocol.messages import Join, Ready


class Membership:
    """The nodes of one job."""

    def __init__(self, settings: JobSettings, liveness: Liveness) -> None:
        self.members: dict[str, Member] = {}  # in the order of joining
        self.places: dict[str, Place] = {}  # the nodes of the live round, or of the last one while gathering
        self.eligible: set[str] = set()
        self.waiting: dict[str, float] = {}  # eligible nodes outside the round, and since when; oldest first
        self.not_ready_in_round: set[str] = set()
        self.warming_up: set[str] = set()  # nodes outside the round that are not ready
        self.degraded: dict[str, None] = {}
        self._degraded_outside: set[str] = set()  # degraded nodes outside the round
        self._to_notify: dict[str, None] = {}  # nodes outside the round that must learn why they wait
        self._assessment: DegradedNodes | None = None  # None: a change requires a new one
        self._retained: set[str] = set()  # degraded nodes in the round that were reported as retained
        self._reported_assessment: DegradedNodes | None = None  # its retained nodes were reported
        self._vacated_ranks: dict[int, int] = {}  # node number to rank, of nodes that the round lost
        self._min_nodes = settings.min_nodes
        self._cooldown = settings.quarantine.cooldown
        self.quarantine = Quarantine(settings.quarantine)
        self._liveness = liveness

    # one node ---------------------------------------------------------------------------------------------------------

    def join(self, join: Join, now: float) -> list[Event]:
        """A node joins, or rejoins over a new connection."""
        name, events = join.node.id, list[Event]()
        member = self.members.get(name)
        if member is None:
            self.quarantine.inherit_record(join.node, (other.node for other in self.members.values()), now)
            member = self.members[name] = Member(join.node)
            events.append(NodeJoined(name, join.node.host, join.node.slots))
        member.node = join.node
        member.ready = join.ready is not None
        member.port, member.served = join.ready.store_port if join.ready else 0, 0
        member.health_interval = join.health_interval
        self._liveness.connect(name, now)
        return events + self.set_problems(name, join.problems, now)

    def join_after_end(self, name: str, node: Node, now: float) -> None:
        """A node joins after the end, only to receive the report."""
        self.members.setdefault(name, Member(node))
        self._update(name, now)

    def set_ready(self, node: str, offer: Ready, now: float) -> None:
        """The node is ready.  Its port is ignored if the node offered it before its last store's round."""
        member = self.members[node]
        if offer.after >= member.served:
            member.port = offer.store_port
        member.ready = True
        self._update(node, now)

    def take_port(self, node: str, round: int) -> Address:
        """The address of this round's store.  The port serves no other round."""
        member = self.members[node]
        store = Address(member.node.host, member.port)
        member.port, member.served = 0, round
        return store

    def set_problems(self, node: str, problems: tuple[str, ...], now: float) -> list[Event]:
        member, events = self.members[node], list[Event]()
        if problems and not member.problems:
            member.unhealthy_since = now
            events.append(NodeUnhealthy(node, problems))
        elif member.problems and not problems:
            events.append(NodeHealthy(node))
        member.problems = problems
        self._update(node, now)
        return events

    def disconnect(self, node: str, now: float) -> None:
        self._liveness.disconnect(node, now)
        self._update(node, now)

    def mark_leaving(self, node: str, now: float) -> None:
        self._liveness.mark_leaving(node)
        self._update(node, now)

    def remove(self, node: str, now: float) -> None:
        member = self.members.pop(node)
        if node in self.places and member.node.number is not None:
            self._vacated_ranks[member.node.number] = self.places[node].group_rank
        self._liveness.remove(node)
        self._update(node, now)

    def record_fault(self, node: str, what: str, now: float) -> list[Event]:
        """The node caused the end of a round."""
        why = self.quarantine.record_fault(self.members[node].node, what, now)
        if not why:
            return []
        self._update(node, now)
        return [NodeQuarantined(node, why, self._cooldown)]

    def release(self, now: float) -> list[Event]:
        """Release the nodes whose quarantine is over."""
        released = [node for node in self.quarantine.release(now) if node in self.members]
        for node in released:
            self._update(node, now)
        return [NodeReleased(node) for node in released]

    # the round --------------------------------------------------------------------------------------------------------

    def start_round(self, places: dict[str, Place], now: float) -> None:
        self.places.clear()
        self.places.update(places)
        self._vacated_ranks = {}
        for node in self.members:
            self._update(node, now)

    def set_place(self, node: str, place: Place | None, now: float) -> None:
        """A node of a round that is being recovered returned, or is lost."""
        if place is not None:
            self.places[node] = place
        else:
            self.places.pop(node, None)
        self._update(node, now)

    # the sets ---------------------------------------------------------------------------------------------------------

    def _update(self, node: str, now: float) -> None:
        in_round = node in self.places
        eligibility = eligibility_of(
            self.members.get(node),
            in_round=in_round,
            leaving=node in self._liveness.leaving,
            disconnected=node in self._liveness.disconnected,
            quarantined=bool(self.quarantine.reason(node)),
        )
        _put(self.eligible, node, eligibility is Eligibility.ELIGIBLE)
        _put(self.not_ready_in_round, node, eligibility is Eligibility.NOT_READY and in_round)
        _put(self.warming_up, node, eligibility is Eligibility.NOT_READY and not in_round)
        if eligibility is Eligibility.DEGRADED:
            self.degraded[node] = None
        else:
            self.degraded.pop(node, None)
            self._retained.discard(node)
        self._update_outside(node, eligibility if not in_round else None, now)
        self._assessment = None

    def _update_outside(self, node: str, eligibility: Eligibility | None, now: float) -> None:
        """A node that starts to wait outside the round must be notified."""
        waits, degraded = eligibility is Eligibility.ELIGIBLE, eligibility is Eligibility.DEGRADED
        if (waits and node not in self.waiting) or (degraded and node not in self._degraded_outside):
            self._to_notify[node] = None
        elif not waits and not degraded:
            self._to_notify.pop(node, None)
        if waits:
            self.waiting.setdefault(node, now)
        else:
            self.waiting.pop(node, None)
        _put(self._degraded_outside, node, degraded)

    # the next round ---------------------------------------------------------------------------------------------------

    def ready_count(self) -> int:
        """How many nodes a round could have now."""
        return len(self.eligible) + len(self.assess_degraded().needed)

    def is_complete(self, target: int, *, first: bool) -> bool:
        """Whether no other node is worth a wait.  A first round waits for every node that it could have."""
        if self.not_ready_in_round:
            return False
        if self.ready_count() >= target:
            return True
        survivors = len(self.eligible) - len(self.waiting) + self.assess_degraded().needed_in_round
        return not first and (survivors >= self._min_nodes or not self.warming_up)

    def candidates(self, max_nodes: int) -> list[Candidate]:
        """The nodes of the next round, each with its rank of the last round or the rank that it inherits.

        Survivors come first, by rank; then waiting nodes, the longest waiting first; then degraded nodes.  A node that
        keeps its rank comes before a node that inherits one.
        """
        survivors = sorted((n for n in self.places if n in self.eligible), key=lambda n: self.places[n].group_rank)
        chosen = [*survivors, *self.waiting, *self.assess_degraded().needed][:max_nodes]
        kept = [(self.members[n].node, self.places[n].group_rank) for n in chosen if n in self.places]
        new = [self.members[n].node for n in chosen if n not in self.places]
        return [*kept, *((node, self._inherited_rank(node)) for node in new)]

    def _inherited_rank(self, node: Node) -> int | None:
        """The rank of the lost node with the same number, if there is one."""
        return None if node.number is None else self._vacated_ranks.get(node.number)

    def has_port_for_next_store(self) -> bool:
        """Whether rank 0, if it stays, has offered a port: no round ends for a resize before that."""
        needed = self.assess_degraded().needed
        hosts = (n for n, place in self.places.items() if not place.group_rank and (n in self.eligible or n in needed))
        return all(self.members[n].port for n in hosts)

    # notices ----------------------------------------------------------------------------------------------------------

    def notify_all_again(self) -> None:
        """The reason for which nodes wait has changed."""
        self._to_notify = dict.fromkeys([*self.waiting, *self._degraded_outside])

    def take_nodes_to_notify(self) -> dict[str, None]:
        """The nodes that must learn why they wait; each is returned once."""
        nodes, self._to_notify = self._to_notify, {}
        return nodes

    # degraded nodes ---------------------------------------------------------------------------------------------------

    def assess_degraded(self) -> DegradedNodes:
        """Which degraded nodes the job needs; computed only after a change."""
        if self._assessment is None:
            eligible, least = len(self.eligible), self._min_nodes
            self._assessment = (
                assess_degraded(self.degraded, eligible, least, self.members, self.places)
                if self.degraded
                else NO_DEGRADED_NODES
            )
        return self._assessment

    def unfit_reason(self, node: str) -> str:
        """Why a node is degraded; empty when it is not."""
        member = self.members.get(node)
        if member is not None and member.problems:
            return f"unhealthy: {'; '.join(member.problems)}"
        why = self.quarantine.reason(node)
        return f"in quarantine: {why}" if why else ""

    def first_unhealthy(self) -> str | None:
        return next((n for n, member in self.members.items() if member.problems), None)

    def newly_retained(self) -> list[tuple[str, str]]:
        """The degraded nodes that the round keeps, and why; each is returned once."""
        assessment = self.assess_degraded()
        if assessment is self._reported_assessment:
            return []
        self._reported_assessment = assessment
        found = [n for n in assessment.needed if n in self.places and n not in self._retained]
        self._retained.update(found)
        why = f"the job needs {self._min_nodes} nodes, and {len(self.eligible)} other nodes are eligible"
        if assessment.is_common:
            why = "most nodes of the round are unhealthy, so the cause is probably external"
        return [(node, f"{why} (it is {self.unfit_reason(node)})") for node in found]


def _put(nodes: set[str], node: str, inside: bool) -> None:
    if inside:
        nodes.add(node)
    else:
        nodes.discard(node)
