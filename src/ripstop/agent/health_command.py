"""Runs the user's own check of this node, once.

It is a child of the agent in a process group of its own, and dies with the agent.  When it has ended, or its time is
up, or nobody wants to know any more, whatever is left in its group is killed.  Of what it prints the end is kept.
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from ripstop.agent.health import Ran
from ripstop.workers import linux
from ripstop.workers.look import settle
from ripstop.workers.process import Children, End

TAIL = 8192  # bytes of its output


async def run(command: Sequence[str], environ: Mapping[str, str], patience: float, children: Children) -> Ran:
    """How it ended within that many seconds."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[End] = loop.create_future()
    output = _Output()
    try:
        try:
            pid = _start(command, environ, output)
        except OSError as error:
            return Ran(None, error=error.strerror or str(error))
        children.watch(pid, partial(settle, ended))
        try:
            async with asyncio.timeout(patience):
                end = await ended
        except TimeoutError:
            return Ran(None, output.last_line())
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        return Ran(end.returncode, output.last_line())
    finally:
        output.close()


def _start(command: Sequence[str], environ: Mapping[str, str], output: "_Output") -> int:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output.writing,
        stderr=output.writing,
        env=dict(environ),
        process_group=0,
        preexec_fn=linux.parent_death_signal(signal.SIGKILL),  # noqa: PLW1509  # made for it
    )
    process.returncode = 0  # `Children` reaps it
    output.started()
    return process.pid


class _Output:
    """A pipe, and the end of what came through it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reading, self.writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reading, False)
        self._tail = bytearray()
        self._loop.add_reader(self._reading, self._read)

    def started(self) -> None:
        """The child has its end of it."""
        os.close(self.writing)
        self.writing = -1

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
        if self.writing >= 0:
            os.close(self.writing)
