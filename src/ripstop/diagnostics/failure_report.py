"""The report at the end of a job: the root cause, for people and as JSON.  Pure.

When one worker dies, its peers die a moment later in a collective that lost its partner.  So among the failures of one
round, those that a peer can explain come last, regardless of the clocks of their hosts.  Among equals, the earlier one
comes first.  In a round that hangs, the odd ranks come first (`hang_analysis.py`).
"""

import re
from collections.abc import Iterable, Iterator
from enum import IntEnum

from msgspec import to_builtins
from msgspec.structs import replace

from ripstop.diagnostics.hang_analysis import describe, hangs_among, odd_ranks
from ripstop.model.failure import Failure, JobReport
from ripstop.model.round import Outcome
from ripstop.model.text_formatting import truncate

# compiled at first use: most jobs never need them
_COLLECTIVE = (
    r"gloo/transport|gloo::|\bpair\.cc\b|Application timeout caused pair closure"
    r"|ncclRemoteError|NCCL communicator was aborted|remote process exited"
    r"|Watchdog caught collective operation timeout|collective operation timeout|monitoredBarrier|watchdog got stuck"
    r"|DistStoreError|DistNetworkError|DistBackendError|TCPStore|wait timeout after \d+ ?ms|Timed out waiting \d+ ?ms"
    r"|failed to recv, got 0 bytes|(?:send|recv)(?:Bytes|Value|Vector|String) failed"
)
_CONNECTION = r"Connection (?:reset|closed|refused|aborted)|closed by (?:remote )?peer|Broken pipe|Socket Timeout"
_OWN_FAULT = (  # reported by collectives, too, but not caused by a peer
    r"out of memory|unhandled cuda error|UnhandledCudaError|EADDRINUSE|address already in use|invalid usage"
    r"|Duplicate GPU|InvalidArgument"
)

_MAX_FULL_FAILURES = 8  # that are sent with all their texts
_MAX_FAILURES = 64  # that are sent
_MAX_OTHERS = 15  # that are printed besides the root cause


class _Blame(IntEnum):
    """How likely a failure is the cause and not a consequence; smaller values are more likely."""

    CAUSE = 0  # killed, crashed, raised its own exception, or could not be started
    UNEXPLAINED = 1  # an exit code without a message, or an abort
    CONNECTION = 2  # lost a connection, perhaps to a peer
    COLLECTIVE = 3  # lost a peer


def root_cause(failures: Iterable[Failure]) -> Failure | None:
    """The first failure in order of blame; None if there is none."""
    return next(iter(order(failures)), None)


