"""One restore: what this node holds, what the ranks agree on, and the transfers (`agreement.py` decides).

The steps of a rank: read the headers of all buffers on this node; offer them to rank 0; compute digests if rank 0 asks;
give and receive shards; load; wait until all have loaded, if a rank uses buffers that are not its own.
"""

import dataclasses
import logging
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from ripstop.commit_memory import (
    CONTENT_OFFSET,
    FIRST_COPY_SLOT,
    HEAD_BYTES,
    IS_REPLICATED,
    IS_SHARDED,
    CommitHeader,
    NotEnoughMemory,
    unpack_commit_header,
)  # fmt: skip
from ripstop.train import checkpoint_files, content, interruption, sharding
from ripstop.train.agent_memory import AgentError, AgentMemory, Identity
from ripstop.train.agreement import AgreementOffer, Commit, Compare, Digests, Holding, Restore, Start, Transfer, agree
from ripstop.train.checkpoint_restore import (
    CheckpointOffer,
    CheckpointPlan,
    ReshardedCheckpoint,
    RestorableCheckpoint,
    checkpoint_plan,
    checkpoint_restore_offer,
    find_restorable,
)
from ripstop.train.commit_buffer import CommitBuffer, Corrupted
from ripstop.train.rank_store import Absent, RankStore
from ripstop.train.sharding import ReshardingSource
from ripstop.train.transfer import LocalSource, PeerSource, TransferError, TransferGiver, TransferReceiver

log = logging.getLogger("ripstop.train")

T = TypeVar("T")

NO_SLOT = -1  # of a buffer that the agent does not keep


class RestorableShard(NamedTuple):
    """A complete commit of one rank, in this node's memory under the rank that runs or ran here."""

    kept_for: int
    slot: int
    buffer: CommitBuffer
    header: CommitHeader

    @property
    def commit(self) -> Commit:
        return Commit(self.header.id.round, self.header.id.number, self.header.world_size)

    @property
    def offer(self) -> AgreementOffer:
        flags = self.header.flags
        return AgreementOffer(self.commit, self.header.rank, bool(flags & IS_REPLICATED), bool(flags & IS_SHARDED))


class RestorableShardSet(NamedTuple):
    """A commit whose sharding is not that of this round."""

    commit: Commit
    stored: list[content.StoredContent]
    sources: list[ReshardingSource]

    @property
    def names(self) -> list[str]:
        return self.stored[0].names

    def load(self, name: str, live: Any) -> Any:
        places = [stored.pieces(name, shard) for shard, stored in enumerate(self.stored)]
        pieces = {".".join(path): [found[path] for found in places] for path in places[0]}

        def fill(targets: sharding.Tensors) -> None:
            by_name = {".".join(path): target for path, target in targets.items()}
            sharding.copy_resharded(pieces, self.sources, by_name)

        return sharding.load_with_live_sharding(live, self.stored[0].structure(name), places[0], fill)


class NotKept(Exception):
    """Another rank has no memory for the State, and there is no commit yet: all ranks go on without it."""


def first_restore_topic(count: int) -> str:
    """What the ranks wait for first in this restore."""
    return f"restore {count} begins" if _may_commit_during_restore(count) else f"restore {count} 0"


def _may_commit_during_restore(count: int) -> bool:
    """Whether ranks may still commit while others restore already."""
    return count > 1 or interruption.is_elastic


