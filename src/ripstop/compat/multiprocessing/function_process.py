"""What all workers that are functions do, whoever started them: `functions.py`'s and `function_worker.py`'s.

Imported in every such worker: no torch.
"""

import fcntl
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import parent_process
from typing import Any


def lead_a_session() -> None:
    with suppress(PermissionError):  # it leads one already
        os.setsid()


def drop_handlers(signums: Iterable[int]) -> None:
    """Those that a fork has from its parent: a signal does again what it does to any Python program."""
    for signum in signums:
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)


def die_with_parent_process() -> None:
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


def is_success(end: SystemExit) -> bool:
    """Whether the process would have exited with 0; such a function has returned None."""
    return end.code is None or end.code == 0


def cannot_be_sent(value: Any, error: Exception) -> TypeError:
    return TypeError(
        f"a worker's return value is sent to its parent, and this {type(value).__name__} cannot be pickled: {error}; "
        "return plain data"
    )
