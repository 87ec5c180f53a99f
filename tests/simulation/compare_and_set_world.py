"""A rendezvous over a compare-and-set blob under random faults: the nodes are real machines, the store is a model.

The store loses requests, loses the answers of writes that it has made, and gives old states to readers.  Nodes come,
die, fail, are starved, and have clocks that jump.  Then the faults end (clocks still jump, for that is to be harmless),
and all that live must come to rest: in one round, or as spares of a full one.
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
from tests.simulation.rules import demand

ACTS = 200  # while faults happen
CALM = 2_500  # at most, until all is at rest
QUIET = 60  # acts without a change that matters are a rest
SETTLED = 400  # calm acts after which nobody's silence is of before
BEAT, SILENCE, LAST_CALL = 1.0, 3.0, 2.0


@dataclass
class Store:
    """All states there ever were, as they are read from their blobs; the number of a state is its token."""

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
    """One node: its machine, what it has read, and whether it is in a round."""

    member: Participant
    store: Address
    clock: float  # beside the world's
    state: SharedState
    token: int = 0
    running: int = 0  # round
    shut: bool = False

    @property
    def name(self) -> str:
        return self.member.node


class World:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        least = random.randint(1, 3)
        self.settings = MemberSettings(least, random.randint(least, 4), LAST_CALL, BEAT, SILENCE)
        self.now = 0.0
        self.store = Store()
        self.actors: list[Actor] = []
        self.born = 0
        self.calm = 0
        self.formed: dict[int, dict[str, Formed]] = {}  # what each node was told of each round
        self.wrote: dict[str, float] = {}  # when each node last did
        self.closes = random.random() < 0.2
        self.starved = random.random() < 0.3

    def run(self) -> None:
        for _ in range(self.random.randint(1, 4)):
            self._bear()
        for _ in range(ACTS):
            self._hurt()
            self._act(self.random.choice(self.actors) if self.actors else None, faulty=True)
        self._come_to_rest()

    # faults -----------------------------------------------------------------------------------------------------------

    def _bear(self) -> None:
        self.born += 1
        name = f"n{self.born}"
        clock = self.random.uniform(-1e6, 1e6)
        member = Participant(name, self.settings)
        self.actors.append(Actor(member, Address(name, 1), clock, SharedState("job")))

    def _hurt(self) -> None:
        random = self.random
        self.now += random.uniform(0, 0.3)
        if random.random() < 0.02 and len(self.actors) < 6:
            self._bear()
        if random.random() < 0.01 and self.actors:
            self.actors.remove(random.choice(self.actors))
        if self.starved and random.random() < 0.01:
            self.now += random.uniform(0, 2 * SILENCE)
        if self.closes and random.random() < 0.002 and self.actors:
            actor = random.choice(self.actors)
            self._carry_out(actor, actor.member.close(actor.state), faulty=True)
        if random.random() < 0.01:
            self._jump()

    def _jump(self) -> None:
        if self.actors:
            self.random.choice(self.actors).clock += self.random.uniform(-100, 100)

    # nodes ------------------------------------------------------------------------------------------------------------

    def _act(self, actor: Actor | None, *, faulty: bool) -> None:
        """One node's turn: it reads or has read, and takes one step."""
        if actor is None or actor.shut:
            return
        random = self.random
        if random.random() < 0.7 and not (faulty and random.random() < 0.1):  # else it lost the request
            stale = random.randint(1, 5) if faulty and random.random() < 0.1 else 0
            actor.state, actor.token = self.store.read(stale)
        now = self.now + actor.clock
        if actor.running:
            fails = faulty and random.random() < 0.02
            if fails or actor.member.waiting(actor.state):
                actor.running = 0
                self._offer(actor)
        elif faulty and random.random() < 0.01:
            self._offer(actor)  # it had given up, and comes again
        step = (
            actor.member.beat(actor.state, now) if actor.running else actor.member.join(actor.state, actor.store, now)
        )
        self._carry_out(actor, step, faulty=faulty)

    def _offer(self, actor: Actor) -> None:
        """Every time it comes, it offers another port."""
        actor.store = Address(actor.name, actor.store.port + 1)

    def _carry_out(self, actor: Actor, step: Step, *, faulty: bool) -> None:
        match step:
            case Write(state):
                if faulty and self.random.random() < 0.1:
                    return  # the request was lost
                before, _ = self.store.read()
                if self.store.compare_set(encode(state), actor.token):
                    self._check(before, self.store.read()[0])
                    self.wrote[actor.name] = self.now
                if not (faulty and self.random.random() < 0.1):  # else the answer was lost
                    actor.state, actor.token = self.store.read()
            case Formed():
                self._check_formed(actor, step)
                actor.running = step.round
            case RendezvousClosed():
                actor.shut = True

    # rules ------------------------------------------------------------------------------------------------------------

    def _check(self, before: SharedState, after: SharedState) -> None:
        """A write that the store has made."""
        demand(not before.closed, "nothing is written after the end")
        demand(after.revision == before.revision + 1, "every write has a revision")
        demand(len({c.node for c in after.coming}) == len(after.coming), "a node comes once")
        demand(not {c.node for c in after.coming} & set(after.inside()), "who waits is in no round")
        demand(set(after.beats) == {c.node for c in after.coming} | set(after.inside()), "who is there beats")
        alive = {actor.name for actor in self.actors}
        if self.calm > SETTLED:
            demand(not (set(before.beats) - set(after.beats)) & alive, "who beats is not lost")
        if after.round == before.round:
            demand(after.seats == before.seats and after.gone >= before.gone, "a round does not change")
            return
        demand(after.round == before.round + 1, "numbers grow by one")
        demand(len(set(after.seats)) == len(after.seats), "a node has one rank")
        demand(self.settings.min_nodes <= len(after.seats) <= self.settings.max_nodes, "min to max nodes")
        for node in set(before.inside()) - {after.writer}:
            demand(self.now - self.wrote[node] > BEAT / 2, "a round forms when nobody is in the last one")
        for comer in before.coming:
            stays = before.round and comer.after == before.round and comer.node in after.seats
            rank = before.seats.index(comer.node) if stays else len(after.seats)
            demand(rank >= len(after.seats) or after.seats[rank] == comer.node, "survivors keep their ranks")

    def _check_formed(self, actor: Actor, formed: Formed) -> None:
        others = self.formed.setdefault(formed.round, {})
        demand(actor.name not in others, "a node enters a round once")
        for other in others.values():
            demand((other.size, other.store) == (formed.size, formed.store), "all in a round agree")
            demand(other.rank != formed.rank, "a rank is one node's")
        demand(0 <= formed.rank < formed.size, "ranks are 0 to n-1")
        demand(formed.rank != 0 or formed.store == actor.store, "rank 0 serves the store it offered")
        demand(all(actor.name not in of for number, of in self.formed.items() if number > formed.round), "rounds grow")
        others[actor.name] = formed

    # rest -------------------------------------------------------------------------------------------------------------

    def _come_to_rest(self) -> None:
        quiet, last, turns = 0, None, list[Actor]()
        while quiet < QUIET or self.calm <= SETTLED:
            self.calm += 1
            demand(self.calm < CALM, f"all come to rest: {last}")
            self.now += self.random.uniform(0, 0.1)
            if self.calm % 100 == 0:  # seldom enough: one jump is not taken for silence, three at once are
                self._jump()
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
            return all(actor.shut or actor.running for actor in self.actors)
        inside = [actor for actor in self.actors if actor.running == state.round and actor.name in state.inside()]
        if live >= self.settings.min_nodes:
            full = len(inside) == self.settings.max_nodes
            return len(inside) == len(state.inside()) and (len(inside) == live or full)
        return len(inside) + len(state.coming) == live  # too few for a round: whoever has left the last one waits
