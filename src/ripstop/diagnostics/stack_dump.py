"""Reads the stacks of worker processes from outside: with py-spy, else with faulthandler, else only from the kernel.

Rules:

1. A dump changes nothing in the process, and has a time limit for all processes together.  A process that is not
   reached in time has only the kernel's data.  The reason is part of the result.
2. py-spy is searched beside the interpreter and on PATH.  It may be forbidden (containers without ptrace).
3. faulthandler is the fallback.  A worker that the zygote forked has it registered for `DUMP_SIGNAL`, and it writes to
   a file of that worker.  The signal is sent only to a process that handles it.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ripstop.diagnostics.stack_parser import (
    Frame,
    Thread,
    from_faulthandler,
    from_py_spy,
    main_frames,
    parsed_stacks_text,
)
from ripstop.system import linux
from ripstop.system.blocking_calls import run_in_daemon_thread

DUMP_SIGNAL = signal.SIGRTMIN + 11  # not used by any known program
DUMP_TIMEOUT_S = 2.0  # for one process
ALL_DUMPS_TIMEOUT_S = 4.0  # for all workers; queries of operators have five seconds
FAULTHANDLER_RESERVE_S = 1.0  # of these, that py-spy may not use
NATIVE_TIMEOUT_S = 6.0  # for a stack with native frames, whose symbols must be read
KILL_TIMEOUT_S = 0.2  # for py-spy to end after SIGKILL
MAX_PY_SPY_PROCESSES = 4
MAX_DUMP_BYTES = 256 * 1024
SETTLE_TIME_S = 0.02  # a faulthandler dump that does not grow for this time is complete
_STATES = {"R": "running", "S": "sleeping", "D": "uninterruptible", "T": "stopped", "t": "traced", "Z": "dead"}


class StackDump(Struct, frozen=True):
    """What one process was doing; `source` is py-spy, faulthandler or kernel."""

    pid: int
    state: str  # the kernel's letter; empty: the process has ended
    wchan: str  # the kernel function in which it sleeps
    kernel: str  # the kernel stack, readable by root only
    threads: tuple[Thread, ...]
    source: str
    why: str = ""  # why there is no stack from py-spy

    @property
    def frames(self) -> tuple[Frame, ...]:
        return main_frames(self.threads)

    @property
    def stack(self) -> str:
        """The Python stacks, or the kernel's data, as text."""
        return parsed_stacks_text(self.threads) or f"{self.doing}\n{self.kernel}".rstrip()

    @property
    def doing(self) -> str:
        where = f" in {self.wchan}" if self.wchan not in ("", "0") else ""
        return f"{self.state or '?'} ({_STATES.get(self.state, 'ended' if not self.state else 'other')}){where}"


def stack_dump_of_ended_process(pid: int) -> StackDump:
    return StackDump(pid, "", "", "", (), "kernel")


async def dump_stack(pid: int, file: Path | None = None) -> StackDump:
    """The stack of one process; `file` is the one that faulthandler writes to."""
    (stack,) = await dump_stacks([(pid, file)])
    return stack


async def dump_stacks(processes: Iterable[tuple[int, Path | None]]) -> list[StackDump]:
    """The stacks of several processes, each given with its faulthandler file."""
    slots = asyncio.Semaphore(MAX_PY_SPY_PROCESSES)
    deadline = asyncio.get_running_loop().time() + ALL_DUMPS_TIMEOUT_S
    return list(await asyncio.gather(*(_dump_process_stack(pid, file, slots, deadline) for pid, file in processes)))


async def _dump_process_stack(pid: int, file: Path | None, slots: asyncio.Semaphore, deadline: float) -> StackDump:
    process = linux.read_process(pid)
    found = StackDump(
        pid,
        process.state if process else "",
        _read_kernel_stack_file(pid, "wchan"),
        _read_kernel_stack_file(pid, "stack"),
        (),
        "kernel",
    )
    if process is None or process.dead:
        return found
    stopped = found.state == "T"
    why = f"not within {ALL_DUMPS_TIMEOUT_S:g} s for all workers"
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline - FAULTHANDLER_RESERVE_S), slots:
                options = ("--nonblocking",) if stopped else ()  # py-spy cannot pause a stopped process
                text, why = await _py_spy(pid, DUMP_TIMEOUT_S, "--json", *options)
                if threads := from_py_spy(text, pid):
                    return replace(found, threads=threads, source="py-spy")
                why = why or "the output of py-spy cannot be parsed"
        if file is not None and not stopped:
            async with asyncio.timeout_at(deadline):
                if threads := from_faulthandler(await _faulthandler(pid, file)):
                    return replace(found, threads=threads, source="faulthandler", why=why)
    except TimeoutError:
        pass
    except Exception as error:  # no descriptor or no thread left: the hang must be reported all the same
        why = f"{why}; {error}"
    return replace(found, why=why)


async def native_stacks(pids: Iterable[int]) -> list[str]:
    """Python and native stacks as py-spy prints them, or the reason why not.  py-spy pauses the processes."""
    slots = asyncio.Semaphore(MAX_PY_SPY_PROCESSES)

    async def one(pid: int) -> str:
        async with slots:
            text, why = await _py_spy(pid, NATIVE_TIMEOUT_S, "--native")
            return text[:MAX_DUMP_BYTES] or f"no native stack: {why}"

    return list(await asyncio.gather(*(one(pid) for pid in pids)))


@cache
def py_spy() -> str | None:
    """The path of py-spy, if it is installed."""
    from shutil import which  # slow to import, and every agent loads this module at its start

    return which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


async def _py_spy(pid: int, timeout: float, *flags: str) -> tuple[str, str]:
    """The output, or the reason why there is none."""
    if (program := py_spy()) is None:
        return "", "py-spy is not installed (ripstop[diagnose])"
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            "dump",
            f"--pid={pid}",
            *flags,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        return "", f"py-spy cannot be started: {error.strerror}"
    try:
        async with asyncio.timeout(timeout):
            out, err = await process.communicate()
    except TimeoutError:
        return "", f"py-spy took more than {timeout:g} s"
    finally:
        with suppress(ProcessLookupError):  # also if this task is cancelled
            process.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await process.wait()
    if process.returncode == 0:
        return out.decode(errors="replace"), ""
    errors = err.decode(errors="replace").strip().splitlines()
    return "", f"py-spy: {errors[0][:200] if errors else f'exit code {process.returncode}'}"


async def _faulthandler(pid: int, file: Path) -> str:
    """The dump that the process writes when it gets the signal; empty if it writes none."""
    if not linux.catches(pid, DUMP_SIGNAL):
        return ""
    try:
        before = grown = await run_in_daemon_thread(partial(stack_dump_size, file))
        os.kill(pid, DUMP_SIGNAL)
        async with asyncio.timeout(DUMP_TIMEOUT_S):
            while True:  # a dump has no end mark
                await asyncio.sleep(SETTLE_TIME_S)
                last, grown = grown, await run_in_daemon_thread(partial(stack_dump_size, file))
                if last == grown > before:
                    break
        return await run_in_daemon_thread(partial(_read_stack_dump, file, before))
    except (OSError, TimeoutError):
        return ""


def stack_dump_size(file: Path) -> int:
    """0 if the file does not exist."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _read_stack_dump(file: Path, offset: int) -> str:
    with file.open("rb") as dumps:
        dumps.seek(offset)
        return dumps.read(MAX_DUMP_BYTES).decode(errors="replace")


def _read_kernel_stack_file(pid: int, what: str) -> str:
    try:
        return Path(f"/proc/{pid}/{what}").read_text(errors="replace")[:4096].strip()
    except OSError:
        return ""
