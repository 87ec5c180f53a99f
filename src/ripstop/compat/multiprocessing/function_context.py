"""Workers that are functions, started by multiprocessing; `function_worker.py` is their side of it.

Rules: (1) waiting is for events: pidfds, and the pipes that return values come through; (2) a return value is pickled
by value and read piecemeal, so its size blocks nobody; (3) a function that ends without returning has failed, whatever
its exit code; (4) nobody ends before all have returned, for one may host what the others need.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ripstop.compat.multiprocessing.context import (
    KILLED,
    PContext,
    RunProcsResult,
    abandoned,
    await_all,
    died_badly,
    kill_group,
    kill_leader,
    raise_signal,
)
from ripstop.compat.multiprocessing.errors import ProcessFailure
from ripstop.compat.multiprocessing.function_worker import LENGTH, Task, work
from ripstop.compat.multiprocessing.logs_specs import LogsSpecs
from ripstop.compat.multiprocessing.numa_binding import binding_of

_READ = 1 << 20
_NO_RETURN = "the function ended the process (exit code 0) instead of returning; let it return"
_PARTING = 1.0  # seconds in which workers that have returned usually are gone

log = logging.getLogger(__name__)


class _Inbox:
    """What one worker sends: the length of its pickled return value, and then that."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._received = bytearray()
        self._ended = False
        os.set_blocking(connection.fileno(), False)

    @property
    def complete(self) -> bool:
        return len(self._received) >= LENGTH.size and len(self._received) - LENGTH.size >= self._length()

    @property
    def open(self) -> bool:
        """Whether more may come."""
        return not (self._ended or self.complete)

    def receive(self) -> None:
        """Take what is there."""
        while self.open:
            try:
                piece = os.read(self.connection.fileno(), _READ)
            except BlockingIOError:
                return
            except OSError:
                piece = b""
            self._received += piece
            self._ended = not piece

    def value(self) -> Any:
        """Unpickled; raises whatever unpickling raises."""
        with memoryview(self._received) as whole:
            return pickle.loads(whole[LENGTH.size :])

    def release(self) -> None:
        """The worker may end."""
        with suppress(OSError):
            os.write(self.connection.fileno(), b"!")

    def _length(self) -> int:
        return int(LENGTH.unpack_from(self._received)[0])


