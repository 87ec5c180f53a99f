"""torch.distributed.elastic.multiprocessing.redirects: redirects a process's stdout or stderr to a file.

The descriptor is redirected, so C code and child processes are too.  Python's stream is also replaced if it is not on
that descriptor, as in a notebook or a test.
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
    """Redirect `std` ("stdout" or "stderr") to a file, which is truncated first; its directory must exist."""
    if std not in _DESCRIPTORS:
        raise ValueError(f"there is no standard stream {std!r} to redirect; use 'stdout' or 'stderr'")
    stream, before = getattr(sys, std), os.dup(_DESCRIPTORS[std])
    try:
        redirect_permanently(std, to_file, truncate=True)
        try:
            yield
        finally:
            try:
                _flush_redirected_stream(std)
            finally:  # even if the disk is full
                os.dup2(before, _DESCRIPTORS[std])
                setattr(sys, std, stream)
    finally:
        os.close(before)


redirect_stdout = partial(redirect, "stdout")
redirect_stderr = partial(redirect, "stderr")


def redirect_permanently(std: str, to_file: str, *, truncate: bool = False) -> None:
    """Redirect permanently; appends to the file, or truncates it first."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (os.O_TRUNC if truncate else 0)
    file = os.open(to_file, flags, 0o666)
    try:
        _flush_redirected_stream(std)
        os.dup2(file, _DESCRIPTORS[std])
    finally:
        os.close(file)
    if not _redirect_reaches_stream(std):
        setattr(sys, std, os.fdopen(_DESCRIPTORS[std], "w", 1, "utf-8", "backslashreplace", closefd=False))


def _redirect_reaches_stream(std: str) -> bool:
    """Whether Python's stream writes to the process's descriptor."""
    try:
        return bool(getattr(sys, std).fileno() == _DESCRIPTORS[std])
    except (AttributeError, OSError, ValueError):
        return False


def _flush_redirected_stream(std: str) -> None:
    """Flush the buffers of C and Python."""
    ctypes.CDLL(None).fflush(None)
    if (stream := getattr(sys, std)) is not None:
        stream.flush()
