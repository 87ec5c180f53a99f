"""Restore from disk: choose a checkpoint with all ranks, and make it a commit in memory, to load like any other.

A checkpoint is used if all ranks can read it.  The log names one that is damaged, and the next older one is tried.
Sharded state of another number of ranks or another mesh is read straight into the live tensors, as DCP plans it.
"""

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch

from ripstop.commit_memory import IS_SHARDED, CommitHeader, CommitId, NotEnoughMemory
from ripstop.train import checkpoint_files, content
from ripstop.train.agreement import Commit
from ripstop.train.checkpoint_files import Unusable
from ripstop.train.commit_buffer import CommitBuffer
from ripstop.train.sharding import ShardedTensorParts

log = logging.getLogger("ripstop.train")


class CheckpointPlan(NamedTuple):
    """What all ranks agree on: checkpoints to try, the newest round that anyone has seen, and the interval of saves."""

    candidates: list[str]
    newest_round: int
    interval: float


class CheckpointOffer(NamedTuple):
    """What a rank sees on disk.  As JSON it is a list."""

    has_directory: bool
    checkpoints: list[list[int]]  # round and number of each
    newest_round: int
    interval: float


def checkpoint_restore_offer(directory: str, interval: float, name: str, newest_round: int) -> CheckpointOffer:
    """What this rank sees on disk, for rank 0."""
    seen = []
    if directory:
        folder = checkpoint_files.checkpoint_folder(directory, name)
        seen = checkpoint_files.checkpoints(folder)
        newest_round = max(newest_round, checkpoint_files.newest_checkpoint_round(folder))
    return CheckpointOffer(bool(directory), [[each.round, each.number] for each in seen], newest_round, interval)


def checkpoint_plan(received: list[Any], name: str, memory_commit: Commit | None) -> CheckpointPlan:
    """Rank 0's decision from the offers of all ranks; `memory_commit` would be restored without disk."""
    offers = [CheckpointOffer(*each) for each in received]
    rounds = [0, *(each.newest_round for each in offers)]
    if not all(each.has_directory for each in offers):
        if any(each.has_directory for each in offers):
            log.warning("state %r is not saved to disk: give all nodes --checkpoint-dir", name)
        return CheckpointPlan([], max(rounds), 0.0)
    found = [{(round, number) for round, number in each.checkpoints} for each in offers]
    rounds += [round for seen in found for round, _ in seen]
    common = sorted(set.intersection(*found), reverse=True)
    newest = max(set.union(*found), default=None)
    if newest is not None and newest not in common:
        log.warning("state %r: not all nodes see checkpoint %s; --checkpoint-dir must be shared by all nodes",
                    name, checkpoint_files.checkpoint_name(*newest))  # fmt: skip
    newer = [each for each in common if memory_commit is None or each > (memory_commit.round, memory_commit.number)]
    return CheckpointPlan([checkpoint_files.checkpoint_name(*each) for each in newer], max(rounds), offers[0].interval)


