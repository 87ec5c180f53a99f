"""The round's store process: torch's own TCPStore on a socket that the agent has bound.

Run in a fork of a zygote that has torch, or as a program: `python serve_store.py HOST PORT FD`.  Only what torch needs
is imported.  It serves until it is killed.
"""

import os
import sys
from typing import NoReturn

TITLE = b"ripstop-store"
PR_SET_NAME = 15


def serve(host: str, port: int, fd: int) -> NoReturn:
    """Never returns."""
    show_as(TITLE)
    try:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
    except Exception as error:
        fail(f"the job's store needs torch, which cannot be imported: {error}; install torch for {sys.executable}.")
    import signal

    try:
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
    except Exception as error:
        fail(f"torch cannot serve the job's store on {host}:{port}: {error}")
    while True:
        signal.pause()
        assert store is not None  # it serves for as long as it is referred to


def show_as(title: bytes) -> None:
    """In `ps`: a fork has the command line of the program it was forked from, and is not to be taken for another."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_NAME, title, 0, 0, 0)
    with open("/proc/self/stat", "rb") as file:  # noqa: PTH123 - pathlib is slow to import
        fields = file.read().rpartition(b")")[2].split()
    start, size = int(fields[45]), int(fields[46]) - int(fields[45])
    ctypes.memmove(start, title[: max(0, size - 1)].ljust(size, b"\0"), size)


def fail(why: str) -> NoReturn:
    """Ends at once: the listening socket goes with the process, and clients are refused instead of left waiting."""
    sys.stderr.write(f"ripstop: {' '.join(why.split())}\n")
    os._exit(1)


if __name__ == "__main__":
    del sys.path[0]  # our own directory
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
