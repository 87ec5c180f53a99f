"""Writes a job's report beside its event file, at the end of the job.

Rules: (1) the job is over when this runs, and its result does not depend on it; (2) it takes a bounded time: a thread
does the work, and a large event file is left to `ripstop report`; (3) it raises nothing.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from msgspec import json

from ripstop.system.safe_files import replace_file
from ripstop.telemetry.event_file import JOB_EVENTS

REPORT_PAGE = "job-report.html"
REPORT_DATA = "job-report.json"
MAX_EVENT_BYTES = 64 << 20
WRITE_TIMEOUT_S = 5.0


def write_report(directory: Path, warn: Callable[[str], None]) -> Path | None:
    """The page that was written; None if there are no events of the job here, or after a warning."""
    if not (directory / JOB_EVENTS).exists():  # removed with the empty logs of a successful job
        return None
    done: list[Path | str | None] = []
    thread = threading.Thread(target=lambda: done.append(_try_to_write_report(directory)), name="report", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        done.append(str(error))
    else:
        thread.join(WRITE_TIMEOUT_S)
    result = done[0] if done else f"not complete after {WRITE_TIMEOUT_S:g} s"
    if isinstance(result, str):
        warn(f"the report of the job was not written: {result}; make it with: ripstop report {directory}")
        return None
    return result


def _try_to_write_report(directory: Path) -> Path | str | None:
    try:
        from ripstop.report.builder import build_report  # at the end of a job only
        from ripstop.report.html import render
        from ripstop.report.reader import Skipped, event_files_for_report, read_events_for_report

        size = (directory / JOB_EVENTS).stat().st_size
        if size > MAX_EVENT_BYTES:
            return f"the event file has {size >> 20} MiB"
        skipped = Skipped()
        report = build_report(read_events_for_report(event_files_for_report(directory), skipped), skipped.notes())
        replace_file(directory / REPORT_DATA, json.encode(report).decode() + "\n")
        replace_file(directory / REPORT_PAGE, render(report))
    except FileNotFoundError:
        return None  # the event file could not be written, or its directory was removed
    except OSError as error:
        return error.strerror or str(error)
    except Exception as defect:
        return repr(defect)
    return directory / REPORT_PAGE
