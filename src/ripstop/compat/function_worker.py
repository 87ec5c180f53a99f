"""One worker that is a function: the worker's side of `MultiprocessContext`.  Imported in every such worker: no torch.

The worker's life: it leads a session of its own and dies with its parent, takes its environment and its streams, runs
the function with its exceptions recorded, sends the pickled return value, and stays until it is released, so that what
it hosts for its peers lives as long as the slowest of them.
"""

import fcntl
import os
import pickle
import signal
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from ripstop.compat.errors import record
from ripstop.compat.redirects import send
from ripstop.observe.recording import users_part

LENGTH = struct.Struct("!Q")  # before the pickled return value


@dataclass(frozen=True, slots=True)
class Task:
    """What one worker is to do."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    env: dict[str, str]
    stdout: str
    stderr: str
    handled: tuple[int, ...]  # signals that a forked worker has inherited handlers for, and that are blocked
    bind: Callable[[], None] | None


def work(task: Task, connection: Connection) -> None:
    """The target of the process."""
    _stand_alone(task)
    os.environ.update({name: str(value) for name, value in task.env.items()})
    try:
        value = _run(task)
    except KeyboardInterrupt:
        _die_of(signal.SIGINT)
    except Exception as error:
        import traceback

        traceback.print_exception(type(error), error, users_part(error.__traceback__))
        sys.exit(1)
    with suppress(OSError):  # a parent that has gone wants no value
        _write(connection.fileno(), LENGTH.pack(len(value)))
        _write(connection.fileno(), value)
        _await_release(connection)


def _stand_alone(task: Task) -> None:
    with suppress(PermissionError):  # it leads a session already
        os.setsid()
    for signum in task.handled:
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, task.handled)
    _die_with_parent()


def _die_with_parent() -> None:
    """Have the kernel kill us when the pipe that only our parent holds is closed.

    Not prctl's way: that is for the death of the thread that forked us, which is a fork server's or may just end.
    """
    parent = parent_process()
    assert parent is not None, "multiprocessing started us"
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    if not parent.is_alive():  # it died before the kernel was told
        os._exit(1)


def _run(task: Task) -> bytes:
    """The pickled return value; what goes wrong on the way to it is recorded."""

    def run() -> bytes:
        for std, path in (("stdout", task.stdout), ("stderr", task.stderr)):
            if path:
                send(std, path)
        if task.bind is not None:
            task.bind()
        return _pickled(task.function(*task.args))

    value = record(run)()
    return _pickled(None) if value is None else value  # None: it called sys.exit(0)


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(
            f"a worker's return value is sent to its parent, and this {type(value).__name__} cannot be pickled: "
            f"{error}; return plain data"
        ) from error


def _write(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def _await_release(connection: Connection) -> None:
    wait([connection])  # if the parent dies meanwhile, so do we


def _die_of(signum: signal.Signals) -> NoReturn:
    """As a process that has no handler for it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    raise AssertionError("still alive")
