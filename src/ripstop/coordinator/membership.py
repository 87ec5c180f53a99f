"""The nodes of a job: which may join, which the next round may contain, and which degraded nodes may stay.  Pure.

Every change to a node or to the round's places is a method of `Membership`.  Each method updates the sets of nodes, so
that no decision iterates over all nodes, and returns the events to record.  `job.py` decides what a change means for
the round.

Rules for rounds: (1) every node has exactly one `Eligibility`; (2) an unhealthy node, or one in quarantine
(`quarantine.py`), is degraded: a round contains it only while the job has too few other nodes; (3) an unhealthy node
loses its place when it is still unhealthy after every node has checked its health again, unless most nodes of the round
are unhealthy (then the cause is probably external); a node in quarantine loses its place at once; (4) an unhealthy node
outside the round gets no place before it is healthy.
"""

from collections.abc import Iterable
from enum import Enum, auto

from msgspec import Struct

from ripstop.coordinator.degraded_nodes import NO_DEGRADED_NODES, DegradedNodes, classify_degraded_nodes
from ripstop.coordinator.job_types import JobSettings
from ripstop.coordinator.liveness import Liveness
from ripstop.coordinator.quarantine import FaultRecord, Quarantine
from ripstop.coordinator.ranks import Candidate
from ripstop.model.config import MAX_SLOTS
from ripstop.model.events import Event, NodeHealthy, NodeJoined, NodeQuarantined, NodeReleased, NodeUnhealthy
from ripstop.model.round import Address, Node, Place
from ripstop.protocol.limits import MAX_NAME, max_round_within_limits, name_outside_limits
from ripstop.protocol.messages import Join, Ready

MAX_HEALTH_CHECK_S = 30.0  # the longest time that a node's health check may take


class Member(Struct):
    node: Node
    ready: bool = False
    port: int = 0  # offered for a store; 0: none
    replica_port: int = 0  # takes copies of training state; 0: the node takes none
    served: int = 0  # the last round whose store used a port offered over this connection
    problems: tuple[str, ...] = ()  # why the node is unhealthy
    problems_version: int = 0
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


