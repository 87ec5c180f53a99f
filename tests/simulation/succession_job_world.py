"""Succession with the real job: the schedules of `succession_world.py`, with the real `Job` and the real agents.

The coordinator of the moment is a `Job`, as in `coordinator/driver.py`: what follows a new round waits until the round
is committed, and a coordinator that is not the leader decides nothing.  Agents start and stop workers, keep the
coordinator's memory, and send it before their `Join`.  Instead of forming rounds at random, operators restart, scale
and drain, and workers fail.  Rules, besides those of `succession_world.py`:

1.  A node starts a round only after it is committed, and only a newer one than any before.
2.  In one round, all nodes have the same store and different ranks.
3.  At rest, the job runs one round, with as many nodes as the target allows.
4.  At rest, the coordinator knows the newest memory that a living node keeps, and the lowest rank keeps its memory.
5.  In one leadership, a coordinator's memory is never replaced by an older one.
6.  A round that ends before its change begins is not committed.

`python -m tests.simulation.succession_job_world SEED` prints one schedule as a transcript.
"""

import sys
from typing import Any

from ripstop.agent import machine as agent
from ripstop.agent import machine_io as agent_io
from ripstop.agent.machine_state import AgentSettings
from ripstop.coordinator import job_types
from ripstop.coordinator.commit_queue import CommitQueue
from ripstop.coordinator.job import Job
from ripstop.coordinator.job_types import JobSettings, Predecessor
from ripstop.election.candidate import Lead
from ripstop.model.config import Budget, QuarantineLimits, Timing
from ripstop.model.failure import Failure
from ripstop.model.job_memory import Memory
from ripstop.model.operator_commands import DrainNode, OperatorCommand, RestartRound, ScaleJob
from ripstop.model.round import Address, Node, Place
from ripstop.model.status import Phase
from ripstop.protocol.messages import (
    Follow,
    FromCoordinator,
    Heartbeat,
    LeaderElected,
    Left,
    Promise,
    Redirect,
    Remember,
    Renew,
    Renewed,
    RequestPromise,
)
from tests.simulation.rules import require
from tests.simulation.succession_world import CLIENT, LEASE_S, SERVER, Connection, Process, SuccessionWorld, check_world

MAX_NODES = 8
TIMING = Timing(0.2, join=1e6, lease=LEASE_S, coordinator=1e6, shutdown=1.0, inprocess=0.0)
BUDGET = Budget(1_000_000, backoff=0.0)
SETTINGS = JobSettings("job", 1, MAX_NODES, TIMING, BUDGET, quarantine=QuarantineLimits(0))


class JobProcess(Process):
    """One agent, and as the leader, a job."""

    def __init__(self, name: str, host: int, listed_addresses: int, now: float, random: Any) -> None:
        super().__init__(name, host, listed_addresses, now, random)
        settings = AgentSettings(Node(name, f"host{host}", 1), 1, MAX_NODES, TIMING, drain_timeout=0.0)
        self.machine = agent.Agent(settings, now * self.rate)
        self.place: Place | None = None  # of its workers
        self.started = 0  # the newest round that it started
        self.memory: tuple[Memory, float] | None = None
        self.is_leaving = False
        # as the leader
        self.job: Job | None = None
        self.sessions: dict[str, Connection] = {}
        self.proposed_round = 0
        self.queue = CommitQueue[Connection]()


