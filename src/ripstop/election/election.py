"""Leader election through etcd: the decisions of one agent.  The leader hosts the coordinator.  Pure.

One etcd key names the leader.  An agent creates it only if it does not exist, bound to an etcd lease of its own.  The
coordinator's state is soft, so this key is all that etcd stores of a running job.  Rules:

1.  An agent follows the leader that the key names, also if that is itself.  It campaigns if there is no key.
2.  Leadership ends, by the leader's own clock, before the lease can end in etcd.  The time counts from the moment a
    renewal was requested, not from its reply, and is shorter than the lease by `LEASE_MARGIN`.  So an old leader that
    was slow, frozen or disconnected decides nothing after the next election.
3.  A reply that arrives after that time is ignored: an agent that learns too late that it was elected is not leader.
4.  A key that ripstop did not write, or wrote for another job, is neither followed nor overwritten.
"""

from msgspec import Struct

from ripstop.model.round import Address

LEASE_MARGIN = 0.1  # fraction of a lease: for clocks of different speed, and the time to step down


class Leader(Struct, frozen=True):
    """The elected agent: the address of its coordinator, and the etcd revision of its election."""

    address: Address
    node: str
    revision: int


# events ---------------------------------------------------------------------------------------------------------------


class NoLeader(Struct, frozen=True):
    """The key does not exist."""


class LeaderKnown(Struct, frozen=True):
    """The key names this leader."""

    leader: Leader


class Elected(Struct, frozen=True):
    """This agent is the leader, with a lease of `ttl` seconds."""

    leader: Leader
    requested_at: float
    ttl: float


class Renewed(Struct, frozen=True):
    """etcd renewed the lease of this agent."""

    requested_at: float
    ttl: float


class Expired(Struct, frozen=True):
    """etcd has no such lease any more."""


class Tick(Struct, frozen=True):
    """A deadline has passed."""


Event = NoLeader | LeaderKnown | Elected | Renewed | Expired | Tick


# commands -------------------------------------------------------------------------------------------------------------


class Campaign(Struct, frozen=True):
    """Try to create the key."""


class Lead(Struct, frozen=True):
    """Start the coordinator."""

    leader: Leader


class Follow(Struct, frozen=True):
    """Connect to this leader's coordinator instead of any other."""

    leader: Leader


class StepDown(Struct, frozen=True):
    """Stop the coordinator at once."""

    why: str


Command = Campaign | Lead | Follow | StepDown


class Election:
    """The state of one agent in the election; see the rules above."""

    def __init__(self) -> None:
        self._followed = 0  # the revision of the leader that is followed; 0: none
        self._own = 0  # the revision of this agent's leadership; 0: not leader
        self._until = 0.0  # the end of this agent's leadership, unless renewed

    def on(self, event: Event, now: float) -> list[Command]:
        """Handle one event; execute the commands in order."""
        out = self._step_down("its lease was not renewed in time") if self._own and now >= self._until else []
        match event:
            case NoLeader():
                self._followed = 0
                return [*out, *self._step_down("its key was deleted from etcd"), Campaign()]
            case LeaderKnown(leader) if leader.revision != self._own:
                return [*out, *self._step_down(f"node {leader.node} was elected"), *self._follow(leader)]
            case Elected(leader, requested_at, ttl):
                self._until = _election_valid_until(requested_at, ttl)
                if now >= self._until:
                    return [*out, StepDown("it was elected too late for its lease")]  # rule 3
                self._own = leader.revision
                return [*out, Lead(leader), *self._follow(leader)]
            case Renewed(requested_at, ttl) if self._own:
                self._until = max(self._until, _election_valid_until(requested_at, ttl))
            case Expired():
                return [*out, *self._step_down("its lease has ended in etcd")]
        return out

    def is_leader(self, now: float) -> bool:
        """Whether this agent's coordinator may decide."""
        return bool(self._own) and now < self._until

    def deadline(self) -> float | None:
        """The time of the next `Tick`, if one is needed."""
        return self._until if self._own else None

    def _follow(self, leader: Leader) -> list[Command]:
        if leader.revision == self._followed:
            return []
        self._followed = leader.revision
        return [Follow(leader)]

    def _step_down(self, why: str) -> list[Command]:
        if not self._own:
            return []
        self._own = 0
        return [StepDown(why)]


def _election_valid_until(requested_at: float, ttl: float) -> float:
    return requested_at + ttl * (1 - LEASE_MARGIN)  # rule 2