class Membership:
    def __init__(self, settings: JobSettings) -> None:
        self.members: dict[str, Member] = {}  # in the order of joining
        self.places: dict[str, Place] = {}  # the nodes of the live round, or of the last one while gathering
        self.partnered: set[str] = set()  # those of them that copy training state to a partner
        # Nodes of one kind, and since when; oldest first.
        self.eligible: dict[str, float] = {}
        self.waiting: dict[str, float] = {}  # eligible nodes outside the round
        self.not_ready_in_round: dict[str, float] = {}
        self.warming_up: dict[str, float] = {}  # nodes outside the round that are not ready
        self.degraded: dict[str, float] = {}
        self._degraded_outside: dict[str, float] = {}  # degraded nodes outside the round
        self._to_notify: dict[str, None] = {}  # nodes outside the round that must learn why they wait
        self._assessment: DegradedNodes | None = None  # None: a change requires a new one
        self._retained: set[str] = set()  # degraded nodes in the round that were reported as retained
        self._reported_assessment: DegradedNodes | None = None  # its retained nodes were reported
        self._vacated_ranks: dict[int, int] = {}  # node number to rank, of nodes that the round lost
        self._min_nodes = settings.min_nodes
        self._cooldown = settings.quarantine.cooldown
        self.quarantine = Quarantine(settings.quarantine)
        self.liveness = Liveness(settings.timing.lease, settings.own, own_has_lease=settings.is_elected)

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
        if join.ready:
            member.replica_port = join.ready.replica_port
        member.health_interval = join.health_interval
        self.liveness.connect(name, now)
        return events + self.set_problems(name, join.problems, join.problems_version, now)

    def join_after_end(self, name: str, node: Node, now: float) -> None:
        """A node joins after the end, only to receive the report."""
        self.members.setdefault(name, Member(node))
        self._update(name, now)

    def set_ready(self, node: str, offer: Ready, now: float) -> None:
        """The node is ready.  Its port is ignored if the node offered it before its last store's round."""
        member = self.members[node]
        if offer.after >= member.served:
            member.port = offer.store_port
        member.replica_port = offer.replica_port
        member.ready = True
        self._update(node, now)

    def take_port(self, node: str, round: int) -> Address:
        """The address of this round's store.  The port serves no other round."""
        member = self.members[node]
        store = Address(member.node.host, member.port)
        member.port, member.served = 0, round
        return store

    def replica_address(self, node: str) -> Address | None:
        """Where the node takes copies of training state."""
        member = self.members[node]
        return Address(member.node.host, member.replica_port) if member.replica_port else None

    def set_problems(self, node: str, problems: tuple[str, ...], version: int, now: float) -> list[Event]:
        """The node reports its problems.  An older report than the last one is ignored."""
        member, events = self.members[node], list[Event]()
        if version < member.problems_version:
            problems = member.problems
        if problems and not member.problems:
            member.unhealthy_since = now
            events.append(NodeUnhealthy(node, problems))
        elif member.problems and not problems:
            events.append(NodeHealthy(node))
        member.problems, member.problems_version = problems, max(version, member.problems_version)
        self._update(node, now)
        return events

    def disconnect(self, node: str, closed_by_node: bool, now: float) -> None:
        self.liveness.disconnect(node, closed_by_node, now)
        self._update(node, now)

    def mark_leaving(self, node: str, now: float) -> None:
        self.liveness.leaving.add(node)
        self._update(node, now)

    def remove(self, node: str, now: float) -> None:
        member = self.members.pop(node)
        if node in self.places and member.node.number is not None:
            self._vacated_ranks[member.node.number] = self.places[node].group_rank
        self.liveness.remove(node)
        self._update(node, now)

    def record_fault(self, node: str, what: str, now: float) -> list[Event]:
        """The node caused the end of a round."""
        why = self.quarantine.record_fault(self.members[node].node, what, now)
        if not why:
            return []
        self._update(node, now)
        return [NodeQuarantined(node, why, self._cooldown)]

    def restore_faults(
        self, node: str, host: str, faults: list[float], until: float | None, why: str, now: float
    ) -> None:
        """Another coordinator recorded these faults of a node."""
        self.quarantine.restore(node, FaultRecord(host, faults, until, why))
        if node in self.members:
            self._update(node, now)

    def isolate(self, node: str, why: str, now: float) -> list[Event]:
        """A spare should take the place of this node."""
        self.quarantine.isolate(self.members[node].node, why, now)
        self._update(node, now)
        return [NodeQuarantined(node, why, self._cooldown)]

    def release(self, now: float) -> list[Event]:
        """Release the nodes whose quarantine is over."""
        released = [node for node in self.quarantine.release(now) if node in self.members]
        for node in released:
            self._update(node, now)
        return [NodeReleased(node) for node in released]

    def start_round(self, places: dict[str, Place], now: float) -> None:
        self.places.clear()
        self.places.update(places)
        self.partnered = {node for node, place in places.items() if place.partner}
        self._vacated_ranks = {}
        self.liveness.forget_peer_reports()
        for node in self.members:
            self._update(node, now)

    def set_place(self, node: str, place: Place | None, now: float) -> None:
        """A node of a round that is being recovered returned, or is lost."""
        self.partnered.discard(node)
        if place is not None:
            self.places[node] = place
            self.partnered |= {node} if place.partner else set()
        else:
            self.places.pop(node, None)
        self._update(node, now)

    # the sets ---------------------------------------------------------------------------------------------------------

    def _update(self, node: str, now: float) -> None:
        in_round, eligibility = node in self.places, self._eligibility(node)
        is_eligible, is_degraded = eligibility is Eligibility.ELIGIBLE, eligibility is Eligibility.DEGRADED
        is_unready = eligibility is Eligibility.NOT_READY
        waits = not in_round and (is_eligible or is_degraded)
        if not waits:
            self._to_notify.pop(node, None)
        elif node not in (self.waiting if is_eligible else self._degraded_outside):
            self._to_notify[node] = None
        if not is_degraded:
            self._retained.discard(node)
        for nodes, belongs in (
            (self.eligible, is_eligible),
            (self.waiting, is_eligible and not in_round),
            (self.not_ready_in_round, is_unready and in_round),
            (self.warming_up, is_unready and not in_round),
            (self.degraded, is_degraded),
            (self._degraded_outside, is_degraded and not in_round),
        ):
            if belongs:
                nodes.setdefault(node, now)
            else:
                nodes.pop(node, None)
        self._assessment = None

    def _eligibility(self, node: str) -> Eligibility:
        member = self.members.get(node)
        if member is None or node in self.liveness.leaving or (member.problems and node not in self.places):
            return Eligibility.INELIGIBLE
        if node in self.liveness.disconnected or not member.ready:
            return Eligibility.NOT_READY
        return Eligibility.DEGRADED if member.problems or self.quarantine.reason(node) else Eligibility.ELIGIBLE

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
        return not first and (self.survivor_count() >= self._min_nodes or not self.warming_up)

    def survivor_count(self) -> int:
        """How many nodes of the last round a round could have now."""
        return len(self.eligible) - len(self.waiting) + self.assess_degraded().needed_in_round

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
            self._assessment = NO_DEGRADED_NODES
            if self.degraded:
                eligible, least = len(self.eligible), self._min_nodes
                self._assessment = classify_degraded_nodes(self.degraded, eligible, least, self.members, self.places)
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


def membership_rejection_reason(
    node: str, join: Join, settings: JobSettings, staying: Iterable[Node], known_round: int
) -> str:
    """Why the node cannot join the nodes that stay in the job; empty when it can.

    `known_round` is the highest round that the job knows; 0: none.
    """
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
    highest, held = max_round_within_limits(known_round), join.held.round if join.held else 0
    if not (0 <= join.newest <= highest and 0 <= held <= highest):
        return f"a round is from 0 to {highest} here, node {node} reports {join.newest} and {held}; restart the agent"
    if what := name_outside_limits(join.node, join.held):
        return f"a name is text of at most {MAX_NAME} characters, the {what} of node {node} is not; change it"
    return _membership_rank_rejection(join.node, high, staying) if settings.fixed_ranks else ""


def _membership_rank_rejection(node: Node, nodes: int, staying: Iterable[Node]) -> str:
    """In a static job every node requests a different rank."""
    rank = node.requested_rank
    if rank is None or not 0 <= rank < nodes:
        return f"a static job needs --node-rank from 0 to {nodes - 1} on every node, node {node.id} has {rank}"
    taken = next((other.id for other in staying if other.requested_rank == rank and other.id != node.id), None)
    return f"--node-rank={rank} is taken by node {taken}; use each rank once" if taken is not None else ""
