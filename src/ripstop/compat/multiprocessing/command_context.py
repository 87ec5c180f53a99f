"""Workers that are commands.  Their ends are pidfds that become readable: nothing polls."""

from __future__ import annotations

import logging
import os
import signal
from multiprocessing.connection import wait
from typing import Any

from ripstop.compat.multiprocessing.context import (
    KILLED,
    PContext,
    RunProcsResult,
    abandoned,
    await_all,
    died_badly,
    kill_group,
)
from ripstop.compat.multiprocessing.errors import ProcessFailure
from ripstop.compat.multiprocessing.logs_specs import LogsSpecs
from ripstop.compat.multiprocessing.subprocess_handler import SubprocessHandler, get_subprocess_handler

log = logging.getLogger(__name__)


class SubprocessContext(PContext):
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
        super().__init__(
            name,
            entrypoint,
            args,
            envs,
            logs_specs,
            log_line_prefixes,
            duplicate_stdout_filters,
            duplicate_stderr_filters,
        )
        self._numa_options = numa_options
        self.subprocess_handlers: dict[int, SubprocessHandler] = {}
        self._pidfds: dict[int, int] = {}  # of those that run
        self._failures: dict[int, ProcessFailure] = {}
        self._result: RunProcsResult | None = None

    def pids(self) -> dict[int, int]:
        return {rank: handler.proc.pid for rank, handler in self.subprocess_handlers.items()}

    def _start(self) -> None:
        if self.subprocess_handlers:
            raise ValueError("this context has been started already; make a new one for every start")
        for rank in range(self.nprocs):
            handler = self.subprocess_handlers[rank] = get_subprocess_handler(
                entrypoint=str(self.entrypoint),
                args=self.args[rank],
                env=self.envs[rank],
                stdout=self.stdouts[rank],
                stderr=self.stderrs[rank],
                local_rank_id=rank,
                numa_options=self._numa_options,
            )
            self._pidfds[rank] = os.pidfd_open(handler.proc.pid)

    def _poll(self) -> RunProcsResult | None:
        if self._result is None:
            self._gather()
            if self._failures or not self._pidfds:
                self.close()
                self._result = self._end()
        return self._result

    def _await_news(self, timeout: float | None, period: float) -> None:
        wait(list(self._pidfds.values()), timeout)

    def _gather(self) -> None:
        """Bury those that have ended; those that failed are told of."""
        for rank, pidfd in list(self._pidfds.items()):
            if not wait([pidfd], 0):
                continue
            process = self.subprocess_handlers[rank].proc
            if died_badly(process.pid):
                kill_group(process.pid, signal.SIGKILL)  # what it left behind, before its number is free
            os.close(self._pidfds.pop(rank))
            if code := process.wait():
                self._failures[rank] = ProcessFailure(rank, process.pid, code, self.error_files[rank])

    def _end(self) -> RunProcsResult:
        result = RunProcsResult(failures=self._failures, stdouts=self.stdouts, stderrs=self.stderrs)
        if not self._failures:
            result.return_values = dict.fromkeys(range(self.nprocs))
            return result
        first = next(iter(self._failures.values()))
        log.error(
            "failed (exitcode: %s) local_rank: %s (pid: %s) of binary: %s",
            first.exitcode,
            first.local_rank,
            first.pid,
            self.entrypoint,
        )
        return result

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        running = {
            pidfd: self.subprocess_handlers[rank] for rank, pidfd in self._pidfds.items() if not wait([pidfd], 0)
        }
        for handler in running.values():
            log.warning("ending process %s with %s", handler.proc.pid, death_sig.name)
            handler.close(death_sig=death_sig)
        await_all(running, timeout)
        for handler in running.values():
            log.warning("process %s is alive %s s after %s: SIGKILL", handler.proc.pid, timeout, death_sig.name)
            handler.close(death_sig=signal.SIGKILL)
        await_all(running, KILLED)
        for handler in running.values():
            abandoned(handler.proc.pid)
        self._gather()
