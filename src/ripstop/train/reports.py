"""Progress, told to this node's agent over its socket (`workers/reports.py` is the other end).

Rules: (1) training never waits for it and never fails because of it: a datagram that cannot be sent now is dropped,
but for the latest checkpoint's, which is sent with a later one; (2) it costs next to nothing: a clock is read, and a
few times a second something is sent; (3) a forked child has a socket of its own.
"""

import atexit
import json
import os
import socket
import time

SOCKET = "RIPSTOP_SOCKET"  # the variable that names the agent's socket
INTERVAL = 0.25  # seconds between two datagrams
LONGEST_PATH = 1000  # characters of a checkpoint's name

_socket: socket.socket | None = None
_pid = 0
_next = 0.0  # when something may be sent again
_beats = 0
_untold: int | None = None  # the latest step, if it was not sent
_unsaved: dict[str, object] | None = None  # the latest checkpoint, if it was not sent


def heartbeat(step: int | None = None) -> None:
    """This worker makes progress, and is at this step if it counts any; call it as often as you like.

    With `--hang-timeout`, a worker that has called this once is taken to hang when it does not for that long.
    """
    global _beats, _next, _untold
    _beats += 1
    now = time.monotonic()
    if now < _next and os.getpid() == _pid:
        _untold = step
        return
    _untold = None
    if os.getpid() == _pid:
        _tell_saved()
    if _send({"beat": _beats, "step": None if step is None else int(step)}):
        _next = now + INTERVAL


@atexit.register
def _last_step() -> None:
    if os.getpid() != _pid:
        return
    _tell_saved()
    if _untold is not None:
        _send({"beat": _beats, "step": int(_untold)})


def checkpoint_saved(step: int, path: str = "") -> None:
    """The training's state up to this step is safe, in this place."""
    global _unsaved
    _unsaved = {"saved": int(step), "path": str(path)[:LONGEST_PATH]}
    _tell_saved()


def _tell_saved() -> None:
    global _unsaved
    if _unsaved is not None and _send(_unsaved):
        _unsaved = None


def _send(message: dict[str, object]) -> bool:
    """Whether it need not be tried again soon."""
    global _socket, _pid
    if not (path := os.environ.get(SOCKET)):
        return True
    try:
        if _socket is None or _pid != os.getpid():
            _socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            _pid = os.getpid()
        _socket.sendto(json.dumps(message).encode(), path)
    except BlockingIOError:  # the agent has not read what was sent before; the next call tries again
        return False
    except OSError:  # there is no agent
        return True
    return True
