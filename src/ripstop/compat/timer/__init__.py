"""`torch.distributed.elastic.timer`: blocks of code with a deadline, and who ends a worker that misses one.

The parts are in `timer_api.py`, `local_timer.py` (through a queue) and `file_timer.py` (through a named pipe; an agent
has such a server of its own with `TORCHELASTIC_ENABLE_FILE_TIMER=1`).
"""

from ripstop.compat.timer.api import RequestQueue, TimerClient, TimerRequest, TimerServer, configure, expires
from ripstop.compat.timer.file_timer import (
    FileTimerClient,
    FileTimerRequest,
    FileTimerServer,
    log_debug_info_for_expired_timers,
)
from ripstop.compat.timer.local_timer import LocalTimerClient, LocalTimerServer, MultiprocessingRequestQueue

__all__ = [
    "FileTimerClient",
    "FileTimerRequest",
    "FileTimerServer",
    "LocalTimerClient",
    "LocalTimerServer",
    "MultiprocessingRequestQueue",
    "RequestQueue",
    "TimerClient",
    "TimerRequest",
    "TimerServer",
    "configure",
    "expires",
    "log_debug_info_for_expired_timers",
]
