"""A simulation of succession in one thread: the real voters, candidates and searches of a job, under random faults.

Deterministic: a seed is a schedule.  The world stands in for network, clocks and job.  A connection delivers in order
or breaks; in the mixes with disorder, messages also arrive twice and in any order, and in one mix a voter also receives
and answers what was sent to it over connections that it has left.  Processes are killed, frozen and started again,
hosts lose their power, networks part in one or both directions, clocks run at different speeds, and in some mixes they
also jump.  The coordinator of the moment forms rounds at random.  `reached` counts the faults that had an effect.
Rules, at every step:

1.  At most one process is the leader (not with jumping clocks, which break leases; all other rules hold then, too).
2.  An epoch has one coordinator.  (If all agents of the list are started again at the same time, they start another
    job; then the epochs and rounds of the old one do not count.)
3.  A new coordinator knows every committed round.  Rounds of a higher epoch have higher numbers, and no number is used
    twice.
4.  A node starts rounds in the order of their numbers.
5.  A node that has left is no voter any more.
6.  A coordinator that knows a newer one is not the leader.
7.  A candidate asks for promises only if its agent follows no other coordinator, and again only if its contacts could
    elect it.

Faults stop at some time.  If a majority of the newest electorate is alive then, with a candidate, all nodes follow one
coordinator and a round of all of them is committed within `REST_TIMEOUT_S`.

`python -m tests.simulation.succession_world SEED` prints one schedule as a transcript.
"""

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from typing import Any

from msgspec import Struct

from ripstop.election.candidate import Announce, Candidate, CandidateCommand, Lead, SendTo, StepDown
from ripstop.election.search import Search
from ripstop.election.voter import Accept, Reply, Voter, VoterCommand
from ripstop.model.electorate import Electorate, first_electorate
from ripstop.model.round import Address
from ripstop.protocol.messages import Follow, LeaderElected, Promise, Redirect, Renew, Renewed, RequestPromise
from tests.simulation.rules import Violation, require

LEASE_S = 2.0
REST_TIMEOUT_S = 60.0  # simulated, after the last fault
MAX_STEPS = 60_000  # of one schedule: more is a busy loop
CLIENT, SERVER = 0, 1  # the ends of a connection


@dataclass(frozen=True)
class Mix:
    """The relative frequency of each fault."""

    name: str
    faults: dict[str, int]
    disorder: bool = False
    stale: bool = False  # voters receive messages of connections that they have left
    clocks_jump: bool = False
    latency: float = 0.03  # of a message, at most; above 0.03, some pairs of hosts have it, and others do not
    patience: float = 1.0  # how long agents wait at a candidate, as a factor


PROCESSES = {"kill": 4, "kill_leader": 4, "power_off": 2, "restart": 4, "leave": 2, "freeze": 3, "freeze_leader": 3}
NETWORK = {"cut": 3, "cut_leader": 3, "pair": 3, "one_way": 3, "reset": 3, "part": 2, "heal": 3}
ROUNDS = {"form": 12, "join": 2}

MIXES = (
    Mix("processes", PROCESSES | ROUNDS),
    Mix("network", NETWORK | ROUNDS),
    Mix("everything", PROCESSES | NETWORK | ROUNDS),
    Mix("everything, in disorder", PROCESSES | NETWORK | ROUNDS, disorder=True),
    Mix("clocks jump", PROCESSES | NETWORK | ROUNDS | {"clock": 6}, clocks_jump=True),
    Mix("clocks jump often", NETWORK | {"form": 40, "clock": 60}, clocks_jump=True, latency=0.4, patience=0.15),
    Mix("candidates restart", NETWORK | {"form": 20, "restart_candidates": 8, "kill_leader": 2}),
    Mix("candidates compete", PROCESSES | NETWORK | {"form": 20}, latency=0.4, patience=0.15),
    Mix("messages are slow", PROCESSES | NETWORK | {"form": 40, "cut_leader": 8}, disorder=True, latency=0.8),
    Mix("rounds change quickly", NETWORK | {"form": 60, "kill_leader": 6, "join": 6, "leave": 4, "freeze_leader": 4}),
    Mix("connections overlap", NETWORK | {"form": 20, "kill_leader": 4, "freeze_leader": 4, "part": 8}, disorder=True,
        stale=True, latency=0.8, patience=0.15),
)  # fmt: skip


