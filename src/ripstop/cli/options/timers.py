"""torch's two variables about timers: whether workers may set them, and the pipe for them."""

import os
from collections.abc import Mapping
from pathlib import Path

from ripstop.workers.environment import TIMER_FILE

ENABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"


def timer_pipe(environ: Mapping[str, str], notes: list[str]) -> Path | None:
    """The path of the pipe, None if timers are off."""
    enabled = environ.get(ENABLE, "0")
    if enabled != "1":
        if enabled not in ("", "0"):
            notes.append(f"{ENABLE}={enabled} has no effect: timers are off; write 1 to enable them")
        return None
    from tempfile import gettempdir

    from ripstop.diagnostics.timer_pipe import check_path, in_use

    file = environ.get(TIMER_FILE)
    path = Path(file).absolute() if file else Path(gettempdir(), f"watchdog_timer_{os.urandom(16).hex()}")
    if in_use(path):  # for example in a worker that starts a job itself
        path = path.with_name(f"{path.name}_{os.urandom(4).hex()}")
        notes.append(f"{TIMER_FILE}={file}: another agent uses this pipe; this job uses {path}")
    check_path(f"{TIMER_FILE}={file}" if file else f"{path}", path)
    return path
