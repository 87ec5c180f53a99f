"""Restore from disk: choose a checkpoint with all ranks, and make it a commit in memory, to load like any other.

A checkpoint is used if all ranks can read it.  The log names one that is damaged, and the next older one is tried.
"""

import logging
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from torch.distributed.checkpoint import state_dict_loader as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from ripstop.commit_memory import CommitId, Header, NotEnoughMemory
from ripstop.train import checkpoint_files, content
from ripstop.train.agreement import Commit
from ripstop.train.checkpoint_files import Unusable
from ripstop.train.commit_buffer import CommitBuffer
from ripstop.train.rank_store import RankStore

log = logging.getLogger("ripstop.train")


class Plan(NamedTuple):
    """What all ranks agree on: checkpoints to try, the newest round that anyone has seen, and the interval of saves."""

    candidates: list[str]
    newest_round: int
    interval: float


def plan(
    store: RankStore, topic: str, directory: str, interval: float, name: str, newest_round: int, memory: Commit | None
) -> Plan:
    """Agree with the other ranks; `memory` is the commit that would be restored without disk."""
    seen = checkpoint_files.checkpoints(checkpoint_files.folder(directory, name)) if directory else []
    own = [bool(directory), [[each.round, each.number] for each in seen], newest_round, interval]

    def decide(received: list[Any]) -> Any:
        rounds = [0, *(newest for _, _, newest, _ in received)]
        if not all(has_directory for has_directory, *_ in received):
            if any(has_directory for has_directory, *_ in received):
                log.warning("state %r is not saved to disk: give all nodes --checkpoint-dir", name)
            return [[], max(rounds), 0.0]
        found = [{tuple(each) for each in seen} for _, seen, _, _ in received]
        rounds += [round for seen in found for round, _ in seen]
        common = sorted(set.intersection(*found), reverse=True)
        newest = max(set.union(*found), default=None)
        if newest is not None and newest not in common:
            log.warning("state %r: not all nodes see checkpoint %s; --checkpoint-dir must be shared by all nodes",
                        name, checkpoint_files.saved_name(*newest))  # fmt: skip
        newer = [each for each in common if memory is None or each > (memory.round, memory.number)]
        return [[checkpoint_files.saved_name(*each) for each in newer], max(rounds), received[0][3]]

    return Plan(*store.decide(topic, own, decide))


def load(path: Path, run: int, rank: int, world_size: int) -> tuple[CommitBuffer, Header]:
    """The commit of a rank, from disk into a new buffer; Unusable says why it cannot be used."""
    found = checkpoint_files.description(path)
    checkpoint_files.verify(path, found["files"])
    shard = rank
    if found["world_size"] != world_size or str(rank) not in found["ranks"]:
        shard = 0
        if found["differing"]:
            raise Unusable(
                f"{path} is of {found['world_size']} ranks with different values of {', '.join(found['differing'])}, "
                f"and this round has {world_size}"
            )
    described = found["ranks"][str(shard)]
    data = (path / checkpoint_files.pickle_name(shard)).read_bytes()
    offset = described["pickle_offset"]
    try:
        buffer = CommitBuffer.create(offset + content.PICKLE_ROOM * len(data))
    except NotEnoughMemory as error:
        raise Unusable(f"{path} does not fit into memory: {error}") from error
    buffer.write_pickle(offset, data)
    stored = content.Stored(buffer, data)
    parts: dict[str, Any] = {}
    for number, name in enumerate(described["tensors"]):
        parts.setdefault(name, stored.separate_tensor(number))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP's about a single process
            dcp.load(parts, storage_reader=FileSystemReader(path), no_dist=True)
    except (OSError, RuntimeError, ValueError, CheckpointException) as error:
        raise Unusable(f"{path}: {' '.join(str(error).split())}") from error
    for number, name in enumerate(described["tensors"]):  # two of one name are equal
        mine = stored.separate_tensor(number)
        if mine.data_ptr() != parts[name].data_ptr():
            mine.copy_(parts[name])
    id = CommitId(found["round"], found["number"])
    header = Header(run, id, shard, found["world_size"], offset, len(data), crc32(data), described["flags"])
    buffer.complete(header)
    return buffer, header
