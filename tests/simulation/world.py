"""A simulation of a whole job in one thread: the real state machines of agents and coordinator, under random faults.

Deterministic: a seed is a schedule.  The world replaces the drivers and the network and keeps their rules: commands are
executed in order, starting and stopping workers takes time, timers come from `deadline()`, a connection delivers in
order or breaks (a `Join` then repeats the agent's state), a partition delays messages until it ends, and either side
closes a connection that is silent for a lease.  In the mix with disorder, messages after the `Join` also arrive twice
and in any order.  Operators restart, scale, drain and stop at random.

Faults stop at some time.  From then on the job must come to rest within `REST_TIMEOUT_S`: in one round of all nodes
that can run, or in an end that every node knows.  `rules.py` has the rules for every step.

`python -m tests.simulation.world SEED` prints one schedule as a transcript.
"""

import re
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from typing import Any

from ripstop.agent import machine as agent
from ripstop.agent import machine_io as agent_io
from ripstop.agent.health.assessment import HealthProblem
from ripstop.agent.machine_state import AgentSettings
from ripstop.coordinator import job_types
from ripstop.coordinator.job import Job
from ripstop.coordinator.job_types import JobSettings
from ripstop.model.config import Budget, QuarantineLimits, Timing
from ripstop.model.failure import Failure, Hang
from ripstop.model.operator_commands import DrainNode, RestartRound, ScaleJob, StopJob
from ripstop.model.round import Address, Node, Outcome, Place, RankBy
from ripstop.protocol.messages import (
    Assign,
    Closing,
    Drain,
    FromAgent,
    FromCoordinator,
    Heartbeat,
    Join,
    Remember,
    StandBy,
)
from tests.simulation.rules import GLOO, LEASE_S, Rules, Violation, require

HEARTBEAT_INTERVAL_S = LEASE_S / 3
RECHECK_S = 1.0
REST_TIMEOUT_S = 120.0  # simulated, after the last fault
MAX_STEPS = 20_000  # of one schedule: more is a busy loop
_TRANSCRIPT_NOISE = re.compile(  # in a transcript
    r"\b(?:message|place|node|why|text|report)=|, (?:pid|exitcode|signal|oom|log_tail|error_file|logs|traceback)=[^,)]*"
    r"|, (?:failures=\(\)|closing=None|held=None|status=<Status.IDLE: 'idle'>|m(?:in|ax)_nodes=\d+)"
    r"|, (?:first_rank|world_size|slots|role_first_rank|role_size|restarts|role|local_rank|at)=[^,)]*"
    r"|, (?:requested_rank|number|label|rank_by)=[^,)]*"
)
AT_REST = object()


@dataclass(frozen=True)
class Mix:
    """The relative frequency of each fault."""

    name: str
    faults: dict[str, int]
    max_faults: int = 20
    disorder: bool = False
    restarts: tuple[int, ...] = (0, 1, 3, 100, 100)


CHURN = {"join": 6, "kill": 3, "vanish": 2, "signal": 2, "crash": 2}
OPERATOR = {"scale": 2, "drain": 2, "restart": 2}
NETWORK = {"reset": 4, "blink": 3, "cut": 3, "one_way": 3}
COORDINATOR = {"coordinator_dies": 3, "partial_assign": 2, "coordinator_freezes": 2}
WORKERS = {"crash": 5, "victim": 3, "hang": 2, "succeed": 1}
HEALTH = {"unhealthy": 5, "healthy": 2}
EVERYTHING = CHURN | OPERATOR | NETWORK | COORDINATOR | WORKERS | HEALTH | {"close": 1}

MIXES = (
    Mix("quiet", {"join": 1}, max_faults=2),
    Mix("workers fail", WORKERS),
    Mix("nodes come and go", CHURN | OPERATOR),
    Mix("the network is bad", NETWORK | {"crash": 2, "join": 2}),
    Mix("the coordinator is restarted", COORDINATOR | {"crash": 2, "kill": 1, "reset": 1, "join": 2}),
    Mix("nodes are bad", HEALTH | {"crash": 3, "join": 3, "reset": 1, "kill": 1}),
    Mix("everything", EVERYTHING, max_faults=40),
    Mix("everything, in disorder", EVERYTHING, max_faults=40, disorder=True),
)


class Connection:
    """One connection of one node, seen from both ends."""

    __slots__ = ("began", "down_last", "last_received", "life", "linked", "local", "node", "open", "up_last")

    def __init__(self, node: "SimNode", life: int, now: float, local: bool) -> None:
        self.node = node
        self.life = life  # of its coordinator: the number of restarts
        self.local = local
        self.began = now
        self.open = True  # at the node's end
        self.linked = False  # the node has seen it open
        self.last_received = now  # when the node last received something
        self.up_last = self.down_last = now  # messages arrive in order


