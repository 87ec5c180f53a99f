"""Runs the user's health command: one process at a time, however long it takes to start or to exit.

The command is a child of the agent in its own process group, and the kernel kills it if the agent dies.  When the
command exits, times out or is cancelled, the agent kills the rest of its process group.  Only the end of its output is
kept.

The command runs in a thread, because a program on a file server that hangs blocks even its start.  The thread lives as
long as its child: the kernel sends the parent-death signal when the thread that forked ends.
"""

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ripstop.agent.health.assessment import CommandResult
from ripstop.system import linux
from ripstop.system.blocking_calls import start_daemon_thread

MAX_OUTPUT_BYTES = 8192  # kept of the end of the output


class HealthCommand:
    """The health command of one node; used in one event loop."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._command = command
        self._environ = environ
        self._last: _HealthCommandProcess | None = None

    async def run(self, timeout: float) -> CommandResult:
        """Run the command; OSError or RuntimeError if the agent lacks the resources to start it."""
        if self._last is not None:  # killed, but a process that hangs in the kernel may still exist
            await asyncio.wait([self._last.ended], timeout=timeout)
            if not self._last.ended.done():
                return CommandResult(None)
        output = _HealthCommandOutput()
        try:
            process = self._last = _HealthCommandProcess(self._command, self._environ, output.write_end)
            try:
                await asyncio.wait([process.ended], timeout=timeout)
            finally:
                process.kill()
            end = process.ended.result() if process.ended.done() else None
            if isinstance(end, OSError) and end.filename == self._command[0]:
                return CommandResult(None, error=end.strerror or str(end))
            if isinstance(end, Exception):  # not an error of the program
                raise end
            return CommandResult(end, output.last_line())
        finally:
            output.close()


class _HealthCommandProcess:
    """One run of the command; `ended` is its return code, or the error that prevented its start."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], output: int) -> None:
        self._command = command
        self._environ = environ
        self._output = output
        self._lock = threading.Lock()
        self._group = 0  # set while the kernel cannot reuse the number
        self._is_killed = False
        try:
            self.ended = start_daemon_thread(self._run, "ripstop-health")
        except RuntimeError:
            os.close(output)
            raise

    def kill(self) -> None:
        """Kill the whole process group, now or as soon as it exists."""
        with self._lock:
            self._is_killed = True
            if self._group:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._group, signal.SIGKILL)

    def _run(self) -> int | Exception:
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=dict(self._environ),
                process_group=0,
                preexec_fn=linux.exit_with_parent(os.getpid()),  # noqa: PLW1509  # it only calls prctl and getppid
            )
        except Exception as error:
            return error
        finally:
            os.close(self._output)
        with self._lock:
            self._group = process.pid
        if self._is_killed:
            self.kill()
        with suppress(ChildProcessError):  # the program that hosts the agent has reaped it
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            self.kill()
        with self._lock:
            self._group = 0
        return process.wait()


class _HealthCommandOutput:
    """A pipe, and the end of what was written to it; the process owns the write end."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_end, False)
        self._tail = bytearray()
        self._loop.add_reader(self._read_end, self._read)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            data = os.read(self._read_end, 1 << 16)
            self._tail += data
            del self._tail[:-MAX_OUTPUT_BYTES]
            if not data:
                self._loop.remove_reader(self._read_end)

    def last_line(self) -> str:
        self._read()  # output written just before the exit
        lines = self._tail.decode(errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.strip()), "")

    def close(self) -> None:
        self._loop.remove_reader(self._read_end)
        os.close(self._read_end)