class Join(Struct, frozen=True):
    newest: int


class Left(Struct, frozen=True):
    pass


class Assign(Struct, frozen=True):
    epoch: int
    round: int


class Connection:
    """From a client to a server, which may be one process.  The pairs are of the client's and the server's end."""

    __slots__ = ("arrived", "client", "is_closed_by_server", "last_received", "sent", "server", "times")

    def __init__(self, client: "Process", server: "Process", now: float) -> None:
        self.client = client
        self.server = server
        self.is_closed_by_server = False
        self.last_received = [now, now]
        self.times = [now, now]  # when the last message to this end arrives
        self.sent = [0, 0]  # the number of messages to this end
        self.arrived = [0, 0]  # the number of the last one that arrived

    def end(self, of: int) -> "Process":
        return self.server if of == SERVER else self.client


class Process:
    """One agent."""

    def __init__(self, name: str, host: int, listed_addresses: int, now: float, random: Random) -> None:
        first = first_electorate(f"@{listed_address}" for listed_address in range(listed_addresses))
        is_listed = host < listed_addresses
        self.name = name
        self.host = host
        self.alive = True
        self.frozen_until = 0.0
        self.backlog: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.rate = random.uniform(0.98, 1.02)
        self.offset = random.uniform(0, 1000)
        self.voter = Voter(first, LEASE_S, f"@{host}" if is_listed else "")
        self.candidate = Candidate(name, self.voter, LEASE_S) if is_listed else None
        self.search = Search(listed_addresses, LEASE_S)
        self.connection: Connection | None = None
        self.attempt = 0
        self.is_accepted = False
        self.leader = (-1, "")  # its listed_address and name
        self.timer: float | None = None
        self.newest = 0
        self.round = (0, 0)  # the epoch and the number of the round that it runs
        # as a candidate
        self.incoming: dict[str, Connection] = {}
        self.joined: set[str] = set()
        self.highest = 0
        self.proposed: dict[int, tuple[str, ...]] = {}  # rounds that wait for their commit


