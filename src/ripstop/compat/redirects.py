"""torch.distributed.elastic.multiprocessing.redirects: what a process writes to a standard stream goes to a file.

The descriptor itself is redirected, so C code and child processes are too.
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
    stream = _descriptor(std)
    before = os.dup(stream)
    try:
        send(std, to_file)
        try:
            yield
        finally:
            _flush(std)
            os.dup2(before, stream)
    finally:
        os.close(before)


redirect_stdout = partial(redirect, "stdout")
redirect_stderr = partial(redirect, "stderr")


def send(std: str, to_file: str) -> None:
    """Redirect for good."""
    file = os.open(to_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        _flush(std)
        os.dup2(file, _descriptor(std))
    finally:
        os.close(file)


def _descriptor(std: str) -> int:
    try:
        return int(getattr(sys, std).fileno())
    except (AttributeError, OSError, ValueError):  # replaced by something that is no file
        return _DESCRIPTORS[std]


def _flush(std: str) -> None:
    """Everything written so far reaches the file that it was written for: C's buffers, and Python's."""
    ctypes.CDLL(None).fflush(None)
    if (stream := getattr(sys, std)) is not None:
        stream.flush()
