"""The format of a commit in shared memory, and the memory for it.  For workers and for replicators; needs no torch.

0      header: magic, format, run, round, number, rank, world size, place and checksum of the pickle, flags
512    stamp: 0 while the content changes; a checksum of the header once it is whole
4096   tensors, then the pickle
"""

import fcntl
import mmap
import os
import struct
from dataclasses import dataclass
from typing import Final
from zlib import crc32

from ripstop.system.cgroup_memory import available_memory

MAGIC: Final = b"RIPSTATE"
FORMAT: Final = 2
IS_REPLICATED: Final = 1  # flags of a header: the state was found equal on all ranks,
IS_SHARDED: Final = 2  # or its tensors are parts of larger ones
STAMP_OFFSET: Final = 512
CONTENT_OFFSET: Final = 4096
_HEADER = struct.Struct("<8sIIqqiiqqII")  # the fields of CommitHeader, after magic and format
_STAMP = struct.Struct("<Q")
HEADER_BYTES: Final = _HEADER.size
STAMP_BYTES: Final = _STAMP.size
HEAD_BYTES: Final = STAMP_OFFSET + STAMP_BYTES
ROUNDS_OF_A_JOB: Final = 1_000_000
RESERVE_BYTES: Final = 256 << 20  # of the node's memory that buffers never use
MAX_ALLOCATORS: Final = 64  # processes of a node that allocate buffers at the same time
FIRST_COPY_SLOT: Final = 8  # of commits that another node has sent; the lower slots are for this node's workers


@dataclass(frozen=True, slots=True, order=True)
class CommitId:
    """Numbers repeat in a later round if ranks fell back to an older commit; a pair never does."""

    round: int  # `commit_id_round` of the job's round
    number: int

    def in_job(self) -> "CommitId":
        """The same commit with the job's round, as agents and the coordinator have it."""
        return CommitId(self.round % ROUNDS_OF_A_JOB, self.number)


def commit_id_round(job_round: int, newest: int) -> int:
    """The round in the ids of commits: above `newest`, which an earlier job may have left on disk.

    It is the job's round, plus a multiple of ROUNDS_OF_A_JOB.
    """
    return job_round + max(0, (newest - job_round) // ROUNDS_OF_A_JOB + 1) * ROUNDS_OF_A_JOB


@dataclass(frozen=True, slots=True)
class CommitHeader:
    """Which commit a buffer has, and where its pickle is."""

    run: int
    id: CommitId
    rank: int
    world_size: int
    pickle_offset: int
    pickle_size: int
    pickle_checksum: int
    flags: int = 0

    @property
    def end(self) -> int:
        return self.pickle_offset + self.pickle_size

    def pack(self) -> bytes:
        return _HEADER.pack(
            MAGIC, FORMAT, self.run, self.id.round, self.id.number, self.rank, self.world_size,
            self.pickle_offset, self.pickle_size, self.pickle_checksum, self.flags,
        )  # fmt: skip


def commit_header_stamp(header: bytes) -> bytes:
    return _STAMP.pack(1 << 32 | crc32(header))


def unpack_commit_header(head: bytes, run: int) -> CommitHeader | None:
    """From the first HEAD_BYTES of a buffer."""
    packed = head[:HEADER_BYTES]
    if head[STAMP_OFFSET:] != commit_header_stamp(packed):
        return None
    magic, form, its_run, round, number, rank, world_size, offset, size, checksum, flags = _HEADER.unpack(packed)
    if (magic, form, its_run) != (MAGIC, FORMAT, run):
        return None
    return CommitHeader(its_run, CommitId(round, number), rank, world_size, offset, size, checksum, flags)


class NotEnoughMemory(Exception):
    """This node has too little free memory for a buffer."""


def create_memory(size: int) -> int:
    """The descriptor of new memory of at least this size, sealed; NotEnoughMemory if the node has too little.

    Several processes of a node allocate at the same time.  So each takes a small part of what is free and looks again:
    as long as they are at most MAX_ALLOCATORS, all of them together never use more than there is.
    """
    size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    needs = f"a buffer needs {size / 1e9:.3g} GB"
    if (free := usable_commit_memory()) < size:
        raise NotEnoughMemory(f"{needs} and {free / 1e9:.3g} GB are free")
    fd = os.memfd_create("ripstop-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        start = 0
        while start < size:  # now, rather than page by page during the copy
            free = usable_commit_memory()
            part = min(size - start, max(RESERVE_BYTES, free) // MAX_ALLOCATORS // mmap.PAGESIZE * mmap.PAGESIZE)
            if free < part:
                raise NotEnoughMemory(f"{needs}, and other processes took the memory meanwhile")
            os.posix_fallocate(fd, start, part)
            start += part
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except NotEnoughMemory:
        os.close(fd)
        raise
    except OSError as error:
        os.close(fd)
        raise NotEnoughMemory(f"{needs}: {error.strerror}") from error
    return fd


def usable_commit_memory() -> int:
    """Bytes that buffers can still use."""
    return max(0, available_memory() - RESERVE_BYTES)
