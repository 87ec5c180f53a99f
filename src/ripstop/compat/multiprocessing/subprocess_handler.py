"""torch.distributed.elastic.multiprocessing.subprocess_handler: one worker that is a command.

Rules: (1) the worker leads its own session, and signals go to its whole process group; (2) it dies with this process if
the main thread started it: the kernel watches the starting thread, and another thread may end earlier; (3) its log
files are open only in the worker.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from subprocess import Popen
from typing import IO, Any

from ripstop.compat.multiprocessing.numa_binding import multiprocessing_numa_binding
from ripstop.system.linux import parent_death_signal

__all__ = ["SubprocessHandler", "get_subprocess_handler"]


class SubprocessHandler:
    """A process, `proc`, and the files for its output; an empty name means this process's own stream.

    The environment is this process's with `env` added; arguments are converted to strings.
    """

    def __init__(
        self,
        entrypoint: str,
        args: tuple[Any, ...],
        env: dict[str, str],
        stdout: str | None,
        stderr: str | None,
        local_rank_id: int,
        numa_options: Any = None,
    ) -> None:
        self.local_rank_id = local_rank_id
        with ExitStack() as files:  # the worker has its own copies
            out, err = (files.enter_context(_open_subprocess_log(path)) if path else None for path in (stdout, stderr))
            self.proc = Popen(
                (entrypoint, *(str(arg) for arg in args)),
                env={**os.environ, **{name: str(value) for name, value in env.items()}},
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=_subprocess_handler_preexec(multiprocessing_numa_binding(numa_options, local_rank_id)),  # noqa: PLW1509 (it needs no lock that a thread may hold)
            )

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send the signal (SIGTERM) to the worker's process group; does not wait."""
        send_subprocess_handler_signal(self.proc.pid, death_sig or signal.SIGTERM)


get_subprocess_handler = SubprocessHandler  # `SubprocessContext` calls it for each worker


def send_subprocess_handler_signal(pid: int, signum: signal.Signals) -> None:
    """Send a signal to a worker's process group; to the worker alone if it does not lead its group yet."""
    for each in (signum, signal.SIGCONT):  # a stopped process handles no signal until it continues
        try:
            os.killpg(pid, each)
        except (ProcessLookupError, PermissionError):
            with suppress(ProcessLookupError):
                os.kill(pid, each)


def _open_subprocess_log(path: str) -> IO[bytes]:
    """Truncate the file and append to it, so that the worker's children do not overwrite it."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666), "wb", buffering=0)


def _subprocess_handler_preexec(bind: Callable[[], None] | None) -> Callable[[], None] | None:
    """What the new process runs before it executes the command."""
    dies_with_parent = threading.current_thread() is threading.main_thread()
    if not dies_with_parent and bind is None:
        return None
    parent, die_with_parent = os.getpid(), parent_death_signal(signal.SIGKILL)

    def steps() -> None:
        if dies_with_parent:
            die_with_parent()
            if os.getppid() != parent:  # it died before the call
                os._exit(1)
        if bind is not None:
            bind()

    return steps
