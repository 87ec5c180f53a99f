"""`MultiprocessContext`: a group of workers that are functions; `function_worker.py` runs in the workers.

Rules: (1) a return value travels in a file, complete or not at all, so its size does not matter; (2) a function that
exits without returning has failed, whatever its exit code; (3) workers exit when all have returned, because one may
host what the others need.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ripstop.compat.multiprocessing.context import RunProcsResult, SupervisedContext, raise_signal_exception
from ripstop.compat.multiprocessing.errors import ProcessFailure
from ripstop.compat.multiprocessing.function_worker import Inherited, Task, run_function_worker, start_function_worker
from ripstop.compat.multiprocessing.logs_specs import LogsSpecs
from ripstop.compat.multiprocessing.numa_binding import multiprocessing_numa_binding

_NO_RETURN = "the function ended the process (exit code 0) instead of returning; let it return"
_RELEASE_TIMEOUT_S = 1.0  # workers that have returned usually exit within this time


class MultiprocessContext(SupervisedContext):
    """Processes that run a function, started by multiprocessing: `spawn`, `fork` or `forkserver`."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any],
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        start_method: str,
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: Any = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        self.start_method = start_method
        self._context = _function_start_method_context(start_method)
        filters = duplicate_stdout_filters, duplicate_stderr_filters
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes, numa_options, *filters)
        self._connections: dict[int, Connection] = {}  # readable when the worker has returned; written to release it
        self._unreturned: dict[int, Connection] = {}
        self._results: Path | None = None  # a temporary directory, from start to close
        self._released = False

    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    def _start(self) -> None:
        for path in (*self.stdouts.values(), *self.stderrs.values()):
            if path and path != os.devnull:
                Path(path).write_bytes(b"")  # fail here, not in the worker, if the file cannot be written
        if self._results is None:
            self._results = Path(tempfile.mkdtemp(prefix="ripstop_results_"))
        super()._start()

    def _start_worker(self, rank: int) -> int:
        ours, theirs = multiprocessing.Pipe(duplex=True)
        task = self._function_task(rank)
        try:
            process = start_function_worker(
                self._context, run_function_worker, (task, theirs), task.inherited, f"{self.name}{rank}"
            )
        except BaseException as error:
            ours.close()
            if not isinstance(error, pickle.PicklingError | AttributeError | TypeError):
                raise
            raise pickle.PicklingError(
                f"start_method={self.start_method}: a worker's function and arguments must be picklable, and those of "
                f"local rank {rank} ({_function_context_entrypoint_name(task.function)}) are not: {error}; "
                "use a function at the top of a module, or start_method='fork'"
            ) from error
        finally:
            theirs.close()
        self._processes[rank] = process
        self._connections[rank] = self._unreturned[rank] = ours
        # A worker's children hold the sentinel open, so it is used only for the fork server's children.
        return os.dup(process.sentinel) if self.start_method == "forkserver" else os.pidfd_open(process.pid)

    def _function_task(self, rank: int) -> Task:
        assert callable(self.entrypoint)
        handled = tuple(one for one in signal.Signals if signal.getsignal(one) is raise_signal_exception)
        return Task(
            function=self.entrypoint,
            args=self.args[rank],
            env={**os.environ, **{name: str(value) for name, value in self.envs[rank].items()}},
            stdout=self.stdouts[rank],
            stderr=self.stderrs[rank],
            result=str(self._result_file(rank)),
            bind=multiprocessing_numa_binding(self._numa_options, rank),
            inherited=Inherited(handled) if self.start_method == "fork" else None,
        )

    def _result_file(self, rank: int) -> Path:
        assert self._results is not None, "the context has been started"
        return self._results / str(rank)

    def _has_returned(self, rank: int) -> bool:
        return self._result_file(rank).exists()

    def _reap_context_worker(self, rank: int) -> int:
        self._processes[rank].join()
        return int(self._processes[rank].exitcode)

    def _poll(self) -> RunProcsResult | None:
        if self._result is None:
            self._unreturned = {rank: end for rank, end in self._unreturned.items() if not end.poll()}
            if not self._unreturned and not self._released and all(map(self._has_returned, self._processes)):
                self._release_function_workers()
        return super()._poll()

    def _release_function_workers(self) -> None:
        """All workers have returned: let them exit (rule 3)."""
        self._released = True
        for connection in self._connections.values():
            with suppress(OSError):
                os.write(connection.fileno(), b"\n")
        self._running_after(_RELEASE_TIMEOUT_S)

    def _wait_for_change(self, timeout: float | None, period: float) -> None:
        wait([*self._unreturned.values(), *self._exit_fds.values()], timeout)

    def _finish(self) -> RunProcsResult:
        """As with torch, the failures are those of workers that failed before the others were stopped."""
        values: dict[int, Any] = {}
        failures = dict(self._failures)
        for failure in failures.values():
            self._log_failure(
                failure, f"fn: {_function_context_entrypoint_name(self.entrypoint)} (start_method: {self.start_method})"
            )
            if failure.exitcode == 0:
                failure.message = _NO_RETURN
        for rank, process in self._processes.items() if not failures else ():
            try:
                values[rank] = pickle.loads(self._result_file(rank).read_bytes())
            except Exception as error:
                failures[rank] = ProcessFailure(rank, process.pid, 0, self.error_files[rank])
                why = f"{type(error).__name__}: {error}; return plain data"
                failures[rank].message = f"what it returned cannot be read here: {why}"
        self.close()
        return RunProcsResult({} if failures else values, failures, self.stdouts, self.stderrs)

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        super()._close(death_sig, timeout)
        for rank in self._exit_fds:  # still alive: multiprocessing must not wait for it when this program exits
            multiprocessing.process._children.discard(self._processes[rank])  # type: ignore[attr-defined]
        for connection in self._connections.values():
            connection.close()
        self._unreturned = {}
        if self._results is not None:
            shutil.rmtree(self._results, ignore_errors=True)


def _function_context_entrypoint_name(function: Any) -> str:
    return str(getattr(function, "__qualname__", function))


def _function_start_method_context(start_method: str) -> Any:
    try:
        return multiprocessing.get_context(start_method)
    except ValueError:
        methods = ", ".join(multiprocessing.get_all_start_methods())
        raise ValueError(f"start_method={start_method!r}: there is no such method; choose one of {methods}") from None
