"""`train.State`: training state that outlives the worker.

A commit copies the state into memory that the agent keeps; after a fault, `restore` gives the new workers the newest
commit that all ranks have.  Rules
1.  Every rank calls `restore` once before its first `commit`, and `commit` after the same steps.  A collective lies
    between two commits, as in every data-parallel step (`buffer_slots.py` says what this is needed for).
2.  A commit never overwrites the only one that all ranks have.
3.  Without an agent, training goes on and the log says once what is missing.  Without memory for buffers too; then
    commits go to disk only, at the interval of checkpoints, if the job has a directory for them.
"""

import logging
import os
import random
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from zlib import crc32

import torch

from ripstop.commit_memory import (
    IS_REPLICATED,
    IS_SHARDED,
    CommitHeader,
    CommitId,
    NotEnoughMemory,
    commit_id_round,
    usable_commit_memory,
)  # fmt: skip
from ripstop.train import checkpoint_files, content, gpu_copy, interruption, intervals, reports, standby_gate
from ripstop.train.agent_memory import AgentError, AgentMemory, Identity, connect_agent_memory
from ripstop.train.buffer_slots import (
    BLOCKING_BUFFERS,
    OVERLAPPED_BUFFERS,
    may_free_slots_of_others,
    next_slot,
    slots_newest_last,
)
from ripstop.train.commit_buffer import CommitBuffer
from ripstop.train.final_commit import FinalCommit
from ripstop.train.rank_store import RankStore, announce_absence_in_rank_store
from ripstop.train.replication import ReplicationComparison
from ripstop.train.restoring import NO_SLOT, NotKept, RestorableShard, Restoring, first_restore_topic
from ripstop.train.saves import Saves

log = logging.getLogger("ripstop.train")

_names: "weakref.WeakValueDictionary[str, State]" = weakref.WeakValueDictionary()


