"""The coordinator's state machine: all decisions about a job.  Pure.

`Job.on(event, now)` changes the state and returns commands; `deadline()` is the time of the next `Tick`.  The driver
(`driver.py`) owns the clock and the connections.  Parts with rules of their own: the nodes (`membership.py`,
`liveness.py`), when a round forms (`formation.py`), its ranks (`ranks.py`), failures (`failure_policy.py`), the
recovery of a round (`recovery.py`), copies of training state (`replication_plan.py`), nodes that leave with notice
(`departure.py`), the end (`job_end.py`), the status (`job_status.py`).  The rules of the whole:

1.  At most one round is live, and round numbers only grow.  The ranks of a round are exactly 0 … n-1.
2.  A message about any other round than the live one changes nothing; its failures are kept as evidence at most.
3.  The target size is the maximum, unless the job starts with a lower target or an operator scales it.  A recovered
    round (rule 8) keeps its size.
4.  A new node disturbs no other node before it is ready.  Nodes beyond the target are spares: they are notified, and
    get a place when one is free.
5.  A lost node is left out of the next round.  A closed connection is a hint: it becomes a loss when a worker of
    another node fails or reports a lost connection to a peer, or at once for a node that is leaving or outside the
    round.
6.  Failures are charged to the budget, and a failure that no budget covers ends the job.  A node that joins, leaves or
    is lost costs nothing.
7.  A port that a node offers for a store serves one round.  An offer from before that round, or from an earlier
    connection, is stale: other processes may still use that port.
8.  A new coordinator learns the job's state from its agents: the highest round wins, and continues undisturbed when all
    its nodes return.  Restarts that another coordinator granted stay spent.  A job that a node knows to be closing
    closes.
9.  A live round is replaced when it has a degraded node that can be removed.
10. A node that leaves does not close the job.  The job closes once: when all its nodes succeed, by a failure that no
    budget covers, by too few nodes for too long, or by an operator.  Every node receives the report before the
    coordinator ends.
11. A round that hangs is diagnosed on all its nodes before it ends: a rank that hangs on one node may wait for a rank
    on another.
"""

from collections.abc import Iterable, Mapping

from ripstop.coordinator import (
    departure,
    failure_policy,
    job_end,
    job_status,
    job_types,
    ranks,
    recovery,
    replication_plan,
)
from ripstop.coordinator.formation import ChangeRound, Formation, GiveUp, Keep, WaitForNodes
from ripstop.coordinator.job_memory import JobMemory
from ripstop.coordinator.job_types import Disconnect, JobCommand, JobInput, JobSettings, Predecessor, RecordEvent, Send
from ripstop.coordinator.liveness import LATE_TICK_S
from ripstop.coordinator.membership import Member, Membership, membership_rejection_reason
from ripstop.coordinator.phases import TRANSITIONS
from ripstop.coordinator.restart_budget import RestartBudget, is_early_for_restart_budget
from ripstop.model import events
from ripstop.model import operator_commands as operator
from ripstop.model.events import RoundEndCause
from ripstop.model.failure import Failure, JobEnd
from ripstop.model.round import Outcome, Place
from ripstop.model.status import JobStatus, Phase
from ripstop.protocol import messages
from ripstop.protocol.limits import message_within_limits, reason_within_limits


