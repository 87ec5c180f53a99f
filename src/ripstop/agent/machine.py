"""Decides for one node: which workers to start and stop, what to report, and when to give up.  Pure.

`Agent.on(event, now)` changes the state and returns commands; `deadline()` is the time of the next `Tick`.  The driver
(`driver.py`) executes the commands and owns the clock.  Inputs and commands are in `machine_io.py`.  Rules:

1.  At most one group of workers exists.  The next round's workers start after the last round's have all exited,
    except in place (rule 8).
2.  The agent starts only a round newer than every round it has seen.  A `StandBy` ends its round and all older rounds.
    So messages may arrive late, twice or out of order.
3.  The agent reports what happens; the coordinator decides.  A report that cannot be sent is part of the next `Join`,
    or follows it (`StateLost`).  Two are not repeated: a `PeerLost` only saves time, and a node that waits for a
    `FinalCommitMade` leaves at its deadline.
4.  Healthy workers continue while the coordinator is unreachable.  An agent that needs the coordinator gives up after a
    timeout.  It exits 0 if all its workers have succeeded by then.
5.  On a signal the agent leaves: it reports that, stops its workers with the same signal, and exits 128 + n.  A second
    signal kills the workers immediately; the same one within 0.2 s does not, because srun may pass on a copy.  If
    the workers have a `train.State`, and the signal is not from a terminal, they first make a final commit together
    with the other nodes' workers: the coordinator asks for it, and then gives this node no place.  An operator's drain
    and a preemption notice do the same.  A deadline or another signal ends the wait for the final commit.
6.  A node offers itself to the job only after it has passed one health check; it gives up if none passes within the
    join timeout.  Later it only reports its problems: the coordinator decides if the job needs the node anyway.
7.  A node that is ready offers a port for the store of a later round.  An offer is valid for one connection and one
    round: when the connection breaks, the agent replaces an unused offer, because a round that uses it may be lost.  A
    port that the user fixed is opened once, before the first round; a later round opens it again when it starts.
8.  Workers that have registered for it, and have not failed, go on in place in the next round; others are replaced.
    A worker that has not left its last round after a timeout is replaced too.  Its peers wait for its rank.
9.  A node with a worker that SIGKILL does not end leaves the job: that worker holds its memory and its devices.
"""

from msgspec.structs import replace

from ripstop.agent import machine_status
from ripstop.agent.health.assessment import HealthProblem
from ripstop.agent.machine_io import (
    AgentCommand,
    AgentInput,
    CoordinatorConnected,
    CoordinatorLost,
    CoordinatorMessage,
    ExitAgent,
    FinalCommitDone,
    FirstCommit,
    HealthChecked,
    InspectWorkers,
    LogLine,
    MakeFinalCommit,
    OpenStorePort,
    PreemptionNoticed,
    ReformWorkers,
    ReplaceWorkers,
    SendToCoordinator,
    SignalReceived,
    StartWorkers,
    StateLost,
    StopWorkers,
    StorePortReady,
    Tick,
    WarmupDone,
    WorkerLeft,
    WorkerLostPeer,
    WorkerReformed,
    WorkerRegistered,
    WorkersFailed,
    WorkersInspected,
    WorkersStopped,
    WorkersSucceeded,
    WorkersUnkillable,
)
from ripstop.agent.machine_state import (
    REPORTED_STATUS,
    SIGTERM,
    TERMINAL_SIGNALS,
    AgentSettings,
    WorkersState,
)
from ripstop.diagnostics.failure_ranking import trimmed_ranking
from ripstop.model.failure import Failure, JobEnd
from ripstop.model.round import Outcome, Place
from ripstop.model.text_formatting import rank_list, signal_name
from ripstop.protocol import messages

FINAL_REPORT_TIMEOUT_S = 5.0  # wait for the coordinator's report when the job's end is known without it
REPEATED_SIGNAL_S = 0.2
WAIT_LOG_DELAY_S = 5.0  # a shorter wait for the coordinator is not logged


