"""Who the coordinator is, where etcd keeps that: the decisions of one agent that takes part in its election.  Pure.

A key says who it is.  It is made only where there is none, and goes with the etcd lease of the agent that made it.  The
coordinator's state is soft (rule 8 of `machine.py`), so that key is all that etcd holds of a running job.  Rules:

1.  An agent follows whoever the key names, itself included, and campaigns when there is no key.
2.  Holding the office ends, by the holder's own clock, before the lease can end in etcd: it counts from the moment a
    renewal was asked for, not from its answer, and is shorter than the lease by `MARGIN`.  So nobody decides any more
    when the next is elected, however slow, frozen or cut off the last one was.
3.  An answer that comes too late to be of use is worth nothing: who wins after its time has not won.
4.  A key that ripstop did not write, or wrote for another job, is never followed and never overwritten.
"""

import json

from msgspec import Struct

from ripstop.election.stored_record import foreign, opened
from ripstop.model.round import Address

VERSION = 1
MARGIN = 0.1  # of a lease: clocks that run at different speeds, and the time it takes to stop
MAX_VALUE = 4096  # characters


class Leader(Struct, frozen=True):
    """A coordinator in office: where it is, and the revision of etcd at which it was elected."""

    address: Address
    node: str
    revision: int


# events ---------------------------------------------------------------------------------------------------------------


class NoLeader(Struct, frozen=True):
    """There is no coordinator."""


class LeaderKnown(Struct, frozen=True):
    """There is one."""

    seat: Leader


class Elected(Struct, frozen=True):
    """It is this agent; its lease of `ttl` seconds was asked for at `asked`."""

    seat: Leader
    asked: float
    ttl: float


class Renewed(Struct, frozen=True):
    """The lease counts anew from `asked`."""

    asked: float
    ttl: float


class Expired(Struct, frozen=True):
    """etcd knows of no such lease."""


class Tick(Struct, frozen=True):
    """A deadline has passed."""


Event = NoLeader | LeaderKnown | Elected | Renewed | Expired | Tick


# commands -------------------------------------------------------------------------------------------------------------


class Campaign(Struct, frozen=True):
    """Try to be elected."""


class Lead(Struct, frozen=True):
    """Begin to decide."""

    seat: Leader


class Follow(Struct, frozen=True):
    """Link to this coordinator, and to no other."""

    seat: Leader


class StepDown(Struct, frozen=True):
    """Decide nothing more, at once."""

    why: str


Command = Campaign | Lead | Follow | StepDown


class Election:
    """What one agent knows of the election; see the rules above."""

    def __init__(self) -> None:
        self._followed = 0  # revision of the seat that is followed
        self._own = 0  # revision of the seat that is held; 0: none
        self._until = 0.0  # the end of holding it, unless renewed

    def on(self, event: Event, now: float) -> list[Command]:
        """Take one event; the commands are to be executed in order."""
        out = self._step_down("its lease was not renewed in time") if self._own and now >= self._until else []
        match event:
            case NoLeader():
                self._followed = 0
                return [*out, *self._step_down("its key is gone from etcd"), Campaign()]
            case LeaderKnown(seat) if seat.revision != self._own:
                return [*out, *self._step_down(f"node {seat.node} was elected"), *self._follow(seat)]
            case Elected(seat, asked, ttl):
                self._until = asked + ttl * (1 - MARGIN)
                if now >= self._until:
                    return [*out, StepDown("it was elected too late for its lease")]  # rule 3
                self._own = seat.revision
                return [*out, Lead(seat), *self._follow(seat)]
            case Renewed(asked, ttl) if self._own:
                self._until = max(self._until, asked + ttl * (1 - MARGIN))
            case Expired():
                return [*out, *self._step_down("its lease has ended in etcd")]
        return out

    def in_office(self, now: float) -> bool:
        """May this agent's coordinator decide?"""
        return bool(self._own) and now < self._until

    def deadline(self) -> float | None:
        """The time of the next `Tick`, if one is needed."""
        return self._until if self._own else None

    def _follow(self, seat: Leader) -> list[Command]:
        if seat.revision == self._followed:
            return []
        self._followed = seat.revision
        return [Follow(seat)]

    def _step_down(self, why: str) -> list[Command]:
        if not self._own:
            return []
        self._own = 0
        return [StepDown(why)]


# the key's value ------------------------------------------------------------------------------------------------------


def write_leader(run_id: str, address: Address, node: str) -> str:
    return json.dumps(
        {"ripstop": VERSION, "run_id": run_id, "host": address.host, "port": address.port, "node": node},
        ensure_ascii=False,
    )


def read_leader(text: str, run_id: str, revision: int) -> Leader:
    """What `write_seat` wrote; anything else is another's, and a `ProtocolError` (rule 4)."""
    match opened(text, run_id, version=VERSION, most=MAX_VALUE):
        case {"host": str(host), "port": int(port), "node": str(node)} if host and 0 < port < 65536:
            return Leader(Address(host, port), node, revision)
    raise foreign(text)