class Job:
    """The state of one job; see the rules above."""

    def __init__(self, settings: JobSettings, now: float = 0.0, predecessor: Predecessor | None = None) -> None:
        self.settings = settings
        self.predecessor = predecessor
        self.phase = Phase.GATHERING
        self.round = 0  # the number of the live or last round
        self.progressed = False  # a worker of this round has reported a step or a checkpoint
        self.report: JobEnd | None = None
        self.membership = Membership(settings)
        self.liveness = self.membership.liveness
        self.members: Mapping[str, Member] = self.membership.members  # read only
        self.places: Mapping[str, Place] = self.membership.places
        self.formation = Formation(settings, self.membership, now)
        if predecessor is not None:
            self.formation.highest_round = predecessor.round  # rule 1, also if no node has received it
        self.failure_policy = failure_policy.FailurePolicy(settings.budget, settings.timing.lease)
        self.replication = replication_plan.ReplicationPlan()
        self.memory = JobMemory()
        self.departure = departure.Departure()  # of a node that leaves the live round with notice
        self.recovered_place: Place | None = None  # the first place that was reported of a round to recover
        self.last_return = now  # of a node of that round
        self.phase_since = now
        self.why = "first round"  # the reason for the current phase
        self.last_failure = ""  # why the last failed round ended
        self.succeeded: set[str] = set()  # nodes of the live round whose workers all exited 0
        self.is_held = False  # the nodes of the last round were asked to stop
        self.awaiting_stop: set[str] = set()  # nodes whose failures the report waits for
        self.is_ended = False
        self._now = now  # the time of the last event: everything due by then is done
        self._next_due: float | None = now  # the deadline after the last event; heartbeats only make it later
        self.events: list[events.Event] = []  # to record, of the current event
        self.commands: list[JobCommand] = []  # the other commands of the current event

    @property
    def restarts(self) -> RestartBudget:
        return self.failure_policy.restarts

    # input and output -------------------------------------------------------------------------------------------------

    def on(self, event: JobInput, now: float) -> list[JobCommand]:
        """Handle one event; the driver executes the commands in order."""
        match event:
            case job_types.NodeMessage(node, messages.Heartbeat()) if self.renew(node, now):
                return []
        may_be_late = self._next_due is not None and now - self._next_due >= LATE_TICK_S
        if may_be_late and (due := self.deadline()) is not None and now - due >= LATE_TICK_S:
            self._extend_deadlines(now, late=now - due)
        self._now = now
        match event:
            case job_types.NodeMessage(node, message):
                self._on_message(node, message_within_limits(message), now)
            case job_types.NodeDisconnected(node, closed_by_node):
                self._on_disconnect(node, closed_by_node, now)
            case job_types.Tick():
                pass
            case job_types.Progressed(node, round):
                self.progressed |= round == self.round and node in self.places  # rule 2
            case job_types.StragglerFound():
                departure.begin_straggler_departure(self, event, now)
            case command:
                self._on_operator_command(command, now)
        self._remove_expired(now)
        self._advance(now)
        if self.phase is Phase.RUNNING:
            self.events += (events.UnhealthyNodeRetained(*kept) for kept in self.membership.newly_retained())
        self.memory.send_if_changed(self, now)
        out = [*map(RecordEvent, self.events), *self.commands]
        self.events, self.commands = [], []
        self._next_due = self.deadline()
        return out

    def renew(self, node: str, now: float) -> bool:
        """Renew the lease of a node that sent a heartbeat.  False: time-outs are due, so `on` must handle it."""
        if self._next_due is not None and now >= self._next_due:
            return False
        self._now = now
        if node in self.members and self.phase is not Phase.CLOSED:
            self.liveness.renew(node, now)
        return True

    def send(self, node: str, message: messages.FromCoordinator) -> None:
        self.commands.append(Send(node, message))

    def deadline(self) -> float | None:
        """The time of the next `Tick`, if one is needed."""
        times = [*self.liveness.deadlines(), *self.failure_policy.deadlines()]
        if (release := self.membership.quarantine.next_release()) is not None:
            times.append(release)
        match self.phase:
            case Phase.GATHERING:
                times += self.formation.gathering_deadlines(self.phase_since)
            case Phase.RECOVERING:
                times.append(recovery.coordinator_recovery_deadline(self))
            case Phase.RUNNING:
                times += self.formation.resize_deadlines(self._now)
            case Phase.CLOSING:
                times.append(job_end.job_end_report_deadline(self))
            case Phase.CLOSED:
                times = [job_end.job_end_deadline(self)]
        return min((t for t in times if t > self._now), default=None)

    def status(self, now: float) -> JobStatus:
        return job_status.current_job_status(self, now)

    def wait_text(self, now: float) -> str:
        """What the job waits for, if it has no round."""
        return self.formation.wait_text(self.phase_since, now) if self.phase is Phase.GATHERING else ""

    # messages ---------------------------------------------------------------------------------------------------------

    def _on_message(self, node: str, message: messages.FromAgent, now: float) -> None:
        if self.phase is Phase.CLOSED:
            job_end.on_message_after_job_end(self, node, message, now)
            return
        if isinstance(message, messages.Join):
            self._on_join(node, message, now)
            return
        if isinstance(message, messages.Remember):
            self.memory.restore(self, message, now)  # rule 8
            return
        if node not in self.members:
            return  # lost, or never joined: the reply to its next Join brings it up to date
        self.liveness.renew(node, now)
        match message:
            case messages.Ready():
                self.membership.set_ready(node, message, now)
            case messages.Problems(problems, version):
                self.events += self.membership.set_problems(node, problems, version, now)
            case messages.Failed(round, failures):
                self._on_failed(node, round, failures, now)
            case messages.PeerLost(round) if round == self.round and node in self.places:
                self.liveness.report_lost_peer(node, now)  # rule 5
            case messages.Inspected(round, failures):
                self.failure_policy.on_diagnosis(node, round, failures)
            case messages.Succeeded(round):
                self._on_succeeded(node, round)
            case messages.Leaving(why):
                self._on_leaving(node, why, now)
                departure.begin_departure(self, node, message)
            case messages.FinalCommitMade():
                departure.on_final_commit_before_departure(self, node, message)
            case messages.StateLost(round, why) if round == self.round and node in self.places:
                if self.phase in (Phase.RUNNING, Phase.RECOVERING):
                    self.end_round(RoundEndCause.STATE_LOST, why, now)
                    self.stand_by(why)  # all workers of the next round are new processes
            case messages.Stopped(failures):
                self.failure_policy.add_failures(failures, self.round)
                self.awaiting_stop.discard(node)
            case messages.Replicated(round) if round == self.round and node in self.places:  # rule 2
                self._on_replicated(node, message, now)
            case messages.Left(why):
                self._remove(node, f"left: {why}", now, lost=False)
                self.commands.append(Disconnect(node))

    def _on_replicated(self, node: str, report: messages.Replicated, now: float) -> None:
        before = self.replication.complete(report.state)
        for name, request in self.replication.on_report(node, report, self.membership.partnered, now):
            self.commands += [Send(n, request) for n in (self.members if name is None else [name])]
        now_complete = self.replication.complete(report.state)
        if now_complete is not None and (before is None or before.round < now_complete.round):
            size = self.replication.set_bytes(report.state)
            self.events.append(events.StateReplicated(report.round, report.state, now_complete.number, size))

    def _on_join(self, node: str, join: messages.Join, now: float) -> None:
        staying = (member.node for name, member in self.members.items() if not self.liveness.is_departing(name))
        known = max(self.round, self.formation.highest_round)
        if why_not := membership_rejection_reason(node, join, self.settings, staying, known):
            self.events.append(events.NodeRejected(node, why_not))
            self.commands += [Send(node, messages.Rejected(why_not)), Disconnect(node)]
            return
        self.events += self.membership.join(join, now)
        self.memory.on_join(node)
        self.formation.highest_round = max(self.formation.highest_round, join.newest)
        if join.restarts > self.restarts.used:  # rule 8
            self.failure_policy.restarts = RestartBudget(self.settings.budget, join.restarts, now)
        self._synchronize(node, join, now)

    def _synchronize(self, node: str, join: messages.Join, now: float) -> None:
        """Bring a node that has (re)joined and the live round to the same state."""
        if join.closing and self.phase is not Phase.CLOSING:
            job_end.begin_job_end(self, join.closing.outcome, join.closing.why, now)  # rule 8
            return
        if self.phase is Phase.CLOSING:
            assert self.report is not None
            self.awaiting_stop.add(node)
            self.send(node, messages.Closing(self.why, self.report.outcome))
            return
        held = join.held
        if held is not None and held.round > self.round:
            recovery.recover_newer_round(self, held, now)
        if self.phase is Phase.RECOVERING and held is not None and recovery.is_in_recovery_round(self, held):
            self.membership.set_place(node, held, now)
            self.last_return = now
        if held is None or held != self.places.get(node):
            if self.phase is Phase.RUNNING and node in self.places:
                self._assign_again(node, join, now)
            elif held is not None:
                self.send(node, messages.StandBy(self.round, f"round {held.round} is over"))
            return
        if self.phase is Phase.GATHERING and self.is_held:
            self.send(node, messages.StandBy(self.round, self.why))  # the connection may have lost the first one
        match join.status:
            case messages.Status.FAILED:
                self._on_failed(node, held.round, join.failures, now)
            case messages.Status.SUCCEEDED:
                self._on_succeeded(node, held.round)

    def _assign_again(self, node: str, join: messages.Join, now: float) -> None:
        """A node of the live round did not receive its place, because a connection closed."""
        place = self.places[node]
        if join.newest < self.round and place.group_rank:
            self.send(node, messages.Assign(place, self.why))
        else:  # the node lost its workers, or its new connection made rank 0's port stale (rule 7)
            self.end_round(RoundEndCause.NODE_LOST, f"node {node} does not have round {self.round}", now)

    def _on_succeeded(self, node: str, round: int) -> None:
        if round == self.round and node in self.places and self.phase in (Phase.RUNNING, Phase.RECOVERING):
            self.succeeded.add(node)

    def _on_operator_command(self, command: operator.OperatorCommand, now: float) -> None:
        """Apply the command if it is allowed now."""
        why_not = operator.operator_command_rejection(command, self.status(now))
        if isinstance(command, operator.ScaleJob):
            self.events.append(events.ScaleRequested(command.nodes, not why_not, why_not))
        if why_not:
            return
        match command:
            case operator.RestartRound(why):
                self.end_round(RoundEndCause.OPERATOR, why, now)
            case operator.DrainNode(node, why):
                self.send(node, messages.Drain(why))
            case operator.ScaleJob(nodes):
                self.formation.scale(nodes)
            case operator.StopJob(why):
                job_end.begin_job_end(self, Outcome.STOPPED, why, now)

    # failures ---------------------------------------------------------------------------------------------------------

    def _on_failed(self, node: str, round: int, failures: tuple[Failure, ...], now: float) -> None:
        ruling = self.failure_policy.on_failure(node, round, failures, self._round_state(now), now)
        self._apply(ruling, now)

    def _round_state(self, now: float) -> failure_policy.RoundAtFailure:
        leaving = (n for n in self.liveness.leaving if n in self.places)
        return failure_policy.RoundAtFailure(
            self.places,
            self.succeeded,
            departing=(*self.liveness.disconnected, *leaving),
            is_running=self.phase is Phase.RUNNING,
            is_early=is_early_for_restart_budget(now - self.phase_since, progressed=self.progressed),
        )

    def _apply(self, ruling: failure_policy.Ruling, now: float) -> None:
        self.events += ruling.events
        if ruling.fault is not None and ruling.fault[0] in self.members:
            self.events += self.membership.record_fault(*ruling.fault, now)
        match ruling.action:
            case failure_policy.Diagnose(nodes):
                self.commands += [Send(n, messages.Inspect(self.round)) for n in nodes]
            case failure_policy.Restart(cause, reason, delay):
                self.end_round(cause, reason, now, delay)
            case failure_policy.RestartWithout(nodes):
                self._end_round_without(nodes, now)
            case failure_policy.FailJob(reason):
                job_end.begin_job_end(self, Outcome.FAILED, reason, now)

    def _end_round_without(self, departing: Iterable[str], now: float) -> None:
        """A worker failed while these nodes were disconnected or leaving: nothing is charged (rule 5)."""
        for node in departing:
            if node in self.liveness.disconnected:
                self._remove(node, "lost: its connection closed, and a peer failed", now)
        if self.phase is Phase.RUNNING:
            self.end_round(RoundEndCause.NODE_LEFT, f"a worker failed while {next(iter(departing))} was leaving", now)

    # losses -----------------------------------------------------------------------------------------------------------

    def _on_disconnect(self, node: str, closed_by_node: bool, now: float) -> None:
        if node not in self.members or self.phase is Phase.CLOSED:
            return  # after the end, a node that disconnects without a `Left` may return for the report
        is_leaving, is_pending = node in self.liveness.leaving, self.failure_policy.is_failure_pending
        if node not in self.places or is_leaving or is_pending or self.phase is Phase.CLOSING:
            self._remove(node, "lost: its connection closed", now)
            return
        self.membership.disconnect(node, closed_by_node, now)

    def _on_leaving(self, node: str, why: str, now: float) -> None:
        self.membership.mark_leaving(node, now)
        self.events.append(events.NodeLeaving(node, why))
        if self.failure_policy.is_failure_pending and node in self.places:
            self._end_round_without([node], now)

    def _remove_expired(self, now: float) -> None:
        """Remove nodes whose lease or reconnect timeout expired, and release nodes from quarantine."""
        if self.phase is Phase.CLOSED:
            return
        for node, last in self.liveness.expired(now):
            self._remove(node, f"lost: silent for {now - last:.1f} s", now)
            self.commands.append(Disconnect(node))
        if self.phase is Phase.RUNNING and (peer := self.liveness.lost_peer(self.places, now)):
            self._remove(peer, "lost: its connection closed, and a worker lost its connection to a peer", now)
        for node, since in self.liveness.not_reconnected(now):
            self._remove(node, f"lost: its connection closed {now - since:.1f} s ago and it did not return", now)
        self.events += self.membership.release(now)

    def _extend_deadlines(self, now: float, late: float) -> None:
        """This coordinator was away and could receive nothing: all timeouts start again."""
        self.liveness.extend(now)
        self.failure_policy.extend(now)
        self.phase_since += late
        self.last_return += late

    def _remove(self, node: str, why: str, now: float, *, lost: bool = True) -> None:
        if node not in self.members:
            return
        in_round = node in self.places
        self.membership.remove(node, now)
        self.awaiting_stop.discard(node)
        self.events.append(events.NodeGone(node, why, lost))
        self.events += self.failure_policy.on_node_lost(node, now, in_round=in_round)
        if self.phase is Phase.RECOVERING:
            self.membership.set_place(node, None, now)
        elif self.phase is Phase.RUNNING and in_round and node not in self.succeeded:
            self.end_round(RoundEndCause.NODE_LOST if lost else RoundEndCause.NODE_LEFT, f"node {node} {why}", now)

    # rounds -----------------------------------------------------------------------------------------------------------

    def enter(self, phase: Phase, now: float) -> None:
        assert phase in TRANSITIONS[self.phase], f"no transition from {self.phase.value} to {phase.value}"
        self.phase = phase
        self.phase_since = now

    def start_round(self, places: dict[str, Place], now: float) -> None:
        self.succeeded = set()
        self.progressed = False
        self.failure_policy.start_round(self.round)
        self.membership.start_round(places, now)

    def end_round(self, cause: RoundEndCause, why: str, now: float, delay: float = 0.0) -> None:
        """The live round is over; the next one forms when it can, but not before the delay."""
        why = reason_within_limits(why)
        self.events.append(events.RoundEnded(self.round, cause, why, delay))
        self.enter(Phase.GATHERING, now)
        self.why = why
        if cause in (RoundEndCause.APPLICATION, RoundEndCause.INFRASTRUCTURE):
            self.last_failure = why
        self.is_held = False
        self.formation.start_gathering(now + delay)
        self.failure_policy.reset()

    def _advance(self, now: float) -> None:
        """Do what the state now allows: resume, form, hold, resize, finish, end."""
        match self.phase:
            case Phase.RECOVERING:
                self._resume_or_end(now)
            case Phase.GATHERING:
                self._form_or_wait(now)
            case Phase.RUNNING if self.places.keys() <= self.succeeded:
                job_end.begin_job_end(self, Outcome.SUCCEEDED, "all workers exited 0", now)
            case Phase.RUNNING if departure.end_round_for_departure(self, now):
                self._form_or_wait(now)
            case Phase.RUNNING if self.failure_policy.is_undecided:
                ruling = self.failure_policy.review(self._round_state(now), now)
                if ruling.action:
                    self._apply(ruling, now)
                    self._advance(now)
            case Phase.RUNNING:
                self._resize(now)
            case Phase.CLOSING:
                job_end.report_job_end(self, now)
            case Phase.CLOSED:
                job_end.finish_job_end(self, now)

    def _resume_or_end(self, now: float) -> None:
        if not recovery.recover_or_end_round(self, now):
            return
        if self.phase is Phase.RUNNING and self.failure_policy.has_failure:
            self._apply(self.failure_policy.decide(self._round_state(now), now), now)
        self._advance(now)

    def _resize(self, now: float) -> None:
        match self.formation.resize(now, is_finishing=bool(self.succeeded)):
            case Keep(notice):
                if notice:
                    self._notify(self.membership.take_nodes_to_notify(), notice)
            case ChangeRound(cause, reason, removed):
                if removed and self.members[removed].problems:
                    self.failure_policy.mark_explained()
                    self.events += self.membership.record_fault(removed, self.membership.unfit_reason(removed), now)
                self.end_round(cause, reason, now)
                self._form_or_wait(now)

    def _form_or_wait(self, now: float) -> None:
        match self.formation.next_step(self.round, self.phase_since, self.why, now):
            case WaitForNodes(reason):
                self._wait_for_nodes(reason)
            case GiveUp(reason):
                job_end.begin_job_end(self, Outcome.FAILED, reason, now)
            case candidates:
                self._form(candidates, now)

    def _wait_for_nodes(self, why: str) -> None:
        """Once: stop the nodes of the last round, and notify the waiting nodes."""
        self._notify(self.membership.take_nodes_to_notify(), why)
        if not self.is_held:
            self.is_held = True
            self.stand_by(why)

    def stand_by(self, why: str) -> None:
        """Stop the nodes of the last round."""
        self.commands += [Send(n, messages.StandBy(self.round, why)) for n in self.places if n in self.members]

    def _notify(self, nodes: Iterable[str], why: str) -> None:
        for node in nodes:
            own = self.why if node in self.liveness.leaving else self.membership.unfit_reason(node)
            self.send(node, messages.StandBy(self.round, own or why))

    def _form(self, candidates: list[ranks.Candidate], now: float) -> None:
        nodes = ranks.order(candidates, self.settings.rank_by)
        host = nodes[0].id
        if not self.members[host].port:
            self._wait_for_nodes(f"waiting for node {host} to offer a port for the store ({self.why})")
            return
        self.round = self.formation.highest_round = max(self.round, self.formation.highest_round) + 1
        store = self.membership.take_port(host, self.round)
        listening = [self.membership.replica_address(node.id) for node in nodes]
        partners = replication_plan.partners([node.label for node in nodes], listening)
        places = ranks.places(nodes, round=self.round, store=store, restarts=self.restarts.used, partners=partners)
        before = [n for n in self.places if n in self.members]
        self.start_round({node.id: place for node, place in zip(nodes, places, strict=True)}, now)
        self.enter(Phase.RUNNING, now)
        names, world = tuple(self.places), places[0].world_size
        self.events.append(events.RoundFormed(self.round, names, world, str(store), self.restarts.used, self.why))
        self.events += (events.RankRequestDenied(self.round, *each) for each in ranks.denied_ranks(candidates, nodes))
        self.commands += [Send(name, messages.Assign(place, self.why)) for name, place in self.places.items()]
        waiting = self.membership.take_nodes_to_notify()
        left_out = [n for n in before if n not in self.places and n not in waiting]
        self._notify([*left_out, *waiting], f"spare: all {len(nodes)} places of round {self.round} are taken")
