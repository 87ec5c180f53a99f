"""The saver: a process that writes one commit of this node's ranks to disk, and ends.

The agent starts it with the descriptors of the buffers (`workers/saver_process.py`), as a fork of a zygote that has
torch or in a new interpreter.  Workers leave these buffers alone while it runs; the saver checks all the same that
none has changed.  It has low priority for processor and disk.

What it writes (`checkpoint_files.py`): the state of rank 0 as plain DCP has it: `model.0.weight`,
`optimizer.state.0.exp_avg`, `step`.  Of other ranks only the tensors that differ, as `_ripstop.RANK.NUMBER`.  Parts of
sharded tensors are chunks of the whole ones, as DCP writes DTensors.

Who writes: the node of rank 0, if the state is known to be equal on all ranks.  Otherwise every node writes what its
ranks have, and the last one completes the checkpoint.
"""

import ctypes
import dataclasses
import json
import os
import pickle
import shutil
import time
import warnings
from collections import ChainMap
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from ripstop.commit_memory import IS_REPLICATED, IS_SHARDED, CommitHeader, CommitId
from ripstop.train import checkpoint_files, content
from ripstop.train.commit_buffer import CommitBuffer, Corrupted
from ripstop.train.sharding import ShardedTensorParts

NICENESS = 10
MAX_NAMED = 8  # values in a reply
METADATA = ".metadata"  # the file that plain DCP reads first
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # system calls
_IOPRIO_LOWEST = 2 << 13 | 7  # best effort, last


class NotSaved(Exception):
    """Why this commit is not on disk."""


class Shard(NamedTuple):
    buffer: CommitBuffer
    header: CommitHeader
    stored: content.StoredContent


