"""A rendezvous over a compare-and-set store under random faults: the nodes are real state machines, the store a model.

The store loses requests, loses replies to successful writes, and returns old states.  Nodes start, die, fail, get no
CPU time, and have clocks that jump.  Then the faults stop (except clock jumps, which must be harmless), and all live
nodes must come to rest: in one round, or as spares of a full one.
"""

from dataclasses import dataclass, field
from random import Random

from ripstop.compat.rendezvous.compare_and_set import (
    Formed,
    MemberSettings,
    Participant,
    RendezvousClosed,
    SharedState,
    Step,
    Write,
    decode,
    encode,
)
from ripstop.model.round import Address
from tests.simulation.rules import require

FAULT_STEPS = 200  # with faults
MAX_CALM_STEPS = 2_500  # until all nodes are at rest
REST_STEPS = 60  # steps without a relevant change: the nodes are at rest
SETTLED_STEPS = 400  # calm steps after which no node is silent because of an earlier fault
HEARTBEAT_INTERVAL_S, SILENCE_TIMEOUT_S, LAST_CALL_S = 1.0, 3.0, 2.0


@dataclass
class Store:
    """All states in order, decoded; the index of a state is its token."""

    states: list[SharedState] = field(default_factory=lambda: [SharedState("job")])

    def read(self, back: int = 0) -> tuple[SharedState, int]:
        """The state of `back` writes ago."""
        token = max(0, len(self.states) - 1 - back)
        return self.states[token], token

    def compare_set(self, blob: bytes, token: int) -> bool:
        if token != len(self.states) - 1:
            return False
        self.states.append(decode(blob, "job"))
        return True


@dataclass
class Actor:
    """One node: its state machine, the last state it read, and its round."""

    member: Participant
    store: Address
    clock: float  # offset to the world's
    state: SharedState
    token: int = 0
    running: int = 0  # round
    closed: bool = False

    @property
    def name(self) -> str:
        return self.member.node


