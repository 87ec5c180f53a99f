"""A whole job in one thread: agents' machines, the coordinator's machine, and a world that hurts them.

Deterministic: a seed is a schedule.  The world stands in for the drivers and the network and keeps their rules:
commands are executed in order, starting and stopping workers takes time, timers come from `deadline()`, a connection
delivers in order or breaks (a `Join` then says everything again), a partition delays what is sent until it heals,
silence for a lease ends a connection on either side.  In disorder, messages after the `Join` also come twice and in any
order.

Faults stop at some time.  From then on everything must come to rest, in bounded time: in one round that all nodes run
which can, or in an end that everybody knows of.  What must hold at every step is in `_check_*`.

`python -m tests.simulation.world SEED` shows one schedule as a transcript.
"""

import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from typing import Any

from ripstop.agent import machine as agent
from ripstop.config import Budget, Timing
from ripstop.observe.failure import Failure
from ripstop.rendezvous import machine as coordinator
from ripstop.rendezvous.machine import Job, Phase
from ripstop.rendezvous.messages import Assign, Beat, Failed, FromAgent, FromCoordinator, Hold, Join, Succeeded
from ripstop.round import Address, Node, Outcome, Place

LEASE = 2.0
BEAT = LEASE / 3
PATIENCE = 120.0  # simulated seconds after the last fault in which everything must come to rest
MOST_STEPS = 20_000  # of one schedule: more is a busy loop
_NOISE = re.compile(  # in a transcript
    r"\b(?:message|place|node|why|text|report)=|, (?:pid|exitcode|signal|oom|log_tail|error_file|logs|traceback)=[^,)]*"
    r"|, (?:failures=\(\)|closing=None|held=None|status=<Status.IDLE: 'idle'>|wish=None|m(?:in|ax)_nodes=\d+)"
    r"|, (?:first_rank|world_size|slots|role_first_rank|role_size|restarts|role|local_rank|at)=[^,)]*"
)
AT_REST = object()
GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer"


class Violation(AssertionError):
    """Something happened that never may."""


def demand(truth: object, what: str) -> None:
    if not truth:
        raise Violation(what)


@dataclass(frozen=True)
class Mix:
    """How often which fault comes, relative to the others."""

    name: str
    faults: dict[str, int]
    most: int = 20
    disorder: bool = False
    restarts: tuple[int, ...] = (0, 1, 3, 100, 100)


CHURN = {"join": 6, "kill": 3, "vanish": 2, "signal": 2, "crash": 2, "scale": 1}
NETWORK = {"reset": 4, "blink": 3, "cut": 3, "one_way": 3}
MASTER = {"coordinator_dies": 3, "half_told": 2, "coordinator_freezes": 2}
WORKERS = {"crash": 5, "victim": 3, "succeed": 1}

MIXES = (
    Mix("quiet", {"join": 1}, most=2),
    Mix("workers fail", WORKERS),
    Mix("nodes come and go", CHURN),
    Mix("the network is bad", NETWORK | {"crash": 2, "join": 2}),
    Mix("the coordinator is restarted", MASTER | {"crash": 2, "kill": 1, "reset": 1, "join": 2}),
    Mix("everything", CHURN | NETWORK | MASTER | WORKERS | {"close": 1}, most=40),
    Mix("everything, in disorder", CHURN | NETWORK | MASTER | WORKERS | {"close": 1}, most=40, disorder=True),
)


class Connection:
    """One connection of one node, from its two ends."""

    __slots__ = ("began", "down_last", "heard", "life", "linked", "local", "node", "open", "up_last")

    def __init__(self, node: "SimNode", life: int, now: float, local: bool) -> None:
        self.node = node
        self.life = life  # of the coordinator it leads to
        self.local = local
        self.began = now
        self.open = True  # at the node's end
        self.linked = False  # the node knows of it
        self.heard = now  # the node's last word from the coordinator
        self.up_last = self.down_last = now  # nothing arrives before what was sent earlier


class Group:
    """The workers of one node in one round."""

    __slots__ = ("began", "place", "state")

    def __init__(self, place: Place, began: float) -> None:
        self.place = place
        self.began = began  # when they are up
        self.state = "running"