class Restoring:
    """The restore number `count` of a State in this round."""

    def __init__(
        self, name: str, run: int, worker: Identity, count: int, memory: AgentMemory, store: RankStore
    ) -> None:
        self._name = name
        self._run = run
        self._rank, self._world_size = worker.rank, worker.world_size
        self._memory = memory
        self._store = store
        self._checkpoints = worker.checkpoint_dir, worker.checkpoint_interval
        self.disk = CheckpointPlan([], 0, 0.0)
        self._count = count
        self._topic = f"restore {count}"
        self._key = store.transfer_key(self._topic)
        self._shards: list[RestorableShard] = []
        if _may_commit_during_restore(count):
            first = store.decide(first_restore_topic(count), None, _absent_from_restore, may_be_absent=True)
            self._check_present(first)  # no rank commits any more
        found = self._buffers()
        self.own = {  # by slot; the agent frees copies that another node has sent
            slot: buffer
            for (kept_for, slot), buffer in found.items()
            if kept_for == self._rank and slot < FIRST_COPY_SLOT
        }
        self.has_others = any(kept_for != self._rank for kept_for, _ in found)
        self._shards = [shard for place, buffer in found.items() if (shard := self._read(*place, buffer))]
        self._is_shared = False
        self._connections = ExitStack()
        self.is_replicated = False  # what is found was equal on all ranks
        self.source = "memory"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connections.close()

    def own_slot(self, commit: Commit) -> int | None:
        """Where this rank has its own part of this commit."""
        own = (shard for shard in self._shards if shard.kept_for == self._rank and shard.slot in self.own)
        return next((shard.slot for shard in own if shard.commit == commit), None)

    def _buffers(self) -> dict[tuple[int, int], CommitBuffer]:
        try:
            return {place: CommitBuffer.adopt(fd) for place, fd in self._memory.get(self._name).items()}
        except AgentError as error:
            log.warning("state %r: no buffers from the agent: %s", self._name, error)
            return {}

    def _read(self, kept_for: int, slot: int, buffer: CommitBuffer) -> RestorableShard | None:
        header = buffer.header(self._run)
        if header is None:
            return None
        try:
            buffer.read_pickle(header)
        except Corrupted as error:
            log.warning("state %r ignores buffer %d of rank %d: %s", self._name, slot, kept_for, error)
            return None
        return RestorableShard(kept_for, slot, buffer, header)

    def find(self, values: Mapping[str, Any]) -> RestorableShard | RestorableShardSet | ReshardedCheckpoint | None:
        """What this rank is to load; None if there is nothing.  A shard is in this node's memory from now on.

        `values` are those of the State: their sharding decides whether a rank can load its own shard.
        """
        decision = self._agree()
        if (found := self._from_disk(values)) is not None:
            return found
        if isinstance(decision, Start):
            self._warn(decision.problem)
            return None
        if decision.skipped and not self._rank:
            log.warning("state %r continues from commit %d: %s", self._name, decision.commit.number, decision.skipped)
        if not decision.shards:
            return self._all_shards(decision)
        is_own = [shard == rank for rank, shard in enumerate(decision.shards)]
        self._is_shared = bool(decision.transfers) or not all(is_own)
        if decision.transfers and (problem := self._transfer(decision)):
            self._topic += " without memory"  # of further decisions about the same checkpoints
            offer = self._disk_offer()
            self.disk = CheckpointPlan(*self._store.decide(f"{self._topic} disk", offer, self._plan_without_memory))
            if (found := self._from_disk(values)) is None:
                self._warn(problem)
            return found
        shard = self._held(decision.commit, decision.shards[self._rank])
        assert shard is not None
        self.is_replicated = bool(shard.header.flags & IS_REPLICATED) or not all(is_own)
        if decision.holders:  # some rank has sharded state: do all have the sharding of the commit?
            stored = content.StoredContent(shard.buffer, shard.buffer.read_pickle(shard.header))
            if not self._store.decide(f"{self._topic} sharding", stored.has_sharding_of(values), all):
                return self._all_shards(decision)
        return shard

    def loaded(self) -> None:
        """This rank has its content.  Return when its buffers may change."""
        if self._is_shared:
            self._store.wait_for_all(f"{self._topic} loaded")

    def _warn(self, problem: str) -> None:
        if problem and not self._rank:
            log.warning("state %r starts from the beginning: %s", self._name, problem)

    # disk -------------------------------------------------------------------------------------------------------------

    def _disk_offer(self) -> CheckpointOffer:
        newest_round = max((shard.header.id.round for shard in self._shards), default=0)
        return checkpoint_restore_offer(*self._checkpoints, self._name, newest_round)

    def _plan_without_memory(self, offers: list[Any]) -> CheckpointPlan:
        return checkpoint_plan(offers, self._name, None)

    def _from_disk(self, values: Mapping[str, Any]) -> RestorableShard | ReshardedCheckpoint | None:
        """The newest usable checkpoint of the plan: those that are newer than the commit in memory."""
        directory, _ = self._checkpoints
        for candidate in self.disk.candidates:
            path = checkpoint_files.checkpoint_folder(directory, self._name) / candidate
            try:
                found = self._from_checkpoint(path, values)
            except checkpoint_files.Unusable as error:
                if not self._rank:
                    log.warning("state %r: checkpoint %s is not used: %s", self._name, candidate, error)
                continue
            self.source = "disk"
            self.is_replicated = isinstance(found, RestorableShard) and bool(found.header.flags & IS_REPLICATED)
            return found
        return None

    def _from_checkpoint(self, path: Path, values: Mapping[str, Any]) -> RestorableShard | ReshardedCheckpoint:
        """Unusable, on all ranks, if one cannot use it."""

        def check() -> tuple[RestorableCheckpoint, bool]:
            found = find_restorable(path, self._rank, self._world_size)
            return found, found.has_sharding_of(self._rank, values)

        found, is_own = self._together(f"{path.name} found", check)
        if self._store.decide(f"{self._topic} {path.name} sharding", is_own, all):
            return self._keep_from_disk(*self._together(f"{path.name} loaded", lambda: found.load(self._run)))
        return self._together(f"{path.name} resharded", found.resharded)

    def _together(self, what: str, function: Callable[[], T]) -> T:
        """What a function returns on this rank, if it is not Unusable on any."""
        problem = ""
        try:
            result = function()
        except checkpoint_files.Unusable as error:
            problem = str(error)
        if problem := str(self._store.decide(f"{self._topic} {what}", problem, _first_restoring_problem)):
            raise checkpoint_files.Unusable(problem)
        return result

    def _keep_from_disk(self, buffer: CommitBuffer, header: CommitHeader) -> RestorableShard:
        if buffer.is_on_disk:  # for lack of memory
            return RestorableShard(self._rank, NO_SLOT, buffer, header)
        slot = 0  # its commit is older
        self.own[slot] = buffer
        try:
            self._memory.keep(self._name, slot, buffer.fd)
        except AgentError as error:
            log.warning("state %r: the agent does not keep the restored commit: %s", self._name, error)
        return RestorableShard(self._rank, slot, buffer, header)

    # agreement --------------------------------------------------------------------------------------------------------

    def _agree(self) -> Restore | Start:
        """Agree on the commit in memory to restore.  Sets `self.disk`, the plan for checkpoints on disk."""
        node = int(os.environ.get("GROUP_RANK", self._rank))  # a number that the ranks of one node share
        own: Any = [node, [shard.offer.pack() for shard in self._shards], self._disk_offer()]
        decide: Callable[[list[Any]], Any] = _Agreement(self._name)
        for attempt in range(1000):
            topic = f"{self._topic} {attempt}"
            found = self._store.decide(topic, own, decide, may_be_absent=topic == first_restore_topic(self._count))
            self._check_present(found)
            if "compare" not in found:
                break
            commit = Commit(*found["compare"])
            own = {shard: self._digests(commit, shard) for shard in found["shards"][self._rank]}
        self.disk = CheckpointPlan(*found["disk"])
        if "problem" in found:
            return Start(found["problem"])
        transfers = tuple(Transfer(*each) for each in found["transfers"])
        holders = tuple(map(tuple, found["holders"]))
        return Restore(Commit(*found["commit"]), tuple(found["shards"]), transfers, holders, found["skipped"])

    def _check_present(self, found: Any) -> None:
        """Raise if a rank takes no part: an error if commits would be lost."""
        if isinstance(found, Absent):  # rank 0: others cannot learn which commits there are
            why, has_commits = found.why, False
        elif found is not None and "absent" in found:
            why, has_commits = found["absent"], found["has_commits"]
        else:
            return
        directory, _ = self._checkpoints
        on_disk = directory and checkpoint_files.checkpoints(checkpoint_files.checkpoint_folder(directory, self._name))
        if has_commits or self._shards or on_disk:
            raise RuntimeError(
                f"state {self._name!r} has commits, and all ranks must be able to restore them; {why}; "
                "repair its node, or start a new job with another --checkpoint-dir"
            )
        raise NotKept(why)

    def _digests(self, commit: Commit, shard: int) -> dict[str, str]:
        held = self._held(commit, shard)
        assert held is not None
        return content.StoredContent(held.buffer, held.buffer.read_pickle(held.header)).digests()

    def _held(self, commit: Commit, rank: int) -> RestorableShard | None:
        found = [shard for shard in self._shards if (shard.commit, shard.header.rank) == (commit, rank)]
        return min(found, key=lambda shard: (shard.kept_for != self._rank, shard.kept_for, shard.slot), default=None)

    # transfers --------------------------------------------------------------------------------------------------------

    def _transfer(self, decision: Restore) -> str:
        """Give and receive shards; why one cannot be had, or ""."""
        given = {each.shard: held.buffer for each in decision.transfers
                 if each.giver == self._rank and (held := self._held(decision.commit, each.shard))}  # fmt: skip
        problem = ""
        with TransferGiver(self._key, given, self._world_size) if given else nullcontext() as giver:
            if giver is not None:
                self._store.publish(f"{self._topic} giver {self._rank}", [giver.host, giver.port])
            for each in decision.transfers:
                if each.receiver == self._rank:
                    self.source = "peer"
                    host, port = self._store.get(f"{self._topic} giver {each.giver}")
                    try:
                        with TransferReceiver(host, port, self._key) as receiver:
                            self._receive(decision.commit, each.shard, receiver)
                    except TransferError as error:
                        raise RuntimeError(
                            f"state {self._name!r}: the shard of rank {each.shard} does not arrive: {error}"
                        ) from error
                    except (NotEnoughMemory, AgentError) as error:
                        problem = f"rank {self._rank} cannot keep a shard: {error}"
            problem = str(self._store.decide(f"{self._topic} received", problem, _first_restoring_problem))
        if not problem:
            self._adopt_received(decision.commit)
        return problem

    def _all_shards(self, decision: Restore) -> RestorableShardSet:
        """Connect to the holders of shards that this node does not have, and let others connect."""
        self._is_shared = True
        givers = {
            (rank, shard): ranks[rank % len(ranks)]
            for rank in range(self._world_size)
            for shard, ranks in enumerate(decision.holders)
            if rank not in ranks
        }
        topic = f"{self._topic} all shards"
        held = {shard: self._held(decision.commit, shard) for shard in range(decision.commit.world_size)}
        given = {shard: found.buffer for (_, shard), giver in givers.items()
                 if giver == self._rank and (found := held[shard])}  # fmt: skip
        if given:
            giver = self._connections.enter_context(TransferGiver(self._key, given, self._world_size))
            self._store.publish(f"{topic} giver {self._rank}", [giver.host, giver.port])
        receivers: dict[int, TransferReceiver] = {}
        sources: list[ReshardingSource] = []
        pickles = []
        for shard, found in held.items():
            if found is not None:
                sources.append(LocalSource(found.buffer))
                pickles.append(found.buffer.read_pickle(found.header))
                continue
            peer = givers[self._rank, shard]
            if peer not in receivers:
                host, port = self._store.get(f"{topic} giver {peer}")
                receivers[peer] = self._connections.enter_context(TransferReceiver(host, port, self._key))
            receiver = receivers[peer]
            header = self._header(decision.commit, shard, receiver)
            sources.append(PeerSource(receiver, shard))
            pickles.append(receiver.read_bytes(shard, header.pickle_offset, header.pickle_size))
            self.source = "peer"
        return RestorableShardSet(decision.commit, [content.StoredContent(None, data) for data in pickles], sources)

    def _header(self, commit: Commit, shard: int, receiver: TransferReceiver) -> CommitHeader:
        header = unpack_commit_header(receiver.read_bytes(shard, 0, HEAD_BYTES), self._run)
        if header is None or (header.id.round, header.id.number, header.world_size, header.rank) != (
            *dataclasses.astuple(commit), shard,
        ):  # fmt: skip
            raise TransferError("it is not the commit that the ranks have agreed on")
        return header

    def _receive(self, commit: Commit, shard: int, receiver: TransferReceiver) -> None:
        header = self._header(commit, shard, receiver)
        buffer = CommitBuffer.create(header.end + header.pickle_size)
        receiver.read(shard, CONTENT_OFFSET, buffer.memory(CONTENT_OFFSET, header.pickle_offset))
        buffer.write_pickle(header.pickle_offset, receiver.read_bytes(shard, header.pickle_offset, header.pickle_size))
        buffer.complete(header)
        slot = self._slot_beside(commit)
        self._memory.keep(self._name, slot, buffer.fd)
        self.own[slot] = buffer
        self._shards = [each for each in self._shards if (each.kept_for, each.slot) != (self._rank, slot)]
        self._shards.append(RestorableShard(self._rank, slot, buffer, header))

    def _slot_beside(self, commit: Commit) -> int:
        """A slot whose old commit is not needed."""
        needed = {each.slot for each in self._shards if (each.kept_for, each.commit) == (self._rank, commit)}
        return min(set(range(len(self.own) + 1)) - needed)

    def _adopt_received(self, commit: Commit) -> None:
        """What other ranks of this node have received."""
        known = {(each.kept_for, each.slot) for each in self._shards if each.commit == commit}
        for place, buffer in self._buffers().items():
            shard = self._read(*place, buffer)
            if shard is not None and shard.commit == commit and place not in known:
                self._shards.append(shard)