class Group:
    """The workers of one node in one round."""

    __slots__ = ("began", "failed", "outside", "place", "registered", "state")

    def __init__(self, place: Place, began: float, kept: Collection[int] = ()) -> None:
        self.place = place
        self.began = began  # when they are up
        self.state = "running"
        self.registered: set[int] = set(kept)  # local ranks of workers that can go on in place
        self.outside: set[int] = set(kept)  # those of them that have not left their last round
        self.failed: set[int] = set()


class SimNode:
    """One agent process; stands in for the driver."""

    __slots__ = (
        "alive", "blocked_down", "blocked_up", "closing", "code", "connection", "drained", "group", "id",
        "is_unhealthy", "leaving", "machine", "newest", "offered", "own", "restarts", "timer", "unlinked_since",
    )  # fmt: skip

    def __init__(self, name: str, machine: agent.Agent, own: bool, now: float) -> None:
        self.id = name
        self.machine = machine
        self.own = own  # in the coordinator's process
        self.alive = True
        self.is_unhealthy = False
        self.leaving = 0  # the signal
        self.drained = False  # it received a `Drain`
        self.closing = False  # it received a `Closing`
        self.code: int | None = None
        self.connection: Connection | None = None
        self.unlinked_since: float = now
        self.group: Group | None = None
        self.offered = 0
        self.newest = 0  # the highest round that it received
        self.restarts = 0
        self.timer: float | None = None
        self.blocked_up = self.blocked_down = 0.0


