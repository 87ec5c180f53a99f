"""`torch.distributed.elastic.control_plane`: a worker that records its failure and serves debug requests.

The server behind `TORCH_WORKER_SERVER_SOCKET` is torch's, with its handlers (`ping`, `dump_traceback`, `fr_trace_json`
…) and those that the program registers.  As with torchrun, the launcher does not set the variable; the program does,
differently for each worker.  ripstop adds: (1) an exception is recorded, in the `with` block as in a decorated
function; (2) a socket that a killed worker left behind is replaced, and no socket is left behind at the end; (3) a main
function may return at once: torch's server never stops if `shutdown` is called before it has started; (4) if the server
cannot start, the program runs without it, after a message on stderr.
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
START_TIMEOUT_S = 10.0  # for the server's first reply


@contextmanager
def worker_main() -> Iterator[None]:
    """A decorator, `@worker_main()`, and a context manager for a worker's main function."""
    error_file.show_crashes()
    try:
        with _worker_server(os.environ.get(TORCH_WORKER_SERVER_SOCKET)):
            yield
    except Exception as error:
        if path := error_file.error_file_path():
            error_file.write_error_file(path, error_file.error_file_content(error))
        raise


@contextmanager
def _worker_server(path: str | None) -> Iterator[None]:
    """Run torch's server at that socket; None runs no server."""
    if path is None:
        yield
        return
    from torch._C._distributed_c10d import _WorkerServer

    try:
        _remove_stale_worker_server_socket(Path(path))
        server = _WorkerServer(path)
        _wait_for_worker_server(path)
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


def _wait_for_worker_server(path: str) -> None:
    """Wait until the server answers (3)."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(START_TIMEOUT_S)
        probe.connect(path)
        probe.sendall(b"POST /handler/ping HTTP/1.0\r\nContent-Length: 0\r\n\r\n")
        probe.recv(1)


def _remove_stale_worker_server_socket(path: Path) -> None:
    """Remove a socket that no process listens on; anything else stays."""
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
