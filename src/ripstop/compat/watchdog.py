"""The file timers of `TORCHELASTIC_ENABLE_FILE_TIMER`: workers set deadlines, and who misses one is killed.

The server is torch's, so torch is imported here, and only when the variable asks for it.
"""

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TORCHELASTIC_ENABLE_FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"
TORCHELASTIC_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
INTERVAL = 0.1


def start(run_id: str, log_event: Any = None) -> tuple[Any, dict[str, str]]:
    """The server, None if it is not asked for, and the variables that workers need to find it."""
    path = os.environ.get(TORCHELASTIC_TIMER_FILE)
    if os.environ.get(TORCHELASTIC_ENABLE_FILE_TIMER) != "1":
        return None, {TORCHELASTIC_TIMER_FILE: path} if path else {}
    import torch.distributed.elastic.timer as torch_timer

    timer: Any = torch_timer
    path = path or str(Path(tempfile.gettempdir(), f"watchdog_timer_{uuid.uuid4()}"))
    server = timer.FileTimerServer(path, run_id, max_interval=INTERVAL, daemon=True, log_event=log_event)
    server.start()
    return server, {TORCHELASTIC_TIMER_FILE: path}


@contextmanager
def from_environment(run_id: str) -> Iterator[dict[str, str]]:
    """The server for as long as a job runs."""
    server, variables = start(run_id)
    try:
        yield variables
    finally:
        if server is not None:
            server.stop()