class World:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        least = random.randint(1, 3)
        self.settings = MemberSettings(
            least, random.randint(least, 4), LAST_CALL_S, HEARTBEAT_INTERVAL_S, SILENCE_TIMEOUT_S
        )
        self.now = 0.0
        self.store = Store()
        self.actors: list[Actor] = []
        self.started = 0
        self.calm = 0
        self.formed: dict[int, dict[str, Formed]] = {}  # by round and node
        self.wrote: dict[str, float] = {}  # when each node last wrote
        self.closes = random.random() < 0.2
        self.starved = random.random() < 0.3

    def run(self) -> None:
        for _ in range(self.random.randint(1, 4)):
            self._start_node()
        for _ in range(FAULT_STEPS):
            self._inject_fault()
            self._act(self.random.choice(self.actors) if self.actors else None, faulty=True)
        self._come_to_rest()

    # faults -----------------------------------------------------------------------------------------------------------

    def _start_node(self) -> None:
        self.started += 1
        name = f"n{self.started}"
        clock = self.random.uniform(-1e6, 1e6)
        member = Participant(name, self.settings)
        self.actors.append(Actor(member, Address(name, 1), clock, SharedState("job")))

    def _inject_fault(self) -> None:
        random = self.random
        self.now += random.uniform(0, 0.3)
        if random.random() < 0.02 and len(self.actors) < 6:
            self._start_node()
        if random.random() < 0.01 and self.actors:
            self.actors.remove(random.choice(self.actors))
        if self.starved and random.random() < 0.01:
            self.now += random.uniform(0, 2 * SILENCE_TIMEOUT_S)
        if self.closes and random.random() < 0.002 and self.actors:
            actor = random.choice(self.actors)
            self._execute(actor, actor.member.close(actor.state), faulty=True)
        if random.random() < 0.01:
            self._jump_clock()

    def _jump_clock(self) -> None:
        if self.actors:
            self.random.choice(self.actors).clock += self.random.uniform(-100, 100)

    # nodes ------------------------------------------------------------------------------------------------------------

    def _act(self, actor: Actor | None, *, faulty: bool) -> None:
        """One step of a node, after a read that may fail."""
        if actor is None or actor.closed:
            return
        random = self.random
        if random.random() < 0.7 and not (faulty and random.random() < 0.1):  # else the request was lost
            stale = random.randint(1, 5) if faulty and random.random() < 0.1 else 0
            actor.state, actor.token = self.store.read(stale)
        now = self.now + actor.clock
        if actor.running:
            fails = faulty and random.random() < 0.02
            if fails or actor.member.waiting(actor.state):
                actor.running = 0
                self._offer(actor)
        elif faulty and random.random() < 0.01:
            self._offer(actor)  # it had given up, and joins again
        step = (
            actor.member.beat(actor.state, now) if actor.running else actor.member.join(actor.state, actor.store, now)
        )
        self._execute(actor, step, faulty=faulty)

    def _offer(self, actor: Actor) -> None:
        """A node offers another port each time it joins."""
        actor.store = Address(actor.name, actor.store.port + 1)

    def _execute(self, actor: Actor, step: Step, *, faulty: bool) -> None:
        match step:
            case Write(state):
                if faulty and self.random.random() < 0.1:
                    return  # the request was lost
                before, _ = self.store.read()
                if self.store.compare_set(encode(state), actor.token):
                    self._check(before, self.store.read()[0])
                    self.wrote[actor.name] = self.now
                if not (faulty and self.random.random() < 0.1):  # else the reply was lost
                    actor.state, actor.token = self.store.read()
            case Formed():
                self._check_formed(actor, step)
                actor.running = step.round
            case RendezvousClosed():
                actor.closed = True

    # rules ------------------------------------------------------------------------------------------------------------

    def _check(self, before: SharedState, after: SharedState) -> None:
        """Check a successful write."""
        require(not before.closed, "nothing is written after the end")
        require(after.revision == before.revision + 1, "every write has a revision")
        require(len({c.node for c in after.coming}) == len(after.coming), "a node waits once")
        require(not {c.node for c in after.coming} & set(after.inside()), "a waiting node is in no round")
        require(set(after.beats) == {c.node for c in after.coming} | set(after.inside()), "every node has a heartbeat")
        alive = {actor.name for actor in self.actors}
        if self.calm > SETTLED_STEPS:
            require(not (set(before.beats) - set(after.beats)) & alive, "a node with a heartbeat is not lost")
        if after.round == before.round:
            require(after.seats == before.seats and after.gone >= before.gone, "a round does not change")
            return
        require(after.round == before.round + 1, "numbers grow by one")
        require(len(set(after.seats)) == len(after.seats), "a node has one rank")
        require(self.settings.min_nodes <= len(after.seats) <= self.settings.max_nodes, "min to max nodes")
        for node in set(before.inside()) - {after.writer}:
            require(
                self.now - self.wrote[node] > HEARTBEAT_INTERVAL_S / 2, "a round forms when no node is in the last one"
            )
        for comer in before.coming:
            stays = before.round and comer.after == before.round and comer.node in after.seats
            rank = before.seats.index(comer.node) if stays else len(after.seats)
            require(rank >= len(after.seats) or after.seats[rank] == comer.node, "survivors keep their ranks")

    def _check_formed(self, actor: Actor, formed: Formed) -> None:
        others = self.formed.setdefault(formed.round, {})
        require(actor.name not in others, "a node enters a round once")
        for other in others.values():
            require((other.size, other.store) == (formed.size, formed.store), "all in a round agree")
            require(other.rank != formed.rank, "a rank belongs to one node")
        require(0 <= formed.rank < formed.size, "ranks are 0 to n-1")
        require(formed.rank != 0 or formed.store == actor.store, "rank 0 serves the store it offered")
        require(all(actor.name not in of for number, of in self.formed.items() if number > formed.round), "rounds grow")
        others[actor.name] = formed

    # rest -------------------------------------------------------------------------------------------------------------

    def _come_to_rest(self) -> None:
        quiet, last, turns = 0, None, list[Actor]()
        while quiet < REST_STEPS or self.calm <= SETTLED_STEPS:
            self.calm += 1
            require(self.calm < MAX_CALM_STEPS, f"the nodes do not come to rest: {last}")
            self.now += self.random.uniform(0, 0.1)
            if self.calm % 100 == 0:  # rare enough: one jump does not look like silence, three at once do
                self._jump_clock()
            turns = turns or self.random.sample(self.actors, len(self.actors))
            self._act(turns.pop() if turns else None, faulty=False)
            seen = self._situation()
            quiet, last = (quiet + 1 if seen == last and self._is_rest() else 0), seen

    def _situation(self) -> tuple[object, ...]:
        state, _ = self.store.read()
        return state.round, state.gone, len(state.coming), state.closed, tuple(a.running for a in self.actors)

    def _is_rest(self) -> bool:
        state, _ = self.store.read()
        live = len(self.actors)
        if state.closed or not live:
            return all(actor.closed or actor.running for actor in self.actors)
        inside = [actor for actor in self.actors if actor.running == state.round and actor.name in state.inside()]
        if live >= self.settings.min_nodes:
            full = len(inside) == self.settings.max_nodes
            return len(inside) == len(state.inside()) and (len(inside) == live or full)
        return len(inside) + len(state.coming) == live  # too few for a round: nodes outside the last one wait