class MultiprocessContext(PContext):
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
        self._context = _context(start_method)
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
        self._processes: dict[int, Any] = {}
        self._inboxes: dict[int, _Inbox] = {}
        self._ends: dict[int, int] = {}  # of those that run: a descriptor that is readable when they do not
        self._released = False
        self._result: RunProcsResult | None = None

    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    def _start(self) -> None:
        if self._processes:
            raise ValueError("this context has been started already; make a new one for every start")
        for path in (*self.stdouts.values(), *self.stderrs.values()):
            if path and path != os.devnull:
                Path(path).write_bytes(b"")  # what cannot be written is found here and not by the worker
        for rank in range(self.nprocs):
            self._start_one(rank, self._task(rank))

    def _task(self, rank: int) -> Task:
        assert callable(self.entrypoint)
        forked = self.start_method == "fork"
        return Task(
            function=self.entrypoint,
            args=self.args[rank],
            env=self.envs[rank],
            stdout=self.stdouts[rank],
            stderr=self.stderrs[rank],
            handled=tuple(signum for signum in signal.valid_signals() if signal.getsignal(signum) is raise_signal)
            if forked
            else (),
            bind=binding_of(self._numa_options, rank),
        )

    def _start_one(self, rank: int, task: Task) -> None:
        ours, theirs = multiprocessing.Pipe(duplex=True)
        process = self._context.Process(target=work, args=(task, theirs), name=f"{self.name}{rank}")
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, task.handled)  # until the worker has dropped our handlers
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            ours.close()
            raise pickle.PicklingError(
                f"start_method={self.start_method}: a worker's function and arguments must be picklable, and those of "
                f"local rank {rank} ({getattr(task.function, '__qualname__', task.function)}) are not: {error}; "
                "use a function at the top of a module, or start_method='fork'"
            ) from error
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._processes[rank] = process
        self._inboxes[rank] = _Inbox(ours)
        # The sentinel is a pipe that a worker's children hold open too; but a fork server's children are not ours.
        self._ends[rank] = process.sentinel if self.start_method == "forkserver" else os.pidfd_open(process.pid)

    def _poll(self) -> RunProcsResult | None:
        if self._result is None:
            self._bury_ended()
            for inbox in self._inboxes.values():
                inbox.receive()
            if failed := [rank for rank in self._processes if self._has_failed(rank)]:
                self._result = self._fail(failed)
            elif all(inbox.complete for inbox in self._inboxes.values()):
                self._result = self._part()
        return self._result

    def _await_news(self, timeout: float | None, period: float) -> None:
        senders = [inbox.connection for inbox in self._inboxes.values() if inbox.open]
        wait([*senders, *self._ends.values()], timeout)

    def _bury_ended(self) -> None:
        for rank, end in list(self._ends.items()):
            if not wait([end], 0):
                continue
            process, inbox = self._processes[rank], self._inboxes[rank]
            inbox.receive()  # it has sent all it had
            if not inbox.complete or died_badly(process.pid):
                kill_group(process.pid, signal.SIGKILL)  # what it left behind, before its number is free
            process.join()
            del self._ends[rank]
            if end != process.sentinel:
                os.close(end)

    def _has_failed(self, rank: int) -> bool:
        return rank not in self._ends and (self._processes[rank].exitcode != 0 or not self._inboxes[rank].complete)

    def _part(self) -> RunProcsResult | None:
        """All have returned: let them go, and have the result when they are gone."""
        if not self._released:
            self._released = True
            for inbox in self._inboxes.values():
                inbox.release()
            await_all({end: rank for rank, end in self._ends.items()}, _PARTING)
            self._bury_ended()
        if failed := [rank for rank in self._processes if self._has_failed(rank)]:
            return self._fail(failed)
        return self._succeed() if not self._ends else None

    def _succeed(self) -> RunProcsResult:
        values: dict[int, Any] = {}
        failures: dict[int, ProcessFailure] = {}
        for rank, inbox in self._inboxes.items():
            try:
                values[rank] = inbox.value()
            except Exception as error:
                why = f"what it returned cannot be read here: {type(error).__name__}: {error}; return plain data"
                failures[rank] = self._failure(rank, why)
        self.close()
        return RunProcsResult({} if failures else values, failures, self.stdouts, self.stderrs)

    def _fail(self, ranks: Iterable[int]) -> RunProcsResult:
        failures = {rank: self._failure(rank) for rank in ranks}
        for rank, failure in failures.items():
            log.error(
                "failed (exitcode: %s) local_rank: %s (pid: %s) of fn: %s (start_method: %s)",
                failure.exitcode,
                rank,
                failure.pid,
                getattr(self.entrypoint, "__qualname__", self.entrypoint),
                self.start_method,
            )
        self.close()
        return RunProcsResult(failures=failures, stdouts=self.stdouts, stderrs=self.stderrs)

    def _failure(self, rank: int, why: str = _NO_RETURN) -> ProcessFailure:
        """`why` is for a process whose end does not tell."""
        process = self._processes[rank]
        failure = ProcessFailure(rank, process.pid, process.exitcode, self.error_files[rank])
        if process.exitcode == 0:
            failure.message = why
        return failure

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        self._bury_ended()
        running = {end: self._processes[rank] for rank, end in self._ends.items()}
        for process in running.values():
            log.warning("ending process %s with %s", process.pid, death_sig.name)
            for signum in (death_sig, signal.SIGCONT):  # a stopped process takes no signal until it goes on
                kill_leader(process.pid, signum)
        await_all(running, timeout)
        for process in running.values():
            log.warning("process %s is alive %s s after %s: SIGKILL", process.pid, timeout, death_sig.name)
            kill_leader(process.pid, signal.SIGKILL)
        await_all(running, KILLED)
        for process in running.values():
            abandoned(process.pid)
            multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]  # not waited for at exit
        self._bury_ended()
        for inbox in self._inboxes.values():
            inbox.connection.close()


def _context(start_method: str) -> Any:
    try:
        return multiprocessing.get_context(start_method)
    except ValueError:
        methods = ", ".join(multiprocessing.get_all_start_methods())
        raise ValueError(f"start_method={start_method!r}: there is no such method; choose one of {methods}") from None
