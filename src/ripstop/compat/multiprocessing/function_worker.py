"""One worker that is a function: the worker's side of `MultiprocessContext`.  Imported in every such worker: no torch.

The worker's life: it leads a session of its own and dies with its parent, takes its environment and its streams, runs
the function with its exceptions recorded, sends the pickled return value, and stays until it is released, so that what
it hosts for its peers lives as long as the slowest of them.
"""

import gc
import os
import pickle
import signal
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from msgspec import Struct

from ripstop.compat.multiprocessing.errors import record
from ripstop.compat.multiprocessing.function_process import (
    cannot_be_sent,
    die_with_parent_process,
    drop_handlers,
    is_success,
    lead_a_session,
)
from ripstop.compat.multiprocessing.redirects import send
from ripstop.workers.error_file import user_frames

LENGTH = struct.Struct("!Q")  # before the pickled return value


class Task(Struct, frozen=True):
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
    gc.freeze()  # after a fork: the parent's garbage may want threads that are not here to be taken apart
    _stand_alone(task)
    os.environ.update({name: str(value) for name, value in task.env.items()})
    try:
        value = _run(task)
    except KeyboardInterrupt:
        _die_of(signal.SIGINT)
    except Exception as error:
        import traceback

        traceback.print_exception(type(error), error, user_frames(error.__traceback__))
        sys.exit(1)
    with suppress(OSError):  # a parent that has gone wants no value
        _write(connection.fileno(), LENGTH.pack(len(value)))
        _write(connection.fileno(), value)
        _await_release(connection)


def _stand_alone(task: Task) -> None:
    lead_a_session()
    drop_handlers(task.handled)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, task.handled)
    die_with_parent_process()


def _run(task: Task) -> bytes:
    """The pickled return value; what goes wrong on the way to it is recorded."""

    def run() -> bytes:
        for std, path in (("stdout", task.stdout), ("stderr", task.stderr)):
            if path:
                send(std, path)
        if task.bind is not None:
            task.bind()
        try:
            value = task.function(*task.args)
        except SystemExit as end:
            if not is_success(end):
                raise
            value = None
        return _pickled(value)

    value = record(run)()
    assert value is not None, "record gives None for sys.exit(0) alone"
    return value


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise cannot_be_sent(value, error) from error


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
