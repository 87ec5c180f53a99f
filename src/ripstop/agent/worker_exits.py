"""Decides what a worker's exit, or its expired timer, means for its round.  Pure.

Rules: (1) exit code 0 is success, and the round succeeds when all its workers have exited 0 before the agent stops
them; (2) any other exit is a failure while the agent does not stop the workers; (3) while it stops them, that exit is a
failure only if the worker wrote an error file and was not killed by a signal that the agent sent; (4) an expired timer
counts only for a process of a live worker and while the agent does not stop the workers.
"""

from enum import Enum, auto

SIGKILL = 9


class ExitKind(Enum):
    """What one worker's exit means."""

    SUCCEEDED = auto()
    ALL_SUCCEEDED = auto()  # and it was the last worker of a round that is not being stopped
    STOPPED = auto()
    FAILED = auto()


class TimerAction(Enum):
    """How to handle an expired timer."""

    IGNORE = auto()
    RECORD = auto()
    KILL = auto()  # record it, and send the signal that the timer names


class WorkerExits:
    """The workers of one round that have exited, and the signals that the agent sent to stop the workers."""

    def __init__(self, workers: int) -> None:
        self.exited: set[int] = set()  # local ranks
        self._not_succeeded = workers
        self._stop_signals: set[int] = set()

    @property
    def is_stopping(self) -> bool:
        return bool(self._stop_signals)

    def on_stop(self, signum: int) -> None:
        """The agent stops the workers with this signal, and with SIGKILL after the grace period."""
        self._stop_signals |= {signum, SIGKILL}

    def on_exit(self, local_rank: int, exitcode: int | None, signum: int | None, *, wrote_error_file: bool) -> ExitKind:
        """Classify a worker's exit.  Either `exitcode` or `signum` is set."""
        self.exited.add(local_rank)
        if exitcode == 0:
            self._not_succeeded -= 1
            return ExitKind.SUCCEEDED if self._not_succeeded or self.is_stopping else ExitKind.ALL_SUCCEEDED
        if self.is_stopping and (signum in self._stop_signals or not wrote_error_file):
            return ExitKind.STOPPED
        return ExitKind.FAILED

    def on_timer_expired(self, local_rank: int | None, signum: int) -> TimerAction:
        """`local_rank` is None for a process of no live worker; `signum` is 0 for a timer that names no signal."""
        if local_rank is None or self.is_stopping:
            return TimerAction.IGNORE
        return TimerAction.KILL if signum else TimerAction.RECORD
