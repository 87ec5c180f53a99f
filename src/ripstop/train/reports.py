"""Sends progress reports to this node's agent over its socket (`workers/report_socket.py` is the other end).

Rules: (1) training never waits or fails because of a report: a datagram that cannot be sent now is dropped, except the
latest checkpoint's and restore's, which are sent later; (2) a call is cheap: it reads a clock, and sends a few times a
second at most; (3) a forked child opens its own socket; (4) a standby reports nothing.
"""

import atexit
import json
import os
import socket
import time

from ripstop.train import interruption, standby_gate
from ripstop.train.step_profile import StepProfile, StepProfiler, open_profiler

SOCKET_VARIABLE = "RIPSTOP_SOCKET"  # the path of the agent's socket
SEND_INTERVAL_S = 0.25
MAX_CHECKPOINT_PATH_CHARS = 1000

_socket: socket.socket | None = None
_pid = 0
_next_send = 0.0
_heartbeats = 0
_unsent_step: int | None = None  # the latest step, if it was not sent
_unsent: dict[str, dict[str, object]] = {}  # the latest checkpoint and the latest restore, if they were not sent
_commits = 0
_stall = 0.0  # seconds in which commits held up training
_sizes: dict[str, int] = {}  # of the last commit of each State
_committed_at = 0.0
_next_commit_send = 0.0
_unsent_commit_step: int | None = None  # of the latest call of commit, if it was not sent
_profiler: StepProfiler | None = None
_profiler_pid = 0


def heartbeat(step: int | None = None) -> None:
    """Report that this worker makes progress, and its step if it counts any.  Call it as often as you like.

    With `--hang-timeout`, a worker that has called this once counts as hanging if it does not call it for that long.
    In a function with `train.elastic`, it raises if the round is over.
    """
    global _heartbeats, _next_send, _unsent_step
    if step is not None:
        standby_gate.refuse_in_standby("train.heartbeat(step)")
    interruption.raise_if_interrupted()
    _heartbeats += 1
    if step is not None and (profiler := _profiler_for_reports()):
        _send_profile_report(profiler.on_heartbeat(int(step)))
    now = time.monotonic()
    if now < _next_send and os.getpid() == _pid:
        _unsent_step = step
        return
    _unsent_step = None
    if os.getpid() == _pid:
        _send_unsent_reports()
    if _send_report({"beat": _heartbeats, "step": None if step is None else int(step)}):
        _next_send = now + SEND_INTERVAL_S


@atexit.register
def send_last_step() -> None:
    """Send what was not sent yet."""
    if os.getpid() != _pid:
        return
    _send_unsent_reports()
    _send_commit_report()
    if _unsent_step is not None:
        _send_report({"beat": _heartbeats, "step": int(_unsent_step)})


def checkpoint_saved(step: int, path: str = "") -> None:
    """Report that the state up to this step is saved, at this path."""
    standby_gate.refuse_in_standby("train.checkpoint_saved()")
    _unsent["checkpoint"] = {"saved": int(step), "path": str(path)[:MAX_CHECKPOINT_PATH_CHARS]}
    _send_unsent_reports()


def state_restored(source: str, step: int, seconds: float) -> None:
    """Report that `State.restore` has loaded a commit from there, and how long it took."""
    _unsent["restore"] = {"restored": source, "step": step, "seconds": seconds}
    _send_unsent_reports()


def state_committed(name: str, size: int, stall: float) -> None:
    """Count a commit of this State."""
    global _commits, _stall, _committed_at
    _commits += 1
    _stall += stall
    _sizes[name] = size
    _committed_at = time.monotonic()


def commit_called(step: int) -> None:
    """Report a call of `State.commit` at this step, and this process's totals.  Called as often as `heartbeat`."""
    global _next_commit_send, _unsent_commit_step
    _unsent_commit_step = step
    if profiler := _profiler_for_reports():
        _send_profile_report(profiler.on_commit(step))
    now = time.monotonic()
    if (now >= _next_commit_send or os.getpid() != _pid) and _send_commit_report():
        _next_commit_send = now + SEND_INTERVAL_S


def reset_reports_for_round() -> None:
    """Totals are of one round: this process takes part in another one now."""
    global _heartbeats, _unsent_step, _commits, _stall, _unsent_commit_step, _next_send, _next_commit_send
    global _profiler_pid
    _heartbeats = _commits = 0
    _stall = _next_send = _next_commit_send = 0.0
    _unsent_step = _unsent_commit_step = None
    _unsent.clear()
    _profiler_pid = 0  # the number of ranks decides whether there is a profiler


def _profiler_for_reports() -> StepProfiler | None:
    global _profiler, _profiler_pid
    if _profiler_pid != os.getpid():
        _profiler, _profiler_pid = open_profiler() if os.environ.get(SOCKET_VARIABLE) else None, os.getpid()
    return _profiler


def _send_profile_report(profile: StepProfile | None) -> None:
    if profile is not None and _profiler is not None:
        _send_report({"profile": _profiler.count, **profile._asdict()})


def _send_unsent_reports() -> None:
    for topic in [topic for topic, message in _unsent.items() if _send_report(message)]:
        del _unsent[topic]


def _send_commit_report() -> bool:
    global _unsent_commit_step
    if _unsent_commit_step is not None:
        totals = {"commits": _commits, "bytes": sum(_sizes.values()), "stall": _stall}
        age = time.monotonic() - _committed_at if _commits else 0.0
        if not _send_report({"step": _unsent_commit_step, "age": age, **totals}):
            return False
    _unsent_commit_step = None
    return True


def _send_report(message: dict[str, object]) -> bool:
    """False if it should be tried again soon."""
    global _socket, _pid
    if not (path := os.environ.get(SOCKET_VARIABLE)) or standby_gate.find_gate() is not None:
        return True
    try:
        if _socket is None or _pid != os.getpid():
            _socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            _pid = os.getpid()
        _socket.sendto(json.dumps(message).encode(), path)
    except BlockingIOError:  # the agent has not read the earlier ones; the next call tries again
        return False
    except OSError:  # no agent
        return True
    return True
