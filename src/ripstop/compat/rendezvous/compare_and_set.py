"""A rendezvous without a coordinator: its whole state is one blob that nodes compare-and-set.  Pure.

`Participant` is one node's part.  Each of its steps takes the state as it was read, and says what to do: write
another one,
look again later, or be done.  A driver (`compat/rendezvous/dynamic.py`) reads, writes and sleeps.  Rules:

1.  Steps look at what the state is, never at what was done before.  So a write whose answer was lost is found in the
    state and not made again, and a write that came too late is replaced by whatever the newer state asks for.
2.  Round numbers only grow.  Round n+1 forms when nobody is in round n any more: each member has come to the next one
    or is lost.  Its ranks are exactly 0 … n-1, and survivors keep theirs (`ranks.py`).
3.  A round forms at once when `max` nodes have come, or when the survivors of the last one are enough; else `min`
    nodes wait for a last call.  Who does not fit in waits without a deadline: it is a spare.
4.  Clocks are never compared.  A beat is the revision of a node's last write; who reads the same one for too long by
    its own clock calls that node lost.  Time counts only while one looks: a clock that jumps, or a node that was
    stopped, blames nobody for it.
5.  Closed is final: nothing is written after it.
6.  A store that has lost the state gets it back from the next member that looks: the highest round wins.
7.  What another program, version or job wrote is refused, and never overwritten.
"""

import json
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ripstop.coordinator import ranks
from ripstop.election.stored_record import parse_record
from ripstop.model.errors import ProtocolError
from ripstop.model.round import Address, Node

VERSION = 1
MAX_STATE = 16 << 20  # bytes: 100,000 nodes and room to spare


class MemberSettings(Struct, frozen=True):
    """The job's size, and seconds: a node beats every `beat`, and is lost after `silence` without one."""

    min_nodes: int
    max_nodes: int
    last_call: float
    beat: float
    silence: float


class Candidate(Struct, frozen=True):
    """A node that has come to the next round: its last round and rank, and where it would serve the workers' store."""

    node: str
    after: int
    rank: int | None
    store: Address


class SharedState(Struct, frozen=True):
    """All that is shared: the last round with its members by rank, those of them that are gone, and who has come."""

    run_id: str
    revision: int = 0
    writer: str = ""
    round: int = 0
    seats: tuple[str, ...] = ()
    store: Address | None = None
    gone: frozenset[str] = frozenset()
    coming: tuple[Candidate, ...] = ()
    beats: Mapping[str, int] = field(default_factory=dict)
    closed: bool = False

    def inside(self) -> list[str]:
        """Who is in the last round still."""
        return [node for node in self.seats if node not in self.gone]


# what a step says -----------------------------------------------------------------------------------------------------


class Write(Struct, frozen=True):
    """Put this in the place of the state that was read."""

    state: SharedState


class Wait(Struct, frozen=True):
    """Look again later; `spare`: the round is full, and waiting for a place has no end."""

    spare: bool = False


class Formed(Struct, frozen=True):
    """This node is in a new round, whose rank 0 is the node `host`."""

    round: int
    rank: int
    size: int
    store: Address
    host: str


class RendezvousClosed(Struct, frozen=True):
    """The rendezvous is closed; `spare`: this node was never needed."""

    spare: bool


class Done(Struct, frozen=True):
    """There is nothing to write."""


Step = Write | Wait | Formed | RendezvousClosed | Done


