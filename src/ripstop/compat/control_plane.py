"""`torch.distributed.elastic.control_plane`: a worker that records its failure and can be looked into.

The server behind `TORCH_WORKER_SERVER_SOCKET` is torch's own, with its handlers (`ping`, `dump_traceback`,
`fr_trace_json` …) and those that the program registers.  As with torchrun, whoever wants it sets the variable, for
each worker another; the launcher does not.  What is ours: (1) an exception is recorded, in the `with` block as in a
decorated function; (2) the socket that a killed worker left behind is no obstacle to the next one, nor does a socket
stay behind; (3) a main function that returns at once ends, where torch's server waits for ever if it is told to stop
before it has begun; (4) a server that cannot be had is said on stderr, and the program runs without it.
"""

import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ripstop.workers import error_file

__all__ = ["worker_main"]

TORCH_WORKER_SERVER_SOCKET = "TORCH_WORKER_SERVER_SOCKET"
PATIENCE = 10.0  # seconds for the server's first word


@contextmanager
def worker_main() -> Iterator[None]:
    """A decorator, `@worker_main()`, and a context manager for a worker's main function."""
    error_file.show_crashes()
    try:
        with _worker_server(os.environ.get(TORCH_WORKER_SERVER_SOCKET)):
            yield
    except Exception as error:
        if path := error_file.error_file():
            error_file.write(path, error_file.describe(error))
        raise


@contextmanager
def _worker_server(path: str | None) -> Iterator[None]:
    """Torch's server at that socket, if there is one to be."""
    if path is None:
        yield
        return
    from torch._C._distributed_c10d import _WorkerServer

    try:
        _remove_dead(Path(path))
        server = _WorkerServer(path)
        _wait_for(path)
    except (OSError, RuntimeError) as error:
        sys.stderr.write(f"ripstop: no worker server at {TORCH_WORKER_SERVER_SOCKET}={path}: {error}\n")
        yield
        return
    try:
        yield
    finally:
        server.shutdown()
        with suppress(OSError):
            Path(path).unlink()


def _wait_for(path: str) -> None:
    """Until it answers (3)."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PATIENCE)
        probe.connect(path)
        probe.sendall(b"POST /handler/ping HTTP/1.0\r\nContent-Length: 0\r\n\r\n")
        probe.recv(1)


def _remove_dead(path: Path) -> None:
    """Remove a socket at which nobody listens; what lives, or is something else, stays."""
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
