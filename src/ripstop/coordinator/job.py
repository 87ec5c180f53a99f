"""What a job does: the coordinator's decisions, and nothing else.  Pure.

`Job.on(event, now)` changes the state and returns commands; `deadline()` says when it wants a `Tick`.  A driver
(`coordinator.py`) owns the clock and the connections.  The job's parts have rules of their own: its nodes (`roster.py`)
and where they stand (`standing.py`), who is in touch (`presence.py`), who may join (`admission.py`), what is known of a
failure and what follows (`inquest.py`).  The rules of the whole:

1.  At most one round is live, and round numbers only grow.  Ranks of a round are exactly 0 … n-1 (`ranks.py`).
2.  What is said of any other round than the live one changes nothing; it is kept as evidence at most.
3.  The first round of a job forms when `max` nodes are ready, or when `min` have been for the time of the last call.  A
    later one forms as soon as every survivor of the last is ready or known to be lost, but not before a restart's
    pause; too few survivors wait for newcomers.  An operator's wish for a size, or what the job was to begin with
    (`target`), stands in for `max`; a round that is recovered (8) is as large as it is.  A job of which a node has
    heard a round number is past its first round, whoever is its coordinator.  Phases follow `transitions.py`.
4.  A newcomer disturbs nobody before it is ready.  Nodes beyond the maximum are spares, told so, and promoted.
5.  A lost node is left out of the next round.  A closed connection is a hint: it is a loss when anybody fails
    meanwhile, and a node that is in no round, or leaving, is gone with its connection.
6.  Failures are charged to the budget, and what no budget covers ends the job; members that come, leave or are lost
    cost nothing.
7.  A port offered for a store serves one round.  An offer made before that round, or over an earlier connection, is
    stale: nobody knows who may still be talking to that port.
8.  A coordinator that knows nothing learns the job from its agents: the highest round wins, and it goes on undisturbed
    when all its members are back within a lease, or sooner when it has failed meanwhile; a failed one does not wait for
    members whose successors are there (`rank_by=slot`: a number belongs to one node); restarts that were granted are
    spent; an end that one of them was told of comes to its end.
9.  A live round makes way for one without a node in trouble, if that may go, as soon as the next store has a port.
10. Leaving is not closing.  The job is closed once: by success of all its nodes, by a failure that no budget covers, by
    too few nodes for too long, or by an operator.  Everybody is told before the coordinator goes.
11. A round that hangs is looked at on all its nodes before it ends: who hangs on one may wait for a rank of another.
"""

from collections.abc import Mapping
from itertools import islice

from msgspec.structs import replace

from ripstop.coordinator import admission, ranks
from ripstop.coordinator.blame import FailJob, FailurePolicy, FormNextRound, Ruling
from ripstop.coordinator.budget import Cause, RestartBudget, dies_young
from ripstop.coordinator.eligibility import Member
from ripstop.coordinator.job_io import (
    Disconnect,
    JobCommand,
    JobEnded,
    JobInput,
    NodeDisconnected,
    NodeMessage,
    Progressed,
    RecordEvent,
    Send,
    Tick,
)
from ripstop.coordinator.liveness import LATE, RECONNECT, Liveness
from ripstop.coordinator.membership import Membership
from ripstop.coordinator.phases import TRANSITIONS
from ripstop.coordinator.settings import JobSettings
from ripstop.diagnostics.failure_report import how
from ripstop.model import events as observe
from ripstop.model.events import RoundEndCause
from ripstop.model.failure import Failure, JobReport
from ripstop.model.operator_commands import (
    DrainNode,
    OperatorCommand,
    RestartRound,
    ScaleJob,
    StopJob,
    rejection_reason,
)
from ripstop.model.round import Node, Outcome, Place, RankBy
from ripstop.model.status import JobStatus, NodeState, NodeStatus, Phase
from ripstop.protocol.limits import bounded, truncate_reason
from ripstop.protocol.messages import (
    Assign,
    Closed,
    Closing,
    Drain,
    Failed,
    FromAgent,
    Inspect,
    Inspected,
    Join,
    Leaving,
    Left,
    Problems,
    Ready,
    Rejected,
    StandBy,
    Status,
    Stopped,
    Succeeded,
)

