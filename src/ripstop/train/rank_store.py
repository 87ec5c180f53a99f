"""How the ranks of a round exchange small values: through the round's store, before or after `init_process_group`.

Anyone who reaches torch's store can read and write it.  So each value has a MAC with the key of the round's workers,
and a value without a valid one is an error.  The sums of `add` have no MAC: they may be wrong.  The message
of a rank without an agent has none either, because this rank has no key.  A forged one can make the ranks go on without
a State that has no commit yet, but it can never make them lose a commit.
"""

import hmac
import json
import os
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

TIMEOUT = timedelta(minutes=10)  # for the slowest rank to arrive
MAC_BYTES = 32
MAX_REASON_BYTES = 500
_ABSENT = b"this rank takes no part: "


class Absent(NamedTuple):
    """A rank has no agent that keeps its state."""

    why: str


def announce_absence_in_rank_store(name: str, topic: str, why: str) -> None:
    """Tell the ranks that wait for this one's value, or for its decision, that it gives none."""
    rank, world_size = (int(os.environ.get(variable, "0")) for variable in ("RANK", "WORLD_SIZE"))
    if world_size < 2 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return  # there are no others, or no store that is there before all ranks
    store = RankStore(name, rank, world_size, b"")
    message = _ABSENT + f"rank {rank}: {why}".encode()[:MAX_REASON_BYTES]
    with suppress(RuntimeError):  # without a store, the others notice it too
        store._connected().set(store._key(f"{topic}/{rank}" if rank else topic), message)


class RankStore:
    """Values of one State in one round.  A job of one rank needs no store."""

    def __init__(self, name: str, rank: int, world_size: int, key: bytes) -> None:
        self._name = name
        self._rank = rank
        self._world_size = world_size
        self._secret = key  # b"": anyone can compute a MAC
        self._store: Any = None

    def decide(self, topic: str, own: Any, decide: Any, *, may_be_absent: bool = False) -> Any:
        """Every rank gives a value; rank 0 decides from all of them, in the order of ranks; all return its decision.

        With `may_be_absent`, a value, or the decision, can be `Absent`.
        """
        if self._world_size == 1:
            return decide([own])
        if self._rank > 0:
            self._set(f"{topic}/{self._rank}", own)
            return self.get(topic, may_be_absent=may_be_absent)
        topics = [f"{topic}/{rank}" for rank in range(1, self._world_size)]
        others = self._get_all(topics, may_be_absent=may_be_absent)
        decision = decide([own, *others])
        self._set(topic, decision)
        return decision

    def wait_for_all(self, topic: str) -> None:
        self.decide(topic, None, lambda _: None)

    def publish(self, topic: str, value: Any) -> None:
        if self._world_size > 1:
            self._set(topic, value)

    def propose(self, topic: str, value: Any) -> Any:
        """The value of the rank that was first."""
        return self._opened(topic, self._connected().compare_set(self._key(topic), "", self._sealed(topic, value)))

    def add(self, topic: str, amount: int) -> int:
        """The sum of all ranks' amounts so far."""
        return int(self._connected().add(self._key(topic), amount))

    def has(self, topics: list[str]) -> bool:
        """Whether all these values are there; does not wait."""
        return self._world_size == 1 or bool(self._connected().check([self._key(topic) for topic in topics]))

    def get(self, topic: str, *, may_be_absent: bool = False) -> Any:
        """Wait for a value."""
        return self._get_all([topic], may_be_absent=may_be_absent)[0]

    def _get_all(self, topics: list[str], *, may_be_absent: bool) -> list[Any]:
        """Wait for these values, in one exchange with the store."""
        try:
            found = self._connected().multi_get([self._key(topic) for topic in topics])
        except RuntimeError as error:  # torch's DistStoreError and others
            missing = self._missing(topics)
            raise RuntimeError(
                f"train.State needs every rank of the round: {missing} did not arrive at rank {self._rank} ({error}); "
                "call restore() and commit() on all ranks, after the same steps"
            ) from error
        return [
            Absent(data.removeprefix(_ABSENT).decode(errors="replace"))
            if may_be_absent and data.startswith(_ABSENT)
            else self._opened(topic, data)
            for topic, data in zip(topics, map(bytes, found), strict=True)
        ]

    def _missing(self, topics: list[str]) -> str:
        """The first of these values that is not there, as far as the store still tells."""
        with suppress(RuntimeError):
            return next((topic for topic in topics if not self.has([topic])), topics[-1])
        return topics[-1]

    def transfer_key(self, topic: str) -> bytes:
        """A key for the connections between the ranks in this restore."""
        return self._mac("transfer", topic, b"")

    def _set(self, topic: str, value: Any) -> None:
        self._connected().set(self._key(topic), self._sealed(topic, value))

    def _sealed(self, topic: str, value: Any) -> bytes:
        text = json.dumps(value).encode()
        return self._mac("value", topic, text) + text

    def _opened(self, topic: str, data: bytes) -> Any:
        mac, text = data[:MAC_BYTES], data[MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac("value", topic, text)):
            raise RuntimeError(
                f"train.State accepts only values of this round's workers: {topic!r} in its store has another MAC; "
                "give all nodes the same RIPSTOP_TOKEN, and keep others away from MASTER_PORT"
            )
        return json.loads(text)

    def _mac(self, use: str, topic: str, text: bytes) -> bytes:
        return hmac.digest(self._secret, json.dumps([use, self._name, topic]).encode() + text, "sha256")

    def _key(self, topic: str) -> str:
        return f"ripstop/{self._name}/{topic}"

    def _connected(self) -> Any:
        if self._store is None:
            from torch import distributed

            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self._store = distributed.TCPStore(  # type: ignore[attr-defined]
                *address, is_master=False, timeout=TIMEOUT, wait_for_workers=False
            )
        return self._store