class World:
    """One schedule."""

    mixes: tuple[Mix, ...] = MIXES
    drain_timeout = 20.0

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.trace = trace
        self.random = random = Random(seed)
        self.mix = mix = self.mixes[seed % len(self.mixes)]
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self.steps = self.serial = 0
        low = random.choice((1, 1, 2, 2, 3))
        high = low + random.choice((0, 0, 1, 2, 3))
        window = random.choice((0.0, 0.0, 8.0))
        self.budget = Budget(random.choice(mix.restarts), window, 2.0, (0, 1, 100)[seed // 7 % 3], infra_window=20.0)
        last_call = (0.5, 0.5, 0.5, 4.0)[seed // 11 % 4]
        self.timing = Timing(last_call, join=8.0, lease=LEASE_S, coordinator=10.0, shutdown=1.0, inprocess=0.5)
        self.fixed = random.random() < 0.1  # a static job: every node requests a rank
        self.low, self.high = (high, high) if self.fixed else (low, high)
        self.rank_by = RankBy.JOIN if self.fixed else tuple(RankBy)[seed % len(RankBy)]
        self.has_own = random.random() < 0.3
        self.finishing = random.random() < 0.4  # workers exit 0 some time after the last fault
        self.slow = random.random() < 0.2
        self.elastic = seed % 5 < 2  # workers can go on in place
        self.quarantine = QuarantineLimits(random.choice((0, 2, 3)), window=10.0, cooldown=5.0)
        # the coordinator's process
        self.life = 0
        self.job: Job | None = None
        self.over = False  # the job has ended
        self.sessions: dict[str, Connection] = {}
        self.job_timer: float | None = None
        self.partial_assign = False  # it dies after it has sent half of the next round's places
        self.frozen_until = 0.0
        self.backlog: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        # nodes and workers
        self.nodes: dict[str, SimNode] = {}
        self.stuck: set[Group] = set()  # workers that SIGKILL does not end
        self.finished: dict[Address, set[str]] = {}  # by the store of their round: nodes whose workers exited 0
        self.port = 40_000
        self.rules = Rules(self)
        self.calm = self._plan()

    # time -------------------------------------------------------------------------------------------------------------

    def at(self, when: float, do: Callable[..., object], *args: Any) -> None:
        self.serial += 1
        heappush(self.queue, (when, self.serial, do, args))

    def soon(self, least: float, most: float, do: Callable[..., object], *args: Any) -> None:
        self.at(self.now + least + (most - least) * self.random.random(), do, *args)

    def run(self) -> None:
        """Run the schedule; raises `Violation`."""
        end = self.calm + REST_TIMEOUT_S
        while self.queue:
            when, _, do, args = heappop(self.queue)
            if when > end:
                break
            self.now = when
            self.steps += 1
            require(self.steps < MAX_STEPS, "busy loop: too many steps")
            if do(*args) is AT_REST:
                return
        raise Violation(f"not at rest {REST_TIMEOUT_S:g} s after the last fault: {self.rules.reason_not_at_rest()}")

    def note(self, text: str) -> None:
        if self.trace:
            self.trace(f"{self.now:9.3f}  {_TRANSCRIPT_NOISE.sub('', text)}")

    # the plan ---------------------------------------------------------------------------------------------------------

    def _plan(self) -> float:
        random = self.random
        self.at(0.0, self._coordinator_up)
        spread = random.choice((0.0, 0.3, 3.0))
        for _ in range(random.randint(self.low - (random.random() < 0.1), min(6, self.high + 1)) - self.has_own):
            self.at(random.random() * spread, self._node_up)
        kinds, weights = list(self.mix.faults), list(self.mix.faults.values())
        when = random.random() * 2.0
        for kind in random.choices(kinds, weights, k=random.randint(0, self.mix.max_faults)):
            self.at(when, self._fault, kind)
            when += random.random() * random.choice((0.05, 0.3, 0.3, 1.0, 3.0))
        calm = when + 0.5
        self.at(calm, self._stop_faults)
        return calm

    def _fault(self, kind: str) -> None:
        living = [n for n in self.nodes.values() if n.alive]
        remote = [n for n in living if not n.own]
        self.note(f"*** {kind}")
        match kind:
            case "join":
                if len(living) < 6:
                    self._node_up()
            case "coordinator_dies":
                self._coordinator_down(0.02 + self.random.random() * self.random.choice((0.2, 1.0, 4.0)))
            case "partial_assign":
                self.partial_assign = True
            case "coordinator_freezes":
                self._freeze(self.random.random() * self.random.choice((0.5, 2.0, 6.0)))
            case "scale":
                self._feed_job(ScaleJob(self.random.randint(self.low, self.high)))
            case "drain":
                self._feed_job(DrainNode(self.random.choice(list(self.nodes) or ["n0"]), "an operator drains it"))
            case "restart":
                self._feed_job(RestartRound("an operator asked for it"))
            case "close":
                self._feed_job(StopJob("an operator asked for it"))
            case "crash" | "victim" | "hang" | "succeed" | "signal" | "unhealthy" | "healthy":
                if living:
                    self._inject(self.random.choice(living), kind)
            case _:
                if remote:
                    self._inject(self.random.choice(remote), kind)

    def _inject(self, node: SimNode, kind: str) -> None:
        self.note(f"*** … {node.id}")
        long = self.now + 0.2 + self.random.random() * self.random.choice((1.0, 6.0))
        match kind:
            case "crash" | "victim":
                if node.group:
                    self._workers_fail(node, node.group, kind)
            case "hang":
                if node.group:
                    self._workers_hang(node, node.group)
            case "succeed":
                if node.group and node.group.state == "running" and node.group.began <= self.now:
                    self._workers_done(node, node.group)
            case "unhealthy" | "healthy":
                self._check_health(node, is_unhealthy=kind == "unhealthy")
            case "signal":
                node.leaving = node.leaving or 15
                self._feed(node, agent_io.SignalReceived(15))
            case "kill":
                self._node_down(node, silent=False)
            case "vanish":
                self._node_down(node, silent=True)
            case "reset":
                self._unlink(node, "connection reset")
            case "blink":
                node.blocked_up = node.blocked_down = self.now + self.random.random() * 0.8
            case "cut":
                node.blocked_up = node.blocked_down = long
            case "one_way":
                if self.random.random() < 0.5:
                    node.blocked_up = long
                else:
                    node.blocked_down = long

    def _stop_faults(self) -> None:
        self.note("*** no more faults")
        for node in self.nodes.values():
            node.blocked_up = min(node.blocked_up, self.now)
            node.blocked_down = min(node.blocked_down, self.now)
            if node.is_unhealthy and self.random.random() < 0.7:
                self._check_health(node, is_unhealthy=False)
            if node.group and self.finishing:
                self.soon(0.1, 1.0, self._try_to_finish, node, node.group)
        self.at(self.now + 0.4, self._check_rest, 0)

    # the coordinator's process ----------------------------------------------------------------------------------------

    def _coordinator_up(self) -> None:
        self.life += 1
        own = ""
        if self.has_own:
            self.serial += 1
            own = f"own{self.life}"
        settings = JobSettings(
            *("job", self.low, self.high, self.timing, self.budget, self.fixed, own, self.rank_by),
            quarantine=self.quarantine,
        )
        self.job = Job(settings, self.now)
        self.note(f"coordinator {self.life} is up")
        self._arm_job()
        if own:
            self._node_up(own)

    def _coordinator_down(self, pause: float) -> None:
        if self.job is None or self.over:
            return
        self.note("coordinator is down")
        self._remove_coordinator()
        self.at(self.now + pause, self._coordinator_up)

    def _remove_coordinator(self) -> None:
        self.job = None
        self.frozen_until = 0.0
        self.backlog = []
        sessions, self.sessions = self.sessions, {}
        for connection in sessions.values():
            self._send_close(connection)
        if not self.over:
            for node in [n for n in self.nodes.values() if n.own]:
                self._node_down(node, silent=True)

    def _freeze(self, pause: float) -> None:
        if self.job is None or self.now < self.frozen_until:
            return
        self.frozen_until = self.now + pause
        self.at(self.frozen_until, self._unfreeze, self.life)

    def _unfreeze(self, life: int) -> None:
        if life != self.life or self.job is None:
            return
        self.note("coordinator goes on")
        backlog, self.backlog = self.backlog, []
        timer = (self._job_tick, (self.life, self.job_timer))
        backlog.insert(self.random.choice((0, len(backlog))), timer)
        for do, args in backlog:
            do(*args)

    def is_frozen(self) -> bool:
        return self.now < self.frozen_until

    def _job_tick(self, life: int, when: float | None) -> None:
        if life != self.life or when is None or when != self.job_timer or self.job is None or when > self.now:
            return
        if not self.is_frozen():
            self.job_timer = None
            self._feed_job(job_types.Tick())

    def _arm_job(self) -> None:
        assert self.job is not None
        when = self.job.deadline()
        require(when is None or when > self.now, f"a deadline in the past: {when}")
        if when != self.job_timer:
            self.job_timer = when
            if when is not None:
                self.at(when, self._job_tick, self.life, when)

    def _feed_job(self, event: job_types.JobInput) -> None:
        job = self.job
        if job is None:
            return
        if self.is_frozen():
            self.backlog.append((self._feed_job, (event,)))
            return
        compare = self.rules.before(job, event)
        beat = isinstance(event, job_types.NodeMessage) and isinstance(event.message, Heartbeat)
        if self.trace and not beat:
            self.note(f"job   ← {event}")
        commands = job.on(event, self.now)
        if compare:
            compare(commands)
        self.rules.after(job, event, commands)
        # The drivers keep the memory (tests/coordinator/test_job_memory.py).  Here, a new coordinator has none.
        commands = [c for c in commands if not (isinstance(c, job_types.Send) and isinstance(c.message, Remember))]
        if beat and not commands:
            return
        if (
            self.partial_assign
            and sum(isinstance(c, job_types.Send) and isinstance(c.message, Assign) for c in commands) > 1
        ):
            commands = self._send_half(commands)
        for command in commands:
            if self.trace:
                self.note(f"job   → {command}")
            match command:
                case job_types.Send(name, message):
                    if connection := self.sessions.get(name):
                        self._send_down(connection, message)
                case job_types.Disconnect(name):
                    if connection := self.sessions.pop(name, None):
                        self._send_close(connection)
                case job_types.JobEnded():
                    self._end()
                    return
        self._arm_job()

    def _send_half(self, commands: list[job_types.JobCommand]) -> list[job_types.JobCommand]:
        """Only some nodes receive their place before the coordinator dies, and one of them is cut off for a while."""
        self.partial_assign = False
        sends = [c for c in commands if isinstance(c, job_types.Send)]
        sent = sends[: self.random.randint(1, len(sends) - 1)]
        isolated = self.nodes[sent[0].node]
        self.at(self.now + 0.25, self._coordinator_down, 0.1 + self.random.random())
        if not isolated.own:
            self.at(self.now + 0.25, self._inject, isolated, "cut")
        return list(sent)

    def _end(self) -> None:
        self.note("coordinator has ended the job")
        self.rules.check_report_received()
        self.over = True
        self._remove_coordinator()
        for node in self.nodes.values():  # a collective without peers times out
            if node.alive and node.group:
                self.soon(1.0, 3.0, self._workers_fail, node, node.group, "victim")

    # nodes ------------------------------------------------------------------------------------------------------------

    def _node_up(self, own: str = "") -> None:
        random = self.random
        if len(self.nodes) > 14 or (self.has_own and not own and self.job is None):
            return
        taken = {n.machine.node.requested_rank for n in self.nodes.values() if n.alive}
        rank = next((r for r in range(self.high) if r not in taken), None) if self.fixed else self._requested_rank()
        if self.fixed and rank is None:
            return
        name = own or f"n{len(self.nodes)}"
        slots, role = random.choice((1, 1, 2, 8)), random.choice(("default", "other"))
        number = len(self.nodes) % 4 if self.rank_by is RankBy.SLOT else None  # the fifth replaces the first
        who = Node(name, f"host-{name}", slots, role, rank, number, label=f"rack{len(self.nodes) % 3}")
        settings = AgentSettings(who, self.low, self.high, self.timing, self.rank_by, RECHECK_S / 3, self.drain_timeout)
        node = self.nodes[name] = SimNode(name, agent.Agent(settings, self.now), bool(own), self.now)
        self.note(f"{name} is up")
        self._arm(node)
        self.soon(0.0, random.choice((0.01, 0.5, 2.0)), self._feed, node, agent_io.WarmupDone())
        self.soon(0.0, 0.05, self._connect, node)
        self.soon(0.0, 0.02, self._check_health, node, "unhealthy" in self.mix.faults and random.random() < 0.1)

    def _check_health(self, node: SimNode, is_unhealthy: bool) -> None:
        node.is_unhealthy = is_unhealthy
        self._feed(node, agent_io.HealthChecked((HealthProblem("disk", "the disk is full"),) if is_unhealthy else ()))

    def _requested_rank(self) -> int | None:
        """In some schedules some nodes request a rank, several of them the same one."""
        return (len(self.nodes) % 3 or None) if self.seed % 3 == 0 else None

    def _node_down(self, node: SimNode, *, silent: bool) -> None:
        if not node.alive:
            return
        self.note(f"{node.id} is dead")
        node.alive = False
        self._fail_peers(node)
        node.group = None
        connection, node.connection = node.connection, None
        if connection and connection.open:
            connection.open = False
            if not silent:
                self._send_disconnect(connection)

    def _arm(self, node: SimNode) -> None:
        when = node.machine.deadline()
        if when != node.timer:
            node.timer = when
            if when is not None:
                self.at(when, self._tick, node, when)

    def _tick(self, node: SimNode, when: float) -> None:
        if node.timer == when and node.alive:
            node.timer = None
            self._feed(node, agent_io.Tick())
            require(node.timer is None or node.timer > self.now, f"{node.id}: a deadline in the past: {node.timer}")

    def _feed(self, node: SimNode, event: agent_io.AgentInput) -> None:
        if not node.alive:
            return
        if self.trace and event != agent_io.CoordinatorMessage(Heartbeat()):
            self.note(f"{node.id:5} ← {event}")
        for command in node.machine.on(event, self.now):
            if self.trace:
                self.note(f"{node.id:5} → {command}")
            match command:
                case agent_io.SendToCoordinator(message):
                    connection = node.connection
                    require(
                        connection is not None and connection.open, f"{node.id} sends while disconnected: {message}"
                    )
                    assert connection is not None
                    self._send_up(connection, message)
                case agent_io.OpenStorePort():
                    self.port += 1
                    node.offered = self.port
                    self.soon(0.0, 0.02, self._feed, node, agent_io.StorePortReady(self.port))
                case agent_io.StartWorkers(place):
                    self._start(node, place)
                case agent_io.InspectWorkers(round):
                    where = (self._hang(node, node.group),) if node.group else ()
                    self.soon(
                        0.0,
                        self.random.choice((0.05, 2.0, 999.0)),
                        self._feed,
                        node,
                        agent_io.WorkersInspected(round, where),
                    )
                case agent_io.StopWorkers(round, _, grace):
                    self._stop(node, round, grace)
                case agent_io.ReformWorkers(place, _, kept):
                    self._reform(node, place, kept)
                case agent_io.ReplaceWorkers(round, ranks):
                    self._replace(node, round, ranks)
                case agent_io.MakeFinalCommit(round):
                    self._make_final_commit(node, round)
                case agent_io.ExitAgent():
                    self._exit(node, command)
                    return
        self._arm(node)

    def _exit(self, node: SimNode, end: agent_io.ExitAgent) -> None:
        require(node.group is None, f"{node.id} ends before its workers")
        require(self._is_right_end(node, end), f"{node.id} ends with a wrong exit code: {end}")
        node.alive, node.code = False, end.code
        connection, node.connection = node.connection, None
        if connection and connection.open:
            connection.open = False
            self._send_disconnect(connection)

    def _is_right_end(self, node: SimNode, end: agent_io.ExitAgent) -> bool:
        if end.report is not None:
            good = end.report.outcome is Outcome.SUCCEEDED
            right = end.code == 0 if good else end.code == (128 + node.leaving if node.leaving else 1)
        elif node.drained and end.code == 0:
            right = True
        elif node.leaving:
            right = end.code == 128 + node.leaving
        elif node.is_unhealthy and end.code == 1 and end.why.startswith("unhealthy for"):
            right = not node.machine.passed_health_check
        elif self.fixed and end.code == 2:
            right = "is taken by node" in end.why  # by a dead node that is not removed yet
        else:
            lost = self.now - node.unlinked_since + 1e-6
            link = node.connection  # it may be new: stopping the workers takes time
            alone = link is None or not link.linked or self.now - link.began < self.timing.shutdown + 1.0
            timeout = min(self.timing.join, self.timing.coordinator)
            held = node.machine.place
            succeeded = held is not None and node.id in self.finished.get(held.store, ()) and not node.closing
            if node.closing or (held is not None and succeeded and held.group_size == 1):
                timeout = min(timeout, agent.FINAL_REPORT_TIMEOUT_S)  # the end is known
            right = (end.code == 1 or (end.code == 0 and succeeded)) and alone and lost >= timeout
        return right

    # workers ----------------------------------------------------------------------------------------------------------

    def _start(self, node: SimNode, place: Place) -> None:
        require(node.group is None, f"{node.id} starts round {place.round} while it has workers")
        self._begin(node, place, ())

    def _begin(self, node: SimNode, place: Place, kept: Collection[int]) -> None:
        require(place.round >= node.newest, f"{node.id} starts round {place.round} after it has seen {node.newest}")
        require(place.restarts >= node.restarts, f"{node.id}: fewer restarts than {node.restarts}: {place}")
        node.restarts = place.restarts
        if place.group_rank == 0:
            require(place.store.port == node.offered, f"{node.id} has to serve {place.store}, offers {node.offered}")
            node.offered = 0
        began = self.now + self.random.random() * (0.5 if self.slow else 0.05)
        node.group = Group(place, began, kept)
        for rank in range(place.slots) if self.elastic else ():
            if rank not in kept and self.random.random() < 0.9:
                self.at(began + 0.1 * self.random.random(), self._register, node, node.group, rank)
        if place.round % 2:
            self.at(began + 0.2, self._workers_step, node, node.group)
        if self.over:
            self.soon(1.0, 3.0, self._workers_fail, node, node.group, "victim")
        if self.now >= self.calm and self.finishing:
            self.at(began + 0.1 + self.random.random(), self._try_to_finish, node, node.group)

    def _register(self, node: SimNode, group: Group, rank: int) -> None:
        if node.group is group and rank not in group.failed and group.state in ("running", "failed"):
            group.registered.add(rank)
            self._feed(node, agent_io.WorkerRegistered(group.place.round, rank))

    def _reform(self, node: SimNode, place: Place, kept: tuple[int, ...]) -> None:
        old = node.group
        require(old and old.state in ("running", "failed"), f"{node.id} has no workers for {place}")
        assert old is not None
        unfit = set(kept) - old.registered | set(kept) & old.failed
        require(not unfit, f"{node.id}: workers {unfit} failed or have not registered, and go on in {place}")
        self._begin(node, place, kept)
        for rank in kept:
            if self.random.random() < 0.8:  # the others are stuck in the old round
                self.soon(0.0, 0.6, self._reformed, node, node.group, rank)

    def _reformed(self, node: SimNode, group: Group, rank: int) -> None:
        if node.alive and node.group is group and rank in group.outside and rank not in group.failed:
            has_left = self.random.random() < 0.1
            if not has_left:
                group.outside.discard(rank)
            self._feed(node, agent_io.WorkerLeft(group.place.round, rank, has_exited=True) if has_left
                       else agent_io.WorkerReformed(group.place.round, rank))  # fmt: skip

    def _replace(self, node: SimNode, round: int, ranks: tuple[int, ...]) -> None:
        group = node.group
        require(group and group.place.round == round, f"{node.id} replaces workers of round {round}, which it has not")
        assert group is not None
        require(set(ranks) <= group.outside, f"{node.id} replaces {ranks}, outside are {group.outside}")
        group.outside -= set(ranks)
        group.registered -= set(ranks)

    def _make_final_commit(self, node: SimNode, round: int) -> None:
        """For `state_world.py`: here, workers have no State."""
        raise Violation(f"{node.id} has to make a final commit of round {round}, and has no State")

    def _workers_step(self, node: SimNode, group: Group) -> None:
        """The workers report their first step to the current coordinator."""
        connection = node.connection
        linked = connection and connection.life == self.life and self.sessions.get(node.id) is connection
        if linked and not self.is_frozen() and node.alive and node.group is group and group.state == "running":
            self._feed_job(job_types.Progressed(node.id, group.place.round))

    def _stop(self, node: SimNode, round: int, grace: float) -> None:
        group = node.group
        require(group and group.place.round == round, f"{node.id} stops round {round}, which it does not have")
        assert group is not None
        if group.state != "stopping":
            self._fail_peers(node)
            group.state = "stopping"
        need = self.random.choice((0.01, 0.1, 0.1, 1.0)) * self.random.random()
        self.at(max(self.now, group.began) + min(grace, need), self._stopped, node, group)

    def _stopped(self, node: SimNode, group: Group) -> None:
        if node.group is group:
            node.group = None
            self._feed(node, agent_io.WorkersStopped(group.place.round))

    def _workers_fail(self, node: SimNode, group: Group, kind: str) -> None:
        if not node.alive or node.group is not group or group.state == "done":
            return
        if group.state == "running":
            self._fail_peers(node)
            group.state = "failed"
        group.failed.add(0)
        group.outside.discard(0)
        text = GLOO if kind == "victim" else "ValueError: no"
        place = group.place
        failure = Failure(place.first_rank, 0, place.round, node.id, self.now, exitcode=1, message=text, traceback=text)
        self._feed(node, agent_io.WorkersFailed(place.round, (failure,)))

    def _workers_hang(self, node: SimNode, group: Group) -> None:
        """Peers that wait for these workers hang a moment later."""
        if not node.alive or node.group is not group or group.state != "running":
            return
        group.state = "failed"
        group.failed.add(0)
        for peer in self.nodes.values():
            if peer.group and peer.group.place.store == group.place.store and self.random.random() < 0.7:
                self.soon(0.0, 0.5, self._workers_hang, peer, peer.group)
        self._feed(node, agent_io.WorkersFailed(group.place.round, (self._hang(node, group),)))

    def _hang(self, node: SimNode, group: Group) -> Failure:
        hang = Hang(1.0, "no heartbeat", "all_reduce", "train.py:41", self.random.random() < 0.5, "S")
        return Failure(group.place.first_rank, 0, group.place.round, node.id, self.now, hang=hang)

    def _fail_peers(self, node: SimNode) -> None:
        """Some peers of its collectives fail; workers that can go on in place report it and wait."""
        group = node.group
        if group is None or group.state != "running":
            return
        for peer in self.nodes.values():
            there = peer.group
            together = there is not None and there.state == "running" and there.place.store == group.place.store
            if peer is not node and together and self.random.random() < 0.5:
                self.soon(0.0, 0.4, self._workers_fail, peer, there, "victim")
            elif peer is not node and together and there is not None and there.registered:
                self.soon(0.0, 0.4, self._lose_peer, peer, there)

    def _lose_peer(self, node: SimNode, group: Group) -> None:
        if node.alive and node.group is group:
            self._feed(node, agent_io.WorkerLostPeer(group.place.round))

    def _workers_done(self, node: SimNode, group: Group) -> None:
        group.state = "done"
        self.finished.setdefault(group.place.store, set()).add(node.id)
        self._feed(node, agent_io.WorkersSucceeded(group.place.round))

    def _try_to_finish(self, node: SimNode, group: Group) -> None:
        store = group.place.store
        if not node.alive or node.group is not group or group.state != "running":
            return
        there = {n.id: n.group for n in self.nodes.values() if n.group and n.group.place.store == store}
        inside = {name for name, workers in there.items() if workers.state == "running" and not workers.outside}
        together = self.finished.get(group.place.store, set()) | inside
        if len(together) == group.place.group_size and self.now >= group.began:
            self._workers_done(node, group)
        else:
            self.soon(0.2, 0.5, self._try_to_finish, node, group)

    # the network ------------------------------------------------------------------------------------------------------

    def _latency(self) -> float:
        return self.random.random() * (0.2 if self.slow else 0.02)

    def _send_up(self, connection: Connection, message: FromAgent) -> None:
        node = connection.node
        if self.mix.disorder and not isinstance(message, Join):
            when = max(self.now, node.blocked_up, connection.up_last) + self._disorder()  # but not before the Join
            self.at(when, self._arrive_up, connection, message)
            if self.random.random() < 0.1:
                self.at(when + self.random.random(), self._arrive_up, connection, message)
            return
        when = max(self.now + (0.0 if connection.local else self._latency()), node.blocked_up, connection.up_last)
        connection.up_last = when
        self.at(when, self._arrive_up, connection, message)

    def _disorder(self) -> float:
        return self.random.random() * self.random.choice((0.01, 0.3))

    def _arrive_up(self, connection: Connection, message: FromAgent) -> None:
        name = connection.node.id
        if connection.life != self.life or self.sessions.get(name) is not connection:
            return
        if self.is_frozen():
            self.backlog.append((self._arrive_up, (connection, message)))
            return
        self._feed_job(job_types.NodeMessage(name, message))

    def _send_down(self, connection: Connection, message: FromCoordinator) -> None:
        node = connection.node
        if self.mix.disorder:
            when = max(self.now, node.blocked_down) + self._disorder()
            if self.random.random() < 0.1:
                self.at(when + self._disorder(), self._arrive_down, connection, message)
        else:
            when = max(self.now + (0.0 if connection.local else self._latency()), node.blocked_down)
            when = max(when, connection.down_last)
        connection.down_last = max(when, connection.down_last)
        self.at(when, self._arrive_down, connection, message)

    def _arrive_down(self, connection: Connection, message: FromCoordinator) -> None:
        node = connection.node
        if not connection.open or node.connection is not connection:
            return
        connection.last_received = self.now
        match message:
            case Assign(place):
                node.newest = max(node.newest, place.round)
            case StandBy(round):
                node.newest = max(node.newest, round)
            case Closing():
                node.closing = True
            case Drain():
                node.drained = True
        self._feed(node, agent_io.CoordinatorMessage(message))

    def _send_disconnect(self, connection: Connection) -> None:
        when = max(self.now + self._latency(), connection.node.blocked_up, connection.up_last)
        self.at(when, self._arrive_disconnect, connection)

    def _arrive_disconnect(self, connection: Connection) -> None:
        name = connection.node.id
        if connection.life != self.life or self.sessions.get(name) is not connection:
            return
        if self.is_frozen():
            self.backlog.append((self._arrive_disconnect, (connection,)))
            return
        del self.sessions[name]
        self._feed_job(job_types.NodeDisconnected(name, closed_by_node=not connection.node.alive))

    def _send_close(self, connection: Connection) -> None:
        node = connection.node
        when = max(self.now + self._latency(), node.blocked_down, connection.down_last)
        self.at(when, self._arrive_close, connection)

    def _arrive_close(self, connection: Connection) -> None:
        if connection.open and connection.node.connection is connection:
            self._unlink(connection.node, "closed by the coordinator")

    def _connect(self, node: SimNode) -> None:
        if not node.alive or node.connection is not None:
            return
        blocked = max(node.blocked_up, node.blocked_down) > self.now
        if self.job is None or self.is_frozen() or (blocked and not node.own):
            self.soon(0.05, HEARTBEAT_INTERVAL_S, self._connect, node)
            return
        connection = node.connection = Connection(node, self.life, self.now, node.own)
        old = self.sessions.get(node.id)
        self.sessions[node.id] = connection
        if old is not None:
            self._send_close(old)
        self.soon(0.0, 0.02, self._linked, connection)

    def _linked(self, connection: Connection) -> None:
        node = connection.node
        if connection.open and node.connection is connection and node.alive:
            connection.linked = True
            self._feed(node, agent_io.CoordinatorConnected(f"host-{node.id}"))
            if not connection.local:
                self.soon(0.0, HEARTBEAT_INTERVAL_S, self._heartbeat, connection)

    def _unlink(self, node: SimNode, why: str) -> None:
        connection = node.connection
        if not node.alive or connection is None or (connection.local and self.job):
            return
        if connection.open:
            connection.open = False
            self._send_disconnect(connection)
        node.connection = None
        if connection.linked:
            node.unlinked_since = self.now
            self._feed(node, agent_io.CoordinatorLost(why))
        self.soon(0.01, self.random.choice((0.1, 0.1, 1.5)), self._connect, node)

    def _heartbeat(self, connection: Connection) -> None:
        node = connection.node
        if not connection.open or node.connection is not connection:
            return
        if node.blocked_up <= self.now:
            self._arrive_heartbeat(connection)
        if self.now - connection.last_received >= LEASE_S:
            self._unlink(node, "the coordinator is silent")
        else:
            self.at(self.now + HEARTBEAT_INTERVAL_S, self._heartbeat, connection)

    def _arrive_heartbeat(self, connection: Connection) -> None:
        """A heartbeat and the reply to it."""
        node = connection.node
        if connection.life != self.life or self.sessions.get(node.id) is not connection:
            return
        if self.is_frozen():
            self.backlog.append((self._arrive_heartbeat, (connection,)))
            return
        if self.job is not None and not self.job.renew(node.id, self.now):  # as in the coordinator's driver
            self._feed_job(job_types.NodeMessage(node.id, Heartbeat()))
        if node.blocked_down <= self.now:
            connection.last_received = self.now

    # at rest ----------------------------------------------------------------------------------------------------------

    def _check_rest(self, seen: int) -> object:
        self.rules.check_stopped()
        if self.rules.reason_not_at_rest():
            seen = 0
        elif seen:
            self.note("at rest")
            return AT_REST
        else:
            seen = 1
        self.at(self.now + 0.5, self._check_rest, seen)
        return None


def check(seed: int) -> None:
    """Run one schedule; a violation has the transcript and the command to print all of it."""
    try:
        World(seed).run()
    except Exception as error:
        lines: list[str] = []
        with suppress(Exception):
            World(seed, lines.append).run()
        shown = "\n".join(lines[-120:])
        raise Violation(
            f"schedule {seed}: {error}\n{shown}\nthe whole transcript: python -m tests.simulation.world {seed}"
        ) from error


if __name__ == "__main__":
    World(int(sys.argv[1]), print).run()
