"""The timer server of a `LocalElasticAgent`, if a variable enables it.

`ripstop run` and `elastic_launch` use the engine's timers (`diagnostics/timer_pipe.py`).
"""

import os
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

from ripstop.cli.options.monitoring import ENABLE_TIMERS
from ripstop.compat.timer.file_timer import FileTimerRequest, FileTimerServer
from ripstop.workers.environment import TIMER_FILE

TORCHELASTIC_ENABLE_FILE_TIMER, TORCHELASTIC_TIMER_FILE = ENABLE_TIMERS, TIMER_FILE  # as torch calls them
INTERVAL_S = 0.1  # torch's


def start(
    run_id: str, log_event: Callable[[str, FileTimerRequest | None], None]
) -> tuple[FileTimerServer | None, dict[str, str]]:
    """The server, None if it is not enabled, and the variables that tell workers its path."""
    path = os.environ.get(TORCHELASTIC_TIMER_FILE)
    if os.environ.get(TORCHELASTIC_ENABLE_FILE_TIMER) != "1":
        return None, {TORCHELASTIC_TIMER_FILE: path} if path else {}
    path = path or str(Path(tempfile.gettempdir(), f"watchdog_timer_{uuid.uuid4()}"))
    server = FileTimerServer(path, run_id, max_interval=INTERVAL_S, daemon=True, log_event=log_event)
    server.start()
    return server, {TORCHELASTIC_TIMER_FILE: path}
