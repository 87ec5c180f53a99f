"""Converts the evidence of a failure to an event and back, so that an event file alone explains a failed job.  Pure."""

from msgspec import Struct

from ripstop.diagnostics.hang_analysis import describe_hang_position
from ripstop.model.events import WorkerEvidence
from ripstop.model.failure import Failure, Hang

MAX_RECORDED = 8  # workers of one node in one round; the likeliest causes of all nodes are among them


class Evidence(Struct, frozen=True):
    """The evidence as a failure that `failure_ranking.py` can compare, and what a `Failure` has no field for.

    `is_recorded`: it is from an event of this kind, and not made up from another one.
    """

    failure: Failure
    collectives: str = ""
    files: tuple[str, ...] = ()
    is_recorded: bool = True


def evidence_to_event(failure: Failure) -> WorkerEvidence:
    hang = failure.hang
    files = (failure.logs, failure.error_file, hang.file if hang else "")
    return WorkerEvidence(
        round=failure.round,
        rank=failure.rank,
        local_rank=failure.local_rank,
        pid=failure.pid or 0,
        host=failure.host,
        failed_at=failure.at,
        exitcode=-1 if failure.exitcode is None else failure.exitcode,
        signal=failure.signal or "",
        message=failure.message,
        traceback=failure.traceback,
        oom=failure.oom,
        log_tail=failure.log_tail,
        files=tuple(filter(None, files)),
        hangs=hang is not None,
        sign=hang.sign if hang else "",
        seconds=hang.seconds if hang else 0.0,
        call=hang.call if hang else "",
        where=hang.where if hang else "",
        waits=hang.waits if hang else False,
        state=hang.state if hang else "",
        collectives=describe_hang_position(hang.collectives) if hang and hang.collectives is not None else "",
    )


def evidence_from_event(event: WorkerEvidence) -> Evidence:
    hang = Hang(event.seconds, event.sign, event.call, event.where, event.waits, event.state) if event.hangs else None
    failure = Failure(
        rank=event.rank,
        local_rank=event.local_rank,
        round=event.round,
        host=event.host,
        at=event.failed_at,
        pid=event.pid or None,
        exitcode=None if event.exitcode < 0 else event.exitcode,
        signal=event.signal or None,
        message=event.message,
        traceback=event.traceback,
        oom=event.oom,
        log_tail=event.log_tail,
        hang=hang,
    )
    return Evidence(failure, event.collectives, event.files)
