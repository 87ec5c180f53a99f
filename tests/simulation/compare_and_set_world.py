"""A compare-and-set rendezvous under random faults: the participants are real, the store is a model.

The store loses requests, loses the replies to writes that it made, and returns old states.  Nodes join, die, fail, are
starved, and have clocks that jump.  Then the faults end, except for clock jumps, which must be harmless.  All live
nodes must settle: in one round, or as spares of a full one.

`python -m tests.simulation.compare_and_set_world SEED` runs one schedule.
"""

import sys
from dataclasses import dataclass, field
from random import Random

from ripstop.compat.rendezvous.compare_and_set import (
    CompareAndSetParticipant,
    CompareAndSetState,
    Formed,
    ParticipantSettings,
    RendezvousClosed,
    Step,
    StoreAddress,
    Write,
    decode_compare_and_set_state,
    encode_compare_and_set_state,
)
from tests.simulation.rules import Violation, require

FAULTY_STEPS = 200
MAX_CALM_STEPS = 2_500  # until all nodes have settled
QUIET_STEPS = 60  # without a change: the nodes have settled
RECOVERY_STEPS = 400  # calm steps after which faults have no effect any more
HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT, LAST_CALL = 1.0, 3.0, 2.0


@dataclass
class Store:
    """All states that were ever stored, as `decode_compare_and_set_state` reads them; a state's token is its index."""

    states: list[CompareAndSetState] = field(default_factory=lambda: [CompareAndSetState("job")])

    def read(self, back: int = 0) -> tuple[CompareAndSetState, int]:
        """The state before the last `back` writes."""
        token = max(0, len(self.states) - 1 - back)
        return self.states[token], token

    def compare_set(self, value: bytes, token: int) -> bool:
        if token != len(self.states) - 1:
            return False
        self.states.append(decode_compare_and_set_state(value, "job"))
        return True


@dataclass
class SimulatedNode:
    """A participant, the state that it has read, and the round that it runs."""

    member: CompareAndSetParticipant
    store: StoreAddress
    clock: float  # relative to the world's
    state: CompareAndSetState
    token: int = 0
    running: int = 0  # round number
    shut: bool = False

    @property
    def name(self) -> str:
        return self.member.node


