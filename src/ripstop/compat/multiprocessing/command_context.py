"""`SubprocessContext`: a group of workers that are commands."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

from ripstop.compat.multiprocessing.context import RunProcsResult
from ripstop.compat.multiprocessing.logs_specs import LogsSpecs
from ripstop.compat.multiprocessing.subprocess_handler import SubprocessHandler, get_subprocess_handler
from ripstop.compat.multiprocessing.supervised_context import SupervisedContext

log = logging.getLogger(__name__)


class SubprocessContext(SupervisedContext):
    """Processes that run a command."""

    def __init__(
        self,
        name: str,
        entrypoint: str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: Any = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        filters = duplicate_stdout_filters, duplicate_stderr_filters
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes, *filters)
        self._numa_options = numa_options
        self.subprocess_handlers: dict[int, SubprocessHandler] = {}

    def pids(self) -> dict[int, int]:
        return {rank: handler.proc.pid for rank, handler in self.subprocess_handlers.items()}

    def _start_worker(self, rank: int) -> int:
        handler = self.subprocess_handlers[rank] = get_subprocess_handler(
            entrypoint=str(self.entrypoint),
            args=self.args[rank],
            env=self.envs[rank],
            stdout=self.stdouts[rank],
            stderr=self.stderrs[rank],
            local_rank_id=rank,
            numa_options=self._numa_options,
        )
        return os.pidfd_open(handler.proc.pid)

    def _signal_worker(self, rank: int, signum: signal.Signals) -> None:
        self.subprocess_handlers[rank].close(death_sig=signum)

    def _reap_worker(self, rank: int) -> int:
        return self.subprocess_handlers[rank].proc.wait()

    def _finish(self) -> RunProcsResult:
        """As with torch, the failures include the workers that `close` stops."""
        first = next(iter(self._failures.values()), None)
        self.close()
        if first is None:
            return RunProcsResult(dict.fromkeys(range(self.nprocs)), {}, self.stdouts, self.stderrs)
        log.error(
            "failed (exitcode: %s) local_rank: %s (pid: %s) of binary: %s",
            first.exitcode,
            first.local_rank,
            first.pid,
            self.entrypoint,
        )
        return RunProcsResult({}, self._failures, self.stdouts, self.stderrs)
