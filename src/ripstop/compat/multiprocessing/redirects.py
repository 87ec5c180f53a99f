"""torch.distributed.elastic.multiprocessing.redirects: what a process writes to a standard stream goes to a file.

The descriptor itself is redirected, so C code and child processes are too; and Python's stream, where something else
(a notebook, a test) stands in for the one on that descriptor.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

__all__ = ["redirect", "redirect_stderr", "redirect_stdout"]

_DESCRIPTORS = {"stdout": 1, "stderr": 2}


@contextmanager
def redirect(std: str, to_file: str) -> Iterator[None]:
    """Redirect `std` ("stdout" or "stderr") to a file, which is emptied first; the directory must exist."""
    if std not in _DESCRIPTORS:
        raise ValueError(f"there is no standard stream {std!r} to redirect; say 'stdout' or 'stderr'")
    stream, before = getattr(sys, std), os.dup(_DESCRIPTORS[std])
    try:
        send(std, to_file, emptied=True)
        try:
            yield
        finally:
            try:
                _flush(std)
            finally:  # also when the file's disk is full
                os.dup2(before, _DESCRIPTORS[std])
                setattr(sys, std, stream)
    finally:
        os.close(before)


redirect_stdout = partial(redirect, "stdout")
redirect_stderr = partial(redirect, "stderr")


def send(std: str, to_file: str, *, emptied: bool = False) -> None:
    """Redirect for good, to the end of a file that may be emptied first."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (os.O_TRUNC if emptied else 0)
    file = os.open(to_file, flags, 0o666)
    try:
        _flush(std)
        os.dup2(file, _DESCRIPTORS[std])
    finally:
        os.close(file)
    if not _is_own(std):
        setattr(sys, std, os.fdopen(_DESCRIPTORS[std], "w", 1, "utf-8", "backslashreplace", closefd=False))


def _is_own(std: str) -> bool:
    """Whether Python's stream writes to the process's."""
    try:
        return bool(getattr(sys, std).fileno() == _DESCRIPTORS[std])
    except (AttributeError, OSError, ValueError):
        return False


def _flush(std: str) -> None:
    """Everything written so far reaches the file that it was written for: C's buffers, and Python's."""
    ctypes.CDLL(None).fflush(None)
    if (stream := getattr(sys, std)) is not None:
        stream.flush()
