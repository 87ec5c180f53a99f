"""Whether the round of this worker is over although its training function still runs (`elastic_session.py`).

The function is left at the next safe point: a collective, which raises because its process group is aborted, or a call
of ripstop's that checks here (`heartbeat`, `State.commit`, `State.restore`).  An exception between any two instructions
would be faster, but could leave a lock of the script's, or of a library's, held for ever.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

is_elastic = False  # the training function runs inside `train.elastic`
entries = 0  # of this process into its training function: the number of rounds in which it took part
_is_over = threading.Event()
_thread = 0  # the one that runs the function; others go on
on_opposed: Callable[[str], None] | None = None  # set while the function runs
_wake: Callable[[], None] | None = None  # set while the function waits


class Interrupted(BaseException):
    """The round is over.  Not an Exception, so that a script that handles all of these does not keep it."""


def interrupt() -> None:
    _is_over.set()
    if (wake := _wake) is not None:
        wake()


def enter_interruptible() -> None:
    """The training function is about to be entered."""
    global is_elastic, entries, _thread
    is_elastic, _thread = True, threading.get_ident()
    entries += 1
    _is_over.clear()


def leave_interruptible() -> None:
    global is_elastic, on_opposed
    is_elastic, on_opposed = False, None


def raise_if_interrupted() -> None:
    """Raise if the round is over."""
    if _is_over.is_set() and threading.get_ident() == _thread:
        raise Interrupted("the round is over; train.elastic enters the function again")


@contextmanager
def interruptible_wait(wake: Callable[[], None]) -> Iterator[None]:
    """Call `wake` in another thread when the round is over.  It ends a wait in this block.

    Then `raise_if_interrupted` raises.
    """
    global _wake
    _wake = wake
    try:
        raise_if_interrupted()
        yield
    finally:
        _wake = None


def oppose_interruption(why: str) -> None:
    """This process cannot roll back its state: after a fault it is to be replaced."""
    if on_opposed is not None:
        on_opposed(why)
