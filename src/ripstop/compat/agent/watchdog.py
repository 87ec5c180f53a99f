"""The timers of a `LocalElasticAgent`: the server that a variable asks for, and where workers find it.

`ripstop run` and `elastic_launch` have theirs in the engine (`diagnostics/timer_pipe.py`).
"""

import os
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

from ripstop.cli.options.timers import ENABLE
from ripstop.compat.timer.file_timer import FileTimerRequest, FileTimerServer
from ripstop.workers.environment import TIMER_FILE

TORCHELASTIC_ENABLE_FILE_TIMER, TORCHELASTIC_TIMER_FILE = ENABLE, TIMER_FILE  # as torch calls them
INTERVAL = 0.1  # seconds, torch's


def start(
    run_id: str, log_event: Callable[[str, FileTimerRequest | None], None]
) -> tuple[FileTimerServer | None, dict[str, str]]:
    """The server, None if it is not asked for, and the variables that workers need to find it."""
    path = os.environ.get(TORCHELASTIC_TIMER_FILE)
    if os.environ.get(TORCHELASTIC_ENABLE_FILE_TIMER) != "1":
        return None, {TORCHELASTIC_TIMER_FILE: path} if path else {}
    path = path or str(Path(tempfile.gettempdir(), f"watchdog_timer_{uuid.uuid4()}"))
    server = FileTimerServer(path, run_id, max_interval=INTERVAL, daemon=True, log_event=log_event)
    server.start()
    return server, {TORCHELASTIC_TIMER_FILE: path}