def save(settings: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """Write the commit; `fds` are the buffers of `settings["ranks"]`.  What was done, for the agent's log."""
    began = time.monotonic()
    run, id = crc32(settings["run_id"].encode()), CommitId(settings["round"], settings["number"])
    shards = {rank: _open_saver_shard(fd, run, id, rank) for rank, fd in zip(settings["ranks"], fds, strict=True)}
    is_replicated = all(shard.header.flags & IS_REPLICATED for shard in shards.values())
    if is_replicated and 0 not in shards:
        return {"skipped": "the node of rank 0 saves the state, which is equal on all ranks"}
    folder = checkpoint_files.checkpoint_folder(settings["directory"], settings["name"])
    is_shared = not is_replicated and len(shards) < settings["world_size"]
    unfinished = folder / checkpoint_files.unfinished_checkpoint_name(id.round, id.number, is_shared=is_shared)
    sizes = [shard.header.end for shard in shards.values()]
    is_sharded = any(shard.header.flags & IS_SHARDED for shard in shards.values())
    needed = sum(sizes) if is_sharded else max(sizes)  # what is equal is written once
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _make_room_to_save(folder, settings["keep"], id, needed, is_shared=is_shared)
        if not is_shared:
            checkpoint_files.remove_checkpoint(unfinished)  # of a killed saver
        unfinished.mkdir(exist_ok=True)
        try:
            part = _save_part(unfinished, shards)
            if changed := [rank for rank, shard in shards.items() if shard.buffer.header(run) != shard.header]:
                raise NotSaved(f"the buffer of rank {changed[0]} has changed meanwhile")
            checkpoint_files.sync_checkpoint_files(*(unfinished / name for name in part.files))
            checkpoint_files.write_checkpoint_part(unfinished, min(shards), pickle.dumps(part))
        except BaseException as error:
            checkpoint_files.remove_checkpoint(unfinished)  # without this node's part, the others are of no use
            if is_shared and isinstance(error, FileNotFoundError):
                raise NotSaved(
                    "another node has removed its parts: it failed, or it saves a later commit; "
                    "if this happens again and again, raise --checkpoint-interval"
                ) from error
            raise
        if (parts := _parts_of_all_savers(unfinished, settings["world_size"]) if is_shared else [part]) is None:
            return {"skipped": "another node completes the checkpoint, or says why it cannot"}
        try:
            size = _complete_save(unfinished, id, settings["world_size"], parts)
            saved = unfinished.rename(folder / checkpoint_files.checkpoint_name(id.round, id.number))
            (saved / checkpoint_files.COMPLETING).unlink(missing_ok=True)
        except BaseException:
            checkpoint_files.remove_checkpoint(unfinished)
            raise
        checkpoint_files.sync_checkpoint_files(folder)
        with suppress(OSError):  # the next save tries again
            checkpoint_files.prune(folder, settings["keep"], id.round, id.number)
    except (OSError, RuntimeError, CheckpointException) as error:
        raise NotSaved(_why_not_saved(error, folder, needed)) from error
    opaque = parts[0].opaque[:MAX_NAMED]
    return {"path": str(saved), "bytes": size, "seconds": time.monotonic() - began, "opaque": opaque}


def _make_room_to_save(folder: Path, keep: int, id: CommitId, needed: int, *, is_shared: bool) -> None:
    checkpoint_files.prune(folder, keep, id.round, id.number)
    if is_shared and shutil.disk_usage(folder).free < needed:
        checkpoint_files.prune(folder, keep, id.round, id.number, keep_parts=False)
    if (free := shutil.disk_usage(folder).free) < needed:
        raise NotSaved(f"{folder} has {free} bytes free, and the checkpoint needs {needed}")


def _open_saver_shard(fd: int, run: int, id: CommitId, rank: int) -> Shard:
    try:
        os.fsync(fd)  # of a file: what cannot be written to disk must not be read as if it were
    except OSError as error:
        raise NotSaved(f"the buffer of rank {rank} cannot be written to disk: {error.strerror}") from error
    buffer = CommitBuffer(fd)
    header = buffer.header(run)
    if header is None or (header.id, header.rank) != (id, rank):
        raise NotSaved(f"the buffer of rank {rank} has another commit by now")
    try:
        return Shard(buffer, header, content.StoredContent(buffer, buffer.read_pickle(header)))
    except Corrupted as error:
        raise NotSaved(str(error)) from error


class Part(NamedTuple):
    """What one node has written."""

    ranks: dict[int, dict[str, Any]]  # as in the description
    digests: dict[int, dict[str, str]]  # of each rank's values
    metadata: Metadata
    results: list[WriteResult]
    files: dict[str, list[int]]
    opaque: list[str]  # values that plain DCP reads as a pickle, with the reason
    chunks: dict[str, dict[tuple[int, ...], int]]  # the digests of parts of sharded tensors, by name and offsets


def _save_part(path: Path, shards: dict[int, Shard]) -> Part:
    """Write the files of this node."""
    state, names, opaque, sharded = _content_to_save(shards)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP's about a single process
        planner = DefaultSavePlanner()
        planner.set_up_planner(state)
        (plan,), metadata = create_default_global_save_plan([planner.create_local_plan()])
        plan = dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{min(shards)}_"))
        results = FileSystemWriter(path, sync_files=False).write_data(plan, planner).wait()
    files = {result.storage_data.relative_path for result in results}
    ranks = {}
    for rank, (buffer, header, _) in shards.items():
        ranks[rank] = {"pickle_offset": header.pickle_offset, "flags": header.flags, "tensors": names[rank]}
        files.add(checkpoint_files.pickle_name(rank))
        (path / checkpoint_files.pickle_name(rank)).write_bytes(buffer.read_pickle(header))
    digests = {rank: shard.stored.digests() for rank, shard in shards.items()}
    metadata = dataclasses.replace(metadata, planner_data=planner.mappings)
    chunks = {name: tensor.digests() for name, tensor in sharded.items()}
    return Part(ranks, digests, metadata, results, checkpoint_files.file_table(path, files), opaque, chunks)


def _parts_of_all_savers(path: Path, world_size: int) -> list[Part] | None:
    """The parts of all ranks; None if some are missing, or if another node completes the checkpoint."""
    try:
        parts: list[Part] = [pickle.loads(data) for data in checkpoint_files.read_checkpoint_parts(path)]
        there = {rank for part in parts for rank in part.ranks}
        is_last = there == set(range(world_size)) and checkpoint_files.is_first_to_complete(path)
    except FileNotFoundError:  # it has completed it meanwhile, or has given up
        return None
    return parts if is_last else None


def _complete_save(path: Path, id: CommitId, world_size: int, parts: list[Part]) -> int:
    """Write what describes all parts, those of rank 0 first; return the size of all."""
    metadata = _metadata_to_save(parts)
    FileSystemWriter(path, sync_files=False).finish(metadata, [part.results for part in parts])
    files = checkpoint_files.file_table(path, [METADATA])
    digests = [digest for part in parts for digest in part.digests.values()]
    files |= {name: found for part in parts for name, found in part.files.items()}
    description = {
        "round": id.round, "number": id.number, "world_size": world_size,
        "ranks": {rank: found for part in parts for rank, found in part.ranks.items()},
        "differing": [name for name in digests[0] if any(each.get(name) != digests[0][name] for each in digests)],
        "files": files,
    }  # fmt: skip
    checkpoint_files.write_checkpoint_description(path, description)
    checkpoint_files.remove_checkpoint_parts(path)
    checkpoint_files.sync_checkpoint_files(path / METADATA, path / checkpoint_files.DESCRIPTION, path)
    return sum(size for size, _ in files.values())


def _metadata_to_save(parts: list[Part]) -> Metadata:
    """Of all nodes.  A chunk that several nodes have written is used once."""
    state: dict[str, Any] = {}
    chunks: dict[str, dict[tuple[int, ...], int]] = {}
    for part in parts:
        for name, digests in part.chunks.items():
            known_digests = chunks.setdefault(name, {})
            if any(known_digests.get(offsets, digest) != digest for offsets, digest in digests.items()):
                raise _not_saved_with_two_contents(name)
            known_digests |= digests
        for name, described in part.metadata.state_dict_metadata.items():
            there = state.setdefault(name, described)
            if there is not described and isinstance(described, TensorStorageMetadata):
                if there.size != described.size:
                    raise _not_saved_with_two_contents(name)
                known = {chunk.offsets for chunk in there.chunks}
                there.chunks.extend(chunk for chunk in described.chunks if chunk.offsets not in known)
    for name, described in state.items():
        if isinstance(described, TensorStorageMetadata):
            here = sum(chunk.sizes.numel() for chunk in described.chunks)
            if here != described.size.numel():
                raise NotSaved(f"{name} has {described.size.numel()} values, and the ranks have {here} of them")
    mappings = dict(ChainMap(*(part.metadata.planner_data for part in parts)))
    return Metadata(state, planner_data=mappings)


def _not_saved_with_two_contents(name: str) -> NotSaved:
    return NotSaved(
        f"{name} is a sharded tensor with different contents on several device meshes, as on pipeline stages; "
        "in the State, use different names for it"
    )


def _content_to_save(
    shards: dict[int, Shard],
) -> tuple[dict[str, Any], dict[int, list[str]], list[str], dict[str, ShardedTensorParts]]:
    """What to write, the names of each rank's tensors in it, what is opaque, and the sharded tensors in it."""
    state: dict[str, Any] = {}
    names: dict[int, list[str]] = {}
    opaque: list[str] = []
    sharded: dict[str, ShardedTensorParts] = {}
    first, shared = min(shards), set[int]()  # the tensors of the first rank that others can have too
    for rank, shard in shards.items():
        plain, tensors, names[rank], its_opaque = _plain_dcp_for_saver(rank, shard.stored)
        if rank == first:
            shared = {number for number, tensor in enumerate(tensors) if not isinstance(tensor, ShardedTensorParts)}
        if not rank:
            state, opaque = plain, its_opaque
        for number, tensor in enumerate(tensors):
            name = names[rank][number]
            if isinstance(tensor, ShardedTensorParts) and name in sharded:
                if not sharded[name].add_parts(tensor):
                    raise _not_saved_with_two_contents(name)
            elif isinstance(tensor, ShardedTensorParts):
                sharded[name] = tensor
                state |= {name: tensor} if rank else {}
            elif rank != first and number in shared and shard.stored.is_same(number, shards[first].stored):
                names[rank][number] = names[first][number]
            elif rank:
                names[rank][number] = f"{checkpoint_files.OWN}{rank}.{number}"
                state[names[rank][number]] = tensor
    return state, names, opaque, sharded


def _plain_dcp_for_saver(
    rank: int, stored: content.StoredContent
) -> tuple[dict[str, Any], list[torch.Tensor], list[str], list[str]]:
    """The state of a rank, its tensors, the name of each of them in a checkpoint of rank 0, and what is opaque."""
    tensors = [stored.separate_tensor(number) for number in range(stored.tensor_count)]
    for number, part in stored.parts.items():
        if torch.Size(part.shape).numel():
            tensors[number] = ShardedTensorParts(part, tensors[number])
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    state: dict[str, Any] = {}
    names: dict[int, str] = {}
    opaque = []
    for name in stored.names:
        if name == content.RANDOM:
            continue
        try:
            value = stored.unpickle(name, tensors.__getitem__)
            flat, _ = flatten_state_dict({name: value})
        except Exception as error:  # of a class in the script, or with keys that DCP cannot tell apart
            opaque.append(f"{name} ({type(error).__name__}: {error})"[:200])
            continue
        state[name] = value
        for key, leaf in flat.items():
            if id(leaf) in numbers:
                names.setdefault(numbers[id(leaf)], key)
    for number in range(len(tensors)):  # random states, and tensors that DCP does not see
        if number not in names:
            names[number] = f"{checkpoint_files.OWN}{rank}.{number}"
            tensors[number] = stored.separate_tensor(number)
            state[names[number]] = tensors[number]
    return state, tensors, [names[number] for number in range(len(tensors))], opaque


def _why_not_saved(error: BaseException, folder: Path, needed: int) -> str:
    while isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    text = " ".join(str(error).split("\n")[0].split()) or type(error).__name__
    try:
        free = f"{shutil.disk_usage(folder).free} bytes are free in {folder}"
    except OSError:
        free = f"{folder} cannot be read"
    return f"{text}; {free}, and the checkpoint needs {needed}"


def run_saver(settings: str, reply_fd: int, fds: list[int]) -> NoReturn:
    """The process: save, and answer the agent with one line of JSON."""
    os.nice(NICENESS)
    if (call := _IOPRIO_SET.get(os.uname().machine)) is not None:
        ctypes.CDLL(None).syscall(*map(ctypes.c_long, (call, 1, 0, _IOPRIO_LOWEST)))
    torch.set_num_threads(1)
    try:
        reply = save(json.loads(settings), fds)
    except NotSaved as error:
        reply = {"problem": str(error)}
    except BaseException as error:  # a defect; the agent names it
        reply = {"problem": f"{type(error).__name__}: {error}"}
    os.write(reply_fd, json.dumps(reply).encode())
    os._exit(0)
