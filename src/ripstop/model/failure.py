"""One worker's failure, and the end of a job.

Pure.  `diagnostics/evidence.py` truncates the texts, so that a failure fits into a message.
"""

import signal

from msgspec import Struct

from ripstop.model.field_types import Int64, Items
from ripstop.model.round import Outcome
from ripstop.model.text_formatting import signal_name

MAX_COLLECTIVES = 8  # process groups of one rank that are sent and kept


class CollectiveProgress(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's position in one process group, from torch's flight recorder (`diagnostics/flight_recorder.py`).

    `entered` is the number of the latest operation that the worker entered, `pending` of the oldest that it has not
    completed; 0 means none.  `op` and `size` describe the pending operation, or else the latest.
    """

    group: str
    label: str
    entered: Int64 = 0
    pending: Int64 = 0
    op: str = ""
    size: str = ""
    p2p: bool = False


class Hang(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a worker was when its round made no progress (`diagnostics/hang_analysis.py` compares workers).

    `sign` is the symptom of the hang; empty for a worker that was inspected because others hang.  `state` is the
    kernel's process state letter.  `file` has all that was found.  `collectives` is None if the worker did not reply.
    """

    seconds: float
    sign: str
    call: str
    where: str
    waits: bool
    state: str
    file: str = ""
    collectives: Items[CollectiveProgress] | None = None


class Failure(Struct, frozen=True, forbid_unknown_fields=True):
    """Why one worker exited, or why it hangs.

    `at` is the wall-clock time of the exception if the worker wrote an error file, or else of the exit.  Exactly one of
    `exitcode` and `signal` is set; neither is for a worker that hangs or could not be started.  For a hang, `at` is the
    time of the last progress and `traceback` is the stack.
    """

    rank: Int64
    local_rank: Int64
    round: Int64
    host: str
    at: float
    pid: Int64 | None = None
    exitcode: Int64 | None = None
    signal: str | None = None
    message: str = ""
    traceback: str = ""
    oom: str = ""
    log_tail: Items[str] = ()
    error_file: str = ""
    logs: str = ""
    hang: Hang | None = None


class JobEnd(Struct, frozen=True, forbid_unknown_fields=True):
    """How and why a job ended, and the failures of its last round, the root cause first."""

    run_id: str
    outcome: Outcome
    why: str
    rounds: Int64
    restarts: Int64
    failures: Items[Failure] = ()


def failure_in_short(failure: Failure) -> str:
    """How a worker ended, in short."""
    if hang := failure.hang:
        return f"made no progress for {hang.seconds:.0f} s ({hang.sign})" if hang.sign else "did not hang itself"
    if failure.signal:
        return f"died of {failure.signal}" + (", out of memory" if failure.oom else "")
    return "was not started" if failure.exitcode is None else f"exited with code {failure.exitcode}"


def exit_reason_of_failure(returncode: int) -> str:
    """The exit status in words, of a worker that ripstop did not stop."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    name = signal_name(-returncode)
    if returncode == -signal.SIGKILL:
        return f"killed by {name}, which was not sent by ripstop"
    try:
        meaning = signal.strsignal(-returncode)
    except ValueError:
        meaning = None
    return f"died of {name} ({meaning.lower()})" if meaning else f"died of {name}"
