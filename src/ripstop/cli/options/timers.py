"""Whether workers may set timers, and on which pipe: torch's two variables."""

import os
from collections.abc import Mapping
from pathlib import Path

from ripstop.workers.environment import TIMER_FILE

ENABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"


def timer_pipe(environ: Mapping[str, str], notes: list[str]) -> Path | None:
    """The pipe, None where nobody asked for timers."""
    asked = environ.get(ENABLE, "0")
    if asked != "1":
        if asked not in ("", "0"):
            notes.append(f"{ENABLE}={asked} has no effect: 1 switches timers on")
        return None
    from tempfile import gettempdir

    from ripstop.diagnostics.timer_pipe import check_path, in_use

    named = environ.get(TIMER_FILE)
    path = Path(named).absolute() if named else Path(gettempdir(), f"watchdog_timer_{os.urandom(16).hex()}")
    if in_use(path):  # as in a worker that launches a job of its own
        path = path.with_name(f"{path.name}_{os.urandom(4).hex()}")
        notes.append(f"{TIMER_FILE}={named}: another agent reads this pipe; this job's is {path}")
    check_path(f"{TIMER_FILE}={named}" if named else f"{path}", path)
    return path
