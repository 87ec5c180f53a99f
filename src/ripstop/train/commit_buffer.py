"""One commit in shared memory: a memfd with a header, the bytes of tensors, and a pickle of everything else.

`ripstop/commit_memory.py` has the format.

Why a commit is never torn.  A commit clears the stamp, writes the content, writes the header, then writes the stamp.
Workers read it after the writer has died.  (A replicator reads while the writer lives.  It compares the header before
and after, and sends a checksum.)  The kernel owns the pages, so a kill at any
instruction leaves every earlier store of the writer and none of the later ones.  The stamp therefore says that all is
there, and tensors need no checksum, which would cost more than the copy.  (Copies over a network or to disk do.)  The
header and the pickle are small, and are checked.

The pickle is made and read by workers of one user's job only; the agent does not look into a buffer.
"""

import mmap
import os
import weakref
from pathlib import Path
from tempfile import TemporaryFile
from zlib import crc32

import torch

from ripstop.commit_memory import (
    HEAD_BYTES,
    STAMP_BYTES,
    STAMP_OFFSET,
    CommitHeader,
    NotEnoughMemory,
    commit_header_stamp,
    create_memory,
    unpack_commit_header,
)  # fmt: skip


class Corrupted(Exception):
    """A complete buffer has content that no commit wrote."""


class CommitBuffer:
    """A mapped memfd.  A process maps each memfd once, because CUDA registers memory only once."""

    def __init__(self, fd: int, *, is_on_disk: bool = False) -> None:
        self.fd = fd
        self.is_on_disk = is_on_disk
        self.identity = _buffer_identity(fd)
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self.bytes: torch.Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.size = len(self._map)
        _open[self.identity] = self
        weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, size: int) -> "CommitBuffer":
        """A new buffer of at least this size; NotEnoughMemory if the node cannot hold it."""
        fd = create_memory(size)
        try:
            return cls(fd)
        except OSError as error:  # a limit of this process, such as ulimit -v
            os.close(fd)
            raise NotEnoughMemory(f"a buffer of {size / 1e9:.3g} GB cannot be mapped: {error.strerror}") from error

    @classmethod
    def create_on_disk(cls, folder: Path, size: int) -> "CommitBuffer":
        """A buffer in a file without a name, for lack of memory; the kernel writes its pages to disk as it needs."""
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            fd = os.dup(file.fileno())
            try:
                return cls(fd, is_on_disk=True)
            except BaseException:
                os.close(fd)
                raise

    @classmethod
    def adopt(cls, fd: int) -> "CommitBuffer":
        """The buffer of this descriptor, which the caller gives away."""
        if (found := _open.get(_buffer_identity(fd))) is not None:
            os.close(fd)
            return found
        return cls(fd)

    def clear(self) -> None:
        """From now on, and until `complete`, the buffer has no commit."""
        self._map[STAMP_OFFSET : STAMP_OFFSET + STAMP_BYTES] = bytes(STAMP_BYTES)

    def complete(self, header: CommitHeader) -> None:
        packed = header.pack()
        self._map[: len(packed)] = packed
        self._map[STAMP_OFFSET : STAMP_OFFSET + STAMP_BYTES] = commit_header_stamp(packed)

    def memory(self, start: int, end: int) -> memoryview:
        return memoryview(self._map)[start:end]

    def write_pickle(self, offset: int, data: bytes) -> None:
        self._map[offset : offset + len(data)] = data

    def header(self, run: int) -> CommitHeader | None:
        """The complete commit in this buffer; None if there is none of this run and format."""
        header = unpack_commit_header(self._map[:HEAD_BYTES], run)
        return header if header is not None and header.end <= self.size else None

    def read_pickle(self, header: CommitHeader) -> bytes:
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


def _buffer_identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


_open: "weakref.WeakValueDictionary[tuple[int, int], CommitBuffer]" = weakref.WeakValueDictionary()
