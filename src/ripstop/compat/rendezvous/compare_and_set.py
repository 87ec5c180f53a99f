"""A rendezvous without a coordinator: its shared state is one value that nodes change by compare-and-set.  Pure.

`CompareAndSetParticipant` is one node's part.  Each of its steps takes the state as it was read and returns what to do:
write another state, wait and read again, or stop.  A driver (`dynamic.py`) reads, writes and sleeps.  Rules:

1.  A step depends on the state, never on earlier steps.  So a write whose reply was lost is found in the state and not
    repeated, and a write that came too late is replaced by what the newer state needs.
2.  Round numbers only grow.  Round n+1 forms when round n has no active member: each has joined the next round or is
    lost.  Its ranks are exactly 0 … n-1, and survivors keep theirs (`ranks.py`).
3.  A round forms at once when `max_nodes` have joined, or when the survivors of the last round are `min_nodes` or more;
    otherwise `min_nodes` wait for the last call.  A node that does not fit in waits without a deadline: it is a spare.
4.  Clocks are never compared.  A heartbeat is the revision of a node's last write.  A participant that reads the same
    heartbeat for too long by its own clock removes that node.  Time counts only while a participant reads, so a clock
    that jumps, or a process that was stopped, removes nobody.
5.  Closed is final: nothing is written after it.
6.  A store that has lost the state gets it back from the next member that reads it; the highest round wins.
7.  A value that another program, version or job wrote is rejected, and never overwritten.
"""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from ripstop.coordinator import ranks
from ripstop.election.records import parse_record
from ripstop.model.errors import ProtocolError
from ripstop.model.round import Node

VERSION = 1
MAX_STATE_BYTES = 16 << 20  # enough for more than 100,000 nodes

Count: TypeAlias = Annotated[int, Meta(ge=0)]


class ParticipantSettings(Struct, frozen=True):
    """The job's size, and times in seconds."""

    min_nodes: int
    max_nodes: int
    last_call: float
    heartbeat_interval: float
    heartbeat_timeout: float


class StoreAddress(Struct, frozen=True, array_like=True):
    """Where a node serves the workers' store."""

    host: str
    port: Count


class Candidate(Struct, frozen=True, array_like=True):
    """A node that has joined the next round: its last round and rank, and where it would serve the workers' store."""

    node: str
    last_round: Count
    rank: Count | None
    store: StoreAddress


class CompareAndSetState(Struct, frozen=True, tag_field="ripstop", tag=VERSION):
    """The last round with its members by rank, the members that left it, and the candidates for the next round."""

    run_id: str
    revision: Count = 0
    writer: str = ""
    round: Count = 0
    members: tuple[str, ...] = field(default=(), name="seats")
    store: StoreAddress | None = None
    departed: frozenset[str] = field(default=frozenset(), name="gone")
    candidates: tuple[Candidate, ...] = field(default=(), name="coming")
    heartbeats: dict[str, Count] = field(default_factory=dict, name="beats")
    closed: bool = False

    def active(self) -> list[str]:
        """The members that are still in the last round."""
        return [node for node in self.members if node not in self.departed]


# what a step returns --------------------------------------------------------------------------------------------------


class Write(Struct, frozen=True):
    """Replace the state that was read with this one."""

    state: CompareAndSetState


class Wait(Struct, frozen=True):
    """Read again later; a `spare` waits without a deadline, because the round is full."""

    spare: bool = False


class Formed(Struct, frozen=True):
    """This node is in a new round, whose rank 0 is the node `host`."""

    round: int
    rank: int
    size: int
    store: StoreAddress
    host: str


class RendezvousClosed(Struct, frozen=True):
    """The rendezvous is closed; a `spare` was never needed."""

    spare: bool


class Done(Struct, frozen=True):
    """There is nothing to write."""


Step = Write | Wait | Formed | RendezvousClosed | Done