class SuccessionWorld:
    """One schedule."""

    process_type = Process
    disordered: tuple[type, ...] = (Follow, Promise, Renewed, RequestPromise, LeaderElected, Renew, Redirect, Assign)

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.trace = trace
        self.random = random = Random(seed)
        self.mix = MIXES[seed % len(MIXES)]
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self.serial = self.names = self.steps = 0
        self.hosts = random.randint(2, 6)
        self.listed_addresses = random.randint(2, min(4, self.hosts))
        self.blocked: dict[tuple[int, int], float] = {}  # from, to: until when
        self.off: set[int] = set()  # hosts without power
        self.processes: dict[int, Process] = {}  # by host
        self.announced: dict[int, int] = {}  # round: epoch
        self.coordinators: dict[int, str] = {}  # by epoch
        self.leaders: dict[str, Process] = {}  # who think that they are leaders
        self.reached: Counter[str] = Counter()
        self.latency, self.patience = self.mix.latency, self.mix.patience
        self.latencies: dict[tuple[int, int], float] = {}
        self.is_calm, self.calm_at = False, 0.0
        self.elections = 0
        self.is_another_job = False  # rule 2 holds for one job; all agents of the list were lost at the same time
        for host in range(self.hosts):
            self.at(random.random() * random.choice((0.1, 2.0)), self._start, host)
        when = 1.0 + random.random() * 3.0
        kinds, weights = list(self.mix.faults), list(self.mix.faults.values())
        for kind in random.choices(kinds, weights, k=random.randint(0, 30)):
            self.at(when, self._fault, kind)
            when += random.random() * random.choice((0.02, 0.1, 0.5, 2.0, 4.0))
        self.at(when, self._stop_faults)

    # time -------------------------------------------------------------------------------------------------------------

    def at(self, when: float, do: Callable[..., object], *args: Any) -> None:
        self.serial += 1
        heappush(self.queue, (when, self.serial, do, args))

    def _begin_without_faults(self, hosts: int, listed_addresses: int) -> None:
        """Start these hosts instead of what the mix has planned; the world cuts its coordinator off later."""
        self.queue, self.is_calm = [], True
        self.hosts, self.listed_addresses = hosts, listed_addresses
        for host in range(hosts):
            self.at(self.random.random(), self._start, host)
        self.at(2.0, self._stop_faults)

    def run(self) -> None:
        """Run the schedule; raises `Violation`."""
        while self.queue:
            self.now, _, do, args = heappop(self.queue)
            self.steps += 1
            require(self.steps < MAX_STEPS, "busy loop: too many steps")
            if do(*args):
                return
            if len(self.leaders) > 1:
                self._check_one_leader()

    def note(self, text: str) -> None:
        if self.trace:
            self.trace(f"{self.now:9.3f}  {text}")

    def clock(self, process: Process) -> float:
        return self.now * process.rate + process.offset

    def _check_one_leader(self) -> None:
        """Rule 1."""
        holders = [p.name for p in self.leaders.values() if p.candidate and p.candidate.holds_leadership(self.clock(p))]
        self.reached["two coordinators"] += 1
        self.reached["two coordinators by their clocks"] += len(holders) > 1
        require(len(holders) <= 1 or self.mix.clocks_jump, f"{holders} hold the leadership")

    # faults -----------------------------------------------------------------------------------------------------------

    def _start(self, host: int) -> None:
        old = self.processes.get(host)
        if (old and old.alive) or host in self.off:
            return
        self.names += 1
        process = self.processes[host] = self.process_type(
            f"n{host}.{self.names}", host, self.listed_addresses, self.now, self.random
        )
        self.note(f"{process.name} starts")
        self._connect(process)

    def _leader(self) -> Process | None:
        return next((p for p in self._living() if p.candidate and p.candidate.is_leader), None)

    def _living(self) -> list[Process]:
        return [p for p in self.processes.values() if p.alive]

    def _fault(self, kind: str) -> None:
        living, random = self._living(), self.random
        if not living:
            return
        leader = self._leader()
        victim = leader if kind.endswith("_leader") and leader else random.choice(living)
        self.note(f"*** {kind} {victim.name}")
        self.reached[kind] += 1
        long = self.now + random.random() * random.choice((0.5, 2.0, 8.0))
        hosts = range(self.hosts)
        match kind.removesuffix("_leader"):
            case "kill":
                self._kill(victim)
                if random.random() < 0.6:
                    self.at(self.now + random.random() * random.choice((0.05, 1.0, 5.0)), self._start, victim.host)
            case "power_off":
                self.off.add(victim.host)
                self._kill(victim)
            case "restart":
                for host in hosts:
                    self.off.discard(host)
                    self._start(host)
            case "restart_candidates":
                for process in [p for p in living if p.candidate]:
                    self._kill(process)
                    self.at(self.now + random.random() * random.choice((0.1, 2.0)), self._start, process.host)
            case "leave":
                self._leave(victim)
            case "freeze":
                if victim.frozen_until <= self.now:
                    victim.frozen_until = long
                    self.at(long, self._thaw, victim)
            case "cut":
                for host in hosts:
                    self._block(victim.host, host, long)
                    self._block(host, victim.host, long)
            case "pair":
                other = random.choice(living).host
                self._block(victim.host, other, long)
                self._block(other, victim.host, long)
            case "one_way":
                for host in hosts:
                    if random.random() < 0.7:
                        self._block(victim.host, host, long)
            case "part":
                side = {host for host in hosts if random.random() < 0.5}
                for one in hosts:
                    for other in hosts:
                        if (one in side) != (other in side):
                            self._block(one, other, long)
            case "heal":
                self.blocked.clear()
            case "reset":
                if victim.connection and victim.frozen_until <= self.now:
                    self._close(victim.connection, CLIENT)
                    self._lost(victim, victim.connection, is_silent=False)
            case "join":
                if self.hosts < 8:
                    self.hosts += 1
                    self._start(self.hosts - 1)
            case "clock":
                victim.offset += random.uniform(-5, 5)
                self.reached["clock of a coordinator jumps"] += victim is leader
                self.reached["clock of a bound voter jumps"] += victim.voter.promised > 0
            case "form":
                if leader:
                    self._form(leader)

    def _block(self, one: int, other: int, until: float) -> None:
        if one != other:
            self.blocked[one, other] = max(until, self.blocked.get((one, other), 0.0))

    def _is_blocked(self, one: int, other: int) -> bool:
        is_blocked = self.blocked.get((one, other), 0.0) > self.now
        if is_blocked:
            self.reached["blocked"] += 1
            self.reached["blocked in one direction"] += self.blocked.get((other, one), 0.0) <= self.now
            self.reached["blocked in part"] += any(
                max(self.blocked.get((one, third), 0.0), self.blocked.get((third, other), 0.0)) <= self.now
                for third in range(self.hosts)
                if third not in (one, other)
            )
        return is_blocked

    def _kill(self, process: Process) -> None:
        process.alive = False
        if self.leaders.pop(process.name, None) and process.candidate:
            self.reached["coordinator dies"] += 1
            self.reached["successor dies before it is settled"] += not process.candidate.is_settled
        if process.host not in self.off:
            for connection in process.incoming.values():
                self._close(connection, SERVER)
            if process.connection:
                self._close(process.connection, CLIENT)

    def _leave(self, process: Process) -> None:
        if process.is_accepted and process.connection:
            self._send(process.connection, SERVER, Left())
        if process.connection and not process.incoming:
            self.at(self.now + 0.05, self._kill, process)
        else:
            self._kill(process)

    def _thaw(self, process: Process) -> None:
        backlog, process.backlog = process.backlog, []
        self.reached["paused process resumes with messages"] += bool(backlog)
        if process.alive:
            self._arm(process)
            for do, args in backlog:
                do(*args)

    def _stop_faults(self) -> None:
        self.note("*** no more faults")
        self.is_calm, self.calm_at = True, self.now
        self.latency, self.patience, self.latencies = 0.03, 1.0, {}
        self.blocked.clear()
        for process in self._living():
            if process.frozen_until > self.now:
                process.frozen_until = self.now
                self._thaw(process)
        self.at(self.now + 1.0, self._check_rest, self.now + REST_TIMEOUT_S)

    def _check_rest(self, end: float) -> bool:
        why_not = self._reason_not_at_rest()
        if why_not and self.now > end:
            raise Violation(f"not at rest {REST_TIMEOUT_S:g} s after the last fault: {why_not}")
        if not why_not:
            self.note("at rest")
            return True
        if leader := self._leader():
            self._form(leader, everybody=True)
        self.at(self.now + 1.0, self._check_rest, end)
        return False

    def _reason_not_at_rest(self) -> str:
        living = self._living()
        of_voters = [p.voter.electorate for p in living]
        of_candidates = [p.candidate.electorate for p in living if p.candidate]
        if not of_candidates:
            return ""
        newest = [max(known, key=lambda electorate: electorate.version) for known in (of_voters, of_candidates)]
        names = {p.name for p in living} | {f"@{p.host}" for p in living if p.candidate}
        leader = self._leader()
        if not all(_can_elect(e, names, has_leader=leader is not None) for e in newest):
            return ""  # the job has lost too many nodes
        if leader is None:
            return f"no coordinator, and {sorted(names)} could elect one: {newest}"
        if any(not p.is_accepted or p.leader[1] != leader.name for p in living):
            return f"not all follow {leader.name}: {[(p.name, p.leader) for p in living]}"
        return self._reason_rounds_differ(leader, living)

    def _reason_rounds_differ(self, leader: Process, living: list[Process]) -> str:
        if {p.round for p in living} != {(leader.candidate and leader.candidate.epoch, leader.highest)}:
            return f"not all run one round: {[(p.name, p.round) for p in living]}"
        return ""

    # the coordinator of the moment ------------------------------------------------------------------------------------

    def _form(self, leader: Process, *, everybody: bool = False) -> None:
        assert leader.candidate
        if (
            not leader.alive
            or leader.frozen_until > self.now
            or not leader.candidate.holds_leadership(self.clock(leader))
        ):
            return
        is_pending = any(leader.incoming.keys() >= set(members) for members in leader.proposed.values())
        if is_pending and (everybody or self.random.random() < 0.5):
            return
        present = sorted(leader.joined & leader.incoming.keys())
        if everybody and len(present) < len(self._living()):
            return
        share = 1.0 if everybody else self.random.choice((0.4, 0.8))
        members = [name for name in present if self.random.random() < share] or present[:1]
        if not members:
            return
        leader.highest += 1
        leader.proposed[leader.highest] = tuple(members)
        self.note(f"{leader.name} forms round {leader.highest} of {members}")
        self._execute(leader, leader.candidate.propose(leader.highest, members, self.clock(leader)))

    def _announce(self, leader: Process, round: int) -> None:
        assert leader.candidate
        epoch = leader.candidate.epoch
        require(round in leader.proposed, f"{leader.name} announces {round}: {leader.proposed}")
        require(round not in self.announced or self.is_another_job, f"round {round} is committed twice")
        for other, of in self.announced.items() if not self.is_another_job else ():
            require(
                (of <= epoch) if other < round else (of >= epoch), f"{epoch}:{round} and {of}:{other} are committed"
            )
            require(self.mix.clocks_jump or other < round, f"round {round} is committed after round {other}")
        self.announced[round] = epoch
        self._release(leader, round)
        leader.proposed = {later: members for later, members in leader.proposed.items() if later > round}

    def _release(self, leader: Process, round: int) -> None:
        """The round is committed: send it."""
        assert leader.candidate
        for name in leader.proposed[round]:
            if connection := leader.incoming.get(name):
                self._send(connection, CLIENT, Assign(leader.candidate.epoch, round))

    def _lead(self, process: Process, lead: Lead) -> None:
        """The process is the leader.  This method and those below it are for `succession_job_world.py`."""

    def _stop_leading(self, process: Process) -> None:
        """It is the leader no longer."""

    def _admit(self, process: Process, node: str) -> None:
        """The coordinator accepts the messages of this node."""

    def _detach(self, process: Process, node: str) -> None:
        """The connection of this node to a candidate has ended."""

    def _renew(self, process: Process, node: str) -> None:
        """A heartbeat of this node has arrived."""

    def _disconnect(self, process: Process) -> None:
        """The agent has lost its coordinator."""

    def _execute(self, process: Process, commands: list[CandidateCommand]) -> None:
        for command in commands:
            if self.trace:
                self.note(f"{process.name}: {command}")
            match command:
                case SendTo(node, message):
                    if isinstance(message, LeaderElected):
                        holder = self.coordinators.setdefault(message.epoch, process.name)
                        require(holder == process.name, f"{holder} and {process.name} have epoch {message.epoch}")
                        self._admit(process, node)
                    elif isinstance(message, RequestPromise) and process.candidate and not process.candidate.is_leader:
                        follows = process.is_accepted and process.connection and process.connection.server
                        require(follows in (False, process), f"{process.name} asks for promises, and has a coordinator")
                    if connection := process.incoming.get(node):
                        self._send(connection, CLIENT, message)
                case Lead(epoch, round):
                    self.elections += 1
                    if not self.is_calm:
                        self.at(self.now + self.random.random() * 0.2, self._form, process)
                        if self.random.random() < 0.3:
                            fault = self.random.choice(("part", "cut_leader", "one_way_leader", "kill_leader"))
                            self.at(self.now + self.random.random() * 0.5, self._fault, fault)
                    process.highest = round
                    process.joined, process.proposed = set(), {}
                    assert process.candidate
                    if process.candidate.electorate.is_first:
                        knows = any(p.candidate and not p.voter.electorate.is_first for p in self._living())
                        self.is_another_job |= bool(self.announced) and not knows
                        self.announced.clear()
                        self.coordinators.clear()
                    lost = [r for r, of in self.announced.items() if r > round and of < epoch]
                    require(
                        not lost or self.is_another_job,
                        f"{process.name} leads from round {round}, and does not know {lost}",
                    )
                    self._lead(process, command)
                case StepDown(why):
                    has_settled = self.is_calm and self.now > self.calm_at + 5 * LEASE_S
                    require(not (has_settled and "renew" in why), f"{process.name} steps down without a fault: {why}")
                    process.joined, process.proposed = set(), {}
                    self._stop_leading(process)
                    for connection in process.incoming.values():
                        self._close(connection, SERVER)
                    process.incoming = {}
                case Announce(round):
                    self._announce(process, round)
        if process.candidate and process.candidate.is_leader:
            epoch, known = process.candidate.epoch, process.candidate.electorate.epoch
            require(epoch == known, f"{process.name} leads epoch {epoch}, and knows {known}")
            self.leaders[process.name] = process
        else:
            self.leaders.pop(process.name, None)
        self._arm(process)

    # messages ---------------------------------------------------------------------------------------------------------

    def _send(self, connection: Connection, to: int, message: Any) -> None:
        sender, receiver = connection.end(1 - to), connection.end(to)
        if (pair := (sender.host, receiver.host)) not in self.latencies:
            self.latencies[pair] = self.random.choice((0.02, 0.02, self.latency))
        when = max(
            self.now + self.random.random() * self.latencies[pair], self.blocked.get((sender.host, receiver.host), 0.0)
        )
        connection.sent[to] = number = connection.sent[to] + 1
        if self.mix.disorder and isinstance(message, self.disordered):
            when += self.random.random() * (0.02 if self.is_calm else self.random.choice((0.01, 0.4)))
            if self.random.random() < 0.1:
                self.at(when + self.random.random() * 0.5, self._arrive, connection, to, message, number)
        else:
            when = connection.times[to] = max(when, connection.times[to])
        self.at(when, self._arrive, connection, to, message, number)

    def _arrive(self, connection: Connection, to: int, message: Any, number: int) -> None:
        receiver = connection.end(to)
        if not receiver.alive:
            return
        if receiver.frozen_until > self.now:
            receiver.backlog.append((self._arrive, (connection, to, message, number)))
            return
        connection.last_received[to] = self.now
        is_current = receiver.incoming.get(connection.client.name) if to == SERVER else receiver.connection
        if is_current is connection:
            if number <= connection.arrived[to]:
                self.reached["message arrives twice or late"] += 1
            connection.arrived[to] = number
            if to == SERVER:
                self._at_server(receiver, connection.client.name, message)
            else:
                self._at_client(receiver, message)
        elif to == CLIENT and self.mix.stale and isinstance(message, RequestPromise | Renew):
            self.reached["message of a connection that was left"] += 1
            for command in receiver.voter.on(message, self.clock(receiver)):
                if isinstance(command, Reply):
                    self._send(connection, SERVER, command.message)
            self._arm(receiver)

    def _at_server(self, process: Process, node: str, message: Any) -> None:
        assert process.candidate
        now = self.clock(process)
        match message:
            case Follow() | Promise() | Renewed():
                self._execute(process, process.candidate.on_message(node, message, now))
            case _:
                self._at_coordinator(process, node, message)

    def _at_coordinator(self, process: Process, node: str, message: Any) -> None:
        assert process.candidate
        if not process.candidate.holds_leadership(self.clock(process)):
            return
        match message:
            case Join(newest):
                process.joined.add(node)
                process.highest = max(process.highest, newest)
            case Left():
                process.joined.discard(node)
                self._remove_voter(process, node)

    def _remove_voter(self, process: Process, node: str) -> None:
        assert process.candidate
        self._execute(process, process.candidate.on_left(node, self.clock(process)))
        voters = process.candidate.electorate.voters
        require(node not in voters or voters == (node,), f"{node} has left and is a voter: {voters}")

    def _at_client(self, process: Process, message: Any) -> None:
        now, target = self.clock(process), process.search.target
        match message:
            case RequestPromise(node=node) | LeaderElected(node=node):
                if process.leader[0] == target and process.leader[1] != node:
                    process.voter.on_gone(process.leader[1])
                self._vote(process, process.voter.on(message, now))
                if process.is_accepted and isinstance(message, LeaderElected):
                    process.leader = (target, node)
            case Renew():
                self._vote(process, process.voter.on(message, now))
            case Redirect(address):
                if not process.is_accepted:
                    delay = process.search.on_redirected(address.port)
                    self.at(self.now + delay, self._redirected, process, process.connection)
            case _ if process.is_accepted:
                self._at_agent(process, message)
        self._arm(process)

    def _at_agent(self, process: Process, message: Any) -> None:
        if isinstance(message, Assign) and message.round > process.newest:
            epoch, round = message.epoch, message.round
            require(epoch >= process.round[0], f"{process.name} starts {epoch}:{round} after {process.round}")
            process.newest = round
            process.round = (epoch, round)

    def _join(self, process: Process) -> None:
        """The peer is the coordinator.  It may have been elected again."""
        if process.connection:
            self._send(process.connection, SERVER, Join(process.newest))

    def _vote(self, process: Process, commands: list[VoterCommand]) -> None:
        for command in commands:
            if self.trace:
                self.note(f"{process.name}: {command}")
            match command:
                case Reply(message):
                    if process.connection:
                        self._send(process.connection, SERVER, message)
                        if isinstance(message, Promise):
                            process.search.on_promised()
                case Accept() if process.connection:
                    if not process.is_accepted:
                        process.is_accepted = True
                        process.search.on_accepted()
                        self._set_leader(process, process.connection.server)
                    self._join(process)

    def _set_leader(self, process: Process, leader: Process | None) -> None:
        if process.candidate:
            address = None if leader is None or leader is process else Address("", leader.host)
            self._execute(process, process.candidate.on_leader(address, self.clock(process)))

    # connections ------------------------------------------------------------------------------------------------------

    def _connect(self, process: Process) -> None:
        if not process.alive:
            return
        if process.frozen_until > self.now:
            process.backlog.append((self._connect, (process,)))
            return
        process.attempt += 1
        target = process.search.target
        server = self.processes.get(target)
        if self._is_blocked(process.host, target) or self._is_blocked(target, process.host) or target in self.off:
            self.at(self.now + LEASE_S / 3, self._failed, process, process.attempt, target, False)
        elif server is None or not server.alive:
            self.at(self.now + 0.01, self._failed, process, process.attempt, target, True)
        elif server.frozen_until > self.now:
            self.at(self.now + LEASE_S, self._failed, process, process.attempt, target, False)
        else:
            connection = process.connection = Connection(process, server, self.now)
            old = server.incoming.get(process.name)
            server.incoming[process.name] = connection
            if old:
                assert server.candidate
                server.candidate.on_disconnected(process.name)
                self._detach(server, process.name)
            self._send(connection, SERVER, process.voter.follow())
            wait = process.search.waiting_time(is_first_election=process.voter.electorate.is_first)
            self.at(self.now + wait * self.patience * self.random.uniform(0.8, 1.2), self._waited, process, connection)
            self.at(self.now + LEASE_S / 3, self._heartbeat, connection)

    def _failed(self, process: Process, attempt: int, target: int, is_refused: bool) -> None:
        if attempt != process.attempt:
            return
        if is_refused and process.leader[0] == target:
            process.voter.on_gone(process.leader[1])
        self.at(self.now + process.search.on_failed(), self._connect, process)

    def _waited(self, process: Process, connection: Connection) -> None:
        if process.alive and process.connection is connection and not process.is_accepted:
            if wait := process.search.extra_wait():
                self.at(self.now + wait * self.patience, self._waited, process, connection)
            else:
                self._leave_candidate(process, process.search.on_failed())

    def _redirected(self, process: Process, connection: Connection) -> None:
        if process.alive and process.connection is connection and not process.is_accepted:
            self._leave_candidate(process, 0.0)

    def _leave_candidate(self, process: Process, delay: float) -> None:
        connection, process.connection = process.connection, None
        if connection:
            self._close(connection, CLIENT)
        process.voter.on_disconnected()
        self.at(self.now + delay + self.random.random() * 0.01, self._connect, process)

    def _lost(self, process: Process, connection: Connection, *, is_silent: bool) -> None:
        if process.connection is not connection or not process.alive:
            return
        process.connection = None
        process.voter.on_disconnected()
        if process.is_accepted:
            process.is_accepted = False
            if is_silent:
                process.voter.on_silent(process.leader[1])
            process.search.on_lost(is_silent=is_silent)
            self._set_leader(process, None)
            self._disconnect(process)
            delay = 0.0
        else:
            delay = process.search.on_failed()
        self.at(self.now + delay + 0.025 * self.random.random(), self._connect, process)

    def _close(self, connection: Connection, by: int) -> None:
        """The other side learns it, if the network lets it."""
        connection.is_closed_by_server |= by == SERVER
        hosts = connection.end(by).host, connection.end(1 - by).host
        when = max(self.now + 0.02, self.blocked.get(hosts, 0.0), connection.times[1 - by])
        self.at(when, self._closed, connection, 1 - by)

    def _closed(self, connection: Connection, end: int) -> None:
        at = connection.end(end)
        if at.frozen_until > self.now:
            at.backlog.append((self._closed, (connection, end)))
        elif end == CLIENT:
            self._lost(at, connection, is_silent=False)
        elif at.incoming.get(connection.client.name) is connection:
            del at.incoming[connection.client.name]
            at.joined.discard(connection.client.name)
            assert at.candidate
            at.candidate.on_disconnected(connection.client.name)
            self._detach(at, connection.client.name)

    def _heartbeat(self, connection: Connection) -> None:
        client, server = connection.client, connection.server
        is_current = client.connection is connection and client.alive
        if not is_current and server.incoming.get(client.name) is not connection:
            return
        is_up = client.alive and server.alive and max(client.frozen_until, server.frozen_until) <= self.now
        if is_up and not self._is_blocked(client.host, server.host) and is_current:
            connection.last_received[SERVER] = self.now
            self._renew(server, client.name)
            if not self._is_blocked(server.host, client.host) and not connection.is_closed_by_server:
                connection.last_received[CLIENT] = self.now
        if is_current and client.frozen_until <= self.now and self.now - connection.last_received[CLIENT] >= LEASE_S:
            self._close(connection, CLIENT)
            self._lost(client, connection, is_silent=True)
        if server.frozen_until <= self.now and self.now - connection.last_received[SERVER] >= LEASE_S:
            self._close(connection, SERVER)
            self._closed(connection, SERVER)
        self.at(self.now + LEASE_S / 3, self._heartbeat, connection)

    # timers -----------------------------------------------------------------------------------------------------------

    def _arm(self, process: Process) -> None:
        when = self._deadline(process)
        if when is None:
            process.timer = None
            return
        when = max(self.now, when + 1e-6)
        if process.timer is None or process.timer <= self.now or when < process.timer:
            process.timer = when
            self.at(when, self._tick, process, when)

    def _deadline(self, process: Process) -> float | None:
        """The time of the next tick."""
        times = [process.voter.deadline(), process.candidate.deadline() if process.candidate else None]
        due = min((t for t in times if t is not None), default=None)
        return None if due is None else (due - process.offset) / process.rate

    def _tick(self, process: Process, when: float) -> None:
        if process.timer != when or not process.alive:
            return
        if process.frozen_until > self.now:
            process.timer = None  # set again when it thaws
            return
        process.timer = None
        now = self.clock(process)
        self._vote(process, process.voter.on_tick(now))
        if process.candidate:
            commands = process.candidate.on_tick(now)
            asks = any(
                isinstance(command, SendTo) and isinstance(command.message, RequestPromise) for command in commands
            )
            require(not asks or process.candidate._is_electable(), f"{process.name} asks, and cannot be elected")
            self._execute(process, commands)
        self._tick_job(process)
        self._arm(process)

    def _tick_job(self, process: Process) -> None:
        """The time of a tick."""


def _can_elect(electorate: Electorate, names: set[str], *, has_leader: bool) -> bool:
    """Whether these must be able to elect or keep a coordinator."""
    if electorate.is_first and not has_leader:
        return set(electorate.voters) <= names
    return all(2 * len(names & set(of)) > len(of) for of in (electorate.voters, electorate.outgoing) if of)


def check(seed: int) -> None:
    """Run one schedule; a violation has the transcript and the command to print all of it."""
    check_world(SuccessionWorld, seed, __name__)


def check_world(world: Callable[..., Any], seed: int, module: str) -> None:
    try:
        world(seed).run()
    except Exception as error:
        lines: list[str] = []
        with suppress(Exception):
            world(seed, lines.append).run()
        shown = "\n".join(lines[-120:])
        raise Violation(
            f"schedule {seed}: {error}\n{shown}\nthe whole transcript: python -m {module} {seed}"
        ) from error


if __name__ == "__main__":
    SuccessionWorld(int(sys.argv[1]), print).run()
