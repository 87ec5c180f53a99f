"""`ripstop report` and `ripstop compare`: what happened in a job, from its event files or from a running job."""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ripstop.cli.job_client import JOB_FLAGS, JOB_HELP, JobClient, JobClientCommandLine, JobCommand
from ripstop.cli.options.flags import HELP_FLAG, Flag
from ripstop.logs.directory import directory_name
from ripstop.model.errors import RipstopError, UsageError
from ripstop.model.event_json import from_json
from ripstop.model.events import EventRecord
from ripstop.model.text_formatting import ascii_json, duration, format_table, one_line, percent
from ripstop.report.builder import NoEvents, build_report
from ripstop.report.compare import compare
from ripstop.report.html import render
from ripstop.report.model import Report
from ripstop.report.reader import Skipped, event_files_for_report, read_events_for_report
from ripstop.report.writer import REPORT_PAGE
from ripstop.system.safe_files import replace_file

REPORT_HELP = f"""\
usage: ripstop report [RUN_DIR | FILE] [FLAGS]

Writes what happened in a job as one HTML page: every failure with its root cause, the time lost, the rounds and the
nodes.  RUN_DIR is LOG_DIR/RUN_ID of `ripstop run`, FILE is one event file.  Without them, the report is about a running
job, as far as its coordinator keeps the events.  The same page is written at the end of every job.

examples
  ripstop report                                          a running job of this machine, so far
  ripstop report logs/job7 --output=-                     a job that is over, to stdout

output
  -o, --output FILE           where to write the page (job-report.html in RUN_DIR; for a running job, in the current
                              directory); - is stdout
  --json                      print the report as JSON instead of writing the page
{JOB_HELP.replace("  --json                      print JSON" + chr(10), "")}"""
COMPARE_HELP = """\
usage: ripstop compare A B [FLAGS]

Compares two runs: goodput, recoveries, step times and the time lost.  A and B are directories LOG_DIR/RUN_ID of
`ripstop run`, or event files.

examples
  ripstop compare logs/before logs/after

output
  --json                      print JSON

Exit codes: 0 done; 1 a run cannot be read; 2 the command line is wrong.
"""


class WriteFailed(RipstopError):
    """The report cannot be written."""


def report_command(command: JobClientCommandLine) -> None:
    output = command.args.text("--output")
    if command.positional:
        if used := [flag for flag in ("--endpoint", "--job", "--rdzv-conf") if flag in command.args]:
            raise UsageError(f"{used[0]}: a report of files needs no running job; remove {used[0]}, or the file")
        source = Path(command.positional[0])
        made, directory = report_of_argument(source)
    else:
        made, directory = _report_of_running_job(command.find_job()), None
    if command.as_json:
        _write_or_print_report(output or "-", ascii_json(made) + "\n")
    elif output:
        _write_or_print_report(output, render(made))
    else:
        name = f"{directory_name(made.summary.run_id or 'job')}-report.html"
        _write_or_print_report(str(directory / REPORT_PAGE if directory else Path(name)), render(made))
    if not command.as_json and output != "-":
        print_report_summary(made)


def compare_runs_command(command: JobClientCommandLine) -> None:
    if len(command.positional) != 2:
        raise UsageError("compare needs two runs; write ripstop compare RUN_DIR_A RUN_DIR_B")
    a, b = (report_of_argument(Path(path))[0] for path in command.positional)
    figures = compare(a, b)
    rows = [[figure.name, figure.a_text, figure.b_text, figure.change] for figure in figures]
    names = [f"{letter}: {one_line(one.summary.run_id or '-')}" for letter, one in (("A", a), ("B", b))]
    command.print(format_table([[one_line(cell) for cell in row] for row in rows], ("", *names, "CHANGE")), [
        {"name": figure.name, "a": figure.a, "b": figure.b, "change": figure.change} for figure in figures
    ])  # fmt: skip


def report_of_argument(source: Path) -> tuple[Report, Path]:
    """The report of a run's directory or of an event file, and the directory of the files."""
    files = _event_files_of_argument(source)
    skipped = Skipped()
    try:
        made = build_report(read_events_for_report(files, skipped), skipped.notes())
    except OSError as error:
        raise UsageError(f"{source}: cannot be read: {error.strerror}; check the path and its permissions") from error
    except NoEvents:
        found = f"{skipped.lines} lines that are no events of ripstop" if skipped.lines else "no events"
        raise UsageError(f"{source}: has {found}; give a directory LOG_DIR/RUN_ID, or an events.jsonl") from None
    return made, files[0].parent


def _event_files_of_argument(source: Path) -> list[Path]:
    if not source.exists():
        raise UsageError(f"{source}: no such file or directory; give LOG_DIR/RUN_ID of a run, or an event file")
    if not source.is_dir():
        return [source]
    if files := event_files_for_report(source):
        return files
    runs = sorted(path for path in source.iterdir() if path.is_dir() and event_files_for_report(path))
    if len(runs) == 1:
        return event_files_for_report(runs[0])
    if runs:
        names = ", ".join(path.name for path in runs[:8]) + (", …" if len(runs) > 8 else "")
        raise UsageError(f"{source}: has several runs ({names}); give one of them, such as {runs[-1]}")
    raise UsageError(f"{source}: has no event files; give LOG_DIR/RUN_ID of a run, or an event file")


def _report_of_running_job(job: JobClient) -> Report:
    notes: list[str] = []
    records = list(_event_records_to_report(job, notes))
    try:
        return build_report(records, notes)
    except NoEvents:
        raise UsageError(f"{job} has no events yet; try again when it has started") from None


def _event_records_to_report(job: JobClient, notes: list[str]) -> Iterator[EventRecord]:
    since, more = 0, True
    while more:
        page: dict[str, Any] = job.get("/events", since=since)
        for event in page["events"]:
            if since == 0 and event["number"] > 1 and not notes:
                notes.append(f"The coordinator no longer keeps the first {event['number'] - 1} events of this job.")
            if record := from_json(msgspec.json.encode(event).decode()):
                yield record
        since, more = page["last"], page["more"]


def _write_or_print_report(output: str, text: str) -> None:
    if output == "-":
        sys.stdout.write(text)
        return
    path = Path(output)
    try:
        if path.is_dir():
            raise UsageError(f"--output={path}: is a directory; give a file")
        if path.exists() and not path.is_file():  # /dev/stdout, a pipe
            path.write_text(text, encoding="utf-8")
        else:
            replace_file(path, text)
    except OSError as error:
        raise WriteFailed(f"{path}: cannot be written: {error.strerror}; choose another file with -o FILE") from error
    print(f"report: {os.path.abspath(path)}", file=sys.stderr)  # noqa: PTH100 - links stay


def print_report_summary(report: Report) -> None:
    summary = report.summary
    facts: Sequence[str] = (
        f"{summary.result.value} after {duration(summary.seconds)}",
        f"goodput {percent(summary.goodput)}" if summary.goodput is not None else "",
        f"{summary.restarts} restarts",
        f"time lost {duration(report.time.downtime + (report.time.repeated or 0.0))}",
        summary.cause,
    )
    print(one_line(f"job {summary.run_id or '-'}: {'; '.join(filter(None, facts))}"))


COMMANDS = {
    "report": JobCommand(
        report_command, REPORT_HELP, (*JOB_FLAGS, Flag("--output", "FILE", short="-o")), max_positional=1
    ),
    "compare": JobCommand(compare_runs_command, COMPARE_HELP, (HELP_FLAG, Flag("--json")), max_positional=2),
}
