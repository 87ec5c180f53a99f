"""The nodes of a job: what is known of each, and where they all stand (`standing.py`).  Pure.

The sets in which nodes stand are kept in step with every change, so that no decision needs to look at everybody: what
changes a node, or the places of the round, is a method here.  What operators should know of it is returned.  What it
means for the round is the machine's.
"""

from collections.abc import Iterator

from ripstop.coordinator.eligibility import NOBODY, DegradedNodes, Eligibility, Member, assess_degraded, eligibility_of
from ripstop.coordinator.liveness import Liveness
from ripstop.coordinator.quarantine import Quarantine
from ripstop.coordinator.ranks import Candidate
from ripstop.coordinator.settings import JobSettings
from ripstop.model.events import Event, NodeHealthy, NodeJoined, NodeQuarantined, NodeReleased, NodeUnhealthy
from ripstop.model.round import Address, Node, Place
from ripstop.protocol.messages import Join, Ready


class Membership:
    """The nodes of one job."""

    def __init__(self, settings: JobSettings, presence: Liveness) -> None:
        self.members: dict[str, Member] = {}  # in the order of joining
        self.places: dict[str, Place] = {}  # the nodes of the live round, or of the last one while gathering
        self.able: set[str] = set()
        self.waiting: dict[str, float] = {}  # the able outside the round, and since when, the longest waiting first
        self.missing: set[str] = set()  # the unready in the round
        self.warming: set[str] = set()  # and outside
        self.reserve: dict[str, None] = {}
        self._benched: set[str] = set()  # the reserve outside the round
        self._untold: dict[str, None] = {}  # those waiting or benched that do not know what they wait for
        self._kept: set[str] = set()  # those of the reserve that are in service; it was said
        self._weighed: DegradedNodes | None = None  # what follows for the reserve; None: to be found anew
        self._told: DegradedNodes | None = None  # of these it was said who is kept
        self._vacated: dict[int, int] = {}  # the ranks that lost nodes of the round had, by those nodes' numbers
        self._least = settings.min_nodes
        self._cooldown = settings.quarantine.cooldown
        self._quarantine = Quarantine(settings.quarantine)
        self._presence = presence

    # a node -----------------------------------------------------------------------------------------------------------

    def join(self, join: Join, now: float) -> list[Event]:
        """It has come, or come back."""
        name, notes = join.node.id, list[Event]()
        member = self.members.get(name)
        if member is None:
            self._quarantine.welcome(join.node, (other.node for other in self.members.values()), now)
            member = self.members[name] = Member(join.node)
            notes.append(NodeJoined(name, join.node.host, join.node.slots))
        member.node = join.node
        member.ready = join.ready is not None
        member.port, member.served = join.ready.store_port if join.ready else 0, 0
        member.health_interval = join.health_interval
        self._presence.came(name, now)
        return notes + self.note_problems(name, join.problems, now)

    def join_late(self, node: str, who: Node, now: float) -> None:
        """It has come after the end, for the last word alone."""
        self.members.setdefault(node, Member(who))
        self._update(node, now)

    def offer(self, node: str, offer: Ready, now: float) -> None:
        """It is ready, and has a port for a store; of an offer older than its last store's round nothing is known."""
        member = self.members[node]
        if offer.after >= member.served:
            member.port = offer.store_port
        member.ready = True
        self._update(node, now)

    def take_port(self, node: str, round: int) -> Address:
        """Where the store of this round is; the port that the node has offered serves no other."""
        member = self.members[node]
        store = Address(member.node.host, member.port)
        member.port, member.served = 0, round
        return store

    def note_problems(self, node: str, problems: tuple[str, ...], now: float) -> list[Event]:
        """It has told what speaks against it, or that nothing does any more."""
        member, notes = self.members[node], list[Event]()
        if problems and not member.problems:
            member.since = now
            notes.append(NodeUnhealthy(node, problems))
        elif member.problems and not problems:
            notes.append(NodeHealthy(node))
        member.problems = problems
        self._update(node, now)
        return notes

    def break_off(self, node: str, now: float) -> None:
        """Its connection closed."""
        self._presence.broke_off(node, now)
        self._update(node, now)

    def leave(self, node: str, now: float) -> None:
        """It is going, and counts no more."""
        self._presence.leaves(node)
        self._update(node, now)

    def lose(self, node: str, now: float) -> None:
        """It is part of the job no more."""
        member = self.members.pop(node)
        if node in self.places and member.node.number is not None:
            self._vacated[member.node.number] = self.places[node].group_rank
        self._presence.forget(node)
        self._update(node, now)

    def fault(self, node: str, what: str, now: float) -> list[Event]:
        """It was to blame for the end of a round."""
        why = self._quarantine.fault(self.members[node].node, what, now)
        if not why:
            return []
        self._update(node, now)
        return [NodeQuarantined(node, why, self._cooldown)]

    def release(self, now: float) -> list[Event]:
        """Quarantines that have run out."""
        released = [node for node in self._quarantine.release(now) if node in self.members]
        for node in released:
            self._update(node, now)
        return [NodeReleased(node) for node in released]

    # the round --------------------------------------------------------------------------------------------------------

    def seat(self, places: dict[str, Place], now: float) -> None:
        """Another round is the one that counts."""
        self.places.clear()
        self.places.update(places)
        self._vacated = {}
        for node in self.members:
            self._update(node, now)

    def reseat(self, node: str, place: Place | None, now: float) -> None:
        """A node of a round that is being recovered has come back, or is lost."""
        if place is not None:
            self.places[node] = place
        else:
            self.places.pop(node, None)
        self._update(node, now)

    def home_of(self, rank: int) -> str:
        """The node that has this rank; empty when none has."""
        return next((n for n, p in self.places.items() if p.first_rank <= rank < p.first_rank + p.slots), "")

    # in step ----------------------------------------------------------------------------------------------------------

    def _update(self, node: str, now: float) -> None:
        inside = node in self.places
        stand = eligibility_of(
            self.members.get(node),
            inside=inside,
            leaving=node in self._presence.leaving,
            absent=node in self._presence.absent,
            quarantined=bool(self._quarantine.reason(node)),
        )
        _put(self.able, node, stand is Eligibility.ABLE)
        _put(self.missing, node, stand is Eligibility.UNREADY and inside)
        _put(self.warming, node, stand is Eligibility.UNREADY and not inside)
        if stand is Eligibility.RESERVE:
            self.reserve[node] = None
        else:
            self.reserve.pop(node, None)
            self._kept.discard(node)
        self._update_idle(node, stand if not inside else None, now)
        self._weighed = None

    def _update_idle(self, node: str, stand: Eligibility | None, now: float) -> None:
        """Who could be in a round and is in none: whoever begins to wait is to be told for what."""
        waits, benched = stand is Eligibility.ABLE, stand is Eligibility.RESERVE
        if (waits and node not in self.waiting) or (benched and node not in self._benched):
            self._untold[node] = None
        elif not waits and not benched:
            self._untold.pop(node, None)
        if waits:
            self.waiting.setdefault(node, now)
        else:
            self.waiting.pop(node, None)
        _put(self._benched, node, benched)

    # the next round ---------------------------------------------------------------------------------------------------

    def ready(self) -> int:
        """How many nodes a round could have now."""
        return len(self.able) + len(self.troubled().needed)

    def is_complete(self, target: int, *, first: bool) -> bool:
        """Is there nobody worth waiting for?  A first round waits for all that it could have."""
        if self.missing:
            return False
        if self.ready() >= target:
            return True
        survivors = len(self.able) - len(self.waiting) + self.troubled().needed_inside
        return not first and (survivors >= self._least or not self.warming)

    def candidates(self, most: int) -> list[Candidate]:
        """Who is to be in the next round, of so many nodes at most, and the rank that each had or inherits.

        Survivors by rank, then newcomers, the longest waiting first, then those in trouble; who has a rank comes before
        who only inherits it.
        """
        survivors = sorted((n for n in self.places if n in self.able), key=lambda n: self.places[n].group_rank)
        chosen = [*survivors, *self.waiting, *self.troubled().needed][:most]
        kept = [(self.members[n].node, self.places[n].group_rank) for n in chosen if n in self.places]
        new = [self.members[n].node for n in chosen if n not in self.places]
        return [*kept, *((node, self._inherited(node)) for node in new)]

    def _inherited(self, node: Node) -> int | None:
        """The rank of the lost node that this one stands in for, if it does."""
        return None if node.number is None else self._vacated.get(node.number)

    def has_store_for_next(self) -> bool:
        """Nobody is stopped before a port is offered, by the node of rank 0 if that stays."""
        needed = self.troubled().needed
        hosts = (n for n, place in self.places.items() if place.group_rank == 0 and (n in self.able or n in needed))
        return all(self.members[n].port for n in hosts)

    def is_untold(self, node: str) -> bool:
        return node in self._untold

    def tell_again(self) -> None:
        """What those who wait are waiting for has changed."""
        self._untold = dict.fromkeys([*self.waiting, *self._benched])

    def take_untold(self) -> dict[str, None]:
        """Who is to be told what it waits for, once."""
        untold, self._untold = self._untold, {}
        return untold

    # nodes in trouble -------------------------------------------------------------------------------------------------

    def troubled(self) -> DegradedNodes:
        """What follows for the reserve; found anew only when somebody stands otherwise than before."""
        if self._weighed is None:
            able, least = len(self.able), self._least
            self._weighed = (
                assess_degraded(self.reserve, able, least, self.members, self.places) if self.reserve else NOBODY
            )
        return self._weighed

    def unfit(self, node: str) -> str:
        """Why a node is not to be counted on; empty when it is."""
        member = self.members.get(node)
        if member is not None and member.problems:
            return f"unhealthy: {'; '.join(member.problems)}"
        why = self._quarantine.reason(node)
        return f"in quarantine: {why}" if why else ""

    def first_unhealthy(self) -> str | None:
        return next((n for n, member in self.members.items() if member.problems), None)

    def newly_kept(self) -> list[tuple[str, str]]:
        """Who is in the round though it is in trouble, and why; each once."""
        troubled = self.troubled()
        if troubled is self._told:
            return []
        self._told = troubled
        found = [n for n in troubled.needed if n in self.places and n not in self._kept]
        self._kept.update(found)
        others = f"the job needs {self._least} nodes, and {len(self.able)} others could be in it"
        if troubled.shared:
            others = "most of the round's nodes are unhealthy, which is likely nobody's own fault"
        return [(node, f"{others} (it is {self.unfit(node)})") for node in found]

    def deadlines(self) -> Iterator[float]:
        """When somebody is to be released."""
        if (release := self._quarantine.deadline()) is not None:
            yield release


def _put(nodes: set[str], node: str, inside: bool) -> None:
    if inside:
        nodes.add(node)
    else:
        nodes.discard(node)