class CompareAndSetParticipant:
    """One node of a rendezvous; `node` is a name that no other process ever has."""

    def __init__(self, node: str, settings: ParticipantSettings) -> None:
        self.node = node
        self.round = 0  # the last one this node was in
        self._settings = settings
        self._rank: int | None = None  # in that round
        self._formed: CompareAndSetState | None = None  # the state when that round formed
        self._time = 0.0  # spent reading (rule 4)
        self._read_at: float | None = None
        self._unchanged: dict[str, tuple[object, float]] = {}  # a value, and since when it is unchanged

    # steps ------------------------------------------------------------------------------------------------------------

    def join(self, state: CompareAndSetState, store: StoreAddress, now: float) -> Step:
        """Leave the current round and join the next; this node would serve the workers' store at `store`."""
        self._advance_time(now)
        if state.closed:
            return RendezvousClosed(spare=self._is_spare(state))
        if state.round > self.round and self.node in state.active() and (formed := self._enter(state, store)):
            return formed
        if self._formed is not None and state.round < self.round:
            return self._write(_restored_compare_and_set_state(state, self._formed))  # rule 6
        after = self._without_lost_nodes(state)
        after = self._with_candidate(after, Candidate(self.node, self.round, self._rank, store))
        after = self._with_next_round(after)
        if after != state or self._is_heartbeat_due(state):
            return self._write(after)
        return Wait(spare=self._is_spare(state))

    def heartbeat(self, state: CompareAndSetState, now: float) -> Step:
        """Write a heartbeat when it is due, and remove nodes whose heartbeats stopped."""
        self._advance_time(now)
        if state.closed:
            return Done()
        if self._formed is not None and state.round < self.round:
            return self._write(_restored_compare_and_set_state(state, self._formed))  # rule 6
        if self.node not in state.heartbeats:
            return Done()  # the others removed this node; `waiting` reports that its round is over
        after = self._without_lost_nodes(state)
        return self._write(after) if after != state or self._is_heartbeat_due(state) else Done()

    def leave(self, state: CompareAndSetState) -> Step:
        """Remove this node from its round and from the candidates."""
        if state.closed or self.node not in state.heartbeats:
            return Done()
        return self._write(_compare_and_set_state_without(state, {self.node}))

    def close(self, state: CompareAndSetState) -> Step:
        return Done() if state.closed else self._write(replace(state, closed=True))

    def waiting(self, state: CompareAndSetState) -> int:
        """How many nodes wait for this one to join the next round; at least 1 when its own round is over."""
        if state.closed:
            return 0
        if state.round < self.round:  # an old state, or one that was lost: count the nodes that left this round
            return sum(candidate.last_round >= self.round for candidate in state.candidates)
        active = state.active()
        if self.round and (state.round > self.round or self.node not in active):
            return max(1, len(state.candidates))
        return len(state.candidates) if len(active) < self._settings.max_nodes else 0

    # parts of steps ---------------------------------------------------------------------------------------------------

    def _enter(self, state: CompareAndSetState, store: StoreAddress) -> Formed | None:
        rank = state.members.index(self.node)
        assert state.store is not None, "a round has a store"
        self.round, self._rank, self._formed = state.round, rank, state
        if rank == 0 and state.store != store:
            return None  # the round was formed with a port that this node does not serve any more: join again
        return Formed(state.round, rank, len(state.members), state.store, state.members[0])

    def _with_candidate(self, state: CompareAndSetState, candidate: Candidate) -> CompareAndSetState:
        known = {other.node: other for other in state.candidates}
        if known.get(self.node) != candidate:
            state = replace(state, candidates=tuple((known | {self.node: candidate}).values()))
        if self.node in state.active():
            state = replace(state, departed=state.departed | {self.node})
        return state

    def _with_next_round(self, state: CompareAndSetState) -> CompareAndSetState:
        """The state with the next round, if it can form (rules 2 and 3)."""
        min_nodes, max_nodes = self._settings.min_nodes, self._settings.max_nodes
        candidates = state.candidates
        newest = max(state.round, *(candidate.last_round for candidate in candidates))
        possible = len(candidates) >= min_nodes and not state.active()
        settled = self._seconds_unchanged("quorum", (state.round, possible)) >= self._settings.last_call
        survivors = [one for one in candidates if one.rank is not None and one.last_round == newest]
        if not possible or not (settled or len(candidates) >= max_nodes or len(survivors) >= min_nodes):
            return state
        newcomers = [one for one in candidates if one not in survivors]
        chosen = [*sorted(survivors, key=lambda one: (one.rank, one.node)), *newcomers][:max_nodes]
        ranked = ranks.order(
            [(Node(one.node, one.store.host, 1), one.rank if one in survivors else None) for one in chosen]
        )
        members = tuple(node.id for node in ranked)
        return replace(
            state,
            round=newest + 1,
            members=members,
            store=next(one.store for one in chosen if one.node == members[0]),
            departed=frozenset(),
            candidates=tuple(one for one in candidates if one not in chosen),
        )

    def _without_lost_nodes(self, state: CompareAndSetState) -> CompareAndSetState:
        known = state.heartbeats.keys() | {"quorum"}
        self._unchanged = {key: value for key, value in self._unchanged.items() if key in known}
        timeout = self._settings.heartbeat_timeout
        lost = {node for node, beat in state.heartbeats.items() if self._seconds_unchanged(node, beat) >= timeout}
        return _compare_and_set_state_without(state, lost - {self.node})

    def _is_heartbeat_due(self, state: CompareAndSetState) -> bool:
        age = self._seconds_unchanged(self.node, state.heartbeats.get(self.node))
        return age >= self._settings.heartbeat_interval

    def _is_spare(self, state: CompareAndSetState) -> bool:
        is_candidate = any(candidate.node == self.node for candidate in state.candidates)
        return is_candidate and len(state.active()) >= self._settings.max_nodes

    def _write(self, state: CompareAndSetState) -> Write:
        revision = state.revision + 1
        present = {*state.active(), *(candidate.node for candidate in state.candidates)}
        heartbeats = {node: beat for node, beat in state.heartbeats.items() if node in present}
        if self.node in present:
            heartbeats[self.node] = revision
        return Write(replace(state, revision=revision, writer=self.node, heartbeats=heartbeats))

    # time -------------------------------------------------------------------------------------------------------------

    def _advance_time(self, now: float) -> None:
        if self._read_at is not None:
            self._time += min(max(0.0, now - self._read_at), self._settings.heartbeat_interval)  # rule 4
        self._read_at = now

    def _seconds_unchanged(self, key: str, value: object) -> float:
        if key not in self._unchanged or self._unchanged[key][0] != value:
            self._unchanged[key] = (value, self._time)
        return self._time - self._unchanged[key][1]


