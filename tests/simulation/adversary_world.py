"""Safety of succession against an adversary: the real voters and candidates, and no clock or network that they trust.

Deterministic: a seed is a schedule.  `succession_world.py` keeps the rules of connections and clocks, so it rarely
comes to the states that the rules of voters and candidates exclude.  Here nothing protects them.  The adversary keeps
every message for as long as it likes, and delivers it to its receiver at any time and as often as it likes, also after
the receiver has turned to another candidate.  Clocks of voters and candidates have nothing to do with each other.
Processes end, and nodes leave.  The adversary prefers the messages of some nodes for a while, so that leaders are
elected and rounds are committed, and then prefers others.  The job has run before: an electorate is confirmed.  Rules,
which use no clock:

1.  An epoch has one coordinator.
2.  A coordinator knows every round that coordinators of lower epochs announce, before or after its election.
3.  The epochs of announced rounds grow with their numbers, and no number is announced twice.
4.  A node that has left is no voter any more.
5.  A coordinator that knows a newer one is not the leader.
6.  A coordinator begins the change to a round after a majority has confirmed, in its epoch, the electorate before it.
7.  The voter of a candidate's agent knows every electorate that the candidate knows.

`python -m tests.simulation.adversary_world SEED` prints one schedule as a transcript.
"""

import sys
from collections.abc import Callable
from random import Random
from typing import Any

from ripstop.election.candidate import Announce, Candidate, CandidateCommand, Lead, SendTo, StepDown
from ripstop.election.voter import Accept, Reply, Voter, VoterCommand
from ripstop.model.electorate import Electorate
from ripstop.model.round import Address
from ripstop.protocol.messages import Follow, LeaderElected, Promise, Redirect, Renew, Renewed, RequestPromise
from tests.simulation.rules import require
from tests.simulation.succession_world import check_world

LEASE_S = 2.0


class Node:
    """One agent, with two clocks."""

    def __init__(self, name: str, electorate: Electorate) -> None:
        self.name = name
        self.voter = Voter(electorate, LEASE_S)
        self.voter.promised, self.voter.promised_to = electorate.epoch, "the first coordinator"
        self.candidate = Candidate(name, self.voter, LEASE_S)
        self.voter_now = self.candidate_now = 0.0
        self.highest = 0  # round
        self.led = electorate  # the newest electorate of its leadership