class Participant:
    """One node of a rendezvous; `node` is a name that no other node has, nor this one in another life."""

    def __init__(self, node: str, settings: MemberSettings) -> None:
        self.node = node
        self.round = 0  # the last one this node was in
        self._settings = settings
        self._rank: int | None = None  # there
        self._formed: SharedState | None = None  # as that round was when it was new
        self._time = 0.0  # rule 4: spent looking
        self._looked: float | None = None
        self._seen: dict[str, tuple[object, float]] = {}  # what is unchanged, and since when

    # steps ------------------------------------------------------------------------------------------------------------

    def join(self, state: SharedState, store: Address, now: float) -> Step:
        """Leave the round this node is in, and come to the next; `store` is where the workers' store would be."""
        self._look(now)
        if state.closed:
            return RendezvousClosed(spare=self._is_spare(state))
        if state.round > self.round and self.node in state.inside() and (formed := self._enter(state, store)):
            return formed
        if self._formed is not None and state.round < self.round:
            return self._write(_restored(state, self._formed))  # rule 6
        after = self._without_the_lost(state)
        after = self._come(after, Candidate(self.node, self.round, self._rank, store))
        after = self._form(after)
        if after != state or self._is_due(state):
            return self._write(after)
        return Wait(spare=self._is_spare(state))

    def beat(self, state: SharedState, now: float) -> Step:
        """Say that this node is alive, when it is time, and take out who is not."""
        self._look(now)
        if state.closed:
            return Done()
        if self._formed is not None and state.round < self.round:
            return self._write(_restored(state, self._formed))  # rule 6
        if self.node not in state.beats:
            return Done()  # it was taken for lost, and will learn so
        after = self._without_the_lost(state)
        return self._write(after) if after != state or self._is_due(state) else Done()

    def leave(self, state: SharedState) -> Step:
        """Take this node out: it waits no longer, and is in no round."""
        if state.closed or self.node not in state.beats:
            return Done()
        return self._write(_without(state, {self.node}))

    def close(self, state: SharedState) -> Step:
        return Done() if state.closed else self._write(replace(state, closed=True))

    def waiting(self, state: SharedState) -> int:
        """How many nodes wait for this one to come to the next round; at least 1 when its own round is over."""
        if state.closed:
            return 0
        if state.round < self.round:  # an old state, or one that was lost: who was in this round has left it
            return sum(comer.after >= self.round for comer in state.coming)
        inside = state.inside()
        if self.round and (state.round > self.round or self.node not in inside):
            return max(1, len(state.coming))
        return len(state.coming) if len(inside) < self._settings.max_nodes else 0

    # parts of them ----------------------------------------------------------------------------------------------------

    def _enter(self, state: SharedState, store: Address) -> Formed | None:
        rank = state.seats.index(self.node)
        assert state.store is not None, "a round has a store"
        self.round, self._rank, self._formed = state.round, rank, state
        if rank == 0 and state.store != store:
            return None  # it was formed with an offer that this node has taken back: come again
        return Formed(state.round, rank, len(state.seats), state.store, state.seats[0])

    def _come(self, state: SharedState, comer: Candidate) -> SharedState:
        known = {other.node: other for other in state.coming}
        if known.get(self.node) != comer:
            state = replace(state, coming=tuple((known | {self.node: comer}).values()))
        if self.node in state.inside():
            state = replace(state, gone=state.gone | {self.node})
        return state

    def _form(self, state: SharedState) -> SharedState:
        least, most = self._settings.min_nodes, self._settings.max_nodes
        coming, newest = state.coming, max(state.round, *(comer.after for comer in state.coming))
        possible = len(coming) >= least and not state.inside()
        settled = self._age("quorum", (state.round, possible)) >= self._settings.last_call
        survivors = [comer for comer in coming if comer.rank is not None and comer.after == newest]
        if not possible:
            return state
        if not (settled or len(coming) >= most or len(survivors) >= least):
            return state
        newcomers = [comer for comer in coming if comer not in survivors]
        chosen = [*sorted(survivors, key=lambda comer: (comer.rank, comer.node)), *newcomers][:most]
        kept = [(Node(comer.node, comer.store.host, 1), comer.rank if comer in survivors else None) for comer in chosen]
        seats = tuple(node.id for node in ranks.order(kept))
        return replace(
            state,
            round=newest + 1,
            seats=seats,
            store=next(comer.store for comer in chosen if comer.node == seats[0]),
            gone=frozenset(),
            coming=tuple(comer for comer in coming if comer not in chosen),
        )

    def _without_the_lost(self, state: SharedState) -> SharedState:
        self._seen = {key: seen for key, seen in self._seen.items() if key in state.beats or key == "quorum"}
        silent = {n for n, beat in state.beats.items() if self._age(n, beat) >= self._settings.silence}
        return _without(state, silent - {self.node})

    def _is_due(self, state: SharedState) -> bool:
        return self._age(self.node, state.beats.get(self.node)) >= self._settings.beat

    def _is_spare(self, state: SharedState) -> bool:
        here = any(comer.node == self.node for comer in state.coming)
        return here and len(state.inside()) >= self._settings.max_nodes

    def _write(self, state: SharedState) -> Write:
        revision = state.revision + 1
        here = {*state.inside(), *(comer.node for comer in state.coming)}
        beats = {node: beat for node, beat in state.beats.items() if node in here}
        if self.node in here:
            beats[self.node] = revision
        return Write(replace(state, revision=revision, writer=self.node, beats=beats))

    # time -------------------------------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        if self._looked is not None:
            self._time += min(max(0.0, now - self._looked), self._settings.beat)  # rule 4
        self._looked = now

    def _age(self, key: str, value: object) -> float:
        """For how long this has been so."""
        if key not in self._seen or self._seen[key][0] != value:
            self._seen[key] = (value, self._time)
        return self._time - self._seen[key][1]


