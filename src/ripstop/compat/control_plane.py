"""`torch.distributed.elastic.control_plane`: a worker that records its failure and can be looked into.

The server behind `TORCH_WORKER_SERVER_SOCKET` is torch's own, with its handlers (`ping`, `dump_traceback`,
`fr_trace_json` …) and those that the program registers.  As with torchrun, whoever wants it sets the variable, for
each worker another; the launcher does not.  What is ours: (1) an exception is recorded, in the `with` block as in a
decorated function; (2) the socket that a killed worker left behind is no obstacle to the next one, nor does a socket
stay behind; (3) a server that cannot be had is said on stderr, and the program runs without it.
"""

import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ripstop.observe import recording

__all__ = ["worker_main"]

TORCH_WORKER_SERVER_SOCKET = "TORCH_WORKER_SERVER_SOCKET"


@contextmanager
def worker_main() -> Iterator[None]:
    """A decorator, `@worker_main()`, and a context manager for a worker's main function."""
    recording.show_crashes()
    try:
        with _worker_server(os.environ.get(TORCH_WORKER_SERVER_SOCKET)):
            yield
    except Exception as error:
        if path := recording.error_file():
            recording.write(path, recording.describe(error))
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


def _remove_dead(path: Path) -> None:
    """Remove a socket at which nobody listens; what lives, or is something else, stays."""
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
