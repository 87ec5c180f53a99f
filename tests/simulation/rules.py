"""The rules for every schedule, at every step and at its end.

They read the state of the machines: a violation inside shows outside only much later, if at all.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ripstop.coordinator import job_types
from ripstop.coordinator.job import Job
from ripstop.coordinator.restart_budget import Cause
from ripstop.model.events import NodeGone, RoundEnded
from ripstop.model.operator_commands import (
    DrainNode,
    OperatorCommand,
    RestartRound,
    ScaleJob,
    StopJob,
    operator_command_rejection,
)
from ripstop.model.round import Address, Place, RankBy
from ripstop.model.status import Phase
from ripstop.protocol.messages import (
    Assign,
    Drain,
    Failed,
    FinalCommitMade,
    Join,
    Leaving,
    Problems,
    StandBy,
    StateLost,
    Succeeded,
)

if TYPE_CHECKING:
    from tests.simulation.world import World

LEASE_S = 2.0
STOP_TIMEOUT_S = 3.0  # in which workers that must stop have ended, with every delay
GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer"


Check = Callable[[list[job_types.JobCommand]], None]  # of the state after an event, and the commands


class Violation(AssertionError):
    """A rule does not hold."""


def require(truth: object, what: str) -> None:
    if not truth:
        raise Violation(what)


class Rules:
    """The rules of one schedule, and their state."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.committed: set[tuple[int, int]] = set()  # the coordinator's life, and the round
        self.ranks: dict[str, int] = {}  # of the nodes in the round that was committed last
        self.ports: dict[Address, tuple[int, int]] = {}
        self.running = (0, 0)  # the round last seen running
        self.previous_nodes: set[str] = set()  # nodes in the round before this step
        self.quorum_since = (0, 0.0)  # the coordinator's life, and since when quorum_since nodes are ready

    # a step of the coordinator ----------------------------------------------------------------------------------------

    def before(self, job: Job, event: job_types.JobInput) -> Check | None:
        """Record the state before certain events; the result compares it with the state after."""
        self.previous_nodes = set(job.places)
        if isinstance(event, job_types.Tick | job_types.NodeDisconnected | job_types.Progressed):
            return None
        match event:
            case job_types.NodeMessage(name, Join(held=held)) if held is not None:
                self.previous_nodes.add(name)  # perhaps in a round that this coordinator does not know
            case job_types.NodeMessage(_, Problems()):
                charged = job.restarts.used
                return lambda _: require(job.restarts.used == charged, f"a health problem was charged: {event}")
            case job_types.NodeMessage(name, StateLost(round)) if round == job.round and name in job.places:
                return self._before_restart_without_state(job)
            case job_types.NodeMessage(_, Leaving() | FinalCommitMade()) if self._is_on_time(job):
                used = job.restarts.used
                return lambda _: require(job.restarts.used == used, f"a departure was charged: {event}")
            case job_types.StragglerFound(name, round):
                is_known = job.phase is Phase.RUNNING and round == job.round and name in job.places
                replaceable = is_known and not job.succeeded and name in job.membership.eligible
                is_replaced = replaceable and bool(job.membership.waiting)
                return lambda _: require(
                    bool(job.membership.quarantine.reason(name)) or not is_replaced, f"{name} is slow and stays"
                )
            case DrainNode() | RestartRound() | ScaleJob() | StopJob():
                return self._before_operator_command(job, event)
            case job_types.NodeMessage(_, Failed(round) | Succeeded(round)) if round != job.round:
                used, done = job.restarts.used, set(job.succeeded)

                def untouched(_: list[job_types.JobCommand]) -> None:
                    require(job.restarts.used == used, f"a stale failure was charged: {event}")
                    require(job.succeeded <= done, f"a stale success was counted: {event}")

                return untouched
            case job_types.NodeMessage(name, Failed(round, failures)) if (
                job.phase is Phase.RUNNING
                and name in job.places
                and not (job.liveness.disconnected or job.liveness.leaving or job.failure_policy.is_failure_pending)
                and failures[0].message != GLOO
                and failures[0].hang is None
                and self._charges(job) >= self.world.budget.max_restarts
                and self._is_on_time(job)
            ):
                return lambda _: require(
                    job.phase in (Phase.CLOSING, Phase.CLOSED), f"the budget is spent and the job goes on: {event}"
                )
        return None

    def _before_restart_without_state(self, job: Job) -> Check | None:
        """The round ends, nothing is charged, and all its workers are stopped: those of the next one are new."""
        if job.phase not in (Phase.RUNNING, Phase.RECOVERING) or not self._is_on_time(job):
            return None
        used, round, phase, nodes = job.restarts.used, job.round, job.phase, [n for n in job.places if n in job.members]

        def check(commands: list[job_types.JobCommand]) -> None:
            require(job.restarts.used == used, "a lost state was charged")
            require(job.round > round or job.phase is not phase, f"round {round} goes on without its state")
            sent = [(c.node, c.message.round) for c in commands
                    if isinstance(c, job_types.Send) and isinstance(c.message, StandBy)]  # fmt: skip
            require(all((n, round) in sent for n in nodes), f"{nodes} must stop, told were {sent}")

        return check

    def _before_operator_command(self, job: Job, command: OperatorCommand) -> Check:
        """An allowed command takes effect, a rejected one changes nothing, and none is charged."""
        used, round, phase, target = job.restarts.used, job.round, job.phase, job.formation.target
        allowed = not operator_command_rejection(command, job.status(self.world.now)) and self._is_on_time(job)

        def check(commands: list[job_types.JobCommand]) -> None:
            require(job.restarts.used == used, f"an operator's command was charged: {command}")
            match command:
                case DrainNode(node, why):
                    done = job_types.Send(node, Drain(why)) in commands
                case RestartRound():
                    done = job.round > round or job.phase is not phase
                case ScaleJob(nodes):
                    done = job.formation.target == nodes
                    require(done or job.formation.target == target, f"the target is {job.formation.target}: {command}")
                case StopJob():
                    done = job.phase in (Phase.CLOSING, Phase.CLOSED)
            require(done or not allowed, f"an operator's command had no effect: {command}")

        return check

    def after(self, job: Job, event: job_types.JobInput, commands: list[job_types.JobCommand]) -> None:
        """Check the decisions of one step."""
        here = (self.world.life, job.round)
        if not self.committed:
            self._check_last_call(job)
        if job.phase is Phase.RUNNING and self.running != here:
            self.running = here
            self._check_one_round(job)
        if not commands:
            return
        self._check_places(
            job, commands, again=isinstance(event, job_types.NodeMessage) and isinstance(event.message, Join)
        )
        charges = self._charges(job)
        require(charges <= self.world.budget.max_restarts, f"{charges} restarts are charged, too many")
        hangs = job.restarts.spent(Cause.INFRASTRUCTURE, job._now)
        require(hangs <= self.world.budget.max_infra_restarts, f"{hangs} hangs are charged, too many")
        for command in commands:
            match command:
                case job_types.RecordEvent(NodeGone(name, why)) if why.startswith("lost: silent"):
                    self._check_loss(name)
                case job_types.RecordEvent(RoundEnded(delay=delay)) if delay:
                    require(not job.progressed, f"a round that made progress is followed by a delay of {delay:g} s")

    def _charges(self, job: Job) -> int:
        """How many charges count now."""
        window = self.world.budget.window
        return sum(not window or at > self.world.now - window for at in job.restarts._charges[Cause.APPLICATION])

    def _is_on_time(self, job: Job) -> bool:
        due = job.deadline()
        return due is None or due >= self.world.now

    def _check_loss(self, name: str) -> None:
        connection, now = self.world.sessions.get(name), self.world.now
        if connection is None or not connection.open:
            return
        connected = now - max(connection.began, connection.node.blocked_up)
        require(connected < LEASE_S, f"{name} is removed as lost, but was connected for {connected:.1f} s")

    # rounds -----------------------------------------------------------------------------------------------------------

    def _check_one_round(self, job: Job) -> None:
        table = sorted((p.group_rank, p.group_size, str(p.store)) for p in job.places.values())
        right = [(rank, len(table), table[0][2]) for rank in range(len(table))]
        require(table == right, f"nodes of different rounds are treated as one: {job.places}")

    def _check_places(self, job: Job, commands: list[job_types.JobCommand], *, again: bool) -> None:
        last: dict[str, Place] = {}
        for command in commands:
            match command:
                case job_types.Send(name, Assign(place)):
                    last[name] = place
                case job_types.Send(name, StandBy()):
                    last.pop(name, None)
        for name, place in last.items():
            require(job.places.get(name) == place, f"{name} receives a place that is not its own: {place}")
            live = job.round == place.round and (job.phase is Phase.RUNNING or again)
            require(live, f"a place in no live round: {place}")
        if last and (self.world.life, job.round) not in self.committed:
            self._check_commit(job)

    def _check_commit(self, job: Job) -> None:
        life, round = self.world.life, job.round
        last = max((r for of, r in self.committed if of == life), default=0)
        require(last < round, f"round {round} comes after round {last}")
        if (life, round - 1) in self.committed:  # and no other coordinator formed a round
            self._check_ranks(job)
        self.ranks = {name: place.group_rank for name, place in job.places.items()}
        self.committed.add((life, round))
        table = sorted(job.places.items(), key=lambda entry: entry[1].group_rank)
        nodes = [job.members[name].node for name, _ in table]
        size = len(table)
        require(self.world.low <= size <= min(self.world.high, job.formation.target), f"round {round} has {size} nodes")
        store = table[0][1].store
        for rank, (name, place) in enumerate(table):
            node = nodes[rank]
            right = Place(
                round=round,
                group_rank=rank,
                group_size=size,
                first_rank=sum(n.slots for n in nodes[:rank]),
                world_size=sum(n.slots for n in nodes),
                slots=node.slots,
                role_first_rank=sum(n.slots for n in nodes[:rank] if n.role == node.role),
                role_size=sum(n.slots for n in nodes if n.role == node.role),
                store=store,
                restarts=job.restarts.used,
            )
            require(
                not self.world.fixed or node.requested_rank == rank, f"{name} has rank {rank} in a static job: {node}"
            )
            require(place == right, f"{name} has a wrong place: {place}, right is {right}")
        self._check_fitness(job)
        require(store.host == nodes[0].host, f"the store {store} is not on rank 0's host")
        require(store not in self.ports, f"store {store} was used in round {self.ports.get(store)}, again in {round}")
        self.ports[store] = (life, round)

    def _check_fitness(self, job: Job) -> None:
        """A degraded node is in a round only if there are too few others, or most are unhealthy."""
        ill = [name for name in job.places if job.members[name].problems]
        degraded = [name for name in job.places if job.membership.unfit_reason(name)]
        for name in ill:
            require(name in self.previous_nodes, f"{name} is unhealthy and was given a place")
        before = [name for name in self.previous_nodes if name in job.members and job.members[name].problems]
        able = sorted(job.membership.eligible)
        right = not degraded or len(able) < self.world.low or len(before) > 1
        require(right, f"{degraded} are degraded and in round {job.round}, eligible are: {able}")

    def _check_last_call(self, job: Job) -> None:
        """The first round has the target size, or the last call is over."""
        if job.membership.ready_count() < self.world.low:
            self.quorum_since = (0, 0.0)
            return
        if self.quorum_since[0] != self.world.life:
            self.quorum_since = (self.world.life, self.world.now)
        waited = self.world.now - self.quorum_since[1]
        right = (
            not job.places or len(job.places) >= job.formation.target or waited >= self.world.timing.last_call - 1e-9
        )
        require(
            right, f"the first round has {len(job.places)} of {job.formation.target} nodes, and waited {waited:.1f} s"
        )

    def _check_ranks(self, job: Job) -> None:
        for name, place in job.places.items():
            rank = self.ranks.get(name, place.group_rank)
            home = self.world.rank_by is RankBy.SLOT and job.members[name].node.number == place.group_rank
            moved = rank != place.group_rank and rank < place.group_size and not home
            require(not moved, f"{name} had rank {rank} and has {place.group_rank} of {place.group_size}")

    # the end ----------------------------------------------------------------------------------------------------------

    def check_stopped(self) -> None:
        """No connected node has workers of a round that ended some time ago."""
        world, job = self.world, self.world.job
        if job is None or job.phase is not Phase.GATHERING:
            return
        if world.now - max(job.phase_since, world.frozen_until) < STOP_TIMEOUT_S:
            return
        for node in world.nodes.values():
            link = node.connection
            if node.alive and node.group and node.group not in world.stuck and link and link.linked:
                connected = world.now - max(link.began, link.up_last, link.down_last)
                require(connected < STOP_TIMEOUT_S, f"{node.id} has workers of {node.group.place}, which is over")

    def check_report_received(self) -> None:
        """Every connected node knows the end before the coordinator ends."""
        world = self.world
        for link in world.sessions.values():
            node = link.node
            connected = world.now - max(link.began, link.up_last, link.down_last, world.frozen_until)
            if node.alive and link.open and link.linked and connected > STOP_TIMEOUT_S:
                require(node.machine._exit is not None, f"{node.id} does not know the end, and the coordinator ends")

    def reason_not_at_rest(self) -> str:
        """Why the job is not at rest; empty when it is."""
        world, job = self.world, self.world.job
        living = [n for n in world.nodes.values() if n.alive]
        if not living:
            return "" if job is None or job.phase is not Phase.RUNNING else "a job without nodes is running"
        if job is None or job.phase is not Phase.RUNNING:
            return f"{len(living)} nodes live, the job is {'down' if job is None else job.phase.value}"
        if world.finishing:
            return "the workers have not finished"
        if any(n.leaving or n.drained for n in living):
            return "a node is leaving"
        ids = {n.id for n in living}
        if not (job.places.keys() - job.succeeded <= ids == job.members.keys()):
            return f"the job has {sorted(job.members)}, alive are {sorted(ids)}"
        if any(job.membership.quarantine.reason(n.id) for n in living):
            return "a node is in quarantine"
        unhealthy = {n.id for n in living if n.is_unhealthy}
        if any(not n.machine.passed_health_check for n in living):
            return "a node waits to be healthy"
        if (
            not job.succeeded
            and not unhealthy & job.places.keys()
            and len(job.places) != min(job.formation.target, len(ids - unhealthy))
        ):
            return f"{len(job.places)} nodes of {len(living)} are in the round"
        common = len(unhealthy & job.places.keys()) > 1
        if not job.succeeded and unhealthy & job.places.keys() and len(ids - unhealthy) >= world.low and not common:
            return f"{sorted(unhealthy)} are unhealthy and in the round, others are eligible"
        for node in living:
            place = job.places.get(node.id)
            runs = node.group.place if node.group else None
            if runs != place:
                return f"{node.id} runs {runs}, should {place}"
            if node.group and node.machine._state_lost.round == node.group.place.round:
                return f"{node.id} has lost its state, and round {node.group.place.round} goes on"
            if node.group and node.group.outside:
                return f"{node.id}: workers {node.group.outside} are not in the round"
            if node.group and node.group.state not in ("running", "done"):
                return f"{node.id}'s workers are {node.group.state}"
        return ""
