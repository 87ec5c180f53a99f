"""What a process prints and writes when its job is over: the result, the reports, and the termination message."""

import logging
import os
import re
import select
import sys
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from ripstop.agent.machine_io import ExitAgent
from ripstop.diagnostics.failure_report import failure_report_json, render_failure_report
from ripstop.logs.directory import LogDirectory
from ripstop.model.config import LogFormat
from ripstop.model.failure import JobEnd
from ripstop.model.round import Outcome
from ripstop.model.text_formatting import format_clean_text, one_line
from ripstop.system.safe_files import replace_file
from ripstop.system.stderr_terminal import has_colors, terminal_width
from ripstop.telemetry.stderr_log import StderrLogPrinter

REPORT_WIDTH = 100
CONSOLE_TIMEOUT_MS = 1000  # for a console that is slow to read


def print_final_report(report: JobEnd, printer: StderrLogPrinter, level: int = logging.ERROR) -> None:
    """At a terminal, in its width, and the outcome and the root cause of a failure in red."""
    text = shown = render_failure_report(
        report, min(REPORT_WIDTH, terminal_width() if os.isatty(2) else REPORT_WIDTH)
    ).rstrip("\n")
    if level >= logging.ERROR and has_colors(os.environ):
        outcome, blank, rest = text.partition("\n\n")
        rest = re.sub(r"^root cause: .*", "\x1b[1;31m\\g<0>\x1b[0m", rest, flags=re.MULTILINE)
        shown = f"\x1b[1;31m{outcome}\x1b[0m{blank}{rest}"
    printer.line(text, level, shown)


def print_final_output(end: ExitAgent, directory: LogDirectory, printer: StderrLogPrinter) -> None:
    """Print the report or the error of an unsuccessful end, and save the report beside the logs."""
    has_succeeded = end.report is not None and end.report.outcome is Outcome.SUCCEEDED
    directory.tidy(succeeded=has_succeeded)
    if has_succeeded:
        return
    if end.report is not None:
        if printer.settings.format is LogFormat.TEXT:
            with suppress(OSError):  # the console is closed
                print(file=sys.stderr)
        print_final_report(_final_report_without_deleted_files(end.report, directory), printer)
        if directory.kept:
            result = str(path := directory.path / "report.json")
            try:
                replace_file(path, failure_report_json(end.report))
            except OSError as error:
                result += f" cannot be written ({error.strerror}); choose another directory with --log-dir"
            printer.line(f"report: {result}", logging.ERROR, f"report: {result}")
    elif end.code < 128:
        printer.line(f"error: {one_line(end.why)}", logging.ERROR)


def write_final_job_report(directory: LogDirectory, printer: StderrLogPrinter) -> None:
    """On the coordinator's node: write the report of the whole job beside its events, and print its path."""
    if not directory.has_job_events or not directory.kept:
        return
    from ripstop.report.writer import write_report

    def warn(text: str) -> None:
        if _can_print_final_output():
            printer.line(f"warning: {text}", logging.WARNING)

    page = write_report(directory.path, warn)
    if page is not None and _can_print_final_output():
        printer.line(f"job report: {page}", logging.INFO, f"job report: {page}")


def _can_print_final_output() -> bool:
    """False if the console is not being read: that must not delay the exit."""
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    return any(mask & select.POLLOUT for _, mask in poll.poll(CONSOLE_TIMEOUT_MS))


def _final_report_without_deleted_files(report: JobEnd, directory: LogDirectory) -> JobEnd:
    """The report without the names of files in a log directory that was deleted."""
    if directory.kept:
        return report
    deleted = format_clean_text(str(directory.path))
    failures = (
        replace(failure, logs="", error_file="", hang=failure.hang and replace(failure.hang, file=""))
        if failure.logs.startswith(deleted)
        else failure
        for failure in report.failures
    )
    return replace(report, failures=tuple(failures))


def write_final_termination_message(file: Path, end: ExitAgent, printer: StderrLogPrinter) -> None:
    from ripstop.api.termination_message import termination_message

    try:
        file.write_text(termination_message(end.why, end.report))
    except OSError as error:
        problem = f"cannot be written ({error.strerror}); choose another file"
        printer.line(f"RIPSTOP_TERMINATION_LOG={file}: {problem}", logging.WARNING)
