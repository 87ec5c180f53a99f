"""The saver: a process that writes one commit of this node's ranks to disk, and ends.

The agent starts it with the descriptors of the buffers (`workers/saver.py`), as a fork of a zygote that has torch or
in a new interpreter.  Workers leave these buffers alone while it runs; the saver checks all the same that none has
changed.  It has low priority for processor and disk.

What it writes (`checkpoint_files.py`): the state of rank 0 as plain DCP has it: `model.0.weight`,
`optimizer.state.0.exp_avg`, `step`.  Of other ranks only the tensors that differ, as `_ripstop.RANK.NUMBER`.
"""

import ctypes
import json
import os
import shutil
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

import torch
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from ripstop.commit_memory import IS_REPLICATED, IS_SHARDED, CommitId, Header
from ripstop.train import checkpoint_files, content
from ripstop.train.commit_buffer import CommitBuffer, Corrupted

NICENESS = 10
MAX_NAMED = 8  # values in a reply
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # system calls
_IOPRIO_LOWEST = 2 << 13 | 7  # best effort, last


class NotSaved(Exception):
    """Why this commit is not on disk."""


class Shard(NamedTuple):
    buffer: CommitBuffer
    header: Header
    stored: content.Stored


def save(settings: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """Write the commit; `fds` are the buffers of `settings["ranks"]`.  What was done, for the agent's log."""
    began = time.monotonic()
    run, id = crc32(settings["run_id"].encode()), CommitId(settings["round"], settings["number"])
    shards = {rank: _shard(fd, run, id, rank) for rank, fd in zip(settings["ranks"], fds, strict=True)}
    flags = [shard.header.flags for shard in shards.values()]
    if any(each & IS_SHARDED for each in flags):
        raise NotSaved("tensors that are sharded between ranks cannot be saved yet; save them in the script")
    if len(shards) < settings["world_size"] and not all(each & IS_REPLICATED for each in flags):
        raise NotSaved("the ranks are on several nodes, and their state is not known to be equal; save it yourself")
    if 0 not in shards:
        return {"skipped": "the node of rank 0 saves the state, which is equal on all ranks"}
    folder = checkpoint_files.folder(settings["directory"], settings["name"])
    unfinished = folder / checkpoint_files.unfinished_name(id.round, id.number)
    saved = folder / checkpoint_files.saved_name(id.round, id.number)
    needed = shards[0].header.end
    try:
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint_files.prune(folder, settings["keep"])
        if (free := shutil.disk_usage(folder).free) < needed:
            raise NotSaved(f"{folder} has {free} bytes free, and the checkpoint needs {needed}")
        unfinished.mkdir()
        try:
            opaque = _write(unfinished, shards, settings["world_size"])
            if changed := [rank for rank, shard in shards.items() if shard.buffer.header(run) != shard.header]:
                raise NotSaved(f"the buffer of rank {changed[0]} has changed meanwhile")
            checkpoint_files.sync(*unfinished.iterdir(), unfinished)
            size = sum(file.stat().st_size for file in unfinished.iterdir())
            unfinished.rename(saved)
        except BaseException:
            checkpoint_files.remove(unfinished)
            raise
        checkpoint_files.sync(folder)
        checkpoint_files.prune(folder, settings["keep"])
    except (OSError, RuntimeError, CheckpointException) as error:
        raise NotSaved(_why(error, folder, needed)) from error
    return {"path": str(saved), "bytes": size, "seconds": time.monotonic() - began, "opaque": opaque[:MAX_NAMED]}


def _shard(fd: int, run: int, id: CommitId, rank: int) -> Shard:
    buffer = CommitBuffer(fd)
    header = buffer.header(run)
    if header is None or (header.id, header.rank) != (id, rank):
        raise NotSaved(f"the buffer of rank {rank} has another commit by now")
    try:
        return Shard(buffer, header, content.Stored(buffer, buffer.read_pickle(header)))
    except Corrupted as error:
        raise NotSaved(str(error)) from error


def _write(path: Path, shards: dict[int, Shard], world_size: int) -> list[str]:
    """Fill a new directory; return the values that plain DCP reads as a pickle, with the reason."""
    state, names, opaque = _as_plain_dcp(shards[0].stored)
    own: dict[str, torch.Tensor] = {}
    ranks = {}
    for rank, shard in shards.items():
        tensors = names if not rank else _names_of(rank, shard.stored, shards[0].stored, names, own)
        ranks[rank] = {"pickle_offset": shard.header.pickle_offset, "flags": shard.header.flags, "tensors": tensors}
        (path / checkpoint_files.pickle_name(rank)).write_bytes(shard.buffer.read_pickle(shard.header))
    digests = [shard.stored.digests() for shard in shards.values()]
    differing = [name for name in digests[0] if any(each.get(name) != digests[0][name] for each in digests)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP's about a single process
        dcp.save({**state, **own}, storage_writer=FileSystemWriter(path, sync_files=False), no_dist=True)
    commit = {"round": shards[0].header.id.round, "number": shards[0].header.id.number, "world_size": world_size}
    checkpoint_files.describe(path, {**commit, "ranks": ranks, "differing": differing})
    return opaque


def _as_plain_dcp(stored: content.Stored) -> tuple[dict[str, Any], list[str], list[str]]:
    """The state of rank 0, the name of each of its tensors in the checkpoint, and what is opaque."""
    tensors = [stored.separate_tensor(number) for number in range(stored.tensor_count)]
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
    for number, tensor in enumerate(tensors):  # random states, and tensors that DCP does not see
        if number not in names:
            names[number] = f"_ripstop.0.{number}"
            state[names[number]] = tensor
    return state, [names[number] for number in range(len(tensors))], opaque


def _names_of(
    rank: int, stored: content.Stored, first: content.Stored, names: list[str], own: dict[str, torch.Tensor]
) -> list[str]:
    """The names of a rank's tensors: those of rank 0 where they are equal to the last bit; `own` gets the others."""
    found = []
    for number in range(stored.tensor_count):
        if number < first.tensor_count and stored.is_same(number, first):
            found.append(names[number])
        else:
            found.append(f"_ripstop.{rank}.{number}")
            own[found[-1]] = stored.separate_tensor(number)
    return found


def _why(error: BaseException, folder: Path, needed: int) -> str:
    while isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    text = " ".join(str(error).split("\n")[0].split()) or type(error).__name__
    try:
        free = f"{shutil.disk_usage(folder).free} bytes are free in {folder}"
    except OSError:
        free = f"{folder} cannot be read"
    return f"{text}; {free}, and the checkpoint needs {needed}"


def run(settings: str, reply_fd: int, fds: list[int]) -> NoReturn:
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