def order(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """The root cause first, its victims after it; the latest round before earlier rounds."""
    failures = tuple(failures)
    rounds = {failure.round for failure in failures if failure.hang}
    odd = {(round, rank) for round in rounds for rank in odd_ranks(hangs_among(failures, round))}

    def blame(failure: Failure) -> _Blame:
        return _Blame.CAUSE if (failure.round, failure.rank) in odd else _blame(failure)

    return tuple(sorted(failures, key=lambda failure: (-failure.round, blame(failure), failure.at, failure.rank)))


def _blame(failure: Failure) -> _Blame:
    if failure.hang:
        return _Blame.UNEXPLAINED if failure.hang.sign and not failure.hang.waits else _Blame.COLLECTIVE
    aborted = failure.signal == "SIGABRT"
    started = failure.exitcode is not None or failure.signal is not None
    if failure.oom or not started or (failure.signal and not aborted):
        return _Blame.CAUSE
    exceptions = [line for line in failure.traceback.split("\n") if not line.startswith(" ")]  # without frames
    text = "\n".join((failure.message, *exceptions))
    if aborted or not _has_explanation(failure):
        text = "\n".join((text, *failure.log_tail))  # messages of C++ threads are on stderr only
    if re.search(_OWN_FAULT, text, re.IGNORECASE):
        return _Blame.CAUSE
    if re.search(_COLLECTIVE, text, re.IGNORECASE):
        return _Blame.COLLECTIVE
    if re.search(_CONNECTION, text, re.IGNORECASE):
        return _Blame.CONNECTION
    return _Blame.CAUSE if _has_explanation(failure) and not aborted else _Blame.UNEXPLAINED


def _has_explanation(failure: Failure) -> bool:
    return bool(failure.traceback or failure.error_file)


def looks_like_victim(failure: Failure) -> bool:
    """Whether the loss of a peer can explain this failure."""
    return _blame(failure) >= _Blame.CONNECTION


def trim(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """The failures, small enough to send: the likeliest causes in full, more without details, the rest left out."""
    sent = order(failures)[:_MAX_FAILURES]
    short = (replace(f, message=f.message[:200], traceback="", log_tail=()) for f in sent[_MAX_FULL_FAILURES:])
    return (*sent[:_MAX_FULL_FAILURES], *short)


# JSON -----------------------------------------------------------------------------------------------------------------


def to_json(report: JobReport) -> str:
    """The report as a JSON object; `root_cause` is the first of `failures`, or null."""
    import json  # only if a job has failed: every agent loads this module at its start

    failures = [to_builtins(failure) for failure in order(report.failures)]
    fields = to_builtins(report) | {"root_cause": failures[0] if failures else None, "failures": failures}
    return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"


# text -----------------------------------------------------------------------------------------------------------------


def render(report: JobReport, width: int = 100) -> str:
    """The text that is printed at the end of a job."""
    return "\n".join(_lines(report, width)) + "\n"


def _lines(report: JobReport, width: int) -> Iterator[str]:
    counts = f"{_count(report.rounds, 'round')}, {_count(report.restarts, 'restart')}"
    yield from _wrapped(f"job {report.run_id} {report.outcome.value} ({counts}): {report.why}", width)
    if report.outcome is Outcome.SUCCEEDED or not report.failures:
        return
    cause, *others = order(report.failures)
    yield ""
    if cause.hang:
        yield from _wrapped(f"hang: {describe(hangs_among(report.failures, cause.round))}", width)
    pid = f", pid {cause.pid}" if cause.pid is not None else ""
    yield f"root cause: rank {cause.rank} on {cause.host} (local rank {cause.local_rank}{pid})"
    yield from _facts(cause, width)
    if others:
        yield ""
        yield f"other failures ({len(others)}), most likely because of it:"
        for failure in others[:_MAX_OTHERS]:
            yield truncate(f"  rank {failure.rank} on {failure.host} {_in_short(failure)}", width)
        if len(others) > _MAX_OTHERS:
            yield f"  … and {len(others) - _MAX_OTHERS} more"


def _facts(failure: Failure, width: int) -> Iterator[str]:
    yield f"  when     {_when(failure.at)}, round {failure.round}"
    yield f"  how      {how(failure)}"
    if failure.oom and failure.oom != failure.message:
        yield from _labelled("memory", failure.oom, width)
    if failure.message not in ("", how(failure)):
        yield from _labelled("why", failure.message, width)
    stacks = failure.hang.file if failure.hang else ""
    for label, path in (("logs", failure.logs), ("error", failure.error_file), ("stacks", stacks)):
        if path:
            yield f"  {label:<8} {path}"
    if failure.traceback:
        yield "  stack" if failure.hang else "  traceback"
        yield from (f"    {line}" for line in failure.traceback.split("\n"))
    if tail := tail_without_traceback(failure):
        yield "  last lines of stderr"
        yield from (f"    {line}" for line in tail)


def tail_without_traceback(failure: Failure) -> tuple[str, ...]:
    """The last lines of stderr; without the traceback, if they end with it."""
    tail = failure.log_tail
    if not (tail and failure.traceback and tail[-1].endswith(failure.traceback.rpartition("\n")[2])):
        return tail
    headers = [index for index, line in enumerate(tail) if line.endswith("Traceback (most recent call last):")]
    return tail[: headers[-1]] if headers else ()


def _when(at: float) -> str:
    from datetime import UTC, datetime

    try:
        moment = datetime.fromtimestamp(at, UTC)
    except (ValueError, OverflowError):
        return f"at {at}"  # out of range; it came from another machine
    return f"{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03} UTC"


def how(failure: Failure) -> str:
    """How a worker ended, in short."""
    if hang := failure.hang:
        return f"made no progress for {hang.seconds:.0f} s ({hang.sign})" if hang.sign else "did not hang itself"
    if failure.signal:
        return f"died of {failure.signal}" + (", out of memory" if failure.oom else "")
    return "was not started" if failure.exitcode is None else f"exited with code {failure.exitcode}"


def _in_short(failure: Failure) -> str:
    first_line = failure.message.split("\n", 1)[0]
    message = re.sub(r"\[/\S*/(\w+\.\w+:\d+)\]", r"[\1]", first_line)  # shorten paths of torch's build machine
    return how(failure) if message in ("", how(failure)) else f"{how(failure)}: {message}"


def _labelled(label: str, text: str, width: int) -> Iterator[str]:
    first, *rest = [piece for line in text.split("\n") for piece in _wrapped(line, width - 11)]
    yield f"  {label:<8} {first}"
    yield from (f"           {line}" for line in rest)


def _wrapped(text: str, width: int) -> list[str]:
    from textwrap import wrap

    return wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
