"""The report that every node prints when a job fails, as text and as JSON: the root cause first.  Pure."""

import re
from collections.abc import Iterator

from msgspec import to_builtins

from ripstop.diagnostics.failure_ranking import rank_failures
from ripstop.diagnostics.hang_analysis import describe_hangs, hangs_among
from ripstop.model.failure import Failure, JobEnd, how_it_ended
from ripstop.model.round import Outcome
from ripstop.model.text_formatting import truncate, wrapped_lines

_MAX_OTHERS = 15  # that are printed besides the root cause


# JSON -----------------------------------------------------------------------------------------------------------------


def failure_report_json(report: JobEnd) -> str:
    """The report as a JSON object; `root_cause` is the first of `failures`, or null."""
    import json  # only if a job has failed: every agent loads this module at its start

    failures = [to_builtins(failure) for failure in rank_failures(report.failures)]
    fields = to_builtins(report) | {"root_cause": failures[0] if failures else None, "failures": failures}
    return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"


# text -----------------------------------------------------------------------------------------------------------------


def render_failure_report(report: JobEnd, width: int = 100) -> str:
    """The text that is printed at the end of a job."""
    return "\n".join(_failure_report_lines(report, width)) + "\n"


def _failure_report_lines(report: JobEnd, width: int) -> Iterator[str]:
    counts = f"{_failure_report_count(report.rounds, 'round')}, {_failure_report_count(report.restarts, 'restart')}"
    yield from wrapped_lines(f"job {report.run_id} {report.outcome.value} ({counts}): {report.why}", width)
    if report.outcome is Outcome.SUCCEEDED or not report.failures:
        return
    cause, *others = rank_failures(report.failures)
    yield ""
    if cause.hang:
        yield from wrapped_lines(f"hang: {describe_hangs(hangs_among(report.failures, cause.round))}", width)
    pid = f", pid {cause.pid}" if cause.pid is not None else ""
    yield f"root cause: rank {cause.rank} on {cause.host} (local rank {cause.local_rank}{pid})"
    yield from _failure_report_details(cause, width)
    if others:
        yield ""
        yield f"other failures ({len(others)}), most likely because of it:"
        for failure in others[:_MAX_OTHERS]:
            yield truncate(f"  rank {failure.rank} on {failure.host} {_failure_report_summary(failure)}", width)
        if len(others) > _MAX_OTHERS:
            yield f"  … and {len(others) - _MAX_OTHERS} more"


def _failure_report_details(failure: Failure, width: int) -> Iterator[str]:
    yield f"  when     {_failure_report_time(failure.at)}, round {failure.round}"
    yield f"  how      {how_it_ended(failure)}"
    if failure.oom and failure.oom != failure.message:
        yield from _failure_report_field("memory", failure.oom, width)
    if failure.message not in ("", how_it_ended(failure)):
        yield from _failure_report_field("why", failure.message, width)
    stacks = failure.hang.file if failure.hang else ""
    for label, path in (("logs", failure.logs), ("error", failure.error_file), ("stacks", stacks)):
        if path:
            yield f"  {label:<8} {path}"
    if failure.traceback:
        yield "  stack" if failure.hang else "  traceback"
        yield from (f"    {line}" for line in failure.traceback.split("\n"))
    if tail := failure_report_log_tail(failure):
        yield "  last lines of stderr"
        yield from (f"    {line}" for line in tail)


def failure_report_log_tail(failure: Failure) -> tuple[str, ...]:
    """The last lines of stderr; without the traceback, if they end with it."""
    tail = failure.log_tail
    if not (tail and failure.traceback and tail[-1].endswith(failure.traceback.rpartition("\n")[2])):
        return tail
    headers = [index for index, line in enumerate(tail) if line.endswith("Traceback (most recent call last):")]
    return tail[: headers[-1]] if headers else ()


def _failure_report_time(at: float) -> str:
    from datetime import UTC, datetime

    try:
        moment = datetime.fromtimestamp(at, UTC)
    except (ValueError, OverflowError):
        return f"at {at}"  # out of range; it came from another machine
    return f"{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03} UTC"


def _failure_report_summary(failure: Failure) -> str:
    first_line = failure.message.split("\n", 1)[0]
    message = re.sub(r"\[/\S*/(\w+\.\w+:\d+)\]", r"[\1]", first_line)  # shorten paths of torch's build machine
    return how_it_ended(failure) if message in ("", how_it_ended(failure)) else f"{how_it_ended(failure)}: {message}"


def _failure_report_field(label: str, text: str, width: int) -> Iterator[str]:
    first, *rest = [piece for line in text.split("\n") for piece in wrapped_lines(line, width - 11)]
    yield f"  {label:<8} {first}"
    yield from (f"           {line}" for line in rest)


def _failure_report_count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
