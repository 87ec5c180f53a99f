"""Copies a commit from a GPU while training goes on.

The buffer is registered with CUDA, and a side stream fills it.  Everything is in the order of that stream: clear the
stamp, copy the content, write the header, write the stamp.  The host waits for nothing, and a worker that is killed at
any moment leaves a complete commit or none.  Rules
1.  The side stream starts after the work that the script has queued so far.
2.  The training stream waits for the copy of whatever may change before the next optimizer step, such as the running
    means of batch norm.  These are small.
3.  Before any optimizer's step, the training stream waits for the whole copy.
4.  Any other change in place before that is noticed by the tensor's version, and the commit is withdrawn.  If the
    script steps on another stream than it commits on, rule 2 does not protect its tensors, and none may change.
"""

import logging
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ripstop.commit_memory import HEADER_BYTES, STAMP_BYTES, STAMP_OFFSET, CommitHeader, commit_header_stamp
from ripstop.train.commit_buffer import CommitBuffer
from ripstop.train.content import Snapshot

log = logging.getLogger("ripstop.train")

MAX_STAGED_BYTES = 64 << 20  # of tensors in host memory, which are copied before `commit` returns

_registered: "weakref.WeakSet[CommitBuffer]" = weakref.WeakSet()
_in_flight: "weakref.WeakSet[OverlappedCopy]" = weakref.WeakSet()
_hook: Any = None


def register_with_gpu(buffer: CommitBuffer) -> bool:
    """Let the GPU write to this buffer directly; False if CUDA does not allow it."""
    if buffer in _registered:
        return True
    address = buffer.bytes.data_ptr()
    error = int(torch.cuda.cudart().cudaHostRegister(address, buffer.size, 0))
    if error:
        log.warning("a buffer of %.3g GB cannot be registered with CUDA (error %d); commits are slow: raise the "
                    "limit of locked memory (ulimit -l)", buffer.size / 1e9, error)  # fmt: skip
        return False
    _registered.add(buffer)
    weakref.finalize(buffer, torch.cuda.cudart().cudaHostUnregister, address).atexit = False
    return True


def can_overlap(taken: Snapshot) -> bool:
    """Whether the content is on one GPU, but for a little in host memory."""
    devices = {tensor.device for tensor in taken.tensors if tensor.is_cuda}
    return len(devices) == 1 and taken.pickle_offset - taken.host_offset <= MAX_STAGED_BYTES


class OverlappedCopy:
    """One commit on its way into a buffer.  `stable` are the numbers of tensors that only optimizers change."""

    def __init__(self, buffer: CommitBuffer, taken: Snapshot, header: CommitHeader, stable: set[int]) -> None:
        global _hook
        if _hook is None:
            _hook = register_optimizer_step_pre_hook(_wait_for_gpu_copies)
        on_gpu = [number for number, tensor in enumerate(taken.tensors) if tensor.is_cuda]
        self._buffer = buffer
        self._device = taken.tensors[on_gpu[0]].device
        self._tensors = [taken.tensors[number] for number in on_gpu]  # kept, so that their memory is not reused
        self._versions = [tensor._version for tensor in self._tensors]
        self._is_stable = [number in stable for number in on_gpu]
        self._is_checked = False
        self._stage = _staged(taken, header)
        self._done = torch.cuda.Event()
        changing = [number for number in on_gpu if number not in stable]
        training, side = torch.cuda.current_stream(self._device), _side_stream(self._device)
        self._training = training
        side.wait_stream(training)  # rule 1
        with torch.cuda.stream(side):
            staged = self._stage.to(self._device, non_blocking=True)
            head, content = staged[:STAGED_HEAD_BYTES], staged[STAGED_HEAD_BYTES:]
            self._write(STAMP_OFFSET, head[:STAMP_BYTES])  # zeros
            self._copy(taken, changing)
            training.wait_event(side.record_event())  # rule 2
            self._copy(taken, [number for number in on_gpu if number in stable])
            self._write(taken.host_offset, content)
            self._write(0, head[2 * STAMP_BYTES :])
            self._write(STAMP_OFFSET, head[STAMP_BYTES : 2 * STAMP_BYTES])
            self._done.record(side)
        _in_flight.add(self)

    def _copy(self, taken: Snapshot, numbers: list[int]) -> None:
        for number in numbers:
            entry = taken.layout[number]
            self._buffer.tensor(entry.offset, entry.dtype, entry.shape).copy_(taken.tensors[number], non_blocking=True)

    def _write(self, offset: int, data: torch.Tensor) -> None:
        self._buffer.bytes[offset : offset + len(data)].copy_(data, non_blocking=True)

    def before_change(self) -> None:
        """The script is about to change its tensors: the training stream waits for the copy (rule 3)."""
        if not self._is_checked:
            self._is_checked = True
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._done)
            must_not_change = self._is_stable if stream == self._training else [True] * len(self._tensors)
            found = zip(self._tensors, self._versions, must_not_change, strict=True)
            if any(checked and tensor._version != version for tensor, version, checked in found):  # rule 4
                self._done.synchronize()
                self._buffer.clear()
                log.warning(
                    "a commit is withdrawn: a tensor was changed in place before it was copied, and not by an "
                    "optimizer's step; change it before commit(), or use commit(blocking=True)"
                )

    def finish(self) -> None:
        """Wait until the commit is complete."""
        self.before_change()
        self._done.synchronize()
        _in_flight.discard(self)


STAGED_HEAD_BYTES = 2 * STAMP_BYTES + HEADER_BYTES  # zeros, stamp, header


def _staged(taken: Snapshot, header: CommitHeader) -> torch.Tensor:
    """In pinned memory: the head, then the part of the buffer that does not come from the GPU."""
    packed = header.pack()
    size = taken.pickle_offset - taken.host_offset + len(taken.pickle)
    stage = torch.empty(STAGED_HEAD_BYTES + size, dtype=torch.uint8, pin_memory=True)
    head = bytes(STAMP_BYTES) + commit_header_stamp(packed) + packed
    stage[:STAGED_HEAD_BYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    content = stage[STAGED_HEAD_BYTES:]
    for tensor, entry in zip(taken.tensors, taken.layout, strict=True):
        if not tensor.is_cuda and entry.size:
            at = entry.offset - taken.host_offset
            content[at : at + entry.size] = tensor.contiguous().view(-1).view(torch.uint8)
    content[taken.pickle_offset - taken.host_offset :] = torch.frombuffer(bytearray(taken.pickle), dtype=torch.uint8)
    return stage


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)
    return _side_streams[device]


def _wait_for_gpu_copies(*_: object) -> None:
    for copy in list(_in_flight):
        copy.before_change()
