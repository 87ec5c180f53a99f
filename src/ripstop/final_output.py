"""What a process prints and writes when its job is over: the result, the reports, and the termination message."""

import sys
from pathlib import Path

from msgspec.structs import replace

from ripstop.agent.machine_io import ExitAgent
from ripstop.diagnostics.failure_report import render, to_json
from ripstop.logs.directory import LogDirectory
from ripstop.model.failure import JobReport
from ripstop.model.round import Outcome
from ripstop.model.text_formatting import clean, one_line
from ripstop.system.safe_files import replace_file

CONSOLE_TIMEOUT_MS = 1000  # for a console that is slow to read


def print_result(end: ExitAgent, directory: LogDirectory) -> None:
    """Print the report or the error of an unsuccessful end, and save the report beside the logs."""
    has_succeeded = end.report is not None and end.report.outcome is Outcome.SUCCEEDED
    directory.tidy(succeeded=has_succeeded)
    if has_succeeded:
        return
    if end.report is not None:
        print(f"\n{render(_without_deleted_files(end.report, directory))}", end="", file=sys.stderr)
        if directory.kept:
            result = str(path := directory.path / "report.json")
            try:
                replace_file(path, to_json(end.report))
            except OSError as error:
                result += f" cannot be written ({error.strerror}); choose another directory with --log-dir"
            print(f"report: {result}", file=sys.stderr)
    elif end.code < 128:
        print(f"ripstop run: error: {one_line(end.why)}", file=sys.stderr)


def write_job_report(directory: LogDirectory, command: str) -> None:
    """On the coordinator's node: write the report of the whole job beside its events, and print its path."""
    if not directory.has_job_events or not directory.kept:
        return
    from ripstop.report.files import write_report

    page = write_report(directory.path, lambda text: _print_if_read(f"ripstop {command}: warning: {text}"))
    if page is not None:
        _print_if_read(f"job report: {page}")


def _print_if_read(line: str) -> None:
    """Print one line, unless the console is not being read: that must not delay the exit."""
    import select

    poll = select.poll()
    poll.register(2, select.POLLOUT)
    if any(mask & select.POLLOUT for _, mask in poll.poll(CONSOLE_TIMEOUT_MS)):
        print(line, file=sys.stderr)


def _without_deleted_files(report: JobReport, directory: LogDirectory) -> JobReport:
    """The report without the names of files in a log directory that was deleted."""
    if directory.kept:
        return report
    deleted = clean(str(directory.path))
    failures = (
        replace(failure, logs="", error_file="", hang=failure.hang and replace(failure.hang, file=""))
        if failure.logs.startswith(deleted)
        else failure
        for failure in report.failures
    )
    return replace(report, failures=tuple(failures))


def write_termination_message(file: Path, end: ExitAgent) -> None:
    from ripstop.api.termination_message import termination_message

    try:
        file.write_text(termination_message(end.why, end.report))
    except OSError as error:
        problem = f"cannot be written ({error.strerror}); choose another file"
        print(f"ripstop run: RIPSTOP_TERMINATION_LOG={file}: {problem}", file=sys.stderr)