class Agent:
    """The state of one node; see the rules above."""

    def __init__(self, settings: AgentSettings, now: float = 0.0) -> None:
        self.node = settings.node
        self.state = WorkersState.IDLE
        self.place: Place | None = None  # of the workers that exist, or of the last ones
        self.passed_health_check = False  # at least once
        self.settings = settings
        self._newest_round = 0  # the highest round number seen
        self._restarts = 0  # the highest restart count seen in a place
        self._next: tuple[Place, str] | None = None  # the round to start when the workers have stopped, and why
        self._elastic: set[int] = set()  # local ranks of the workers that can go on in place
        self._reforming: set[int] = set()  # those of them that have to leave their last round yet, until the deadline
        self._reform_until = 0.0
        self.is_warm = False
        self._problems: tuple[HealthProblem, ...] = ()
        self._problems_version = 0  # grows with each change: messages may arrive out of order
        self._unhealthy_since: float | None = None  # while no health check has passed yet
        self._ready: messages.Ready | None = None  # the offer that no round uses
        self._is_opening_port = False
        self._has_opened_port = False
        self._replica_port = 0  # takes copies of another node's training state; 0: none
        self._failures: tuple[Failure, ...] = ()
        self._leave_signal = 0
        self._signalled_at = 0.0
        self._leave_at: float | None = None  # without a final commit, at this time
        self._state_round = 0  # the last round whose workers have a State
        self._state_lost = messages.StateLost(0, "")  # the last report
        self._closing: messages.Closing | None = None
        self._exit: ExitAgent | None = None  # to execute when the workers have stopped
        self.is_connected = False
        self.was_connected = False
        self.connection_error = ""
        self._waiting_since: float | None = now  # the agent needs the coordinator and cannot reach it
        self._is_wait_logged = False
        self.notice = ""  # the coordinator's latest reason why this node has no place

    def on(self, event: AgentInput, now: float) -> list[AgentCommand]:
        """Handle one event; the driver executes the commands in order."""
        if self.state is WorkersState.OVER:
            return []
        out = self._dispatch(event, now)
        if self.is_connected or self.state is WorkersState.RUNNING:
            self._waiting_since = None
            self._is_wait_logged = False
        elif self._waiting_since is None:
            self._waiting_since = now
        return out

    def deadline(self) -> float | None:
        """The time of the next `Tick`, if one is needed."""
        if self.state in (WorkersState.STOPPING, WorkersState.OVER):
            return None
        times = [] if self._unhealthy_since is None else [self._unhealthy_since + self.settings.timing.join]
        if self._reforming:
            times.append(self._reform_until)
        times += [] if self._leave_at is None else [self._leave_at]
        if self._waiting_since is not None:
            timeout = self.coordinator_timeout()
            times.append(self._waiting_since + (timeout if self._is_wait_logged else min(WAIT_LOG_DELAY_S, timeout)))
        return min(times, default=None)

    def coordinator_timeout(self) -> float:
        timing = self.settings.timing
        is_alone = self.state is WorkersState.SUCCEEDED and self.place is not None and self.place.group_size == 1
        if self._closing or is_alone:
            return FINAL_REPORT_TIMEOUT_S
        return timing.coordinator if self.was_connected else timing.join

    def _dispatch(self, event: AgentInput, now: float) -> list[AgentCommand]:
        match event:
            case CoordinatorConnected(host):
                return self._on_connected(host)
            case CoordinatorLost(why):
                return self._on_disconnected(why)
            case CoordinatorMessage(message):
                return self._on_message(message, now)
            case WarmupDone():
                self.is_warm = True
                return self._offer_store_port()
            case HealthChecked(problems):
                return self._on_health_checked(problems, now)
            case StorePortReady(port, replica_port):
                self._is_opening_port, self._has_opened_port, self._replica_port = False, True, replica_port
                return self._offer(port)
            case WorkersFailed(round, failures):
                return self._on_workers_failed(round, failures)
            case WorkersInspected(round, failures):
                return self._send(messages.Inspected(round, trimmed_ranking(failures)))
            case WorkersSucceeded(round) if self._has_workers_of(round) and self.state is WorkersState.RUNNING:
                self.state = WorkersState.SUCCEEDED
                return self._send(messages.Succeeded(round))
            case WorkersStopped(round) if self._has_workers_of(round) and self.state is WorkersState.STOPPING:
                return self._on_workers_stopped()
            case WorkersUnkillable(round, why) if self._has_workers_of(round):
                return self._on_workers_unkillable(why)
            case WorkerRegistered(round, rank) if self._has_workers_of(round):
                self._elastic.add(rank)
            case WorkerLostPeer(round) if self._has_workers_of(round) and self.state is WorkersState.RUNNING:
                return self._send(messages.PeerLost(round))
            case WorkerReformed(round, rank) if self._has_workers_of(round):
                self._reforming.discard(rank)
            case WorkerLeft(round, rank, has_exited) if self._has_workers_of(round):
                self._elastic.discard(rank)
                if has_exited and rank in self._reforming:
                    return self._replace({rank}, "exited 0 before this round")
            case FirstCommit(round):
                self._state_round = round
            case FinalCommitDone(round, commits, why_not):
                return self._send(messages.FinalCommitMade(round, commits, why_not))
            case StateLost(round, why):
                self._state_lost = messages.StateLost(round, why)
                return self._send(self._state_lost)
            case SignalReceived(signum):
                return self._on_signal(signum, now)
            case PreemptionNoticed(source) if not self.is_leaving():
                return self._on_signal(SIGTERM, now, f"preemption notice in {source}")
            case Tick():
                due = self.deadline()
                if due is not None and now >= due:
                    return self._on_timeout(now)
        return []

    # health -----------------------------------------------------------------------------------------------------------

    def _on_health_checked(self, problems: tuple[HealthProblem, ...], now: float) -> list[AgentCommand]:
        before, self._problems = self._problems, problems
        has_changed = [problem.key for problem in before] != [problem.key for problem in problems]
        self._problems_version += has_changed
        report = messages.Problems(self.problem_texts(), self._problems_version)
        if not problems:
            self.passed_health_check, self._unhealthy_since = True, None
            out = [LogLine("healthy again"), *self._send(report)] if before else []
            return [*out, *self._offer_store_port()]
        if not self.passed_health_check and self._unhealthy_since is None:
            self._unhealthy_since = now
        if not has_changed:
            return []
        texts, limit = self.problem_texts(), f"{self.settings.timing.join:g} s"
        wait = "" if self.passed_health_check else f"; waiting at most {limit} for recovery before joining"
        return [LogLine(f"unhealthy: {'; '.join(texts)}{wait}"), *self._send(report)]

    def problem_texts(self) -> tuple[str, ...]:
        return tuple(problem.text for problem in self._problems)

    # the connection to the coordinator --------------------------------------------------------------------------------

    def _on_connected(self, host: str) -> list[AgentCommand]:
        was_connected = self.was_connected
        self.is_connected = self.was_connected = True
        if not self.node.host:
            self.node = replace(self.node, host=host)
        place, status = self._reported_round()
        join = messages.Join(
            node=self.node,
            min_nodes=self.settings.min_nodes,
            max_nodes=self.settings.max_nodes,
            rank_by=self.settings.rank_by,
            newest=self._newest_round,
            restarts=self._restarts,
            ready=None if self.is_leaving() else self._ready,
            held=place,
            status=status,
            failures=trimmed_ranking(self._failures) if status is messages.Status.FAILED else (),
            closing=self._closing,
            problems=self.problem_texts(),
            health_interval=self.settings.health_interval,
            problems_version=self._problems_version,
        )
        out: list[AgentCommand] = [SendToCoordinator(join)]
        if self._has_workers_of(self._state_lost.round):
            out.append(SendToCoordinator(self._state_lost))
        leaving = signal_name(self._leave_signal) if self._leave_signal else self._exit.why if self._exit else None
        if leaving is not None:
            out.append(SendToCoordinator(messages.Leaving(leaving)))
        return [*out, *([LogLine("coordinator found again")] if was_connected else []), *self._offer_store_port()]

    def _reported_round(self) -> tuple[Place | None, messages.Status]:
        """The round that a `Join` reports: the one whose workers exist, or start next."""
        if self._next:
            return self._next[0], messages.Status.RUNNING
        status = REPORTED_STATUS.get(self.state, messages.Status.IDLE)
        return None if status is messages.Status.IDLE else self.place, status

    def _on_disconnected(self, why: str) -> list[AgentCommand]:
        self.connection_error = why
        if not self.is_connected:
            return []
        self.is_connected = False
        self._ready = None  # rule 7
        return [LogLine(f"coordinator lost: {why}; workers continue, reconnecting"), *self._offer_store_port()]

    def _send(self, message: messages.FromAgent) -> list[AgentCommand]:
        return [SendToCoordinator(message)] if self.is_connected else []  # rule 3: the next Join reports it

    def _on_timeout(self, now: float) -> list[AgentCommand]:
        if self._reforming and now >= self._reform_until:
            why = f"did not leave the last round within {self.settings.timing.inprocess:g} s"
            return self._replace(set(self._reforming), why)
        if self._leave_at is not None and now >= self._leave_at:
            why = f"no common commit of all ranks within {self.settings.drain_timeout:g} s: leaving without it"
            return [LogLine(why, is_warning=True), *self._stop(why, self._leave_signal or SIGTERM)]
        if self._unhealthy_since is not None and now >= self._unhealthy_since + self.settings.timing.join:
            problems = "; ".join(self.problem_texts())
            return self._exit_with(ExitAgent(1, f"unhealthy for {self.settings.timing.join:g} s: {problems}"))
        assert self._waiting_since is not None, "a healthy agent has a deadline only while it waits for the coordinator"
        timeout, error = self.coordinator_timeout(), self.connection_error
        if now < self._waiting_since + timeout:
            self._is_wait_logged = True
            return [LogLine(f"waiting for the coordinator, at most {timeout:g} s ({error})")]
        if self._closing:
            return self._exit_with(ExitAgent(1, self._closing.why))
        if self.state is WorkersState.SUCCEEDED:
            why = f"all workers of this node exited 0, and no coordinator was reachable for {timeout:g} s"
            return self._exit_with(ExitAgent(0, why))
        return self._exit_with(ExitAgent(1, machine_status.status_when_machine_gives_up(self, timeout)))

    # the store port ---------------------------------------------------------------------------------------------------

    def _offer_store_port(self) -> list[AgentCommand]:
        """Offer a port if this node can start workers and has no unused offer (rule 7)."""
        is_promised = self._next is not None and self._next[0].group_rank == 0
        if not (self.is_warm and self.passed_health_check and self.node.host):
            return []
        if self._ready or self._is_opening_port or is_promised or self.is_leaving():
            return []
        fixed = self.settings.store_port
        if fixed and (self._has_opened_port or self.place is not None):
            return self._offer(fixed)
        self._is_opening_port = True
        return [OpenStorePort(fixed, is_required=self.place is None)]

    def _offer(self, port: int) -> list[AgentCommand]:
        self._ready = messages.Ready(port, after=self._newest_round, replica_port=self._replica_port)
        return [] if self.is_leaving() else self._send(self._ready)

    # messages from the coordinator ------------------------------------------------------------------------------------

    def _on_message(self, message: messages.FromCoordinator, now: float) -> list[AgentCommand]:
        match message:
            case messages.Assign(place, why):
                return self._on_assign(place, why, now)
            case messages.StandBy(round, why):
                return self._on_stand_by(round, why)
            case messages.Drain(why):
                return self._on_drain(why, now)
            case messages.MakeFinalCommit(round):
                is_running = self._has_workers_of(round) and self.state is WorkersState.RUNNING
                return [MakeFinalCommit(round)] if is_running else []
            case messages.Inspect(round):
                exist = self._has_workers_of(round) and self.state in (WorkersState.RUNNING, WorkersState.FAILED)
                return [InspectWorkers(round)] if exist else self._send(messages.Inspected(round))
            case messages.Closing(why):
                self._closing = message
                self._next = None
                return self._on_workers_stopped() if self.state is WorkersState.IDLE else self._stop(why)
            case messages.Closed(report):
                return self._on_closed(report)
            case messages.Rejected(why):
                return self._exit_with(ExitAgent(2, why))
            case _:
                return []

    def _on_assign(self, place: Place, why: str, now: float) -> list[AgentCommand]:
        hosts_store = place.group_rank == 0
        uses_offer = self._ready is not None and self._ready.store_port == place.store.port
        if hosts_store and uses_offer:
            self._ready = None  # the offer is used, even if this node does not start the round
        if place.round <= self._newest_round or self.is_leaving():
            return self._offer_store_port()  # rule 2
        if hosts_store and not uses_offer:
            return []  # the coordinator formed the round before it read this connection's `Join`, and will correct it
        self._newest_round, self._restarts = place.round, max(self._restarts, place.restarts)
        if self.state is WorkersState.IDLE:
            return self._start(place, why)
        kept = self._elastic - self._failed_ranks()
        if kept and self.settings.timing.inprocess and self.state in (WorkersState.RUNNING, WorkersState.FAILED):
            return self._reform(place, why, kept, now)
        self._next = (place, why)
        return [*self._stop(why), *self._offer_store_port()]

    def _on_stand_by(self, round: int, why: str) -> list[AgentCommand]:
        if round < self._newest_round:
            return []  # rule 2
        self._newest_round, self._next, self.notice = round, None, why
        stop = self._stop(why, self._leave_signal or SIGTERM)  # which is logged, with the reason
        return [*(stop or [LogLine(why)]), *self._offer_store_port()]

    # workers ----------------------------------------------------------------------------------------------------------

    def _start(self, place: Place, why: str) -> list[AgentCommand]:
        self.state, self.place, self._failures = WorkersState.RUNNING, place, ()
        self._elastic.clear()
        return [StartWorkers(place, why), *self._offer_store_port()]

    def _reform(self, place: Place, why: str, kept: set[int], now: float) -> list[AgentCommand]:
        self.state, self.place, self._failures = WorkersState.RUNNING, place, ()
        self._elastic, self._reforming = set(kept), set(kept)
        self._reform_until = now + self.settings.timing.inprocess
        command = ReformWorkers(place, why, tuple(sorted(kept)), self.settings.timing.shutdown)
        return [command, *self._offer_store_port()]

    def _replace(self, local_ranks: set[int], why: str) -> list[AgentCommand]:
        assert self.place is not None
        self._reforming -= local_ranks
        self._elastic -= local_ranks
        ranks = rank_list(sorted(self.place.first_rank + rank for rank in local_ranks))
        replaced = ReplaceWorkers(self.place.round, tuple(sorted(local_ranks)))
        return [LogLine(f"{ranks} {why}: replaced by a new worker", is_warning=True), replaced]

    def _on_workers_failed(self, round: int, failures: tuple[Failure, ...]) -> list[AgentCommand]:
        if not self._has_workers_of(round):
            return []
        self._failures += failures
        self._reforming -= self._failed_ranks()
        if self.state in (WorkersState.RUNNING, WorkersState.FAILED):
            self.state = WorkersState.FAILED
            return self._send(messages.Failed(round, trimmed_ranking(failures)))
        return []  # the workers are being stopped; if the job is closing, `Stopped` reports the failures

    def _failed_ranks(self) -> set[int]:
        return {failure.local_rank for failure in self._failures}

    def _stop(self, why: str, signum: int = SIGTERM) -> list[AgentCommand]:
        """Stop the workers, unless there are none or they are being stopped."""
        if self.state in (WorkersState.IDLE, WorkersState.STOPPING) or self.place is None:
            return []
        self.state, self._leave_at = WorkersState.STOPPING, None
        self._reforming.clear()
        return [StopWorkers(self.place.round, signum, self.settings.timing.shutdown, why)]

    def _on_workers_stopped(self) -> list[AgentCommand]:
        self.state = WorkersState.IDLE
        if self._exit:
            return self._exit_with(self._exit)
        if self._leave_signal:
            return self._exit_with(ExitAgent(128 + self._leave_signal, signal_name(self._leave_signal)))
        if self._closing:
            return self._send(messages.Stopped(trimmed_ranking(self._failures)))
        if self._next:
            place, why = self._next
            self._next = None
            return self._start(place, why)
        return []

    def _on_workers_unkillable(self, why: str) -> list[AgentCommand]:
        self.state, self._next = WorkersState.IDLE, None  # rule 9: they count as stopped
        if self._closing and not self._exit:
            return [LogLine(why, is_warning=True), *self._on_workers_stopped()]
        return self._exit_with(self._exit if self._exit and self._exit.code else ExitAgent(1, why))

    def _has_workers_of(self, round: int) -> bool:
        return self.place is not None and self.place.round == round

    # the end ----------------------------------------------------------------------------------------------------------

    def is_leaving(self) -> bool:
        return bool(self._leave_signal or self._closing or self._exit)

    def _on_signal(self, signum: int, now: float, why: str = "") -> list[AgentCommand]:
        if signum == self._leave_signal and now - self._signalled_at < REPEATED_SIGNAL_S:
            return []
        if self._leave_signal and self._leave_at is None:
            if self.state is not WorkersState.STOPPING or self.place is None:
                return []
            kill = StopWorkers(self.place.round, signum, 0.0, "second signal")
            return [LogLine("second signal: killing the workers"), kill]
        why, is_second = why or signal_name(signum), self._leave_at is not None
        self._leave_signal, self._signalled_at, self._next = signum, now, None
        if signum not in TERMINAL_SIGNALS and not is_second and (out := self._plan_to_leave(why, now)):
            return out
        out = self._send(messages.Leaving(why))
        if self.state is WorkersState.IDLE:
            return [*out, *self._exit_with(ExitAgent(128 + signum, why))]
        return [*out, LogLine(f"{why}: stopping the workers and leaving"), *self._stop(why, signum)]

    def _on_drain(self, why: str, now: float) -> list[AgentCommand]:
        """Leave because an operator asked for it; the exit code is 0."""
        if self.is_leaving():
            return []
        if out := self._plan_to_leave(why, now):
            self._exit, self._next = ExitAgent(0, why), None
            return out
        return [*self._send(messages.Leaving(why)), LogLine(f"{why}: leaving"), *self._exit_with(ExitAgent(0, why))]

    def _plan_to_leave(self, why: str, now: float) -> list[AgentCommand]:
        """Leave after a final commit, if the workers can make one (rule 5); empty if they cannot."""
        timeout, has_state = self.settings.drain_timeout, self._has_workers_of(self._state_round)
        if not (timeout and has_state and self.is_connected and self.state is WorkersState.RUNNING):
            return []
        self._leave_at = now + timeout
        log = LogLine(f"{why}: leaving after a final commit of all ranks (timeout {timeout:g} s)")
        leaving = messages.Leaving(why, is_planned=True, is_saved_to_disk=self.settings.has_checkpoints)
        return [SendToCoordinator(leaving), log]

    def _on_closed(self, report: JobEnd) -> list[AgentCommand]:
        has_succeeded = report.outcome is Outcome.SUCCEEDED
        out = self._exit_with(ExitAgent(0 if has_succeeded else 1, report.why, report))
        if has_succeeded and self.place is None:
            why = f"job={report.run_id} ended ({report.why}) before this node got a place: this node ran no worker"
            return [LogLine(why, is_warning=True), *out]
        return out

    def _exit_with(self, end: ExitAgent) -> list[AgentCommand]:
        """End the agent after its workers have stopped.  A signal determines the exit code of an unsuccessful end."""
        is_signalled = self._leave_signal and end.code
        self._exit = replace(end, code=128 + self._leave_signal) if is_signalled else end
        self._next = None
        if self.state is not WorkersState.IDLE:
            return self._stop(end.why)
        self.state = WorkersState.OVER
        return [*self._send(messages.Left(self._exit.why or f"exit {self._exit.code}")), self._exit]