FAREWELL = 5.0  # seconds everybody has to take the last word
SETTLE = 2.0  # seconds that a later round waits for nodes that are not ready yet


class Job:
    """The state of one job; see the rules above."""

    def __init__(self, settings: JobSettings, now: float = 0.0) -> None:
        self.settings = settings
        self.phase = Phase.GATHERING
        self.round = 0  # of the live or last round
        self.progressed = False  # a worker of this round has reported a step or a checkpoint
        self.restarts = RestartBudget(settings.budget)
        self.report: JobReport | None = None
        self._presence = Liveness(settings.timing.lease, settings.own)
        self._roster = Membership(settings, self._presence)
        self.members: Mapping[str, Member] = self._roster.members  # to look at: the roster changes them
        self.places: Mapping[str, Place] = self._roster.places
        self._inquest = FailurePolicy()
        self._highest = 0  # the highest number anybody has heard of
        self._target = settings.max_nodes if settings.target is None else settings.target
        self._scaled = False  # the target is an operator's wish, made here
        self._witness: Place | None = None  # the first place heard of in the round that is being recovered
        self._since = now  # when this phase began
        self._not_before = now  # a restart's pause
        self._why = "first round"
        self._last_failure = ""  # why a round ended that failed
        self._quorum: float | None = None  # since when enough nodes are ready
        self._done: set[str] = set()  # nodes of the live round whose workers all exited 0
        self._held = False  # survivors of the last round were told to stop
        self._unstopped: set[str] = set()  # nodes whose evidence is awaited
        self._ended = False
        self._now = now  # of the last event: what was due by then has been done
        self._notes: list[observe.Event] = []  # for operators, of the event at hand

    # the outside ------------------------------------------------------------------------------------------------------

    def on(self, event: JobInput, now: float) -> list[JobCommand]:
        """Take one event; the commands are to be executed in order."""
        due = self.deadline()
        if due is not None and now - due >= LATE:
            self._forgive(now, late=now - due)
        self._now = now
        out: list[JobCommand] = []
        match event:
            case NodeMessage(node, message):
                out += self._hear(node, bounded(message), now)
            case NodeDisconnected(node):
                self._gone(node, now)
            case Tick():
                pass
            case Progressed(node, round):
                self.progressed |= round == self.round and node in self.places  # rule 2
            case wish:
                out += self._steer(wish, now)
        out += self._expire(now)
        out += self._advance(now)
        if self.phase is Phase.RUNNING:
            self._notes += (observe.UnhealthyNodeRetained(*kept) for kept in self._roster.newly_kept())
        notes, self._notes = self._notes, []
        return [*map(RecordEvent, notes), *out] if notes else out

    def deadline(self) -> float | None:
        """The time of the next `Tick`, if one is needed."""
        timing = self.settings.timing
        times = [*self._presence.deadlines(), *self._inquest.deadlines(), *self._roster.deadlines()]
        match self.phase:
            case Phase.GATHERING:
                if self._quorum is None:
                    times.append(self._since + timing.join)
                else:
                    times += [self._quorum + self._time_for_more(), self._not_before]
            case Phase.RECOVERING:
                times.append(self._since + self._time_to_return())
            case Phase.CLOSING:
                times.append(self._since + timing.shutdown + FAREWELL)
            case Phase.CLOSED:
                times = [self._since + FAREWELL]
            case Phase.RUNNING:
                times += [since + SETTLE for since in islice(self._roster.waiting.values(), 1)]
                times += self._roster.troubled().next_after(self._now)
        return min((t for t in times if t > self._now), default=None)

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
            NodeState.ABSENT if name in self._presence.absent
            else NodeState.LEAVING if name in self._presence.leaving
            else NodeState.DONE if name in self._done
            else NodeState.RUNNING if place
            else NodeState.UNHEALTHY if self.members[name].problems
            else NodeState.QUARANTINED if name in self._roster.reserve
            else NodeState.WARMING if name not in self._roster.able
            else NodeState.SPARE if self.phase is Phase.RUNNING
            else NodeState.READY
        )  # fmt: skip
        ranks_ = (place.group_rank, place.first_rank) if place else (-1, -1)
        return NodeStatus(name, node.host, node.slots, node.role, state, *ranks_, self._roster.unfit(name))

    # what is heard ----------------------------------------------------------------------------------------------------

    def _hear(self, node: str, message: FromAgent, now: float) -> list[JobCommand]:
        if self.phase is Phase.CLOSED:
            return self._hear_after_the_end(node, message, now)
        if isinstance(message, Join):
            return self._join(node, message, now)
        if node not in self.members:
            return []  # lost meanwhile, or never joined: it will learn from its next Join
        self._presence.spoke(node, now)
        match message:
            case Ready():
                self._roster.offer(node, message, now)
            case Problems(problems):
                self._notes += self._roster.note_problems(node, problems, now)
            case Failed(round, failures):
                return self._failed(node, round, failures, now)
            case Inspected(round, failures):
                self._inquest.keep(failures, round)
                if round == self.round:
                    self._inquest.dismiss(node)
            case Succeeded(round):
                self._succeeded(node, round)
            case Leaving(why):
                self._leave_soon(node, why, now)
            case Stopped(failures):
                self._inquest.keep(failures, self.round)
                self._unstopped.discard(node)
            case Left(why):
                self._lose(node, f"left: {why}", now, lost=False)
                return [Disconnect(node)]
            case _:
                pass
        return []

    def _hear_after_the_end(self, node: str, message: FromAgent, now: float) -> list[JobCommand]:
        assert self.report is not None
        match message:
            case Join(node=who):
                self._roster.join_late(node, who, now)
                return [Send(node, Closed(self.report))]
            case Left():
                if node in self.members:
                    self._roster.lose(node, now)
                return [Disconnect(node)]
            case _:
                return []

    def _join(self, node: str, join: Join, now: float) -> list[JobCommand]:
        staying = (member.node for name, member in self.members.items() if not self._presence.is_going(name))
        if why_not := admission.objection(node, join, self.settings, staying):
            self._notes.append(observe.NodeRejected(node, why_not))
            return [Send(node, Rejected(why_not)), Disconnect(node)]
        self._notes += self._roster.join(join, now)
        self._highest = max(self._highest, join.newest)
        if join.restarts > self.restarts.used:  # rule 8: an earlier coordinator granted them
            self.restarts = RestartBudget(self.settings.budget, join.restarts, now)
        return self._sync(node, join, now)

    def _sync(self, node: str, join: Join, now: float) -> list[JobCommand]:
        """Bring a node that has just (re)joined and the live round to one view."""
        if join.closing and self.phase is not Phase.CLOSING:
            return self._close(join.closing.outcome, join.closing.why, now)  # rule 8
        if self.phase is Phase.CLOSING:
            assert self.report is not None
            self._unstopped.add(node)
            return [Send(node, Closing(self._why, self.report.outcome))]
        held, out = join.held, list[JobCommand]()
        if held is not None and held.round > self.round:
            out += self._adopt(held, now)
        if self.phase is Phase.RECOVERING and held is not None and self._is_recovered(held):
            self._roster.reseat(node, held, now)
        if held is None or held != self.places.get(node):
            if self.phase is Phase.RUNNING and node in self.places:
                return out + self._missed(node, join, now)
            return out if held is None else [*out, Send(node, StandBy(self.round, f"round {held.round} is over"))]
        if self.phase is Phase.GATHERING and self._held:
            out.append(Send(node, StandBy(self.round, self._why)))  # the first one may have been lost on the way
        match join.status:
            case Status.FAILED:
                out += self._failed(node, held.round, join.failures, now)
            case Status.SUCCEEDED:
                self._succeeded(node, held.round)
        return out

    def _missed(self, node: str, join: Join, now: float) -> list[JobCommand]:
        """A node of the live round does not have it: the word was lost with a connection."""
        place = self.places[node]
        if join.newest < self.round and place.group_rank:
            return [Send(node, Assign(place, self._why))]
        # nor does it have its store, if that was there
        self._gather(RoundEndCause.NODE_LOST, f"node {node} does not have round {self.round}", now)
        return []

    def _failed(self, node: str, round: int, failures: tuple[Failure, ...], now: float) -> list[JobCommand]:
        self._inquest.keep(failures, round)
        if node in self.members and self._inquest.is_culprit(round, failures):
            self._fault(node, how(failures[0]), now)  # its victims were heard first
        if round != self.round or node not in self.places:
            return []  # rule 2
        self._inquest.testify(node)
        return self._judge(now) if self.phase is Phase.RUNNING else []

    def _judge(self, now: float) -> list[JobCommand]:
        """The live round has failed: what of it?"""
        if gone := [*self._presence.absent, *(n for n in self._presence.leaving if n in self.places)]:
            self._blame(gone, now)
            return []
        if self._inquest.doomed:
            return []
        if self._inquest.only_hangs:
            return self._inspect(now)
        ruling = self._inquest.rule(self.restarts, len(self.places), now, young=self._dies_young(now))
        return self._carry_out(ruling, now)

    def _dies_young(self, now: float) -> bool:
        return dies_young(now - self._since, progressed=self.progressed)

    def _inspect(self, now: float) -> list[JobCommand]:
        """Have a round that hangs looked at on all its nodes (rule 11)."""
        asked = self._inquest.inspect((n for n in self.places if n not in self._done), now)
        return [Send(n, Inspect(self.round)) for n in asked]

    def _carry_out(self, ruling: Ruling, now: float) -> list[JobCommand]:
        self._notes += ruling.notes
        match ruling:
            case FormNextRound(_, ending, why, delay, culprit):
                if culprit is not None:
                    self._fault(self._roster.home_of(culprit.rank), culprit.deed, now)
                self._gather(ending, why, now, delay)
            case FailJob(_, why):
                return self._close(Outcome.FAILED, why, now)
        return []

    def _fault(self, node: str, what: str, now: float) -> None:
        """This node, and no other, is to blame for the end of the round."""
        self._inquest.explained()
        if node in self.members:
            self._notes += self._roster.fault(node, what, now)

    def _blame(self, gone: list[str], now: float) -> None:
        """A failure while nodes were absent or leaving: it is theirs (rule 5), and nobody is charged."""
        for node in gone:
            if node in self._presence.absent:
                self._lose(node, "lost: its connection closed, and a peer failed", now)
        if self.phase is Phase.RUNNING:
            self._gather(RoundEndCause.NODE_LEFT, f"a worker failed while node {gone[0]} was going", now)

    def _succeeded(self, node: str, round: int) -> None:
        if round == self.round and node in self.places and self.phase in (Phase.RUNNING, Phase.RECOVERING):
            self._done.add(node)

    def _steer(self, wish: OperatorCommand, now: float) -> list[JobCommand]:
        """What an operator wants, if it can be had."""
        why_not = rejection_reason(wish, self.status(now))
        if isinstance(wish, ScaleJob):
            self._notes.append(observe.ScaleRequested(wish.nodes, not why_not, why_not))
        if why_not:
            return []
        match wish:
            case RestartRound(why):
                self._gather(RoundEndCause.OPERATOR, why, now)
            case DrainNode(node, why):
                return [Send(node, Drain(why))]
            case ScaleJob(nodes):
                self._target, self._scaled = nodes, True
            case StopJob(why):
                return self._close(Outcome.STOPPED, why, now)
        return []

    # who is gone ------------------------------------------------------------------------------------------------------

    def _gone(self, node: str, now: float) -> None:
        if node not in self.members or self.phase is Phase.CLOSED:
            return  # at the end, who breaks off without a `Left` may come back for the last word
        leaving = node in self._presence.leaving
        if node not in self.places or leaving or self._inquest.doomed or self.phase is Phase.CLOSING:
            self._lose(node, "gone: its connection closed", now)
            return
        self._roster.break_off(node, now)

    def _leave_soon(self, node: str, why: str, now: float) -> None:
        self._roster.leave(node, now)
        self._notes.append(observe.NodeLeaving(node, why))
        if self._inquest.doomed and node in self.places:
            self._blame([node], now)

    def _expire(self, now: float) -> list[JobCommand]:
        """Leases and hints that have run out."""
        out: list[JobCommand] = []
        if self.phase is Phase.CLOSED:
            return out
        for node, heard in self._presence.silent(now):
            self._lose(node, f"lost: silent for {now - heard:.1f} s", now)
            out.append(Disconnect(node))
        for node, since in self._presence.not_returned(now):
            self._lose(node, f"lost: its connection closed {now - since:.1f} s ago and it did not return", now)
        self._notes += self._roster.release(now)
        return out

    def _forgive(self, now: float, late: float) -> None:
        """This coordinator was away, and nobody could be heard meanwhile: all waiting starts anew."""
        self._presence.forgive(now)
        self._inquest.forgive(now)
        self._since += late

    def _lose(self, node: str, why: str, now: float, *, lost: bool = True) -> None:
        if node not in self.members:
            return
        self._roster.lose(node, now)
        self._unstopped.discard(node)
        self._inquest.dismiss(node)
        self._notes.append(observe.NodeGone(node, why, lost))
        if node in self.places and self._inquest.excuse(self.restarts, self.settings.timing.lease, now):
            self._notes.append(observe.BudgetRefunded(self.round, node))
        if self.phase is Phase.RECOVERING:
            self._roster.reseat(node, None, now)
        elif self.phase is Phase.RUNNING and node in self.places and node not in self._done:
            self._gather(RoundEndCause.NODE_LOST if lost else RoundEndCause.NODE_LEFT, f"node {node} {why}", now)

    # rounds -----------------------------------------------------------------------------------------------------------

    def _adopt(self, held: Place, now: float) -> list[JobCommand]:
        """A node holds a newer round than this coordinator knows of (rule 8)."""
        out: list[JobCommand] = [
            Send(n, StandBy(self.round, f"round {held.round} is newer")) for n in self.places if n in self.members
        ]
        first = not self.round or self.phase is Phase.RECOVERING
        self.round, self._witness = held.round, held
        if first and not self._scaled:  # an operator asked the last coordinator for it
            self._target = max(self._target, min(held.group_size, self.settings.max_nodes))
        self._begin({}, now)
        if not first:
            self._gather(RoundEndCause.COORDINATOR, f"round {held.round} was alive elsewhere", now)
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
        self._done = set()
        self.progressed = False
        self._inquest.begin(self.round)
        self._roster.seat(places, now)

    def _gather(self, cause: RoundEndCause, why: str, now: float, delay: float = 0.0) -> None:
        """The live round is over; the next forms when it can, but not before the delay."""
        why = truncate_reason(why)
        self._notes.append(observe.RoundEnded(self.round, cause, why, delay))
        self._enter(Phase.GATHERING, now)
        self._why = why
        if cause in (RoundEndCause.APPLICATION, RoundEndCause.INFRASTRUCTURE):
            self._last_failure = why
        self._not_before = now + delay
        self._quorum = None
        self._held = False
        self._inquest.adjourn()

    def _advance(self, now: float) -> list[JobCommand]:
        """Do what the state now allows: resume, form, hold, finish, end."""
        match self.phase:
            case Phase.RECOVERING:
                return self._resume(now)
            case Phase.GATHERING:
                return self._form_or_hold(now)
            case Phase.RUNNING:
                if self.places.keys() <= self._done:
                    return self._close(Outcome.SUCCEEDED, "all workers exited 0", now)
                if why := self._inquest.sentence(now):
                    return self._close(Outcome.FAILED, why, now)
                if self._inquest.inspection is not None:
                    return [] if self._inquest.is_waiting(now) else self._conclude(now)
                return self._resize(now)
            case Phase.CLOSING:
                return self._finish(now)
            case Phase.CLOSED:
                return self._end(now)

    def _conclude(self, now: float) -> list[JobCommand]:
        """All that can be known of the hang is known."""
        ruling = self._inquest.rule_on_hang(self.restarts, now, young=self._dies_young(now))
        return [*self._carry_out(ruling, now), *self._advance(now)]

    def _resume(self, now: float) -> list[JobCommand]:
        assert self._witness is not None
        back, size = len(self.places), self._witness.group_size
        if back < size:
            if now < self._since + self._time_to_return() and not self._is_succeeded(size):
                return []
            self._gather(RoundEndCause.COORDINATOR, f"{back} of {size} nodes came back", now)
            return self._form_or_hold(now)
        self._enter(Phase.RUNNING, now)
        self._why = "the coordinator was restarted"
        self._notes.append(observe.RoundResumed(self.round, back))
        out: list[JobCommand] = []
        if self._inquest.broken:
            out += self._judge(now)
        return [*out, *self._advance(now)]

    def _is_succeeded(self, size: int) -> bool:
        """Whether every missing member of a failed round has a successor, a newcomer with its number.

        Only where all members that are back have their numbers for ranks, as a missing one has no other number then.
        """
        if self.settings.rank_by is not RankBy.SLOT or not self._inquest.broken or len(self.members) < size:
            return False
        numbers = {name: member.node.number for name, member in self.members.items()}
        if any(numbers[name] != place.group_rank for name, place in self.places.items()):
            return False
        newcomers = {number for name, number in numbers.items() if name not in self.places}
        return newcomers >= set(range(size)) - {place.group_rank for place in self.places.values()}

    def _time_to_return(self) -> float:
        """How long the members of a round that is recovered have; less when it is over anyway.

        Who is alive tries every third of a lease.
        """
        lease = self.settings.timing.lease
        return min(lease, lease / 3 + RECONNECT) if self._inquest.broken else lease

    def _resize(self, now: float) -> list[JobCommand]:
        """A live round grows when newcomers are ready, and changes size when an operator says so."""
        roster = self._roster
        if roster.missing or self._inquest.doomed:
            return []  # who is in it will show in a moment
        if len(self.places) > self._target:
            self._gather(RoundEndCause.SCALED, f"scaled down to {self._target} nodes", now)
            return self._form_or_hold(now)
        if not self._done and (node := roster.troubled().replaceable(now)) and roster.has_store_for_next():
            why = roster.unfit(node)
            if self.members[node].problems:
                self._fault(node, why, now)
            self._gather(RoundEndCause.NODE_UNFIT, f"node {node} is {why}", now)
            return self._form_or_hold(now)
        if not roster.waiting:
            return self._tell_newcomers("spare")
        if len(self.places) >= self._target:
            return self._tell_newcomers(f"spare: all {self._target} places are taken")
        if self._done:
            return self._tell_newcomers("spare: the job is about to finish")
        first, since = next(iter(roster.waiting.items()))
        if roster.warming and now < since + SETTLE:
            return []  # one switch for all of them
        if not roster.has_store_for_next():
            return []
        self._gather(RoundEndCause.NODE_JOINED, f"node {first} joined", now)
        return self._form_or_hold(now)

    def _form_or_hold(self, now: float) -> list[JobCommand]:
        least, timing, ready = self.settings.min_nodes, self.settings.timing, self._roster.ready()
        if ready < least:
            self._quorum = None
            if now >= self._since + timing.join:
                sick = self._roster.first_unhealthy()
                because = f"; node {sick} is {self._roster.unfit(sick)}" if sick else ""
                need = f"{least} nodes are needed and {ready} ready after {timing.join:g} s{because}"
                return self._close(Outcome.FAILED, f"{need} ({self._why}); start more, or raise join_timeout", now)
            return self._hold(f"waiting: {ready} of at least {least} nodes are ready ({self._why})")
        if self._quorum is None:
            self._quorum = now
            if not self._highest:
                self._roster.tell_again()  # of the last call
        if now < self._not_before:
            return self._hold(self._why)
        left = self._quorum + self._time_for_more() - now
        complete = left <= 0 or self._roster.is_complete(self._target, first=self.round == 0)
        if self._presence.absent or not complete:
            return self._hold(self._waiting_for_more(ready, left))
        return self._form(self._roster.candidates(self._target), now)

    def _time_for_more(self) -> float:
        """How long nodes that are enough wait for more.  The last call is for the first round of all."""
        return SETTLE if self._highest else self.settings.timing.last_call

    def _waiting_for_more(self, ready: int, left: float) -> str:
        if self._highest:
            return f"{ready} nodes are ready, others may be in {max(0.0, left):.1f} s ({self._why})"
        return (
            f"{ready} of {self._target} nodes are ready; the first round waits {left:.0f} s for more "
            "(to change that: --rdzv-conf=last_call_timeout=SECONDS on the coordinator's node)"
        )

    def _hold(self, why: str) -> list[JobCommand]:
        """Stop what is left of the last round, and tell newcomers what they wait for; once."""
        out = self._tell_newcomers(why)
        if not self._held:
            self._held = True
            out += [Send(n, StandBy(self.round, why)) for n in self.places if n in self.members]
        return out

    def _tell_newcomers(self, why: str) -> list[JobCommand]:
        return [Send(n, StandBy(self.round, self._roster.unfit(n) or why)) for n in self._roster.take_untold()]

    def _form(self, candidates: list[ranks.Candidate], now: float) -> list[JobCommand]:
        nodes = ranks.order(candidates, self.settings.rank_by)
        host = nodes[0].id
        if not self.members[host].port:
            return self._hold(f"waiting for node {host} to offer a port for the store ({self._why})")
        self.round = self._highest = max(self.round, self._highest) + 1
        store = self._roster.take_port(host, self.round)
        places = ranks.places(nodes, round=self.round, store=store, restarts=self.restarts.used)
        before = [n for n in self.places if n in self.members]
        self._begin({node.id: place for node, place in zip(nodes, places, strict=True)}, now)
        self._enter(Phase.RUNNING, now)
        names, world = tuple(self.places), places[0].world_size
        self._notes.append(observe.RoundFormed(self.round, names, world, str(store), self.restarts.used, self._why))
        self._notes += (observe.RankRequestDenied(self.round, *denial) for denial in ranks.denied(candidates, nodes))
        out: list[JobCommand] = [Send(node_id, Assign(place, self._why)) for node_id, place in self.places.items()]
        why = f"spare: all {len(nodes)} places of round {self.round} are taken"
        left_out = [n for n in before if n not in self.places and not self._roster.is_untold(n)]
        out += [Send(n, StandBy(self.round, self._roster.unfit(n) or why)) for n in left_out]
        return out + self._tell_newcomers(why)

    # the end ----------------------------------------------------------------------------------------------------------

    def _close(self, outcome: Outcome, why: str, now: float) -> list[JobCommand]:
        if self.phase in (Phase.CLOSING, Phase.CLOSED):
            return []
        self._why = why = truncate_reason(why)
        self._inquest.adjourn()
        self.report = JobReport(self.settings.run_id, outcome, why, self.round, self.restarts.used)
        self._enter(Phase.CLOSING, now)
        if outcome is Outcome.SUCCEEDED:
            return self._finish(now)
        self._unstopped = set(self.members)
        self._notes.append(observe.JobClosing(outcome, why))
        out: list[JobCommand] = [Send(n, Closing(why, outcome)) for n in self.members]
        return out + self._finish(now)

    def _finish(self, now: float) -> list[JobCommand]:
        """Once all evidence is in (or its time is over), tell everybody how the job ended."""
        assert self.report is not None
        if self._unstopped and now < self._since + self.settings.timing.shutdown + FAREWELL:
            return []
        failures = () if self.report.outcome is Outcome.SUCCEEDED else self._inquest.evidence()
        self.report = replace(self.report, rounds=self.round, restarts=self.restarts.used, failures=failures)
        self._enter(Phase.CLOSED, now)
        out: list[JobCommand] = [Send(n, Closed(self.report)) for n in self.members]
        ended = self.report
        self._notes.append(observe.JobClosed(ended.outcome, ended.why, ended.rounds, ended.restarts))
        return out + self._end(now)

    def _end(self, now: float) -> list[JobCommand]:
        assert self.report is not None
        if self._ended or (self.members and now < self._since + FAREWELL):
            return []
        self._ended = True
        return [JobEnded(self.report)]