def _compare_and_set_state_without(state: CompareAndSetState, nodes: set[str]) -> CompareAndSetState:
    if not nodes:
        return state
    return replace(
        state,
        departed=state.departed | (nodes & set(state.members)),
        candidates=tuple(candidate for candidate in state.candidates if candidate.node not in nodes),
        heartbeats={node: beat for node, beat in state.heartbeats.items() if node not in nodes},
    )


def _restored_compare_and_set_state(state: CompareAndSetState, formed: CompareAndSetState) -> CompareAndSetState:
    """The last round as it formed, without the members that have joined the next one since."""
    return replace(
        state,
        round=formed.round,
        members=formed.members,
        store=formed.store,
        departed=frozenset(one.node for one in state.candidates if one.node in formed.members),
        heartbeats=dict.fromkeys(formed.members, state.revision) | state.heartbeats,
    )


# the stored value -----------------------------------------------------------------------------------------------------

_FIELDS = {each.encode_name for each in msgspec.structs.fields(CompareAndSetState)}


def encode_compare_and_set_state(state: CompareAndSetState) -> bytes:
    return msgspec.json.encode(state, order="deterministic")


def decode_compare_and_set_state(value: bytes, run_id: str) -> CompareAndSetState:
    """The state that `encode_compare_and_set_state` wrote; `ProtocolError` for anything else (rule 7)."""
    found = parse_record(value, run_id, version=VERSION, max_size=MAX_STATE_BYTES)
    try:
        state = msgspec.convert(found, CompareAndSetState)
    except msgspec.ValidationError:
        state = None
    if (
        state is None
        or not found.keys() >= _FIELDS
        or (state.store is None) != (not state.members)
        or len(set(state.members)) != len(state.members)
    ):
        raise ProtocolError(f"it is damaged: found {value[:80]!r}")
    return state