def _without(state: SharedState, nodes: set[str]) -> SharedState:
    if not nodes:
        return state
    return replace(
        state,
        gone=state.gone | (nodes & set(state.seats)),
        coming=tuple(comer for comer in state.coming if comer.node not in nodes),
        beats={node: beat for node, beat in state.beats.items() if node not in nodes},
    )


def _restored(state: SharedState, formed: SharedState) -> SharedState:
    """The last round as it was when it was new, but for those who have left it since."""
    left = frozenset(comer.node for comer in state.coming if comer.node in formed.seats)
    beats = dict.fromkeys(formed.seats, state.revision)
    return replace(
        state, round=formed.round, seats=formed.seats, store=formed.store, gone=left, beats=beats | dict(state.beats)
    )


# the blob -------------------------------------------------------------------------------------------------------------


def encode(state: SharedState) -> bytes:
    value = {
        "ripstop": VERSION,
        "run_id": state.run_id,
        "revision": state.revision,
        "writer": state.writer,
        "round": state.round,
        "seats": state.seats,
        "store": _address(state.store),
        "gone": sorted(state.gone),
        "coming": [[comer.node, comer.after, comer.rank, _address(comer.store)] for comer in state.coming],
        "beats": dict(state.beats),
        "closed": state.closed,
    }
    return json.dumps(value, separators=(",", ":")).encode()


def decode(blob: bytes, run_id: str) -> SharedState:
    """What `encode` wrote; anything else is another's, and a `ProtocolError` (rule 7)."""
    value = parse_record(blob, run_id, version=VERSION, max_size=MAX_STATE)
    try:
        return _state(value)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ProtocolError(f"it is damaged: found {blob[:80]!r}") from None


def _state(value: dict[str, Any]) -> SharedState:
    coming = tuple(
        Candidate(_text(node), _count(after), None if rank is None else _count(rank), _known(_where(store)))
        for node, after, rank, store in value["coming"]
    )
    state = SharedState(
        run_id=value["run_id"],
        revision=_count(value["revision"]),
        writer=_text(value["writer"]),
        round=_count(value["round"]),
        seats=tuple(map(_text, value["seats"])),
        store=_where(value["store"]),
        gone=frozenset(map(_text, value["gone"])),
        coming=coming,
        beats={_text(node): _count(beat) for node, beat in value["beats"].items()},
        closed=value["closed"] is True,
    )
    if (state.store is None) != (not state.seats) or len(set(state.seats)) != len(state.seats):
        raise ValueError("a round has members, each once, and a store")
    return state


def _address(address: Address | None) -> list[str | int] | None:
    return None if address is None else [address.host, address.port]


def _where(value: list[Any] | None) -> Address | None:
    if value is None:
        return None
    host, port = value
    return Address(_text(host), _count(port))


def _known(address: Address | None) -> Address:
    if address is None:
        raise ValueError("who has come has offered a store")
    return address


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value