class AdversaryWorld:
    """One schedule."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.trace = trace
        self.random = random = Random(seed)
        names = [f"n{i}" for i in range(random.randint(3, 6))]
        first = Electorate(1, 1, 1, tuple(random.sample(names, random.randint(2, len(names)))))
        self.nodes = {name: Node(name, first) for name in names}
        self.candidates = names[: random.randint(2, 4)]
        self.pool: list[tuple[str, str, Any]] = []  # from, to, message
        self.coordinators: dict[int, str] = {}  # by epoch
        self.elected: list[tuple[int, int]] = []  # the epoch, and the newest round that its coordinator knew
        self.announced: dict[int, int] = {1: 1}  # round: epoch
        self.confirmed: dict[tuple[int, int], set[str]] = {}  # by version: voters that have confirmed the electorate

    def run(self) -> None:
        """Run the schedule; raises `Violation`."""
        for _ in range(self.random.randint(6, 24)):
            self._run_phase()
            if len(self.nodes) < 2:
                return

    def note(self, text: str) -> None:
        if self.trace:
            self.trace(text)

    def _run_phase(self) -> None:
        """The adversary delivers messages of one group.  Most of the group look for a coordinator at one candidate."""
        random = self.random
        group = set(random.sample([*self.nodes], random.randint((len(self.nodes) + 1) // 2, len(self.nodes))))
        self.note(f"*** {sorted(group)}")
        here = [name for name in self.candidates if name in group]
        if here and random.random() < 0.7:
            target = random.choice(here)
            for name in sorted(group):
                if random.random() < 0.8:
                    self._connect(self.nodes[name], target)
        for _ in range(random.randint(10, 80)):
            chance = random.random()
            if chance < 0.86:
                self._deliver(group if random.random() < 0.95 else set(self.nodes))
            elif chance < 0.98:
                leaders = [each for each in self.nodes.values() if each.candidate.is_leader]
                node = random.choice(leaders or [*self.nodes.values()])
                if leaders and chance < 0.92:
                    self._form(node)
                    if random.random() < 0.3:
                        return  # the change is pending
                    continue
                node.candidate_now += random.choice((*[LEASE_S / 12] * 9, 2 * LEASE_S))
                self._lead(node, node.candidate.on_tick(node.candidate_now))
            else:
                self._disturb(random.choice([*self.nodes.values()]))
            if len(self.nodes) < 2:
                return

    def _connect(self, node: Node, target: str) -> None:
        if self.random.random() < 0.8:
            node.voter_now += 2 * LEASE_S  # its promise binds it no longer
        node.voter.on_disconnected()
        self._lead(node, node.candidate.on_leader(None, node.candidate_now))
        self._send(node.name, target, node.voter.follow())

    def _disturb(self, node: Node) -> None:
        match self.random.choice(("connect", "disconnect", "gone", "leave", "end", "tick")):
            case "connect":
                self._connect(node, self.random.choice(self.candidates))
            case "disconnect":
                node.candidate.on_disconnected(self.random.choice(sorted(self.nodes)))
            case "gone":
                node.voter.on_gone(node.voter.promised_to)
            case "leave" if self.random.random() < 0.3:
                self.note(f"*** {node.name} leaves")
                del self.nodes[node.name]
                leader = self.nodes.get(node.voter.promised_to)  # it has promised nobody a higher epoch
                if leader and leader.candidate.is_leader and leader.candidate.epoch == node.voter.promised:
                    self._lead(leader, leader.candidate.on_left(node.name, leader.candidate_now))
                    voters = leader.candidate.electorate.voters
                    is_voter = node.name in voters and len(voters) > 1
                    require(not is_voter, f"{node.name} has left and is a voter: {voters}")
            case "end" if self.random.random() < 0.2:
                self.note(f"*** {node.name} ends")
                del self.nodes[node.name]
            case "tick":
                self._vote(node, self.random.choice(self.candidates), node.voter.on_tick(node.voter_now))

    # messages ---------------------------------------------------------------------------------------------------------

    def _send(self, sender: str, receiver: str, message: Any) -> None:
        self.pool.append((sender, receiver, message))

    def _deliver(self, group: set[str]) -> None:
        """A message between two of these; the newest are likelier."""
        pool, random = self.pool, self.random
        for _ in range(min(8, len(pool))):
            index = int(len(pool) * random.random() ** 0.5)
            sender, receiver, message = pool[index]
            if receiver not in self.nodes:
                pool[index] = pool[-1]
                pool.pop()
                if not pool:
                    return
            elif sender in group and receiver in group:
                if random.random() < 0.85:  # the others arrive again
                    pool[index] = pool[-1]
                    pool.pop()
                self._arrive(sender, self.nodes[receiver], message)
                return

    def _arrive(self, sender: str, node: Node, message: Any) -> None:
        if self.trace:
            self.note(f"{sender} → {node.name}: {message}")
        match message:
            case Follow() | Promise() | Renewed():
                node.candidate_now += 0.001
                self._lead(node, node.candidate.on_message(sender, message, node.candidate_now))
            case RequestPromise() | Renew() | LeaderElected():
                commands = node.voter.on(message, node.voter_now)
                if isinstance(message, Renew) and commands:
                    self.confirmed.setdefault(node.voter.electorate.version, set()).add(node.name)
                self._vote(node, sender, commands)
            case Redirect(address):
                self._connect(node, address.host)

    def _vote(self, node: Node, candidate: str, commands: list[VoterCommand]) -> None:
        for command in commands:
            match command:
                case Reply(message):
                    self._send(node.name, candidate, message)
                case Accept():
                    address = None if candidate == node.name else Address(candidate, 1)
                    self._lead(node, node.candidate.on_leader(address, node.candidate_now))

    # leaders ----------------------------------------------------------------------------------------------------------

    def _form(self, node: Node) -> None:
        candidate = node.candidate
        contacts = [name for name in candidate._contacts if name in self.nodes]
        for _ in range(self.random.choice((1, 1, 2)) if contacts else 0):
            if not candidate.holds_leadership(node.candidate_now):
                return
            node.highest += 1
            members = self.random.sample(contacts, self.random.randint(1, len(contacts)))
            self.note(f"*** {node.name} forms round {node.highest} of {members}")
            self._lead(node, candidate.propose(node.highest, members, node.candidate_now))

    def _lead(self, node: Node, commands: list[CandidateCommand]) -> None:
        epoch = node.candidate.epoch
        for command in commands:
            if self.trace and not isinstance(command, SendTo):
                self.note(f"{node.name} (epoch {epoch}): {command}")
            match command:
                case SendTo(receiver, message):
                    if isinstance(message, LeaderElected):
                        holder = self.coordinators.setdefault(message.epoch, node.name)
                        require(holder == node.name, f"{holder} and {node.name} have epoch {message.epoch}")
                    self._send(node.name, receiver, message)
                case Lead(epoch, round):
                    node.highest = round
                    self.elected.append((epoch, round))
                    lost = [r for r, of in self.announced.items() if of < epoch and r > round]
                    require(not lost, f"{node.name} leads epoch {epoch} from round {round} and does not know {lost}")
                case Announce(round):
                    self._check_round(epoch, round)
                case StepDown():
                    pass
        if self.random.random() < 0.5 and any(isinstance(command, Lead) for command in commands):
            self._form(node)
        self._check_change(node)
        known = node.candidate.electorate.epoch
        require(not node.candidate.is_leader or known == node.candidate.epoch, f"{node.name} leads, and knows {known}")

    def _check_change(self, node: Node) -> None:
        before, after = node.led, node.candidate.electorate
        if after is before:
            return
        node.led = after
        own = node.voter.electorate.version
        require(own >= after.version, f"the voter of {node.name} knows {own}, its candidate {after.version}")
        if node.candidate.is_leader and after.round > before.round and after.epoch == before.epoch:
            confirmed = self.confirmed.get(before.version, set())
            require(before.has_majority(confirmed), f"{node.name} replaces {before}, which only {confirmed} confirmed")

    def _check_round(self, epoch: int, round: int) -> None:
        require(
            round not in self.announced, f"round {round} is announced in epochs {self.announced.get(round)}, {epoch}"
        )
        unknown = [of for of, newest in self.elected if of > epoch and newest < round]
        require(not unknown, f"the coordinators of the epochs {unknown} do not know round {round} of epoch {epoch}")
        for other, of in self.announced.items():
            require(
                (of <= epoch) if other < round else (of >= epoch), f"{epoch}:{round} and {of}:{other} are announced"
            )
        self.announced[round] = epoch


def check(seed: int) -> None:
    """Run one schedule; a violation has the transcript and the command to print all of it."""
    check_world(AdversaryWorld, seed, __name__)


if __name__ == "__main__":
    AdversaryWorld(int(sys.argv[1]), print).run()