class SimNode:
    """One agent's process, as a driver would be."""

    __slots__ = (
        "alive", "blocked_down", "blocked_up", "code", "connection", "group", "id", "leaving", "machine", "newest",
        "offered", "own", "restarts", "timer", "unlinked_since",
    )  # fmt: skip

    def __init__(self, name: str, machine: agent.Agent, own: bool, now: float) -> None:
        self.id = name
        self.machine = machine
        self.own = own  # in the coordinator's process
        self.alive = True
        self.leaving = 0
        self.code: int | None = None
        self.connection: Connection | None = None
        self.unlinked_since: float = now
        self.group: Group | None = None
        self.offered = 0
        self.newest = 0  # the highest round that was put into its hands
        self.restarts = 0
        self.timer: float | None = None
        self.blocked_up = self.blocked_down = 0.0


class World:
    """One schedule."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.trace = trace
        self.random = random = Random(seed)
        self.mix = mix = MIXES[seed % len(MIXES)]
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self.steps = self.serial = 0
        low = random.choice((1, 1, 2, 2, 3))
        high = low + random.choice((0, 0, 1, 2, 3))
        window = random.choice((0.0, 0.0, 8.0))
        self.budget = Budget(random.choice(mix.restarts), window, backoff=2.0)
        self.timing = Timing(settle=0.5, join=8.0, lease=LEASE, coordinator=10.0, shutdown=1.0)
        self.low, self.high = low, high
        self.has_own = random.random() < 0.3
        self.finishing = random.random() < 0.4  # workers exit 0 some time after the last fault
        self.slow = random.random() < 0.2
        # the coordinator's process
        self.life = 0
        self.job: Job | None = None
        self.over = False  # it has ended the job and gone
        self.sessions: dict[str, Connection] = {}
        self.job_timer: float | None = None
        self.half_told = False  # it dies when it has told half of the next round's nodes
        self.frozen_until = 0.0
        self.backlog: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        # what is known of all lives
        self.nodes: dict[str, SimNode] = {}
        self.running = (0, 0)  # the life and the round last seen running
        self.ports: dict[Address, tuple[int, int]] = {}
        self.committed: set[tuple[int, int]] = set()
        self.finished: dict[Address, set[str]] = {}  # by the store of their round: who exited 0
        self.port = 40_000
        self.calm = self._plan()

    # time -------------------------------------------------------------------------------------------------------------

    def at(self, when: float, do: Callable[..., object], *args: Any) -> None:
        self.serial += 1
        heappush(self.queue, (when, self.serial, do, args))

    def soon(self, least: float, most: float, do: Callable[..., object], *args: Any) -> None:
        self.at(self.now + least + (most - least) * self.random.random(), do, *args)

    def run(self) -> None:
        """Live through it; raises `Violation`."""
        end = self.calm + PATIENCE
        while self.queue:
            when, _, do, args = heappop(self.queue)
            if when > end:
                break
            self.now = when
            self.steps += 1
            demand(self.steps < MOST_STEPS, "busy loop: too many steps")
            if do(*args) is AT_REST:
                return
        raise Violation(f"not at rest {PATIENCE:g} s after the last fault: {self._unrest()}")

    def note(self, text: str) -> None:
        if self.trace:
            self.trace(f"{self.now:9.3f}  {_NOISE.sub('', text)}")

    # the plan ---------------------------------------------------------------------------------------------------------

    def _plan(self) -> float:
        random = self.random
        self.at(0.0, self._coordinator_up)
        spread = random.choice((0.0, 0.3, 3.0))
        for _ in range(random.randint(self.low - (random.random() < 0.1), min(6, self.high + 1)) - self.has_own):
            self.at(random.random() * spread, self._node_up)
        kinds, weights = list(self.mix.faults), list(self.mix.faults.values())
        when = random.random() * 2.0
        for kind in random.choices(kinds, weights, k=random.randint(0, self.mix.most)):
            self.at(when, self._fault, kind)
            when += random.random() * random.choice((0.05, 0.3, 0.3, 1.0, 3.0))
        calm = when + 0.5
        self.at(calm, self._calm_down)
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
            case "half_told":
                self.half_told = True
            case "coordinator_freezes":
                self._freeze(self.random.random() * self.random.choice((0.5, 2.0, 6.0)))
            case "scale":
                self._feed_job(coordinator.Scale(self.random.randint(self.low, self.high)))
            case "close":
                self._feed_job(coordinator.Close("an operator wants it"))
            case "crash" | "victim" | "succeed" | "signal":
                if living:
                    self._hurt(self.random.choice(living), kind)
            case _:
                if remote:
                    self._hurt(self.random.choice(remote), kind)

    def _hurt(self, node: SimNode, kind: str) -> None:
        self.note(f"*** … {node.id}")
        long = self.now + 0.2 + self.random.random() * self.random.choice((1.0, 6.0))
        match kind:
            case "crash" | "victim":
                if node.group:
                    self._workers_fail(node, node.group, kind)
            case "succeed":
                if node.group and node.group.state == "running" and node.group.began <= self.now:
                    self._workers_done(node, node.group)
            case "signal":
                node.leaving = node.leaving or 15
                self._feed(node, agent.Signalled(15))
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

    def _calm_down(self) -> None:
        self.note("*** no more faults")
        for node in self.nodes.values():
            node.blocked_up = min(node.blocked_up, self.now)
            node.blocked_down = min(node.blocked_down, self.now)
            if node.group and self.finishing:
                self.soon(0.1, 1.0, self._try_to_finish, node, node.group)
        self.at(self.now + 0.4, self._look, 0)

    # the coordinator's process ----------------------------------------------------------------------------------------

    def _coordinator_up(self) -> None:
        self.life += 1
        own = ""
        if self.has_own:
            self.serial += 1
            own = f"own{self.life}"
        settings = coordinator.Settings("job", self.low, self.high, self.timing, self.budget, own=own)
        self.job = Job(settings, self.now)
        self.note(f"coordinator {self.life} is up")
        self._arm_job()
        if own:
            self._node_up(own)

    def _coordinator_down(self, pause: float) -> None:
        if self.job is None or self.over:
            return
        self.note("coordinator is down")
        self._coordinator_gone()
        self.at(self.now + pause, self._coordinator_up)

    def _coordinator_gone(self) -> None:
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
        self.at(self.frozen_until, self._thaw, self.life)

    def _thaw(self, life: int) -> None:
        if life != self.life or self.job is None:
            return
        self.note("coordinator goes on")
        backlog, self.backlog = self.backlog, []
        timer = (self._job_tick, (self.life, self.job_timer))
        backlog.insert(self.random.choice((0, len(backlog))), timer)
        for do, args in backlog:
            do(*args)

    def _is_frozen(self) -> bool:
        return self.now < self.frozen_until

    def _job_tick(self, life: int, when: float | None) -> None:
        if life != self.life or when is None or when != self.job_timer or self.job is None or when > self.now:
            return
        if not self._is_frozen():
            self.job_timer = None
            self._feed_job(coordinator.Tick())

    def _arm_job(self) -> None:
        assert self.job is not None
        when = self.job.deadline()
        demand(when is None or when > self.now, f"a deadline in the past: {when}")
        if when != self.job_timer:
            self.job_timer = when
            if when is not None:
                self.at(when, self._job_tick, self.life, when)

    def _feed_job(self, event: coordinator.Event) -> None:
        job = self.job
        if job is None:
            return
        if self._is_frozen():
            self.backlog.append((self._feed_job, (event,)))
            return
        before = self._before(job, event)
        beat = isinstance(event, coordinator.Heard) and isinstance(event.message, Beat)
        if self.trace and not beat:
            self.note(f"job   ← {event}")
        commands = job.on(event, self.now)
        if before:
            before()
        if job.phase is Phase.RUNNING and self.running != (self.life, job.number):
            self.running = (self.life, job.number)
            table = sorted((p.group_rank, p.group_size, str(p.store)) for p in job.round.values())
            right = [(rank, len(table), table[0][2]) for rank in range(len(table))]
            demand(table == right, f"nodes of different rounds are taken for one: {job.round}")
        if commands:
            self._check_commit(job, commands, again=isinstance(event, coordinator.Heard) and not beat)
            self._check_budget(job)
        elif beat:
            return
        if (
            self.half_told
            and sum(isinstance(c, coordinator.Send) and isinstance(c.message, Assign) for c in commands) > 1
        ):
            commands = self._tell_half(commands)
        for command in commands:
            if self.trace:
                self.note(f"job   → {command}")
            match command:
                case coordinator.Send(name, message):
                    if connection := self.sessions.get(name):
                        self._send_down(connection, message)
                case coordinator.Drop(name):
                    if connection := self.sessions.pop(name, None):
                        self._send_close(connection)
                case coordinator.Log(text) if " lost: silent" in text:
                    self._check_loss(text.split()[0].removeprefix("node="))
                case coordinator.End():
                    self._end()
                    return
        self._arm_job()

    def _tell_half(self, commands: list[coordinator.Command]) -> list[coordinator.Command]:
        """Only some hear of a round before the coordinator dies, and one of those is cut off for a while."""
        self.half_told = False
        sends = [c for c in commands if isinstance(c, coordinator.Send)]
        told = sends[: self.random.randint(1, len(sends) - 1)]
        lonely = self.nodes[told[0].node]
        self.at(self.now + 0.25, self._coordinator_down, 0.1 + self.random.random())
        if not lonely.own:
            self.at(self.now + 0.25, self._hurt, lonely, "cut")
        return list(told)

    def _end(self) -> None:
        self.note("coordinator has ended the job")
        self.over = True
        self._coordinator_gone()
        for node in self.nodes.values():  # a lonely collective times out some day
            if node.alive and node.group:
                self.soon(1.0, 3.0, self._workers_fail, node, node.group, "victim")

    # nodes ------------------------------------------------------------------------------------------------------------

    def _node_up(self, own: str = "") -> None:
        random = self.random
        if len(self.nodes) > 14 or (self.has_own and not own and self.job is None):
            return
        name = own or f"n{len(self.nodes)}"
        who = Node(name, f"host-{name}", slots=random.choice((1, 1, 2, 8)), role=random.choice(("default", "other")))
        settings = agent.Settings(who, self.low, self.high, self.timing)
        node = self.nodes[name] = SimNode(name, agent.Agent(settings, self.now), bool(own), self.now)
        self.note(f"{name} is up")
        self._arm(node)
        self.soon(0.0, random.choice((0.01, 0.5, 2.0)), self._feed, node, agent.Warmed())
        self.soon(0.0, 0.05, self._connect, node)

    def _node_down(self, node: SimNode, *, silent: bool) -> None:
        if not node.alive:
            return
        self.note(f"{node.id} is dead")
        node.alive = False
        self._hurt_peers(node)
        node.group = None
        connection, node.connection = node.connection, None
        if connection and connection.open:
            connection.open = False
            if not silent:
                self._send_gone(connection)

    def _arm(self, node: SimNode) -> None:
        when = node.machine.deadline()
        if when != node.timer:
            node.timer = when
            if when is not None:
                self.at(when, self._tick, node, when)

    def _tick(self, node: SimNode, when: float) -> None:
        if node.timer == when and node.alive:
            node.timer = None
            self._feed(node, agent.Tick())
            demand(node.timer is None or node.timer > self.now, f"{node.id}: a deadline in the past: {node.timer}")

    def _feed(self, node: SimNode, event: agent.Event) -> None:
        if not node.alive:
            return
        if self.trace and event != agent.Got(Beat()):
            self.note(f"{node.id:5} ← {event}")
        for command in node.machine.on(event, self.now):
            if self.trace:
                self.note(f"{node.id:5} → {command}")
            match command:
                case agent.Tell(message):
                    connection = node.connection
                    demand(connection is not None and connection.open, f"{node.id} speaks without a link: {message}")
                    assert connection is not None
                    self._send_up(connection, message)
                case agent.OfferStore():
                    self.port += 1
                    node.offered = self.port
                    self.soon(0.0, 0.02, self._feed, node, agent.Offered(self.port))
                case agent.Start(place):
                    self._start(node, place)
                case agent.Stop(round, _, grace):
                    self._stop(node, round, grace)
                case agent.Quit():
                    self._quit(node, command)
                    return
        self._arm(node)

    def _quit(self, node: SimNode, end: agent.Quit) -> None:
        demand(node.group is None, f"{node.id} ends before its workers")
        if end.report is not None:
            good = end.report.outcome is Outcome.SUCCEEDED
            right = end.code == 0 if good else end.code == (128 + node.leaving if node.leaving else 1)
        elif node.leaving:
            right = end.code == 128 + node.leaving
        else:
            lost = self.now - node.unlinked_since + 1e-6
            alone = node.connection is None or not node.connection.linked
            right = end.code == 1 and alone and lost >= min(self.timing.join, self.timing.coordinator)
        demand(right, f"{node.id} ends with a wrong exit code: {end}")
        node.alive, node.code = False, end.code
        connection, node.connection = node.connection, None
        if connection and connection.open:
            connection.open = False
            self._send_gone(connection)

    # workers ----------------------------------------------------------------------------------------------------------

    def _start(self, node: SimNode, place: Place) -> None:
        demand(node.group is None, f"{node.id} starts round {place.round} while it has workers")
        demand(place.round >= node.newest, f"{node.id} starts round {place.round} after it has seen {node.newest}")
        demand(place.restarts >= node.restarts, f"{node.id}: restarts are forgotten: {place}, had {node.restarts}")
        node.restarts = place.restarts
        if place.group_rank == 0:
            demand(place.store.port == node.offered, f"{node.id} has to serve {place.store}, offers {node.offered}")
            node.offered = 0
        began = self.now + self.random.random() * (0.5 if self.slow else 0.05)
        node.group = Group(place, began)
        if self.over:
            self.soon(1.0, 3.0, self._workers_fail, node, node.group, "victim")
        if self.now >= self.calm and self.finishing:
            self.at(began + 0.1 + self.random.random(), self._try_to_finish, node, node.group)

    def _stop(self, node: SimNode, round: int, grace: float) -> None:
        group = node.group
        demand(group and group.place.round == round, f"{node.id} stops round {round}, which it does not have")
        assert group is not None
        if group.state != "stopping":
            self._hurt_peers(node)
            group.state = "stopping"
        need = self.random.choice((0.01, 0.1, 0.1, 1.0)) * self.random.random()
        self.at(max(self.now, group.began) + min(grace, need), self._stopped, node, group)

    def _stopped(self, node: SimNode, group: Group) -> None:
        if node.group is group:
            node.group = None
            self._feed(node, agent.WorkersStopped(group.place.round))

    def _workers_fail(self, node: SimNode, group: Group, kind: str) -> None:
        if not node.alive or node.group is not group or group.state == "done":
            return
        if group.state == "running":
            self._hurt_peers(node)
            group.state = "failed"
        words = GLOO if kind == "victim" else "ValueError: no"
        place = group.place
        failure = Failure(
            place.first_rank, 0, place.round, node.id, self.now, exitcode=1, message=words, traceback=words
        )
        self._feed(node, agent.WorkersFailed(place.round, (failure,)))

    def _hurt_peers(self, node: SimNode) -> None:
        """Its collectives' partners notice, some of them."""
        group = node.group
        if group is None or group.state != "running":
            return
        for peer in self.nodes.values():
            there = peer.group
            together = there is not None and there.state == "running" and there.place.store == group.place.store
            if peer is not node and together and self.random.random() < 0.5:
                self.soon(0.0, 0.4, self._workers_fail, peer, there, "victim")

    def _workers_done(self, node: SimNode, group: Group) -> None:
        group.state = "done"
        self.finished.setdefault(group.place.store, set()).add(node.id)
        self._feed(node, agent.WorkersDone(group.place.round))

    def _try_to_finish(self, node: SimNode, group: Group) -> None:
        store = group.place.store
        if not node.alive or node.group is not group or group.state != "running":
            return
        together = self.finished.get(group.place.store, set()) | {
            n.id for n in self.nodes.values() if n.group and n.group.state == "running" and n.group.place.store == store
        }
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
        if self._is_frozen():
            self.backlog.append((self._arrive_up, (connection, message)))
            return
        self._feed_job(coordinator.Heard(name, message))

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
        connection.heard = self.now
        match message:
            case Assign(place):
                node.newest = max(node.newest, place.round)
            case Hold(round):
                node.newest = max(node.newest, round)
        self._feed(node, agent.Got(message))

    def _send_gone(self, connection: Connection) -> None:
        when = max(self.now + self._latency(), connection.node.blocked_up, connection.up_last)
        self.at(when, self._arrive_gone, connection)

    def _arrive_gone(self, connection: Connection) -> None:
        name = connection.node.id
        if connection.life != self.life or self.sessions.get(name) is not connection:
            return
        if self._is_frozen():
            self.backlog.append((self._arrive_gone, (connection,)))
            return
        del self.sessions[name]
        self._feed_job(coordinator.Gone(name))

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
        if self.job is None or self._is_frozen() or (blocked and not node.own):
            self.soon(0.05, BEAT, self._connect, node)
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
            self._feed(node, agent.Linked(f"host-{node.id}"))
            if not connection.local:
                self.soon(0.0, BEAT, self._beat, connection)

    def _unlink(self, node: SimNode, why: str) -> None:
        connection = node.connection
        if not node.alive or connection is None or (connection.local and self.job):
            return
        if connection.open:
            connection.open = False
            self._send_gone(connection)
        node.connection = None
        if connection.linked:
            node.unlinked_since = self.now
            self._feed(node, agent.Unlinked(why))
        self.soon(0.01, self.random.choice((0.1, 0.1, 1.5)), self._connect, node)

    def _beat(self, connection: Connection) -> None:
        node = connection.node
        if not connection.open or node.connection is not connection:
            return
        if node.blocked_up <= self.now:
            self._arrive_beat(connection)
        if self.now - connection.heard >= LEASE:
            self._unlink(node, "the coordinator is silent")
        else:
            self.at(self.now + BEAT, self._beat, connection)

    def _arrive_beat(self, connection: Connection) -> None:
        """A beat, and the answer to it."""
        node = connection.node
        if connection.life != self.life or self.sessions.get(node.id) is not connection:
            return
        if self._is_frozen():
            self.backlog.append((self._arrive_beat, (connection,)))
            return
        self._feed_job(coordinator.Heard(node.id, Beat()))
        if node.blocked_down <= self.now:
            connection.heard = self.now

    # what must hold ---------------------------------------------------------------------------------------------------

    def _before(self, job: Job, event: coordinator.Event) -> Callable[[], None] | None:
        """Look at the state before certain events; the answer compares with the state after."""
        match event:
            case coordinator.Heard(_, Failed(round) | Succeeded(round)) if round != job.number:
                used, done = job.restarts.used, set(job._done)

                def untouched() -> None:
                    demand(job.restarts.used == used, f"a stale failure was charged: {event}")
                    demand(job._done <= done, f"a stale success was counted: {event}")

                return untouched
            case coordinator.Heard(name, Failed(round, failures)) if (
                job.phase is Phase.RUNNING
                and name in job.round
                and not (job._absent or job._leaving or job._verdict)
                and failures[0].message != GLOO
                and self._standing(job) >= self.budget.max_restarts
                and self._is_on_time(job)
            ):
                return lambda: demand(
                    job.phase in (Phase.CLOSING, Phase.CLOSED) or name not in job.round or round != job.number,
                    f"the budget is spent and the job goes on: {event}",
                )
        return None

    def _standing(self, job: Job) -> int:
        """How many charges count now."""
        window = self.budget.window
        return sum(not window or at > self.now - window for at in job.restarts._charges)

    def _is_on_time(self, job: Job) -> bool:
        due = job.deadline()
        return due is None or due >= self.now

    def _check_loss(self, name: str) -> None:
        connection = self.sessions.get(name)
        if connection is None or not connection.open:
            return
        in_touch = self.now - max(connection.began, connection.node.blocked_up)
        demand(in_touch < LEASE, f"{name} is taken for lost, and was in touch for {in_touch:.1f} s")

    def _check_budget(self, job: Job) -> None:
        standing = self._standing(job)
        demand(standing <= self.budget.max_restarts, f"{standing} restarts are charged, too many")

    def _check_commit(self, job: Job, commands: list[coordinator.Command], *, again: bool) -> None:
        last = {
            command.node: command.message.place
            for command in commands
            if isinstance(command, coordinator.Send) and isinstance(command.message, Assign)
        }
        for name, place in last.items():
            demand(job.round.get(name) == place, f"{name} is told a place that is not its own: {place}")
            live = job.number == place.round and (job.phase is Phase.RUNNING or again)
            demand(live, f"a place in no live round: {place}")
        if last and (self.life, job.number) not in self.committed:
            self._check_round(job, job.number)

    def _check_round(self, job: Job, round: int) -> None:
        others = [r for life, r in self.committed if life == self.life]
        demand(all(r < round for r in others), f"round {round} comes after round {max(others, default=0)}")
        self.committed.add((self.life, round))
        table = sorted(job.round.items(), key=lambda entry: entry[1].group_rank)
        size, first, in_role = len(table), 0, dict[str, int]()
        demand(self.low <= size <= min(self.high, job._target), f"round {round} has {size} nodes")
        world = sum(job.members[name].node.slots for name, _ in table)
        sizes: dict[str, int] = {}
        for name, _ in table:
            sizes[self._role(job, name)] = sizes.get(self._role(job, name), 0) + job.members[name].node.slots
        host = job.members[table[0][0]].node.host
        for rank, (name, place) in enumerate(table):
            slots, role = job.members[name].node.slots, self._role(job, name)
            right = Place(
                round, rank, size, first, world, slots, in_role.get(role, 0), sizes[role], place.store, place.restarts
            )
            demand(place == right, f"{name} has a wrong place: {place}, right is {right}")
            demand(place.store == table[0][1].store and place.store.host == host, f"a wrong store: {place}")
            first += slots
            in_role[role] = in_role.get(role, 0) + slots
        store = table[0][1].store
        demand(store not in self.ports, f"store {store} was used in round {self.ports.get(store)}, again in {round}")
        self.ports[store] = (self.life, round)

    @staticmethod
    def _role(job: Job, name: str) -> str:
        return job.members[name].node.role

    # at rest ----------------------------------------------------------------------------------------------------------

    def _check_held(self) -> None:
        """Nobody in touch has workers of a round that has been over for some time."""
        job = self.job
        if job is None or job.phase is not Phase.GATHERING or self.now - max(job._since, self.frozen_until) < 3.0:
            return
        for node in self.nodes.values():
            link = node.connection
            if node.alive and node.group and link and link.linked and self.now - max(link.began, link.down_last) > 3.0:
                raise Violation(f"{node.id} has workers of round {node.group.place.round}, which is over")

    def _look(self, seen: int) -> object:
        self._check_held()
        if self._unrest():
            seen = 0
        elif seen:
            self.note("at rest")
            return AT_REST
        else:
            seen = 1
        self.at(self.now + 0.5, self._look, seen)
        return None

    def _unrest(self) -> str:
        """Why this is not the end of the schedule."""
        living = [n for n in self.nodes.values() if n.alive]
        job = self.job
        if not living:
            return "" if self.over or job is None or job.members == {} or job.phase is not Phase.RUNNING else "a ghost"
        if job is None or job.phase is not Phase.RUNNING:
            return f"{len(living)} nodes live, the job is {'down' if job is None else job.phase.value}"
        if self.finishing:
            return "the workers have not finished"
        if any(n.leaving for n in living):
            return "somebody is leaving"
        ids = {n.id for n in living}
        if not (job.round.keys() - job._done <= ids == job.members.keys()):
            return f"the job knows {sorted(job.members)}, alive are {sorted(ids)}"
        if not job._done and len(job.round) != min(job._target, len(living)):
            return f"{len(job.round)} nodes of {len(living)} are in the round"
        for node in living:
            place = job.round.get(node.id)
            runs = node.group.place if node.group else None
            if runs != place:
                return f"{node.id} runs {runs}, should {place}"
            if node.group and node.group.state not in ("running", "done"):
                return f"{node.id}'s workers are {node.group.state}"
        return ""


def check(seed: int) -> None:
    """Run one schedule; a violation comes with the way to see it again."""
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