class SuccessionJobWorld(SuccessionWorld):
    """One schedule."""

    process_type = JobProcess
    processes: dict[int, JobProcess]  # type: ignore[assignment]
    disordered = (Follow, Promise, Renewed, RequestPromise, LeaderElected, Renew, Redirect)

    def __init__(self, seed: int, trace: Any = None) -> None:
        super().__init__(seed, trace)
        self.port = 0
        self.ranks: dict[tuple[int, Address], dict[int, str]] = {}  # by the round and its store: node by rank
        self.stores: dict[int, Address] = {}  # by round

    def _job_now(self, process: Process) -> float:
        return self.now * process.rate  # it has another clock than the leadership, which does not jump

    # the agent --------------------------------------------------------------------------------------------------------

    def _start(self, host: int) -> None:
        before = self.processes.get(host)
        super()._start(host)
        process = self.processes.get(host)
        if process is not None and process is not before:
            self._feed(process, agent_io.HealthChecked(()))
            self._feed(process, agent_io.WarmupDone())

    def _feed(self, process: JobProcess, event: agent_io.AgentInput) -> None:
        if not process.alive:
            return
        if process.frozen_until > self.now:
            process.backlog.append((self._feed, (process, event)))
            return
        for command in process.machine.on(event, self._job_now(process)):
            match command:
                case agent_io.SendToCoordinator(message):
                    require(
                        process.is_accepted and process.connection, f"{process.name} sends, disconnected: {message}"
                    )
                    assert process.connection
                    self._send(process.connection, SERVER, message)
                case agent_io.OpenStorePort():
                    self.port += 1
                    self.at(self.now + 0.01, self._feed, process, agent_io.StorePortReady(self.port))
                case agent_io.StartWorkers(place):
                    self._start_workers(process, place)
                case agent_io.StopWorkers(round):
                    self.at(self.now + 0.2 * self.random.random(), self._stopped, process, round)
                case agent_io.ExitAgent():
                    process.is_leaving = True
                    is_leader = process.candidate and process.candidate.is_leader
                    self.at(self.now + (0.5 if is_leader else 0.05), self._kill, process)
        self._arm(process)

    def _start_workers(self, process: JobProcess, place: Place) -> None:
        self.note(f"{process.name} starts {place}")
        self.reached["workers start"] += 1
        round = place.round
        require(process.place is None, f"{process.name} starts round {round}, and has workers")
        require(round > process.started, f"{process.name} starts round {round} after {process.started}")
        process.started, process.place = round, place
        if self.is_another_job:
            return
        require(round in self.announced, f"{process.name} starts round {round}, which is not committed")
        store = self.stores.setdefault(round, place.store)
        require(store == place.store, f"round {round} has the stores {store} and {place.store}")
        holder = self.ranks.setdefault((round, store), {}).setdefault(place.group_rank, process.name)
        require(holder == process.name, f"{holder} and {process.name} have rank {place.group_rank} of round {round}")

    def _stopped(self, process: JobProcess, round: int) -> None:
        if process.frozen_until > self.now:
            process.backlog.append((self._stopped, (process, round)))
        elif process.place is not None and process.place.round == round:
            process.place = None
            self._feed(process, agent_io.WorkersStopped(round))

    def _join(self, process: Process) -> None:
        assert isinstance(process, JobProcess) and process.connection
        if process.machine.is_connected:
            return  # its coordinator was elected again
        if process.memory is not None:
            memory, received_at = process.memory
            self._send(process.connection, SERVER, Remember(memory, self._job_now(process) - received_at))
        self._feed(process, agent_io.CoordinatorConnected(f"host{process.host}"))

    def _at_agent(self, process: Process, message: Any) -> None:
        assert isinstance(process, JobProcess)
        if isinstance(message, Remember):
            process.memory = message.memory, self._job_now(process)
        else:
            self._feed(process, agent_io.CoordinatorMessage(message))

    def _disconnect(self, process: Process) -> None:
        assert isinstance(process, JobProcess)
        self._feed(process, agent_io.CoordinatorLost("lost"))

    def _leave(self, process: Process) -> None:
        assert isinstance(process, JobProcess)
        self._feed(process, agent_io.SignalReceived(15))

    # the coordinator of the moment ------------------------------------------------------------------------------------

    def _lead(self, process: Process, lead: Lead) -> None:
        assert isinstance(process, JobProcess)
        process.job = Job(SETTINGS, self._job_now(process), Predecessor(lead.round, lead.former, lead.is_lost))
        process.proposed_round = lead.round
        process.queue = CommitQueue()

    def _stop_leading(self, process: Process) -> None:
        assert isinstance(process, JobProcess)
        process.job = None
        process.sessions = {}
        process.queue = CommitQueue()

    def _admit(self, process: Process, node: str) -> None:
        assert isinstance(process, JobProcess)
        if process.job is not None and node in process.incoming:
            process.sessions[node] = process.incoming[node]

    def _detach(self, process: Process, node: str) -> None:
        assert isinstance(process, JobProcess)
        if process.sessions.pop(node, None):
            self._feed_job(process, job_types.NodeDisconnected(node))

    def _renew(self, process: Process, node: str) -> None:
        assert isinstance(process, JobProcess)
        if node in process.sessions:
            self._feed_job(process, job_types.NodeMessage(node, Heartbeat()))

    def _at_coordinator(self, process: Process, node: str, message: Any) -> None:
        assert isinstance(process, JobProcess) and process.candidate
        if process.sessions.get(node) is not process.incoming.get(node) or process.job is None:
            return
        self._feed_job(process, job_types.NodeMessage(node, message))
        if isinstance(message, Left):
            self._remove_voter(process, node)

    def _feed_job(self, process: JobProcess, event: job_types.JobInput) -> None:
        job = process.job
        if job is None or not process.alive or process.candidate is None:
            return
        if process.frozen_until > self.now:
            process.backlog.append((self._feed_job, (process, event)))
            return
        if not process.candidate.holds_leadership(self.clock(process)):
            return
        serial, begun = job.memory._serial, process.candidate.electorate.round
        commands = job.on(event, self._job_now(process))
        require(job.memory._serial >= serial, f"{process.name} replaces memory {serial} by {job.memory._serial}")
        if job.phase is Phase.RUNNING and job.round > process.proposed_round:
            process.proposed_round = job.round
            process.queue.propose(job.round)
            process.proposed[job.round] = tuple(job.places)
            self.note(f"{process.name} forms round {job.round} of {tuple(job.places)}")
            self._execute(process, process.candidate.propose(job.round, tuple(job.places), self.clock(process)))
        elif job.phase is not Phase.RUNNING and not process.queue.is_empty:
            self.reached["round withdrawn"] += any(round > begun for round in process.proposed)
            process.proposed = {round: nodes for round, nodes in process.proposed.items() if round <= begun}
            self._send_all(process, process.queue.withdraw(process.candidate.withdraw()))
        for command in commands:
            match command:
                case job_types.Send(node, message):
                    if connection := process.sessions.get(node):
                        self._send_all(process, process.queue.push(connection, message))
                case job_types.Disconnect(node):
                    if connection := process.sessions.pop(node, None):
                        self._send_all(process, process.queue.push(connection, None))
                case job_types.JobEnded():
                    require(False, "the job ends")
        self._arm(process)

    def _send_all(self, process: JobProcess, messages: list[tuple[Connection, FromCoordinator | None]]) -> None:
        for connection, message in messages:
            if message is None:
                self._close(connection, SERVER)
                self._closed(connection, SERVER)
            elif process.sessions.get(connection.client.name, connection) is connection:
                self._send(connection, CLIENT, message)

    def _release(self, leader: Process, round: int) -> None:
        assert isinstance(leader, JobProcess)
        self._send_all(leader, leader.queue.commit(round))

    def _form(self, leader: Process, *, everybody: bool = False) -> None:
        """An operator's command, or a failure of a worker."""
        assert isinstance(leader, JobProcess)
        if everybody or not self._living():
            return
        living = [p for p in self.processes.values() if p.alive]
        victim = self.random.choice(living)
        command: OperatorCommand
        match self.random.choice(("restart", "scale", "scale", "drain", "fail", "fail")):
            case "restart":
                command = RestartRound("an operator asked for it")
            case "scale":
                command = ScaleJob(self.random.randint(1, MAX_NODES))
            case "drain":
                command = DrainNode(victim.name, "an operator drains it")
            case _:
                self._fail(victim)
                return
        self.note(f"*** {command}")
        self.reached[type(command).__name__] += 1
        for other in living:  # an old coordinator may believe that it is the leader
            if other is leader or (other.candidate and other.candidate.is_leader):
                self._feed_job(other, command)

    def _fail(self, process: JobProcess) -> None:
        if place := process.place:
            self.reached["workers fail"] += 1
            failure = Failure(place.first_rank, 0, place.round, process.name, self.now, exitcode=1, message="no")
            self._feed(process, agent_io.WorkersFailed(place.round, (failure,)))

    # time -------------------------------------------------------------------------------------------------------------

    def _deadline(self, process: Process) -> float | None:
        assert isinstance(process, JobProcess)
        times = [process.machine.deadline()]
        if process.job is not None and process.candidate and process.candidate.holds_leadership(self.clock(process)):
            times.append(process.job.deadline())
        due = min((t for t in times if t is not None), default=None)
        other = super()._deadline(process)
        if due is None:
            return other
        return due / process.rate if other is None else min(other, due / process.rate)

    def _tick_job(self, process: Process) -> None:
        assert isinstance(process, JobProcess)
        now = self._job_now(process)
        if (due := process.machine.deadline()) is not None and now >= due:
            self._feed(process, agent_io.Tick())
        if process.job is not None and (due := process.job.deadline()) is not None and now >= due:
            self._feed_job(process, job_types.Tick())

    # at rest ----------------------------------------------------------------------------------------------------------

    def _reason_rounds_differ(self, leader: Process, living: list[Process]) -> str:
        assert isinstance(leader, JobProcess)
        job = leader.job
        if job is None or job.phase is not Phase.RUNNING or not leader.queue.is_empty:
            return f"the job of {leader.name} is {job and job.phase}"
        nodes = [p for p in living if isinstance(p, JobProcess)]
        if any(p.is_leaving for p in nodes):
            return "a node is leaving"
        if job.members.keys() != {p.name for p in nodes}:
            return f"the members are {sorted(job.members)}, alive are {[p.name for p in nodes]}"
        if len(job.places) != min(job.formation.target, len(nodes)):
            return f"{len(job.places)} of {len(nodes)} nodes are in the round"
        if any(p.place != job.places.get(p.name) for p in nodes):
            return f"not all run round {job.round}: {[(p.name, p.place and p.place.round) for p in nodes]}"
        for kept in (p.memory[0] for p in nodes if p.memory):
            if kept.serial > job.memory._serial or kept.used > job.restarts.used:
                return f"{leader.name} does not know the memory {kept}"
        lowest = next(p for p in nodes if p.place and p.place.group_rank == 0)
        known = (job.restarts.used, job.formation.operator_target)
        if known != (0, None) and (lowest.memory is None or (lowest.memory[0].used, lowest.memory[0].target) != known):
            return f"{lowest.name} does not keep the memory of {leader.name}: {known}"
        return ""


def check(seed: int) -> None:
    """Run one schedule; a violation has the transcript and the command to print all of it."""
    check_world(SuccessionJobWorld, seed, __name__)


if __name__ == "__main__":
    SuccessionJobWorld(int(sys.argv[1]), print).run()
