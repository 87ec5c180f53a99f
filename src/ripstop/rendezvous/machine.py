"""Membership of one job: the coordinator's decisions, all of them, and nothing else.  Pure.

`Job.on(event, now)` changes the state and returns commands; `deadline()` says when it wants a `Tick`.  A driver
(`coordinator.py`) owns the clock and the connections.  Rules:

1.  At most one round is live, and round numbers only grow.  Ranks of a round are exactly 0 … n-1 (`ranks.py`).
2.  What is said of any other round than the live one changes nothing; it is kept as evidence at most.
3.  A first round forms when `max` nodes are ready, or when `min` are and the settle time has passed.  A later one forms
    as soon as every survivor of the last is ready or known to be lost, but not before a restart's pause; too few
    survivors wait for newcomers.  An operator's wish for a size, or what the job was to begin with (`target`), stands
    in for `max`; a round that is recovered (8) is as large as it is.  Phases follow `TRANSITIONS`.
4.  A newcomer disturbs nobody before it is ready.  Nodes beyond the maximum are spares, told so, and promoted.
5.  A closed connection is a hint: it is a loss when anybody fails meanwhile, or the node is not back after `RECONNECT`.
    A node that is in no round, or leaving, is gone with its connection.  Silence for a lease is a loss.  A coordinator
    that was itself away (stopped, suspended) blames nobody for it.
6.  Failures are charged to the budget; members that come, leave or are lost are not.  A failure that looks like the
    victim of a lost peer is not the end of a job before the loss had `BLAME` seconds to show itself.
7.  A port offered for a store serves one round.  An offer made before that round, or over an earlier connection, is
    stale: nobody knows who may still be talking to that port.
8.  A coordinator that knows nothing learns the job from its agents: the highest round wins, and it goes on undisturbed
    when all its members are back within a lease, or sooner when it has failed meanwhile; restarts that were granted are
    spent; an end that one of them was told of comes to its end.
9.  A node that is unhealthy, or in quarantine (`quarantine.py`), is in a round only while the job has too few others.
    An unhealthy one loses its place when it stays so until everybody has looked at its health again, and does not
    share its trouble with most of the round: then the cause is likely none of theirs.  It is given none before it is
    healthy.
10. Leaving is not closing.  The job is closed once: by success of all its nodes, by a failure that no budget covers, by
    too few nodes for too long, or by an operator.  Everybody is told before the coordinator goes.
11. A round that hangs is looked at on all its nodes before it ends: who hangs on one may wait for a rank of another.
    Nodes have `INSPECTION` seconds for it; a death meanwhile is a failure as ever.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import itemgetter

from ripstop import config
from ripstop.config import MOST_SLOTS, Budget, Timing
from ripstop.observe import events as observe
from ripstop.observe.events import Ending
from ripstop.observe.failure import Failure, Report
from ripstop.observe.report import how, looks_like_victim, order, root_cause, trim
from ripstop.observe.stacks import hangs_among, in_words, odd_ones
from ripstop.observe.status import JobStatus, NodeState, NodeStatus, Phase
from ripstop.rendezvous import ranks
from ripstop.rendezvous.bounds import NAME, bounded, cut, misnamed
from ripstop.rendezvous.events import (
    Close,
    Command,
    Drain,
    Drop,
    End,
    Event,
    Gone,
    Heard,
    Record,
    Restart,
    Scale,
    Send,
    Tick,
)
from ripstop.rendezvous.messages import (
    Assign,
    Closed,
    Closing,
    Depart,
    Failed,
    FromAgent,
    Health,
    Hold,
    Inspect,
    Inspected,
    Join,
    Leave,
    Leaving,
    Ready,
    Rejected,
    Status,
    Stopped,
    Succeeded,
)
from ripstop.rendezvous.policy import Cause, Restarts, Verdict, cause_of
from ripstop.rendezvous.quarantine import Quarantine
from ripstop.round import Address, Node, Outcome, Place, RankBy

LATE = 0.1  # seconds: if a deadline is missed by so much, this process was stopped or starved
RECONNECT = 0.5  # seconds a node may take to come back over a new connection
BLAME = 0.5  # seconds a victim's failure waits for its cause, when it would end the job
INSPECTION = 5.0  # seconds for all nodes to tell where the workers of a hanging round are
LOOK = 30.0  # seconds that a node's look at its health may take, if it looks no oftener
FAREWELL = 5.0  # seconds everybody has to take the last word
EVIDENCE = 256  # failures kept of a round
PLACES = 16_384  # and of one that hangs, in short: the odd one out may be any


@dataclass(frozen=True, slots=True)
class Settings:
    """What the job was started with.

    `own` is the node in the coordinator's own process; it needs no lease.  `target` is how many nodes the job is to
    have until an operator says otherwise; None: as many as it can.
    """

    run_id: str
    min_nodes: int
    max_nodes: int
    timing: Timing = field(default_factory=Timing)
    budget: Budget = field(default_factory=Budget)
    fixed_ranks: bool = False
    own: str = ""
    rank_by: RankBy = RankBy.JOIN
    quarantine: config.QuarantineLimits = field(default_factory=config.QuarantineLimits)
    target: int | None = None


# state ----------------------------------------------------------------------------------------------------------------


TRANSITIONS = {  # every move there is, and what makes it
    Phase.GATHERING: {
        Phase.RUNNING: "enough nodes are ready",
        Phase.RECOVERING: "a new coordinator hears of a round",
        Phase.GATHERING: "a node comes from a newer round",
        Phase.CLOSING: "too few nodes for join_timeout, or an end is asked for",
    },
    Phase.RECOVERING: {
        Phase.RUNNING: "all its nodes are back",
        Phase.GATHERING: "some are not back within a lease",
        Phase.RECOVERING: "a node comes from a newer round",
        Phase.CLOSING: "an end is asked for, or one of its nodes was told of it",
    },
    Phase.RUNNING: {
        Phase.GATHERING: "a failure is healed, nodes come or go, or a restart is asked for",
        Phase.CLOSING: "all workers exited 0, the budget is spent, or an end is asked for",
    },
    Phase.CLOSING: {Phase.CLOSED: "everybody has told how its workers died"},
    Phase.CLOSED: {},
}


@dataclass(slots=True)
class Member:
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


@dataclass(slots=True)
class Troubled:
    """What follows for the nodes in trouble (rule 9) from how everybody stands."""

    needed: dict[str, None]  # those that have a place all the same, by rank
    inside: int  # how many of these are in the round
    shared: bool  # most of the round is unhealthy, which is likely nobody's own fault
    spared: list[tuple[float, str]]  # the others in the round, and when they may lose their place; the first first
    told: bool = False  # it was said who is kept


class Job:
    """The state of one job; see the rules above."""

    def __init__(self, settings: Settings, now: float = 0.0) -> None:
        self.settings = settings
        self.phase = Phase.GATHERING
        self.round = 0  # of the live or last round
        self._highest = 0  # the highest number anybody has heard of
        self.places: dict[str, Place] = {}  # the nodes of the live round, or of the last one while gathering
        self.members: dict[str, Member] = {}  # in the order of joining
        self.restarts = Restarts(settings.budget)
        self.report: Report | None = None
        self._target = settings.max_nodes if settings.target is None else settings.target
        self._witness: Place | None = None  # the first place heard of in the round that is being recovered
        self._since = now  # when this phase began
        self._not_before = now  # a restart's pause
        self._why = "first round"
        self._last_failure = ""  # why a round ended that failed
        self._quorum: float | None = None  # since when enough nodes are ready
        # Where each member stands; `_reclassify` keeps these in step, so that no decision needs to look at everybody.
        self._able: set[str] = set()  # ready, here, not leaving and in no trouble: they could be in a round
        self._waiting: dict[str, float] = {}  # those of the able that are outside the round, and since when
        self._reserve: dict[str, None] = {}  # the same but in trouble: they are in a round only if they must be
        self._benched: set[str] = set()  # those of the reserve that are outside the round
        self._weighed: Troubled | None = None  # what follows for the reserve; None: to be found anew
        self._untold: dict[str, None] = {}  # those waiting or benched that do not know what they wait for
        self._missing: set[str] = set()  # in the round, and not ready or not here
        self._warming: set[str] = set()  # outside the round, and not ready
        self._leaving: set[str] = set()
        self._heard: dict[str, float] = {}  # last word of each node with a lease, the oldest first
        self._forgiven: set[str] = set()  # not heard since this coordinator was away
        self._absent: dict[str, float] = {}  # connections closed, and since when, the oldest first
        self._vacated: dict[int, int] = {}  # the ranks that lost nodes of the round had, by those nodes' numbers
        self._done: set[str] = set()  # nodes of the live round whose workers all exited 0
        self._broken = False  # a worker of the live or last round failed
        self._failures: list[Failure] = []  # of that round
        self._verdict: tuple[float, str] | None = None  # the end, unless a lost node explains the failure by then
        self._inspection: float | None = None  # until when a hanging round is looked at
        self._awaited: set[str] = set()  # nodes that have not told where their workers are
        self._witnesses: set[str] = set()  # nodes of the round that told of a failure
        self._suspect: float | None = None  # time of a charge that a loss may still explain
        self._held = False  # survivors of the last round were told to stop
        self._quarantine = Quarantine(settings.quarantine)
        self._unblamed = 0  # the last round that was charged, and whose culprit may yet be heard of
        self._kept: set[str] = set()  # nodes in trouble that are in service; it was said
        self._unstopped: set[str] = set()  # nodes whose evidence is awaited
        self._ended = False
        self._now = now  # of the last event: what was due by then has been done
        self._notes: list[observe.Event] = []  # for operators, of the event at hand

    # the outside ------------------------------------------------------------------------------------------------------

    def on(self, event: Event, now: float) -> list[Command]:
        """Take one event; the commands are to be executed in order."""
        due = self.deadline()
        if due is not None and now - due >= LATE:
            self._forgive(now, late=now - due)
        self._now = now
        out: list[Command] = []
        match event:
            case Heard(node, message):
                out += self._hear(node, bounded(message), now)
            case Gone(node):
                self._gone(node, now)
            case Scale(nodes):
                self._scale(nodes)
            case Restart(why):
                self._restart(why, now)
            case Drain(node, why):
                out += self._drain(node, why)
            case Close(why):
                out += self._close(Outcome.STOPPED, why, now)
            case Tick():
                pass
        out += self._expire(now)
        out += self._advance(now)
        self._say_who_is_kept()
        notes, self._notes = self._notes, []
        return [*map(Record, notes), *out] if notes else out

    def deadline(self) -> float | None:
        """The time of the next `Tick`, if one is needed."""
        timing = self.settings.timing
        times: list[float] = []
        if self._heard:
            silent = next(iter(self._heard.values())) + timing.lease
            times += [silent, silent + LATE]  # wake up first: if that is late, words may lie unread
        if self._absent:
            times.append(next(iter(self._absent.values())) + RECONNECT)
        if self._verdict:
            times.append(self._verdict[0])
        if (release := self._quarantine.deadline()) is not None:
            times.append(release)
        if self._inspection is not None:
            times.append(self._inspection)
        match self.phase:
            case Phase.GATHERING:
                if self._quorum is None:
                    times.append(self._since + timing.join)
                else:
                    times += [self._quorum + timing.settle, self._not_before]
            case Phase.RECOVERING:
                times.append(self._since + self._time_to_return())
            case Phase.CLOSING:
                times.append(self._since + timing.shutdown + FAREWELL)
            case Phase.CLOSED:
                times = [self._since + FAREWELL]
            case Phase.RUNNING:
                if self._waiting:
                    times.append(next(iter(self._waiting.values())) + timing.settle)
                spared = self._troubled().spared
                later = bisect_right(spared, self._now, key=itemgetter(0))
                times += [when for when, _ in spared[later : later + 1]]
        return min((t for t in times if t > self._now), default=None)

    def objection_to_drain(self, node: str) -> str:
        """Why this node cannot be sent away; empty when it can."""
        if node not in self.members:
            return f"no node {node} is part of the job; `status` lists them"
        staying = sum(n not in self._leaving and n != node for n in self.members)
        if staying < self.settings.min_nodes:
            least = self.settings.min_nodes
            return (
                f"the job needs {least} nodes, and without {node} it has {staying}; stop the job, or add a node first"
            )
        return ""

    def status(self, now: float) -> JobStatus:
        """The job as it is."""
        return JobStatus(
            run_id=self.settings.run_id,
            phase=self.phase,
            why=self._why,
            seconds=max(0.0, now - self._since),
            round=self.round,
            world_size=sum(place.slots for place in self.places.values()) if self.phase is Phase.RUNNING else 0,
            restarts=self.restarts.used,
            max_restarts=self.settings.budget.max_restarts,
            min_nodes=self.settings.min_nodes,
            max_nodes=self.settings.max_nodes,
            target=self._target,
            nodes=tuple(self._node_status(name, member.node) for name, member in self.members.items()),
            last_failure=self._last_failure,
            charged=self.restarts.spent(Cause.APPLICATION, now),
        )

    def _node_status(self, name: str, node: Node) -> NodeStatus:
        place = self.places.get(name) if self.phase in (Phase.RUNNING, Phase.CLOSING) else None
        state = (
            NodeState.ABSENT if name in self._absent
            else NodeState.LEAVING if name in self._leaving
            else NodeState.DONE if name in self._done
            else NodeState.RUNNING if place
            else NodeState.UNHEALTHY if self.members[name].problems
            else NodeState.QUARANTINED if name in self._reserve
            else NodeState.WARMING if name not in self._able
            else NodeState.SPARE if self.phase is Phase.RUNNING
            else NodeState.READY
        )  # fmt: skip
        ranks_ = (place.group_rank, place.first_rank) if place else (-1, -1)
        return NodeStatus(name, node.host, node.slots, node.role, state, *ranks_, self._unfit(name))

    # what is heard ----------------------------------------------------------------------------------------------------

    def _hear(self, node: str, message: FromAgent, now: float) -> list[Command]:
        if self.phase is Phase.CLOSED:
            return self._hear_after_the_end(node, message)
        if isinstance(message, Join):
            return self._join(node, message, now)
        if node not in self.members:
            return []  # lost meanwhile, or never joined: it will learn from its next Join
        self._note_word(node, now)
        match message:
            case Ready():
                self._ready(node, message, now)
            case Health(problems):
                self._health(node, problems, now)
            case Failed(round, failures):
                return self._failed(node, round, failures, now)
            case Inspected(round, failures):
                self._keep(failures, round)
                if round == self.round:
                    self._awaited.discard(node)
            case Succeeded(round):
                self._succeeded(node, round)
            case Leaving(why):
                self._leave_soon(node, why, now)
            case Stopped(failures):
                self._keep(failures, self.round)
                self._unstopped.discard(node)
            case Leave(why):
                self._lose(node, f"left: {why}", now)
                return [Drop(node)]
            case _:
                pass
        return []

    def _note_word(self, node: str, now: float) -> None:
        self._forgiven.discard(node)
        if node != self.settings.own:
            self._heard.pop(node, None)
            self._heard[node] = now  # to the end: the dictionary stays in the order of time

    def _hear_after_the_end(self, node: str, message: FromAgent) -> list[Command]:
        assert self.report is not None
        match message:
            case Join(node=who):
                self.members.setdefault(node, Member(who))
                return [Send(node, Closed(self.report))]
            case Leave():
                self.members.pop(node, None)
                return [Drop(node)]
            case _:
                return []

    def _join(self, node: str, join: Join, now: float) -> list[Command]:
        if objection := self._objection(node, join):
            self._notes.append(observe.NodeRejected(node, objection))
            return [Send(node, Rejected(objection)), Drop(node)]
        member = self.members.get(node)
        if member is None:
            self._quarantine.welcome(join.node, (other.node for other in self.members.values()), now)
            member = self.members[node] = Member(join.node)
            self._notes.append(observe.NodeJoined(node, join.node.host, join.node.slots))
        member.node = join.node
        member.ready = join.ready is not None
        member.port, member.served = join.ready.store_port if join.ready else 0, 0
        self._absent.pop(node, None)
        self._leaving.discard(node)
        self._note_word(node, now)
        member.health_interval = join.health_interval
        self._health(node, join.problems, now)
        self._highest = max(self._highest, join.newest)
        if join.restarts > self.restarts.used:  # rule 8: an earlier coordinator granted them
            self.restarts = Restarts(self.settings.budget, join.restarts, now)
        out = self._sync(node, join, now)
        self._reclassify(node, now)
        return out

    def _objection(self, node: str, join: Join) -> str:
        ours = (self.settings.min_nodes, self.settings.max_nodes)
        theirs = (join.min_nodes, join.max_nodes)
        if ours != theirs:
            return (
                f"--nnodes must be the same on every node: this job has {ours[0]}:{ours[1]}, "
                f"node {node} came with {theirs[0]}:{theirs[1]}; start it with --nnodes={ours[0]}:{ours[1]}"
            )
        if join.rank_by is not self.settings.rank_by:
            ours_by = self.settings.rank_by
            return (
                f"--rdzv-conf rank_by must be the same on every node: this job has {ours_by}, "
                f"node {node} came with {join.rank_by}; start it with --rdzv-conf=rank_by={ours_by}"
            )
        if join.node.id != node:
            return f"a node joins under its own name: {node} came as {join.node.id[:80]!r}; start the agent again"
        if not 1 <= join.node.slots <= MOST_SLOTS:
            return (
                f"a node has 1 to {MOST_SLOTS} workers, node {node} came with {join.node.slots}; fix --nproc-per-node"
            )
        if what := misnamed(join.node, join.held):
            return f"a name is text of at most {NAME} characters, the {what} of node {node} is not; give it another"
        if self.settings.fixed_ranks:
            wish = join.node.wish
            if wish is None or not 0 <= wish < ours[1]:
                return f"a static job needs --node-rank from 0 to {ours[1] - 1} on every node, node {node} has {wish}"
            for other, member in self.members.items():
                going = other in self._absent or other in self._leaving
                if other != node and member.node.wish == wish and not going:
                    return f"--node-rank={wish} is taken by node {other}; give every node its own"
        return ""

    def _sync(self, node: str, join: Join, now: float) -> list[Command]:
        """Bring a node that has just (re)joined and the live round to one view."""
        if join.closing and self.phase is not Phase.CLOSING:
            return self._close(join.closing.outcome, join.closing.why, now)  # rule 8
        if self.phase is Phase.CLOSING:
            assert self.report is not None
            self._unstopped.add(node)
            return [Send(node, Closing(self._why, self.report.outcome))]
        held, out = join.held, list[Command]()
        if held is not None and held.round > self.round:
            out += self._adopt(held, now)
        if self.phase is Phase.RECOVERING and held is not None and self._is_recovered(held):
            self.places[node] = held
        if held is None or held != self.places.get(node):
            if self.phase is Phase.RUNNING and node in self.places:
                return out + self._missed(node, join, now)
            return out if held is None else [*out, Send(node, Hold(self.round, f"round {held.round} is over"))]
        if self.phase is Phase.GATHERING and self._held:
            out.append(Send(node, Hold(self.round, self._why)))  # the first one may have been lost on the way
        match join.status:
            case Status.FAILED:
                out += self._failed(node, held.round, join.failures, now)
            case Status.SUCCEEDED:
                self._succeeded(node, held.round)
        return out

    def _missed(self, node: str, join: Join, now: float) -> list[Command]:
        """A node of the live round does not have it: the word was lost with a connection."""
        place = self.places[node]
        if join.newest < self.round and place.group_rank:
            return [Send(node, Assign(place, self._why))]
        # nor does it have its store, if that was there
        self._gather(Ending.NODE_LOST, f"node {node} does not have round {self.round}", now)
        return []

    def _ready(self, node: str, offer: Ready, now: float) -> None:
        member = self.members[node]
        if offer.after >= member.served:  # rule 7
            member.port = offer.store_port
        member.ready = True
        self._reclassify(node, now)

    def _health(self, node: str, problems: tuple[str, ...], now: float) -> None:
        member = self.members[node]
        if problems and not member.problems:
            member.since = now
            self._notes.append(observe.NodeUnhealthy(node, problems))
        elif member.problems and not problems:
            self._notes.append(observe.NodeHealthy(node))
        member.problems = problems
        self._reclassify(node, now)

    def _failed(self, node: str, round: int, failures: tuple[Failure, ...], now: float) -> list[Command]:
        self._keep(failures, round)
        if round == self._unblamed and node in self.members and not all(looks_like_victim(f) for f in failures):
            self._fault(node, how(failures[0]), now)  # its victims were heard first
        if round != self.round or node not in self.places:
            return []  # rule 2
        self._broken = True
        self._witnesses.add(node)
        self._awaited.discard(node)
        return self._judge(now) if self.phase is Phase.RUNNING else []

    def _judge(self, now: float) -> list[Command]:
        """The live round has failed: what of it?"""
        if gone := [*self._absent, *(n for n in self._leaving if n in self.places)]:
            self._blame(gone, now)
            return []
        if self._verdict:
            return []
        if cause_of(self._failures) is Cause.INFRASTRUCTURE:
            return self._inspect(now)
        verdict = self._charge(Cause.APPLICATION, now)
        victims = len(self.places) > 1 and all(looks_like_victim(f) for f in self._failures)
        if verdict.allowed:
            self._suspect = now if victims else None
            self._unblamed = self.round
            if not victims:
                culprit = root_cause(self._failures)
                self._fault(self._home_of(culprit.rank) if culprit else "", self._culprit(), now)
            self._gather(Ending.APPLICATION, f"{self._culprit()}; {verdict.why}", now, verdict.delay)
            return []
        if victims:  # rule 6
            self._verdict = (now + BLAME, verdict.why)
            return []
        return self._close(Outcome.FAILED, f"{self._culprit()}; {verdict.why}", now)

    def _fault(self, node: str, what: str, now: float) -> None:
        """This node, and no other, is to blame for the end of the round."""
        self._unblamed = 0
        if node in self.members and (why := self._quarantine.fault(self.members[node].node, what, now)):
            self._notes.append(observe.NodeQuarantined(node, why, self.settings.quarantine.cooldown))
            self._reclassify(node, now)

    def _charge(self, cause: Cause, now: float) -> Verdict:
        verdict = self.restarts.charge(now, now - self._since, cause)
        used = self.restarts.spent(cause, now)
        why = f"{self._culprit()}; {verdict.why}"
        self._notes.append(
            observe.BudgetCharged(self.round, cause, used, self.restarts.limit(cause), verdict.allowed, why)
        )
        return verdict

    def _inspect(self, now: float) -> list[Command]:
        """Have a round that hangs looked at on all its nodes (rule 11)."""
        if self._inspection is not None:
            return []
        self._inspection = now + INSPECTION
        self._awaited = {n for n in self.places if n not in self._witnesses and n not in self._done}
        return [Send(n, Inspect(self.round)) for n in self.places if n in self._awaited]

    def _conclude(self, now: float) -> list[Command]:
        """All that can be known of the hang is known."""
        self._inspection = None
        hangs = hangs_among(self._failures, self.round)
        odd = tuple(sorted(odd_ones(hangs)))
        self._notes.append(observe.HangDiagnosed(self.round, odd, cut(in_words(hangs))))
        verdict = self._charge(Cause.INFRASTRUCTURE, now)
        why = f"{self._culprit()}; {verdict.why}"
        if not verdict.allowed:
            return self._close(Outcome.FAILED, why, now)
        if len(odd) == 1:
            self._fault(self._home_of(odd[0]), f"rank {odd[0]} hung", now)
        self._gather(Ending.INFRASTRUCTURE, why, now, verdict.delay)
        return self._form_or_hold(now)

    def _blame(self, gone: list[str], now: float) -> None:
        """A failure while nodes were absent or leaving: it is theirs (rule 5), and nobody is charged."""
        for node in gone:
            if node in self._absent:
                self._lose(node, "lost: its connection closed, and a peer failed", now)
        if self.phase is Phase.RUNNING:
            self._gather(Ending.NODE_LEFT, f"a worker failed while node {gone[0]} was going", now)

    def _succeeded(self, node: str, round: int) -> None:
        if round == self.round and node in self.places and self.phase in (Phase.RUNNING, Phase.RECOVERING):
            self._done.add(node)

    def _scale(self, nodes: int) -> None:
        low, high = self.settings.min_nodes, self.settings.max_nodes
        fits = low <= nodes <= high
        why = "" if fits else f"the job runs on {low} to {high} nodes"
        self._notes.append(observe.ScaleAsked(nodes, fits, why))
        if fits:
            self._target = nodes

    def _restart(self, why: str, now: float) -> None:
        if self.phase is Phase.RUNNING:
            self._gather(Ending.OPERATOR, why, now)

    def _drain(self, node: str, why: str) -> list[Command]:
        return [] if self.objection_to_drain(node) else [Send(node, Depart(why))]

    # who is gone ------------------------------------------------------------------------------------------------------

    def _gone(self, node: str, now: float) -> None:
        if node not in self.members or self.phase is Phase.CLOSED:
            return  # at the end, who breaks off without a `Leave` may come back for the last word
        self._heard.pop(node, None)
        if node not in self.places or node in self._leaving or self._verdict or self.phase is Phase.CLOSING:
            self._lose(node, "gone: its connection closed", now)
            return
        self._absent.setdefault(node, now)
        self._reclassify(node, now)

    def _leave_soon(self, node: str, why: str, now: float) -> None:
        self._leaving.add(node)
        self._reclassify(node, now)
        self._notes.append(observe.NodeLeaving(node, why))
        if self._verdict and node in self.places:
            self._blame([node], now)

    def _expire(self, now: float) -> list[Command]:
        """Leases and hints that have run out."""
        out: list[Command] = []
        if self.phase is Phase.CLOSED:
            return out
        lease = self.settings.timing.lease
        while self._heard:
            node, heard = next(iter(self._heard.items()))
            if now < heard + lease + LATE:
                break
            self._lose(node, f"lost: silent for {now - heard:.1f} s", now)
            out.append(Drop(node))
        while self._absent:
            node, since = next(iter(self._absent.items()))
            if now < since + RECONNECT:
                break
            self._lose(node, f"lost: its connection closed {now - since:.1f} s ago and it did not return", now)
        for node in self._quarantine.release(now):
            if node in self.members:
                self._notes.append(observe.NodeReleased(node))
                self._reclassify(node, now)
        return out

    def _forgive(self, now: float, late: float) -> None:
        """This coordinator was away, and nobody could be heard meanwhile: all waiting starts anew (rule 5).

        But once only for a node that stays silent, lest a starved coordinator never lose anybody.
        """
        again = {n: heard for n, heard in self._heard.items() if n in self._forgiven}
        self._forgiven = set(self._heard)
        self._heard = again | dict.fromkeys(self._forgiven - again.keys(), now)
        self._absent = dict.fromkeys(self._absent, now)
        self._since += late
        if self._verdict:
            self._verdict = (now + BLAME, self._verdict[1])
        if self._inspection is not None:
            self._inspection = max(self._inspection, now + BLAME)

    def _lose(self, node: str, why: str, now: float) -> None:
        if (member := self.members.pop(node, None)) is None:
            return
        if node in self.places and member.node.number is not None:
            self._vacated[member.node.number] = self.places[node].group_rank
        self._heard.pop(node, None)
        self._absent.pop(node, None)
        self._leaving.discard(node)
        self._unstopped.discard(node)
        self._awaited.discard(node)
        self._reclassify(node, now)
        lost = not why.startswith("left")
        self._notes.append(observe.NodeGone(node, why, lost))
        if self._suspect is not None and node in self.places and now - self._suspect <= self.settings.timing.lease:
            self.restarts.refund()  # its victims were heard first
            self._suspect = None
            self._unblamed = 0
            self._notes.append(observe.BudgetRefunded(self.round, node))
        if self.phase is Phase.RECOVERING:
            self.places.pop(node, None)
            self._weighed = None
        elif self.phase is Phase.RUNNING and node in self.places and node not in self._done:
            self._gather(Ending.NODE_LOST if lost else Ending.NODE_LEFT, f"node {node} {why}", now)

    def _reclassify(self, node: str, now: float) -> None:
        """Note where a node stands, after anything about it or the round has changed."""
        member = self.members.get(node)
        inside, staying = node in self.places, member is not None and node not in self._leaving
        here = member is not None and member.ready and staying and node not in self._absent
        sick = member is not None and bool(member.problems)
        able = here and not sick and not self._quarantine.reason(node)
        _put(self._able, node, able)
        _put(self._missing, node, inside and staying and not here)
        _put(self._warming, node, not inside and staying and not here and not sick)
        reserve = here and not able and (inside or not sick)
        if reserve:
            self._reserve[node] = None
        else:
            self._reserve.pop(node, None)
            self._kept.discard(node)
        if able and not inside:
            if node not in self._waiting:
                self._waiting[node] = now
                self._untold[node] = None
        else:
            self._waiting.pop(node, None)
            if not reserve or inside:
                self._untold.pop(node, None)
            elif node not in self._benched:
                self._untold[node] = None
        _put(self._benched, node, reserve and not inside)
        self._weighed = None

    def _reclassify_all(self, now: float) -> None:
        for node in self.members:
            self._reclassify(node, now)

    # rounds -----------------------------------------------------------------------------------------------------------

    def _adopt(self, held: Place, now: float) -> list[Command]:
        """A node holds a newer round than this coordinator knows of (rule 8)."""
        out: list[Command] = [
            Send(n, Hold(self.round, f"round {held.round} is newer")) for n in self.places if n in self.members
        ]
        first = not self.round or self.phase is Phase.RECOVERING
        self.round, self._witness = held.round, held
        self._target = max(self._target, min(held.group_size, self.settings.max_nodes))  # it was asked for since
        self._begin({}, now)
        if not first:
            self._gather(Ending.COORDINATOR, f"round {held.round} was alive elsewhere", now)
            return out
        self._enter(Phase.RECOVERING, now)
        self._notes.append(observe.RoundFound(held.round, held.group_size))
        return out

    def _is_recovered(self, held: Place) -> bool:
        """Is it a place in that very round, and not in one that another coordinator gave the same number?"""
        first = self._witness
        return first is not None and (held.round, held.store) == (first.round, first.store)

    def _enter(self, phase: Phase, now: float) -> None:
        assert phase in TRANSITIONS[self.phase], f"{self.phase.value} does not become {phase.value}"
        self.phase = phase
        self._since = now

    def _begin(self, places: dict[str, Place], now: float) -> None:
        """Another round is the one that counts."""
        self.places = places
        self._vacated = {}
        self._done = set()
        self._broken = False
        self._failures = []
        self._witnesses = set()
        self._reclassify_all(now)

    def _gather(self, cause: Ending, why: str, now: float, delay: float = 0.0) -> None:
        """The live round is over; the next forms when it can, but not before the delay."""
        why = cut(why)
        self._notes.append(observe.RoundEnded(self.round, cause, why, delay))
        self._enter(Phase.GATHERING, now)
        self._why = why
        if cause in (Ending.APPLICATION, Ending.INFRASTRUCTURE):
            self._last_failure = why
        self._not_before = now + delay
        self._quorum = None
        self._held = False
        self._verdict = self._inspection = None

    def _advance(self, now: float) -> list[Command]:
        """Do what the state now allows: resume, form, hold, finish, end."""
        match self.phase:
            case Phase.RECOVERING:
                return self._resume(now)
            case Phase.GATHERING:
                return self._form_or_hold(now)
            case Phase.RUNNING:
                if self.places.keys() <= self._done:
                    return self._close(Outcome.SUCCEEDED, "all workers exited 0", now)
                if self._verdict and now >= self._verdict[0]:
                    return self._close(Outcome.FAILED, f"{self._culprit()}; {self._verdict[1]}", now)
                if self._inspection is not None:
                    return [] if self._awaited and now < self._inspection else self._conclude(now)
                return self._resize(now)
            case Phase.CLOSING:
                return self._finish(now)
            case Phase.CLOSED:
                return self._end(now)

    def _resume(self, now: float) -> list[Command]:
        assert self._witness is not None
        back, size = len(self.places), self._witness.group_size
        if back < size:
            if now < self._since + self._time_to_return():
                return []
            self._gather(Ending.COORDINATOR, f"{back} of {size} nodes came back", now)
            return self._form_or_hold(now)
        self._enter(Phase.RUNNING, now)
        self._why = "the coordinator was restarted"
        self._notes.append(observe.RoundResumed(self.round, back))
        out: list[Command] = []
        if self._broken:
            out += self._judge(now)
        return [*out, *self._advance(now)]

    def _time_to_return(self) -> float:
        """How long the members of a round that is recovered have; less when it is over anyway.

        Who is alive tries every third of a lease.
        """
        lease = self.settings.timing.lease
        return min(lease, lease / 3 + RECONNECT) if self._broken else lease

    def _resize(self, now: float) -> list[Command]:
        """A live round grows when newcomers are ready, and changes size when an operator says so."""
        if self._missing or self._verdict:
            return []  # who is in it will show in a moment
        if len(self.places) > self._target:
            self._gather(Ending.SCALED, f"scaled down to {self._target} nodes", now)
            return self._form_or_hold(now)
        if (node := self._replaceable(now)) and self._next_store_is_offered():
            why = self._unfit(node)
            if self.members[node].problems:
                self._fault(node, why, now)
            self._gather(Ending.NODE_UNFIT, f"node {node} is {why}", now)
            return self._form_or_hold(now)
        if not self._waiting:
            return self._tell_newcomers("spare")
        if len(self.places) >= self._target:
            return self._tell_newcomers(f"spare: all {self._target} places are taken")
        if self._done:
            return self._tell_newcomers("spare: the job is about to finish")
        first, since = next(iter(self._waiting.items()))
        if self._warming and now < since + self.settings.timing.settle:
            return []  # one switch for all of them
        if not self._next_store_is_offered():
            return []
        self._gather(Ending.NODE_JOINED, f"node {first} joined", now)
        return self._form_or_hold(now)

    def _next_store_is_offered(self) -> bool:
        """Nobody is stopped before it is, by the node of rank 0 if that stays."""
        needed = self._troubled().needed
        hosts = (n for n, place in self.places.items() if place.group_rank == 0 and (n in self._able or n in needed))
        return all(self.members[n].port for n in hosts)

    def _form_or_hold(self, now: float) -> list[Command]:
        needed, least, timing = self._troubled().needed, self.settings.min_nodes, self.settings.timing
        ready = len(self._able) + len(needed)
        if ready < least:
            self._quorum = None
            if now >= self._since + timing.join:
                need = f"{least} nodes are needed and {ready} ready after {timing.join:g} s{self._the_unhealthy()}"
                return self._close(Outcome.FAILED, f"{need} ({self._why}); start more, or raise join_timeout", now)
            return self._hold(f"waiting: {ready} of at least {least} nodes are ready ({self._why})")
        if self._quorum is None:
            self._quorum = now
        if now < self._not_before:
            return self._hold(self._why)
        settled = now >= self._quorum + timing.settle
        if self._absent or not (settled or self._complete()):
            return self._hold(f"{ready} nodes are ready, others may be in {timing.settle:g} s ({self._why})")
        return self._form([*self._candidates(), *needed][: self._target], now)

    def _complete(self) -> bool:
        """Is there nobody worth waiting for?"""
        if self._missing:
            return False
        reserve = self._troubled()
        if len(self._able) + len(reserve.needed) >= self._target:
            return True
        survivors = len(self._able) - len(self._waiting) + reserve.inside
        return self.round > 0 and (survivors >= self.settings.min_nodes or not self._warming)

    def _candidates(self) -> list[str]:
        """Who could be in the next round: survivors first, by rank, then newcomers, the longest waiting first."""
        survivors = (n for n in self.places if n in self._able)
        return [*sorted(survivors, key=lambda n: self.places[n].group_rank), *self._waiting]

    def _hold(self, why: str) -> list[Command]:
        """Stop what is left of the last round, and tell newcomers what they wait for; once."""
        out = self._tell_newcomers(why)
        if not self._held:
            self._held = True
            out += [Send(n, Hold(self.round, why)) for n in self.places if n in self.members]
        return out

    def _tell_newcomers(self, why: str) -> list[Command]:
        untold, self._untold = self._untold, {}
        return [Send(n, Hold(self.round, self._unfit(n) or why)) for n in untold]

    def _form(self, chosen: list[str], now: float) -> list[Command]:
        before = {n: self.places[n].group_rank for n in chosen if n in self.places}
        chosen = sorted(chosen, key=lambda n: n not in before)  # who has a rank comes before who only inherits it
        candidates = [(self.members[n].node, before.get(n, self._inherited(n))) for n in chosen]
        nodes = ranks.order(candidates, self.settings.rank_by)
        host = self.members[nodes[0].id]
        if not host.port:
            return self._hold(f"waiting for node {nodes[0].id} to offer a port for the store ({self._why})")
        self.round = self._highest = max(self.round, self._highest) + 1
        store = Address(host.node.host, host.port)
        host.port, host.served = 0, self.round
        places = ranks.places(nodes, round=self.round, store=store, restarts=self.restarts.used)
        left_out = [n for n in self.places if n in self.members and n not in before]
        self._begin({node.id: place for node, place in zip(nodes, places, strict=True)}, now)
        self._enter(Phase.RUNNING, now)
        names, world = tuple(self.places), places[0].world_size
        self._notes.append(observe.RoundFormed(self.round, names, world, str(store), self.restarts.used, self._why))
        self._notes += (observe.RankWishDenied(self.round, *denial) for denial in ranks.denied(candidates, nodes))
        out: list[Command] = [Send(node_id, Assign(place, self._why)) for node_id, place in self.places.items()]
        why = f"spare: all {len(nodes)} places of round {self.round} are taken"
        out += [Send(n, Hold(self.round, self._unfit(n) or why)) for n in left_out if n not in self._untold]
        return out + self._tell_newcomers(why)

    def _inherited(self, node: str) -> int | None:
        """The rank of the lost node that this one stands in for, if it does."""
        number = self.members[node].node.number
        return None if number is None else self._vacated.get(number)

    # nodes in trouble -------------------------------------------------------------------------------------------------

    def _unfit(self, node: str) -> str:
        """Why a node is not to be counted on; empty when it is."""
        member = self.members.get(node)
        if member is not None and member.problems:
            return f"unhealthy: {'; '.join(member.problems)}"
        why = self._quarantine.reason(node)
        return f"in quarantine: {why}" if why else ""

    def _troubled(self) -> Troubled:
        """What follows for those in trouble; found anew only when somebody stands otherwise than before."""
        if self._weighed is None:
            self._weighed = self._weigh() if self._reserve else Troubled({}, 0, False, [])
        return self._weighed

    def _weigh(self) -> Troubled:
        inside = [n for n in self._reserve if n in self.places]
        unhealthy = sum(bool(self.members[n].problems) for n in inside)
        shared = unhealthy > 1 and 2 * unhealthy > len(self.places)
        short = max(0, self.settings.min_nodes - len(self._able))
        if shared:
            short = max(short, len(inside))
        inside.sort(key=lambda n: self.places[n].group_rank)
        needed = dict.fromkeys([*inside, *(n for n in self._reserve if n not in self.places)][:short])
        recheck = max((member.recheck() for n in self.places if (member := self.members.get(n))), default=0.0)
        spared = sorted((self._may_go(n, recheck), n) for n in inside if n not in needed)
        return Troubled(needed, min(short, len(inside)), shared, spared)

    def _may_go(self, node: str, recheck: float) -> float:
        """When a node in trouble may lose its place: at once if it is in quarantine."""
        member = self.members[node]
        return member.since + recheck if member.problems else 0.0

    def _replaceable(self, now: float) -> str | None:
        """A node of the live round without which the job is better off."""
        spared = self._troubled().spared
        return spared[0][1] if spared and not self._done and now >= spared[0][0] else None

    def _say_who_is_kept(self) -> None:
        reserve = self._troubled()
        if self.phase is not Phase.RUNNING or reserve.told:
            return
        reserve.told = True
        for node in reserve.needed:
            if node in self.places and node not in self._kept:
                self._kept.add(node)
                others = f"the job needs {self.settings.min_nodes} nodes, and {len(self._able)} others could be in it"
                if reserve.shared:
                    others = "most of the round's nodes are unhealthy, which is likely nobody's own fault"
                self._notes.append(observe.NodeKept(node, f"{others} (it is {self._unfit(node)})"))

    def _the_unhealthy(self) -> str:
        node = next((n for n, member in self.members.items() if member.problems), None)
        return f"; node {node} is {self._unfit(node)}" if node else ""

    # evidence and the end ---------------------------------------------------------------------------------------------

    def _keep(self, failures: Iterable[Failure], round: int) -> None:
        if round == self.round:
            known = {(f.rank, f.at) for f in self._failures}
            for failure in failures:
                if (failure.rank, failure.at) in known:
                    continue
                if len(self._failures) < EVIDENCE:
                    self._failures.append(failure)
                elif failure.hang and len(self._failures) < PLACES:
                    self._failures.append(replace(failure, traceback="", log_tail=()))

    def _home_of(self, rank: int) -> str:
        return next((n for n, p in self.places.items() if p.first_rank <= rank < p.first_rank + p.slots), "")

    def _culprit(self) -> str:
        failure = root_cause(self._failures)
        if failure and failure.hang:
            return cut(in_words(hangs_among(self._failures, self.round)))
        return f"rank {failure.rank} on {failure.host} {how(failure)}" if failure else "a worker failed"

    def _close(self, outcome: Outcome, why: str, now: float) -> list[Command]:
        if self.phase in (Phase.CLOSING, Phase.CLOSED):
            return []
        self._why = why = cut(why)
        self._verdict = self._inspection = None
        self.report = Report(self.settings.run_id, outcome, why, self.round, self.restarts.used)
        self._enter(Phase.CLOSING, now)
        if outcome is Outcome.SUCCEEDED:
            return self._finish(now)
        self._unstopped = set(self.members)
        self._notes.append(observe.JobClosing(outcome, why))
        out: list[Command] = [Send(n, Closing(why, outcome)) for n in self.members]
        return out + self._finish(now)

    def _finish(self, now: float) -> list[Command]:
        """Once all evidence is in (or its time is over), tell everybody how the job ended."""
        assert self.report is not None
        if self._unstopped and now < self._since + self.settings.timing.shutdown + FAREWELL:
            return []
        failures = () if self.report.outcome is Outcome.SUCCEEDED else trim(order(self._failures))
        self.report = replace(self.report, rounds=self.round, restarts=self.restarts.used, failures=failures)
        self._enter(Phase.CLOSED, now)
        out: list[Command] = [Send(n, Closed(self.report)) for n in self.members]
        ended = self.report
        self._notes.append(observe.JobClosed(ended.outcome, ended.why, ended.rounds, ended.restarts))
        return out + self._end(now)

    def _end(self, now: float) -> list[Command]:
        assert self.report is not None
        if self._ended or (self.members and now < self._since + FAREWELL):
            return []
        self._ended = True
        return [End(self.report)]


def _put(nodes: set[str], node: str, inside: bool) -> None:
    if inside:
        nodes.add(node)
    else:
        nodes.discard(node)
