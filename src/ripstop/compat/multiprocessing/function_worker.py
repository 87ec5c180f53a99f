"""A worker that is a function: how its parent starts it, and what it does.  Imports no torch.

`MultiprocessContext` and `elastic_launch` start such workers.

The worker leads its own session and dies with its parent.  It takes its environment and its streams, runs the function,
records exceptions, and writes the pickled return value to a file.  With a connection it then reports that it has
returned, and exits when the parent releases it: what it hosts for other workers lives as long as they need it.
"""

import fcntl
import gc
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct

from ripstop.compat.multiprocessing.errors import record
from ripstop.compat.multiprocessing.redirects import redirect_permanently
from ripstop.system import linux
from ripstop.system.descriptors import open_descriptors
from ripstop.workers.error_file import error_file_traceback


class Inherited(Struct, frozen=True):
    """What a forked worker must undo: the parent's handlers on these signals, and its descriptors except these.

    None keeps all descriptors.
    """

    signals: tuple[signal.Signals, ...]
    descriptors: frozenset[int] | None = None


class Task(Struct, frozen=True):
    """What one worker runs: sent to it, or inherited by a fork.  `stdout` and `stderr` are files or empty."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    env: Mapping[str, str]
    stdout: str
    stderr: str
    result: str
    bind: Callable[[], None] | None
    parent: int | None = None  # see `set_up_function_worker`
    inherited: Inherited | None = None


def start_function_worker(
    context: Any,
    target: Callable[..., None],
    args: tuple[Any, ...],
    inherited: Inherited | None,
    name: str | None = None,
) -> Any:
    """Start a process of multiprocessing's `context`.

    Signals are blocked until a forked worker has removed the parent's handlers.
    """
    process = context.Process(target=target, args=args, name=name)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, inherited.signals if inherited is not None else ())
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return process


def run_function_worker(task: Task, connection: Connection | None = None) -> None:
    """The target of the process."""
    gc.freeze()  # after a fork: destructors of the parent's garbage may need threads that this process does not have
    set_up_function_worker(task.parent, task.inherited)
    os.environ.clear()
    os.environ.update(task.env)
    try:
        record(partial(_run_function_worker_task, task))()
    except KeyboardInterrupt:
        _end_function_worker(signal.SIGINT)
    except Exception as error:
        import traceback

        traceback.print_exception(type(error), error, error_file_traceback(error.__traceback__))
        sys.exit(1)
    if connection is not None:
        with suppress(OSError):  # the parent does not wait any more
            os.write(connection.fileno(), b"\n")
            wait([connection])


def _run_function_worker_task(task: Task) -> None:
    for std, path in (("stdout", task.stdout), ("stderr", task.stderr)):
        if path:
            redirect_permanently(std, path)
    if task.bind is not None:
        task.bind()
    try:
        value = task.function(*task.args)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        value = None
    _save_function_worker_result(value, task.result)


def _save_function_worker_result(value: Any, path: str) -> None:
    part = Path(f"{path}.part")
    try:
        with part.open("wb") as file:
            pickle.dump(value, file, pickle.HIGHEST_PROTOCOL)
        part.replace(path)
    except OSError as error:
        raise OSError(error.errno, f"the return value cannot be written: {error.strerror}", path) from error
    except Exception as error:
        raise TypeError(
            f"a worker's return value is sent to its parent, and this {type(value).__name__} cannot be pickled: "
            f"{error}; return plain data"
        ) from error


def set_up_function_worker(parent: int | None, inherited: Inherited | None, keep: int = -1) -> None:
    """Lead a session, undo what a fork inherited except the descriptor `keep`, and die with the parent.

    With the pid of a `parent`, the kernel kills this process when the thread that started it ends.  With None, it does
    when the parent process ends: for a parent that is a fork server, or whose starting thread may end early.
    """
    with suppress(PermissionError):  # it leads one already
        os.setsid()
    if inherited is not None:
        signal.set_wakeup_fd(-1)
        for signum in inherited.signals:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
        if inherited.descriptors is not None:
            _close_function_worker_descriptors(inherited.descriptors | {keep})
        signal.pthread_sigmask(signal.SIG_UNBLOCK, inherited.signals)
    if parent is None:
        _die_with_multiprocessing_parent()
        return
    linux.parent_death_signal(signal.SIGKILL)()
    if os.getppid() != parent:
        os._exit(1)


def _close_function_worker_descriptors(kept: frozenset[int]) -> None:
    """Replace all others by /dev/null: their numbers must stay taken, because inherited objects still use them."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in open_descriptors() - kept - {null}:
        with suppress(OSError):
            os.dup2(null, fd, inheritable=False)


def _die_with_multiprocessing_parent() -> None:
    """Have the kernel send SIGKILL when the pipe that only the parent holds is closed.

    prctl's parent death signal is for the death of the thread that forked this process.
    """
    parent = parent_process()
    assert parent is not None, "multiprocessing started this process"
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    if not parent.is_alive():  # it died before these calls
        os._exit(1)


def _end_function_worker(signum: signal.Signals) -> NoReturn:
    """Die as a process without a handler for this signal does."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    raise AssertionError("still alive")