class CompareAndSetWorld:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        least = random.randint(1, 3)
        self.settings = ParticipantSettings(
            least, random.randint(least, 4), LAST_CALL, HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT
        )
        self.now = 0.0
        self.store = Store()
        self.nodes: list[SimulatedNode] = []
        self.started = 0
        self.calm = 0
        self.formed: dict[int, dict[str, Formed]] = {}  # by round and node
        self.wrote: dict[str, float] = {}  # by node: time of its last write
        self.closes = random.random() < 0.2
        self.starved = random.random() < 0.3

    def run(self) -> None:
        for _ in range(self.random.randint(1, 4)):
            self._start_node()
        for _ in range(FAULTY_STEPS):
            self._inject_faults()
            self._act(self.random.choice(self.nodes) if self.nodes else None, faulty=True)
        self._settle()

    # faults -----------------------------------------------------------------------------------------------------------

    def _start_node(self) -> None:
        self.started += 1
        name = f"n{self.started}"
        clock = self.random.uniform(-1e6, 1e6)
        member = CompareAndSetParticipant(name, self.settings)
        self.nodes.append(SimulatedNode(member, StoreAddress(name, 1), clock, CompareAndSetState("job")))

    def _inject_faults(self) -> None:
        random = self.random
        self.now += random.uniform(0, 0.3)
        if random.random() < 0.02 and len(self.nodes) < 6:
            self._start_node()
        if random.random() < 0.01 and self.nodes:
            self.nodes.remove(random.choice(self.nodes))
        if self.starved and random.random() < 0.01:
            self.now += random.uniform(0, 2 * HEARTBEAT_TIMEOUT)
        if self.closes and random.random() < 0.002 and self.nodes:
            node = random.choice(self.nodes)
            self._carry_out(node, node.member.close(node.state), faulty=True)
        if random.random() < 0.01:
            self._jump()

    def _jump(self) -> None:
        if self.nodes:
            self.random.choice(self.nodes).clock += self.random.uniform(-100, 100)

    # nodes ------------------------------------------------------------------------------------------------------------

    def _act(self, node: SimulatedNode | None, *, faulty: bool) -> None:
        """One node reads the state, or uses the one it has, and takes one step."""
        if node is None or node.shut:
            return
        random = self.random
        if random.random() < 0.7 and not (faulty and random.random() < 0.1):  # else the read failed
            stale = random.randint(1, 5) if faulty and random.random() < 0.1 else 0
            node.state, node.token = self.store.read(stale)
        now = self.now + node.clock
        if node.running:
            fails = faulty and random.random() < 0.02
            if fails or node.member.waiting(node.state):
                node.running = 0
                self._change_port(node)
        elif faulty and random.random() < 0.01:
            self._change_port(node)  # it timed out, and joins again
        step = node.member.heartbeat(node.state, now) if node.running else node.member.join(node.state, node.store, now)
        self._carry_out(node, step, faulty=faulty)

    def _change_port(self, node: SimulatedNode) -> None:
        """A node listens on another port for every round."""
        node.store = StoreAddress(node.name, node.store.port + 1)

    def _carry_out(self, node: SimulatedNode, step: Step, *, faulty: bool) -> None:
        match step:
            case Write(state):
                if faulty and self.random.random() < 0.1:
                    return  # the request is lost
                before, _ = self.store.read()
                if self.store.compare_set(encode_compare_and_set_state(state), node.token):
                    self._check(before, self.store.read()[0])
                    self.wrote[node.name] = self.now
                if not (faulty and self.random.random() < 0.1):  # else the reply is lost
                    node.state, node.token = self.store.read()
            case Formed():
                self._check_formed(node, step)
                node.running = step.round
            case RendezvousClosed():
                node.shut = True

    # rules ------------------------------------------------------------------------------------------------------------

    def _check(self, before: CompareAndSetState, after: CompareAndSetState) -> None:
        """Check a write that the store has made."""
        require(not before.closed, "nothing is written after closing")
        require(after.revision == before.revision + 1, "every write increments the revision")
        require(len({c.node for c in after.candidates}) == len(after.candidates), "a node is a candidate once")
        require(not {c.node for c in after.candidates} & set(after.active()), "a candidate is in no round")
        require(
            set(after.heartbeats) == {c.node for c in after.candidates} | set(after.active()),
            "members and candidates have heartbeats",
        )
        alive = {node.name for node in self.nodes}
        if self.calm > RECOVERY_STEPS:
            require(
                not (set(before.heartbeats) - set(after.heartbeats)) & alive,
                "a node that writes heartbeats is not removed",
            )
        if after.round == before.round:
            require(after.members == before.members and after.departed >= before.departed, "a round does not change")
            return
        require(after.round == before.round + 1, "round numbers grow by one")
        require(len(set(after.members)) == len(after.members), "a node has one rank")
        require(self.settings.min_nodes <= len(after.members) <= self.settings.max_nodes, "min to max nodes")
        for node in set(before.active()) - {after.writer}:
            require(
                self.now - self.wrote[node] > HEARTBEAT_INTERVAL / 2,
                "a round forms when the last one has no active member",
            )
        for candidate in before.candidates:
            stays = before.round and candidate.last_round == before.round and candidate.node in after.members
            rank = before.members.index(candidate.node) if stays else len(after.members)
            require(rank >= len(after.members) or after.members[rank] == candidate.node, "survivors keep their ranks")

    def _check_formed(self, node: SimulatedNode, formed: Formed) -> None:
        others = self.formed.setdefault(formed.round, {})
        require(node.name not in others, "a node enters a round once")
        for other in others.values():
            require((other.size, other.store) == (formed.size, formed.store), "all in a round agree")
            require(other.rank != formed.rank, "two nodes do not share a rank")
        require(0 <= formed.rank < formed.size, "ranks are 0 to n-1")
        require(formed.rank != 0 or formed.store == node.store, "rank 0 serves the store that the round names")
        require(all(node.name not in of for number, of in self.formed.items() if number > formed.round), "rounds grow")
        others[node.name] = formed

    # settling
    # ----------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        quiet, last, turns = 0, None, list[SimulatedNode]()
        while quiet < QUIET_STEPS or self.calm <= RECOVERY_STEPS:
            self.calm += 1
            require(self.calm < MAX_CALM_STEPS, f"all nodes settle: {last}")
            self.now += self.random.uniform(0, 0.1)
            if self.calm % 100 == 0:  # rarely: one jump does not count as silence, three at once do
                self._jump()
            turns = turns or self.random.sample(self.nodes, len(self.nodes))
            self._act(turns.pop() if turns else None, faulty=False)
            seen = self._situation()
            quiet, last = (quiet + 1 if seen == last and self._has_settled() else 0), seen

    def _situation(self) -> tuple[object, ...]:
        state, _ = self.store.read()
        return state.round, state.departed, len(state.candidates), state.closed, tuple(a.running for a in self.nodes)

    def _has_settled(self) -> bool:
        state, _ = self.store.read()
        live = len(self.nodes)
        if state.closed or not live:
            return all(node.shut or node.running for node in self.nodes)
        inside = [node for node in self.nodes if node.running == state.round and node.name in state.active()]
        if live >= self.settings.min_nodes:
            full = len(inside) == self.settings.max_nodes
            return len(inside) == len(state.active()) and (len(inside) == live or full)
        return len(inside) + len(state.candidates) == live  # too few for a round: the nodes that left the last one wait


def check(seed: int) -> None:
    """Run one schedule; a violation has the command that runs it again."""
    try:
        CompareAndSetWorld(seed).run()
    except Exception as error:
        raise Violation(f"schedule {seed}: {error}\nto run it again: python -m {__name__} {seed}") from error


if __name__ == "__main__":
    CompareAndSetWorld(int(sys.argv[1])).run()
