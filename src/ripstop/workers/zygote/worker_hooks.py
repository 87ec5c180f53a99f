"""What ripstop installs in a forked worker before the script runs, and how a worker that failed exits.

Rules
1.  An uncaught exception is written to the error file.  Python prints it as usual.
2.  A worker that an exception ended exits when its threads have ended, its exit handlers have run and its files are
    flushed.  Destroying torch's objects would take another 0.2 s, and the whole job would wait for it.
3.  With hang diagnosis on, faulthandler writes stacks at a signal, and a thread serves torch's flight recorders.
"""

# Pathlib is slow to import, and every worker would import it.
# ruff: noqa: PTH110

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _socket
import gc
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

TORCH_EXCEPTHOOK_MODULE = "torch.distributed.distributed_c10d"
RECORDER_BACKLOG = 128
failed_pids: list[int] = []  # the process, once an exception has ended its script
error_file_path: str | None = None  # set for each round
on_exception: Callable[[BaseException], None] | None = None  # in a standby that runs the script


def install_worker_excepthook(import_root: str) -> None:
    """Write an uncaught exception to the error file, in the format of torch's `record`, unless the file exists."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    show = sys.__excepthook__

    def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, Exception) and error_file_path is not None and not os.path.exists(error_file_path):
            sys.path.insert(0, import_root)
            try:
                from ripstop.workers import error_file as writer

                writer.write_error_file(error_file_path, writer.error_file_content(error))
            except Exception:  # best effort: Python prints the exception in any case
                pass
            finally:
                sys.path.remove(import_root)
        show(kind, error, trace)
        if on_exception is not None:
            on_exception(error)
        caller = sys._getframe()
        while caller.f_back is not None:
            caller = caller.f_back
        # True if Python itself called the hook, perhaps through torch's hook.  Other callers continue afterwards, or
        # set an exit code.
        final = caller.f_code is excepthook.__code__ or caller.f_globals.get("__name__") == TORCH_EXCEPTHOOK_MODULE
        if final and isinstance(error, Exception):  # KeyboardInterrupt has its own exit code
            failed_pids.append(os.getpid())

    # Both, for code that restores the original hook or compares with it.
    sys.excepthook = sys.__excepthook__ = excepthook


def exit_failed_worker() -> None:
    """The last exit handler: skip the rest of the interpreter's shutdown in a worker that failed (rule 2)."""
    if os.getpid() not in failed_pids:
        return
    import ctypes
    import io

    for candidate in gc.get_objects():
        try:
            if isinstance(candidate, io.IOBase) and not candidate.closed:
                candidate.flush()
        except Exception:  # Python could not flush this file either
            continue
    ctypes.CDLL(None).fflush(None)
    os._exit(1)


def install_worker_stack_hook(signum: int, path: str) -> None:
    """Write the stacks of all threads to a file at this signal."""
    import faulthandler

    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        faulthandler.register(signum, fd, all_threads=True, chain=False)
    except OSError as error:
        sys.stderr.write(f"ripstop: stacks cannot be written to {path}: {error.strerror}.\n")


def install_exit(signum: int) -> None:
    """Exit at this signal, with its number as exit code, whatever Python does: the handler is the C function _exit."""
    import ctypes

    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signum, ctypes.cast(libc._exit, ctypes.c_void_p))


def install_worker_recorder_hook(path: str) -> None:
    """Start a thread that sends torch's flight recorders to every client of this socket."""
    import _thread

    def serve() -> None:
        opened = worker_hook_socket_identity(listener.fileno())
        while True:
            try:
                if worker_hook_socket_identity(listener.fileno()) != opened:
                    return  # the script has closed all files and opened others
                fd = listener._accept()[0]  # type: ignore[attr-defined]
            except OSError:  # the script has closed all files
                return
            client = _socket.socket(fileno=fd)
            try:
                client.sendall(worker_hook_recorder_dump(is_hanging=client.recv(1) == b"!"))
            except OSError:  # the client has disconnected
                pass
            finally:
                client.close()

    try:
        listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen(RECORDER_BACKLOG)
    except OSError:  # the agent reports a socket that does not answer
        return
    # The thread takes no signal of the script's, and no SIGPIPE.  Its own crash signals stay unblocked.
    crashes = {_signal.SIGSEGV, _signal.SIGBUS, _signal.SIGFPE, _signal.SIGILL, _signal.SIGABRT}
    before = _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals() - crashes)
    try:
        _thread.start_new_thread(serve, ())
    except RuntimeError:  # no more threads available
        listener.close()
    finally:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, before)


def worker_hook_socket_identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def worker_hook_recorder_dump(is_hanging: bool) -> bytes:
    """Return the dumps of the recorders in this torch as one JSON object; NCCL's only for a worker that hangs."""
    core = sys.modules.get("torch._C._distributed_c10d")
    dumps: list[bytes] = []
    recorders = [(b"fr", "_dump_fr_trace_json"), (b"nccl", "_dump_nccl_trace_json")]
    for name, function in recorders if is_hanging else recorders[:1]:
        try:
            dumps.append(b'"%s": %s' % (name, getattr(core, function)()))
        except Exception:  # this torch does not have it
            continue
    return b"{%s}" % b", ".join(dumps)