class _Agreement:
    """Rank 0's decisions, as JSON: first from offers, then from digests."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._disk_offers: list[Any] = []  # what the ranks see there
        self._steps: Generator[Compare, Digests, Restore | Start] | None = None

    def __call__(self, received: list[Any]) -> Any:
        if absent := _absent_from_restore(received):
            return {**absent, "has_commits": any(own[1] for own in received if not isinstance(own, Absent))}
        try:
            if self._steps is None:
                self._disk_offers = [on_disk for _, _, on_disk in received]
                self._steps = agree([Holding(node, list(map(AgreementOffer.unpack, own))) for node, own, _ in received])
                asked = next(self._steps)
            else:
                asked = self._steps.send(received)
        except StopIteration as end:
            decision: Restore | Start = end.value
            if isinstance(decision, Start):
                return {"problem": decision.problem, "disk": checkpoint_plan(self._disk_offers, self._name, None)}
            found = dataclasses.asdict(decision)
            found["disk"] = checkpoint_plan(self._disk_offers, self._name, decision.commit)
            found["commit"] = dataclasses.astuple(decision.commit)
            found["transfers"] = [dataclasses.astuple(each) for each in decision.transfers]
            return found
        return {"compare": dataclasses.astuple(asked.commit), "shards": asked.shards}


def _absent_from_restore(received: list[Any]) -> Any:
    return next(({"absent": own.why, "has_commits": True} for own in received if isinstance(own, Absent)), None)


def _first_restoring_problem(problems: list[str]) -> str:
    return next(filter(None, problems), "")
