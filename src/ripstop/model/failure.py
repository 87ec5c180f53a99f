"""One worker's failure, and the report of a job's end.

Data only, small enough to travel: texts are cut where they are gathered (see `diagnostics/evidence.py`).
"""

from msgspec import Struct

from ripstop.model.round import Outcome

MOST_STANDINGS = 8  # of one rank: no more are sent, and no more are heard


class CollectiveProgress(Struct, frozen=True):
    """How far a worker is in one process group, by torch's flight recorder; `diagnostics/flight_recorder.py` says
    what it means.

    `entered` is the number of the latest operation it has entered, `pending` that of the oldest it has not left; 0:
    none.  `op` and `size` are of the pending one, else of the latest.
    """

    group: str
    label: str
    entered: int = 0
    pending: int = 0
    op: str = ""
    size: str = ""
    p2p: bool = False


class Hang(Struct, frozen=True):
    """Where a worker was when its round made no progress; `diagnostics/stacks.py` says what it means.

    `sign` is how it showed that this worker hangs; empty for one that was looked at because others do.  `state` is the
    kernel's letter for the process, `file` what has all that was found.  `standings` None: it did not tell.
    """

    seconds: float
    sign: str
    call: str
    where: str
    waits: bool
    state: str
    file: str = ""
    standings: tuple[CollectiveProgress, ...] | None = None


class Failure(Struct, frozen=True):
    """Why one worker is dead, or is to be stopped because its round hangs.

    `at` is wall-clock time, of the exception where the worker wrote an error file, else of the exit.  Exactly one of
    `exitcode` and `signal` is set, except for a worker that could not be started at all, or hangs: then neither is.
    A hang's `at` is the last sign of progress, and its `traceback` the stack.
    """

    rank: int
    local_rank: int
    round: int
    host: str
    at: float
    pid: int | None = None
    exitcode: int | None = None
    signal: str | None = None
    message: str = ""
    traceback: str = ""
    oom: str = ""
    log_tail: tuple[str, ...] = ()
    error_file: str = ""
    logs: str = ""
    hang: Hang | None = None


class JobReport(Struct, frozen=True):
    """The end of a job: how, why, and the failures of its last round, the culprit first."""

    run_id: str
    outcome: Outcome
    why: str
    rounds: int
    restarts: int
    failures: tuple[Failure, ...] = ()
