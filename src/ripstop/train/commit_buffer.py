"""One commit in shared memory: a memfd with a header, the bytes of tensors, and a pickle of everything else.

    0      header: magic, format, run, round, number, rank, world size, place and checksum of the pickle
    512    stamp: 0 while the content changes; a checksum of the header once it is whole
    4096   tensors, then the pickle

Why a commit is never torn.  A commit clears the stamp, writes the content, writes the header, then writes the stamp.
The only reader is a later process, which runs after the writer has died.  The kernel owns the pages, so a kill at any
instruction leaves every earlier store of the writer and none of the later ones.  The stamp therefore says that all is
there, and tensors need no checksum, which would cost more than the copy.  (Copies over a network or to disk do.)  The
header and the pickle are small, and are checked.

The pickle is made and read by workers of one user's job only; the agent does not look into a buffer.
"""

import fcntl
import mmap
import os
import struct
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from zlib import crc32

import torch

MAGIC: Final = b"RIPSTATE"
FORMAT: Final = 1
STAMP_OFFSET: Final = 512
CONTENT_OFFSET: Final = 4096
_HEADER = struct.Struct("<8sIIqqiiqqI")  # magic, format, run, round, number, rank, world, pickle offset, size, checksum
_STAMP = struct.Struct("<Q")
HEADER_BYTES: Final = _HEADER.size
STAMP_BYTES: Final = _STAMP.size
_PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True, slots=True, order=True)
class CommitId:
    """Numbers repeat in a later round if ranks fell back to an older commit; a pair never does."""

    round: int
    number: int


@dataclass(frozen=True, slots=True)
class Header:
    """Which commit a buffer has, and where its pickle is."""

    run: int
    id: CommitId
    rank: int
    world_size: int
    pickle_offset: int
    pickle_size: int
    pickle_checksum: int

    def pack(self) -> bytes:
        return _HEADER.pack(
            MAGIC, FORMAT, self.run, self.id.round, self.id.number, self.rank, self.world_size,
            self.pickle_offset, self.pickle_size, self.pickle_checksum,
        )  # fmt: skip


def stamp(header: bytes) -> bytes:
    return _STAMP.pack(1 << 32 | crc32(header))


class NotEnoughMemory(Exception):
    """This node has too little free memory for a buffer."""


class Corrupted(Exception):
    """A complete buffer has content that no commit wrote."""


class CommitBuffer:
    """A mapped memfd.  A process maps each memfd once, because CUDA registers memory only once."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.inode = os.fstat(fd).st_ino
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self.bytes: torch.Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.size = len(self._map)
        _open[self.inode] = self
        weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, size: int) -> "CommitBuffer":
        """A new buffer of at least this size; NotEnoughMemory if the node cannot hold it."""
        size = -(-size // _PAGE_BYTES) * _PAGE_BYTES
        if (free := available_memory()) < size:
            raise NotEnoughMemory(f"a buffer needs {size / 1e9:.3g} GB and {free / 1e9:.3g} GB are free")
        fd = os.memfd_create("ripstop-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, size)  # now, rather than page by page during the copy
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(fd)
        except OSError as error:
            os.close(fd)
            raise NotEnoughMemory(f"a buffer needs {size / 1e9:.3g} GB: {error.strerror}") from error

    @classmethod
    def adopt(cls, fd: int) -> "CommitBuffer":
        """The buffer of this descriptor, which the caller gives away."""
        if (found := _open.get(os.fstat(fd).st_ino)) is not None:
            os.close(fd)
            return found
        return cls(fd)

    def clear(self) -> None:
        """From now on, and until `complete`, the buffer has no commit."""
        self._map[STAMP_OFFSET : STAMP_OFFSET + STAMP_BYTES] = bytes(STAMP_BYTES)

    def complete(self, header: Header) -> None:
        packed = header.pack()
        self._map[: len(packed)] = packed
        self._map[STAMP_OFFSET : STAMP_OFFSET + STAMP_BYTES] = stamp(packed)

    def write_pickle(self, offset: int, data: bytes) -> None:
        self._map[offset : offset + len(data)] = data

    def header(self, run: int) -> Header | None:
        """The complete commit in this buffer; None if there is none of this run and format."""
        packed = self._map[:HEADER_BYTES]
        if self._map[STAMP_OFFSET : STAMP_OFFSET + STAMP_BYTES] != stamp(packed):
            return None
        magic, form, its_run, round, number, rank, world_size, offset, size, checksum = _HEADER.unpack(packed)
        if (magic, form, its_run) != (MAGIC, FORMAT, run) or offset + size > self.size:
            return None
        return Header(its_run, CommitId(round, number), rank, world_size, offset, size, checksum)

    def read_pickle(self, header: Header) -> bytes:
        data = self._map[header.pickle_offset : header.pickle_offset + header.pickle_size]
        if crc32(data) != header.pickle_checksum:
            raise Corrupted(f"commit {header.id.number} of round {header.id.round} does not match its checksum")
        return data

    def contains(self, tensor: torch.Tensor) -> bool:
        return 0 <= tensor.data_ptr() - self.bytes.data_ptr() < self.size

    def tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor whose memory is this part of the buffer."""
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.bytes[offset : offset + size].view(dtype).view(shape)


_open: "weakref.WeakValueDictionary[int, CommitBuffer]" = weakref.WeakValueDictionary()  # by inode


def available_memory() -> int:
    """Bytes that this process can still use: the machine's, or less in a cgroup with a limit."""
    free = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for limit, used in _cgroup_limits():
        free = min(free, limit - used)
    return max(0, free)


def _cgroup_limits() -> list[tuple[int, int]]:
    """Limit and use of this process's cgroups (v2); what the kernel can reclaim from files is not in use."""
    found = []
    try:
        path = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].split("\n")[0]
        group = Path("/sys/fs/cgroup", path.lstrip("/"))
        while group.is_relative_to("/sys/fs/cgroup"):
            if (limit := _read(group / "memory.max")).isdecimal():
                stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
                used = int(_read(group / "memory.current") or 0) - int(stat.get("inactive_file", 0))
                found.append((int(limit), used))
            group = group.parent
    except (OSError, ValueError):  # no cgroups here
        pass
    return found


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""
