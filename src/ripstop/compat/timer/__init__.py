"""`torch.distributed.elastic.timer`: blocks of code with a deadline, and servers that end a worker which misses one.

`api` has the base classes and the `with` block, `local_timer` uses a queue, and `file_timer` a named pipe.  An agent
starts a `FileTimerServer` itself with `TORCHELASTIC_ENABLE_FILE_TIMER=1`.
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