class State:
    """The values by name are the state: objects with `state_dict` and `load_state_dict`, or plain values.

    They are attributes too: `state.step += 1`.  Random states (Python, NumPy, torch, CUDA) are part of every commit.
    `name` tells several States of one script apart.
    """

    def __init__(self, name: str = "state", /, **values: Any) -> None:
        for key in values:
            if key.startswith("_") or hasattr(State, key):
                raise ValueError(f"State({key}=…): this name is used by State itself; choose another")
        if not name or len(name) > 64:
            raise ValueError(f"State({name!r}): a name has 1 to 64 characters")
        if name in _names and _names[name]._entry == interruption.entries:  # an older one is of an earlier round
            raise ValueError(
                f"State({name!r}): this process has a State of this name; give each its own: State('ema', …)"
            )
        self._values: dict[str, Any]
        object.__setattr__(self, "_values", values)
        self._name = name
        self._run = crc32(os.environ.get("TORCHELASTIC_RUN_ID", "").encode())
        self._copy: gpu_copy.OverlappedCopy | None = None  # the newest commit, until it is complete
        self._file: CommitBuffer | None = None  # where commits go without memory, until the saver has read them
        self._start_round()
        content.snapshot(values)  # raises if a value cannot be stored
        _names[name] = self

    def _start_round(self) -> None:
        """Forget what belongs to one round.  A worker that goes on in place has several."""
        self._entry = interruption.entries
        self._number = 0  # of the newest commit
        self._restored_from: str | None = None
        self._memory: AgentMemory | None = None
        self._store: RankStore | None = None
        self._worker: Identity
        self._round = self._rank = 0
        self._world_size = 1
        self._buffers: dict[int, CommitBuffer] = {}  # by slot
        self._slots: list[int] = []  # the next one to overwrite first
        self._newest: tuple[CommitBuffer, CommitHeader] | None = None
        self._comparison: ReplicationComparison | None = None
        self._saves: Saves | None = None
        self._is_on_disk = False  # there is no memory for commits
        self._commits_since_restore = 0
        self._has_others = False  # this node holds shards of other ranks
        self._restores = 0
        self._calls = 0  # of commit, since the restore
        self._next_call: int | None = 1  # that commits; None: to be read from rank 0
        self._newest_call = (0, 0.0)  # that made a commit, and its time
        self._final_commit: FinalCommit | None = None  # of the round

    def __getattr__(self, key: str) -> Any:
        try:
            return self.__dict__["_values"][key]
        except KeyError:
            raise AttributeError(f"this State has no {key!r}; it has {', '.join(self.__dict__['_values'])}") from None

    def __setattr__(self, key: str, value: Any) -> None:
        if key.startswith("_"):
            object.__setattr__(self, key, value)
        elif key in self._values:
            self._values[key] = value
        else:
            raise AttributeError(f"state.{key} is not part of this State; name it when you make it: State({key}=…)")

    @property
    def commits(self) -> int:
        """The number of the newest commit, counted from the job's start."""
        return self._number

    @property
    def restored_from(self) -> str | None:
        """Where the last `restore` found this rank's shard: this node's "memory", a "peer", "disk", or None: none."""
        return self._restored_from

    # restore ----------------------------------------------------------------------------------------------------------

    def restore(self) -> bool:
        """Load the newest commit that all ranks can have; False, and nothing is changed, if there is none.

        Every rank calls it, before the first `commit`.
        """
        standby_gate.refuse_in_standby("State.restore()")
        interruption.raise_if_interrupted()
        began = time.perf_counter()
        self._finish_copy()
        mapped = self._buffers  # until the end of this call: those that are used again need not be mapped again
        if interruption.is_elastic and self._entry != interruption.entries:
            self._start_round()
        self._restores += 1
        self._restored_from = None
        self._calls, self._next_call, self._newest_call = 0, 1, (0, 0.0)
        self._commits_since_restore, self._newest, self._is_on_disk = 0, None, False
        if not self._connect():
            interruption.oppose_interruption(f"state {self._name!r} is not kept")
            return False
        assert self._store is not None and self._memory is not None
        try:
            restoring = Restoring(self._name, self._run, self._worker, self._restores, self._memory, self._store)
            with restoring:
                is_found = self._restore(restoring)
        except NotKept as error:
            log.warning("state %r is not kept: %s", self._name, error)
            interruption.oppose_interruption(f"state {self._name!r} is not kept")
            self._memory = self._store = None
            return False
        del mapped
        if is_found:
            self._restored_from = restoring.source
            reports.state_restored(restoring.source, self._step(), time.perf_counter() - began)
        elif interruption.is_elastic:
            self._keep_beginning()
        return is_found

    def _restore(self, restoring: Restoring) -> bool:
        assert self._store is not None and self._memory is not None
        found = restoring.find(self._values)
        self._buffers, self._has_others = restoring.own, restoring.has_others
        self._slots = sorted(self._buffers)
        if self._saves is None or (found is not None and found.commit.number < self._number):  # ids must not repeat
            self._round = commit_id_round(self._worker.round, max(restoring.disk.newest_round, self._round))
        topic = f"saves {self._restores}"
        self._saves = Saves(self._name, topic, self._rank, self._memory, self._store, restoring.disk.interval)
        worker, restores = self._worker, self._restores
        self._final_commit = FinalCommit(
            self._name, worker.round, self._store, self._memory, self._rank, self._world_size, restores
        )
        topic = f"compare {self._restores}"
        self._comparison = ReplicationComparison(self._store, topic, self._world_size, restoring.is_replicated)
        if found is None:
            return False
        if isinstance(found, RestorableShard):
            if found.kept_for == self._rank and found.slot in self._buffers:
                self._slots = slots_newest_last(self._slots, found.slot)
            self._load_shard(found)
        else:
            self._slots = slots_newest_last(self._slots, restoring.own_slot(found.commit))
            self._load(found.names, found.load)
        restoring.loaded()
        self._number = found.commit.number
        return True

    def _keep_beginning(self) -> None:
        """A worker that goes on in place has a state that has changed: the first one must be kept, as commit 0."""
        assert self._memory is not None
        if interruption.entries > 1:
            interruption.oppose_interruption(f"no commit of state {self._name!r} can be restored")
            with suppress(AgentError):
                self._memory.wait_for_replacement(self._name)
            raise RuntimeError(
                f"state {self._name!r} has changed in this process, and no commit can be restored; a new worker starts "
                "from the beginning"
            )
        self._number = -1
        if not self._commit(None, blocking=True):
            self._number = 0
            interruption.oppose_interruption(f"state {self._name!r} is not kept")
        self._calls = 0

    def _connect(self) -> bool:
        """Whether this is a worker of a ripstop job with memory for state."""
        if self._memory is not None:
            return True
        topic = first_restore_topic(self._restores)
        try:
            self._memory = connect_agent_memory()
            if self._memory is None:
                log.info("state %r is not kept: this is no worker of `ripstop run`", self._name)
                announce_absence_in_rank_store(self._name, topic, "its agent has no socket")
                return False
            self._worker = self._memory.identity()
        except AgentError as error:
            log.warning("state %r is not kept: no memory from the agent: %s", self._name, error)
            self._memory = None
            announce_absence_in_rank_store(self._name, topic, f"no memory from its agent: {error}")
            return False
        self._rank, self._world_size = self._worker.rank, self._worker.world_size
        self._store = RankStore(self._name, self._rank, self._world_size, bytes.fromhex(self._worker.key))
        return True

    def _load_shard(self, shard: RestorableShard) -> None:
        stored = content.StoredContent(shard.buffer, shard.buffer.read_pickle(shard.header))
        if stored.has_gpu_tensors and torch.cuda.is_available() and not shard.buffer.is_on_disk:
            gpu_copy.register_with_gpu(shard.buffer)
        self._load(stored.names, stored.load)
        if shard.header.rank == self._rank:
            _set_random_states(stored.load(content.RANDOM, {}))

    def _load(self, names: list[str], load: Callable[[str, Any], Any]) -> None:
        """`load` gives a live value the content of this name, and returns the value to use."""
        if set(names) != {*self._values, content.RANDOM}:
            there = ", ".join(name for name in names if name != content.RANDOM)
            raise ValueError(
                f"state {self._name!r} has {', '.join(self._values)}, its commit has {there}; "
                "start a new job, or make the State with the same values"
            )
        with torch.no_grad():
            for name, live in self._values.items():
                try:
                    self._values[name] = load(name, live)
                except Exception as error:
                    raise RuntimeError(
                        f"state {self._name!r}: the commit does not fit {name}, which may have changed; "
                        f"start a new job: {' '.join(str(error).split())}"
                    ) from error

    # commit -----------------------------------------------------------------------------------------------------------

    def commit(self, every: int | str | None = None, *, blocking: bool = False) -> bool:
        """Keep the state as it is now.  Every rank calls it, after the same steps, with a collective between two calls.

        `every` skips calls: a number of steps, or a time such as "30s".  From a GPU the copy continues after the
        return, at most until the next optimizer step, unless `blocking`.  Returns whether this call committed.
        """
        interruption.raise_if_interrupted()
        if not self._restores or (interruption.is_elastic and self._entry != interruption.entries):
            raise RuntimeError(
                "commit() comes after restore(): call state.restore() in every round, before the training loop"
            )
        began = time.perf_counter()
        self._calls += 1
        is_last = self._is_final_commit()
        is_kept = self._commit(None if is_last else every, blocking or is_last)
        if self._store is not None:
            if is_kept and self._newest is not None:
                reports.state_committed(self._name, self._newest[1].end, time.perf_counter() - began)
            reports.commit_called(self._step())
        if is_last and is_kept:
            self._wait_for_end()
        return is_kept

    def _is_final_commit(self) -> bool:
        """Whether this call makes the final commit of the round, because a node leaves."""
        if self._memory is None or self._final_commit is None:
            return False
        try:
            return self._final_commit.is_now()
        except (AgentError, RuntimeError):  # the agent or the store is gone: training goes on without a final commit
            return False

    def _wait_for_end(self) -> None:
        """After the final commit; if other States have to make theirs, it returns at once."""
        assert self._final_commit is not None and self._newest is not None
        reports.send_last_step()
        try:
            self._final_commit.made(self._newest[1], NO_SLOT if self._is_on_disk else self._slots[-1])
        except AgentError as error:
            log.warning("state %r: the agent does not end the round: %s", self._name, error)

    def _step(self) -> int:
        """For reports: the value `step`, or the number of commits."""
        step = self._values.get("step")
        return step if type(step) is int and step >= 0 else self._number

    def _commit(self, every: int | str | None, blocking: bool) -> bool:
        if (every is not None and not self._is_commit_due(every)) or self._memory is None:
            return False
        if self._is_on_disk:
            return self._commit_to_disk()
        taken = self._snapshot()
        self._finish_copy()  # after the snapshot, which takes milliseconds: the GPU has work until then
        assert self._comparison is not None and self._saves is not None
        self._saves.send()
        if self._newest is not None and not taken.is_sharded:
            buffer, header = self._newest
            if header.id.number and buffer.header(self._run) == header:  # commit 0 is equal on ranks that differ later
                self._comparison.add(buffer, header)
        on_gpu = any(tensor.is_cuda for tensor in taken.tensors)
        into = self._next_buffer(taken, OVERLAPPED_BUFFERS if on_gpu else BLOCKING_BUFFERS)
        if into is None:
            return self._commit_to_disk()
        header = self._header(taken, self._number + 1)
        if (
            on_gpu
            and gpu_copy.register_with_gpu(into)
            and not blocking
            and self._has_optimizer()
            and gpu_copy.can_overlap(taken)
        ):
            stable = content.stable_content_numbers(self._values, taken)
            self._copy = gpu_copy.OverlappedCopy(into, taken, header, stable)
        else:
            _copy_state_now(into, header, taken)
        self._newest = into, header
        if self._saves.is_due():
            self._saves.add(self._slots[-1], header)
        if self._copy is None:
            self._saves.send()
        self._number += 1
        self._commits_since_restore += 1
        if self._has_others and may_free_slots_of_others(self._commits_since_restore):
            self._has_others = False
            self._drop_others()
        return True

    def _snapshot(self) -> content.Snapshot:
        return content.snapshot({**self._values, content.RANDOM: _random_states()})

    def _commit_to_disk(self) -> bool:
        """Without memory, only commits that are due on disk are kept: a file beside the checkpoints is the buffer."""
        if self._memory is None:
            return False
        assert self._saves is not None
        self._number += 1  # as on ranks that have memory
        if not self._saves.is_due():
            return False
        if NO_SLOT in self._saves.slots_in_use():
            log.warning("state %r: commit %d is not saved: the last checkpoint is still being written; "
                        "raise --checkpoint-interval", self._name, self._number)  # fmt: skip
            return False
        taken = self._snapshot()
        try:
            if self._file is None or not taken.content_fits(self._file):
                folder = checkpoint_files.checkpoint_folder(self._worker.checkpoint_dir, self._name)
                self._file = CommitBuffer.create_on_disk(folder, taken.room)
            self._newest = self._file, self._header(taken, self._number)
            _copy_state_now(*self._newest, taken)
        except OSError as error:
            log.warning("state %r: commit %d is not saved: %s", self._name, self._number, error)
            return False
        self._saves.add(NO_SLOT, self._newest[1], self._file.fd)
        return self._saves.send()

    def _drop_others(self) -> None:
        assert self._memory is not None
        try:
            self._memory.drop_others(self._name)
        except AgentError as error:
            log.warning("state %r: the agent does not free old buffers: %s", self._name, error)

    def _has_optimizer(self) -> bool:
        """Whether changes of parameters are announced by an optimizer's step."""
        return any(isinstance(value, torch.optim.Optimizer) for value in self._values.values())

    def _finish_copy(self) -> None:
        if self._copy is not None:
            self._copy.finish()
            self._copy = None

    def _header(self, taken: content.Snapshot, number: int) -> CommitHeader:
        id = CommitId(self._round, number)
        place = taken.pickle_offset, len(taken.pickle), crc32(taken.pickle)
        assert self._comparison is not None
        flags = IS_SHARDED if taken.is_sharded else IS_REPLICATED if self._comparison.is_replicated() else 0
        return CommitHeader(self._run, id, self._rank, self._world_size, *place, flags)

    def _next_buffer(self, taken: content.Snapshot, wanted: int) -> CommitBuffer | None:
        """The buffer to overwrite, of sufficient size; None if there is no memory for it."""
        held = self._held_slots()
        slot = next_slot(self._slots, wanted, held)
        if held and slot not in self._slots and len(self._slots) >= wanted and usable_commit_memory() < taken.room:
            slot = next_slot(self._slots, wanted)  # a new commit is worth more than the copy of an old one
        if slot not in self._buffers or not taken.content_fits(self._buffers[slot]):
            assert self._memory is not None
            try:
                buffer = CommitBuffer.create(taken.room)
                self._memory.keep(self._name, slot, buffer.fd)
            except (NotEnoughMemory, AgentError) as error:
                oldest = self._buffers.get(next_slot(self._slots, wanted))
                if held and oldest is not None and taken.content_fits(oldest) and isinstance(error, NotEnoughMemory):
                    return self._reused_buffer(next_slot(self._slots, wanted))  # other ranks were faster
                self._continue_without_memory(f"{error}; it needs {wanted} buffers of {taken.room / 1e9:.3g} GB")
                return None
            self._buffers[slot] = buffer  # last: the old one is freed here, and not in the agent
        return self._reused_buffer(slot)

    def _reused_buffer(self, slot: int) -> CommitBuffer:
        assert self._comparison is not None
        self._comparison.release(self._buffers[slot])
        self._slots = slots_newest_last(self._slots, slot)
        return self._buffers[slot]

    def _continue_without_memory(self, why: str) -> None:
        assert self._saves is not None
        self._is_on_disk, self._newest = True, None
        interruption.oppose_interruption(f"state {self._name!r} is not kept in memory")
        if interval := self._saves.interval:
            log.warning("state %r is kept on disk only from now on, about every %g s: %s for each rank of this node",
                        self._name, interval, why)  # fmt: skip
        else:
            log.warning("state %r is not kept from now on: %s for each rank of this node, or a --checkpoint-dir",
                        self._name, why)  # fmt: skip
            self._memory = None

    def _held_slots(self) -> set[int]:
        """The slots whose commits are being saved, or are copied to another node, or were, until it has newer ones."""
        assert self._memory is not None and self._saves is not None
        saved = set(self._saves.slots_in_use())
        try:
            held = self._memory.held(self._name)
        except AgentError:
            return saved
        headers = {slot: buffer.header(self._run) for slot, buffer in self._buffers.items()} if held else {}
        return saved | {slot for slot, header in headers.items() if header is not None and header.id.in_job() in held}

    def _is_commit_due(self, every: int | str) -> bool:
        steps, seconds = intervals.parse_commit_interval(every)
        if steps:
            return self._calls % steps == 0
        if self._store is None:
            return False
        topic = f"interval {self._restores}"
        if self._next_call is None:
            self._next_call = self._store.get(f"{topic} after {self._newest_call[0]}")
        if self._calls < self._next_call:
            return False
        (call, then), now = self._newest_call, time.monotonic()
        self._newest_call = self._calls, now
        if self._rank > 0:
            self._next_call = None
        else:
            interval = intervals.next_interval(seconds, self._calls - call, now - then) if call else 1
            self._next_call = self._calls + interval
            self._store.publish(f"{topic} after {self._calls}", self._next_call)
        return True


def _copy_state_now(buffer: CommitBuffer, header: CommitHeader, taken: content.Snapshot) -> None:
    buffer.clear()
    for tensor, entry in zip(taken.tensors, taken.layout, strict=True):
        buffer.tensor(entry.offset, entry.dtype, entry.shape).copy_(tensor, non_blocking=True)
    for device in {tensor.device for tensor in taken.tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)
    buffer.write_pickle(taken.pickle_offset, taken.pickle)
    buffer.complete(header)


def _random_states() -> dict[str, Any]:
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        found["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
