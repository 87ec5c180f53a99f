"""Runs the user's own check of this node: one at a time, however long it takes to start or to die.

It is a child of the agent in a process group of its own, and dies with the agent.  When it has ended, or its time is
up, or nobody wants to know any more, whatever is left in its group is killed.  Of what it prints the end is kept.

A program on a file server that hangs does not even start, so that nothing of this is waited for in the event loop.  The
kernel sends a parent-death signal when the thread is gone that has forked, so the thread stays as long as its child.
"""

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from ripstop.agent.health.assessment import Ran
from ripstop.system import linux
from ripstop.system.blocking_calls import settle

TAIL = 8192  # bytes of its output


class HealthCommand:
    """The check of one node; used in one event loop."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._command = command
        self._environ = environ
        self._before: _Check | None = None

    async def run(self, patience: float) -> Ran:
        """How it ended within that many seconds; OSError or RuntimeError where the agent has no means to start it."""
        if self._before is not None:  # killed, and a program that hangs in the kernel is there all the same
            await asyncio.wait([self._before.over], timeout=patience)
            if not self._before.over.done():
                return Ran(None)
        output = _Output()
        try:
            check = self._before = _Check(self._command, self._environ, output.writing)
            try:
                check.begin()
                await asyncio.wait([check.over], timeout=patience)
            finally:
                check.kill()
            return self._ended(check.over.result(), output) if check.over.done() else Ran(None, output.last_line())
        finally:
            output.close()

    def _ended(self, how: int | Exception, output: "_Output") -> Ran:
        if isinstance(how, OSError) and how.filename == self._command[0]:
            return Ran(None, error=how.strerror or str(how))
        if isinstance(how, Exception):  # it is not about the program
            raise how
        return Ran(how, output.last_line())


class _Check:
    """One run of the command; `over` is its return code, or why there was none."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], output: int) -> None:
        self.over: asyncio.Future[int | Exception] = asyncio.get_running_loop().create_future()
        self._command = command
        self._environ = environ
        self._output = output
        self._lock = threading.Lock()
        self._group = 0  # while its number cannot be another's
        self._unwanted = False

    def begin(self) -> None:
        try:
            threading.Thread(target=self._carry_out, name="ripstop-health", daemon=True).start()
        except RuntimeError as error:
            os.close(self._output)
            self.over.set_result(error)

    def kill(self) -> None:
        """With all its group; at once, or as soon as it has come to life."""
        with self._lock:
            self._unwanted = True
            if self._group:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._group, signal.SIGKILL)

    def _carry_out(self) -> None:
        how: int | Exception
        try:
            how = self._run()
        except Exception as error:
            how = error
        with suppress(RuntimeError):  # the loop is closed
            self.over.get_loop().call_soon_threadsafe(settle, self.over, how)

    def _run(self) -> int:
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=dict(self._environ),
                process_group=0,
                preexec_fn=die_with(os.getpid()),  # noqa: PLW1509  # made for it
            )
        finally:
            os.close(self._output)
        with self._lock:
            self._group = process.pid
        if self._unwanted:
            self.kill()
        with suppress(ChildProcessError):  # a program that launches has reaped it
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            self.kill()
        with self._lock:
            self._group = 0
        return process.wait()


def die_with(parent: int) -> Callable[[], None]:
    """For the child to call, which has no parent-death signal yet when its parent dies too soon."""
    ask_for_it = linux.parent_death_signal(signal.SIGKILL)

    def die_with_it() -> None:
        ask_for_it()
        if os.getppid() != parent:
            os._exit(1)

    return die_with_it


class _Output:
    """A pipe, and the end of what came through it; its writing end belongs to the check."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reading, self.writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reading, False)
        self._tail = bytearray()
        self._loop.add_reader(self._reading, self._read)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            data = os.read(self._reading, 1 << 16)
            self._tail += data
            del self._tail[:-TAIL]
            if not data:
                self._loop.remove_reader(self._reading)

    def last_line(self) -> str:
        self._read()  # what came just before the end
        lines = self._tail.decode(errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.strip()), "")

    def close(self) -> None:
        self._loop.remove_reader(self._reading)
        os.close(self._reading)