class RestorableCheckpoint(NamedTuple):
    """A checkpoint that can be used."""

    path: Path
    description: dict[str, Any]
    shard: int  # the rank whose values this one takes

    @property
    def id(self) -> CommitId:
        return CommitId(self.description["round"], self.description["number"])

    @property
    def is_sharded(self) -> bool:
        return any(found["flags"] & IS_SHARDED for found in self.description["ranks"].values())

    def read_pickle(self) -> bytes:
        """Its digest is checked here too: `find_restorable` leaves most files to other ranks."""
        name = checkpoint_files.pickle_name(self.shard)
        checkpoint_files.verify_checkpoint_files(self.path, {name: self.description["files"][name]})
        return (self.path / name).read_bytes()

    @property
    def tensor_names(self) -> list[str]:
        return list(self.description["ranks"][str(self.shard)]["tensors"])

    def has_sharding_of(self, rank: int, values: Mapping[str, Any]) -> bool:
        """Whether this rank can take the tensors as the checkpoint has them."""
        is_own = self.shard == rank or not self.is_sharded
        return is_own and content.StoredContent(None, self.read_pickle()).has_sharding_of(values)

    def load(self, run: int) -> tuple[CommitBuffer, CommitHeader]:
        """The commit of a rank, from disk into a new buffer; Unusable says why it cannot be used."""
        described = self.description["ranks"][str(self.shard)]
        data, offset = self.read_pickle(), described["pickle_offset"]
        buffer = _create_checkpoint_restore_buffer(self.path, offset + content.PICKLE_ROOM * len(data))
        buffer.write_pickle(offset, data)
        stored = content.StoredContent(buffer, data)
        parts, wanted = stored.parts, dict[str, torch.Tensor]()
        for number, name in enumerate(self.tensor_names):
            tensor = stored.separate_tensor(number)
            if number in parts and not name.startswith(checkpoint_files.OWN):
                tensor = ShardedTensorParts(parts[number], tensor)
            wanted[name] = tensor
        _fill_from_checkpoint(self.path, wanted)
        header = CommitHeader(
            run, self.id, self.shard, self.description["world_size"], offset, len(data), crc32(data), described["flags"]
        )
        buffer.complete(header)
        return buffer, header

    def resharded(self) -> "ReshardedCheckpoint":
        id, world_size = self.id, self.description["world_size"]
        stored = content.StoredContent(None, self.read_pickle())
        for number in stored.parts:
            if self.tensor_names[number].startswith(checkpoint_files.OWN):
                raise Unusable(f"{self.path} has parts of tensors that only ranks with the same sharding can read")
        return ReshardedCheckpoint(Commit(id.round, id.number, world_size), stored, self)


def find_restorable(path: Path, rank: int, world_size: int) -> RestorableCheckpoint:
    """Unusable says why a checkpoint cannot be used.  Each rank looks at some of its files."""
    found = checkpoint_files.read_checkpoint_description(path)
    files = sorted(found["files"].items())
    checkpoint_files.verify_checkpoint_files(path, dict(files[rank::world_size]))
    if found["world_size"] == world_size and str(rank) in found["ranks"]:
        return RestorableCheckpoint(path, found, rank)
    if found["differing"]:
        raise Unusable(
            f"{path} was made by {found['world_size']} ranks, this round has {world_size}, "
            f"and these values differ between ranks: {', '.join(found['differing'])}"
        )
    return RestorableCheckpoint(path, found, 0)


class ReshardedCheckpoint(NamedTuple):
    """A checkpoint whose sharding is not that of this round."""

    commit: Commit
    stored: content.StoredContent
    found: RestorableCheckpoint

    @property
    def names(self) -> list[str]:
        return self.stored.names

    def load(self, name: str, live: Any) -> Any:
        def fill(tensors: dict[str, torch.Tensor]) -> None:
            _fill_from_checkpoint(self.found.path, tensors)

        return self.stored.load_from_files(name, live, self.found.tensor_names, fill)


def _fill_from_checkpoint(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    # Here, because it takes 0.7 s: every node of a job with a State would pay for it before its first round.
    from torch.distributed.checkpoint import state_dict_loader as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP's about a single process
            dcp.load(dict(tensors), storage_reader=FileSystemReader(path), no_dist=True)
    except (OSError, RuntimeError, ValueError, CheckpointException) as error:
        raise Unusable(f"{path}: {' '.join(str(error).split())}") from error


def _create_checkpoint_restore_buffer(path: Path, size: int) -> CommitBuffer:
    try:
        return CommitBuffer.create(size)
    except NotEnoughMemory as error:
        try:
            return CommitBuffer.create_on_disk(path.parent, size)
        except OSError as on_disk:
            raise Unusable(f"{path} does not fit into memory ({error}), nor beside it ({on_disk.strerror})") from error
