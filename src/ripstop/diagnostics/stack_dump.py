"""Stacks of worker processes, without their help: py-spy, else faulthandler, and what the kernel knows in any case.

Rules: (1) looking changes nothing and is bounded in time, for all processes together, and whoever was not reached by
then is known by what the kernel says; what cannot be seen is said in words; (2) py-spy is found
beside the interpreter or on PATH, and may be forbidden (containers without ptrace); (3) the fall-back is a signal, for
which a worker that the zygote forked has faulthandler registered: it is sent only to a process that catches it, and
the answer is in a file of that worker's.
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

from ripstop.diagnostics.stacks import Frame, Thread, as_text, from_faulthandler, from_py_spy, main_frames
from ripstop.system import linux
from ripstop.system.blocking_calls import run_in_daemon_thread

SIGNAL = signal.SIGRTMIN + 11  # one that nobody uses, and whose loss nobody would notice
PATIENCE = 2.0  # seconds for a Python stack
TOGETHER = 4.0  # and for those of all workers: an operator who asks waits five
LAST = 1.0  # of these, when py-spy's time is over
NATIVE_PATIENCE = 6.0  # and for one with native frames, whose symbols have to be read
BURIAL = 0.2  # for a tool that was killed
AT_ONCE = 4  # tools that run at a time
LARGEST = 256 * 1024  # bytes of one dump that is kept as it is
SETTLED = 0.02  # seconds after which a dump that no longer grows is whole
_SYMBOLS = {"R": "running", "S": "sleeping", "D": "uninterruptible", "T": "stopped", "t": "traced", "Z": "dead"}


class ProcessStack(Struct, frozen=True):
    """What one process was doing; `source` says who knows: py-spy, faulthandler, or only the kernel."""

    pid: int
    state: str  # the kernel's letter
    wchan: str  # the kernel's function in which it sleeps
    kernel: str  # the kernel's stack, for root only
    threads: tuple[Thread, ...]
    source: str
    why: str = ""  # py-spy did not answer

    @property
    def frames(self) -> tuple[Frame, ...]:
        return main_frames(self.threads)

    @property
    def stack(self) -> str:
        """For comparing and for people: the Python stacks, or where it is in the kernel."""
        return as_text(self.threads) or f"{self.doing}\n{self.kernel}".rstrip()

    @property
    def doing(self) -> str:
        where = f" in {self.wchan}" if self.wchan not in ("", "0") else ""
        return f"{self.state or '?'} ({_SYMBOLS.get(self.state, 'gone' if not self.state else 'other')}){where}"


def gone(pid: int) -> ProcessStack:
    """A process that has ended."""
    return ProcessStack(pid, "", "", "", (), "kernel")


async def look(pid: int, file: Path | None = None) -> ProcessStack:
    """One process; `file` is where faulthandler would write."""
    (found,) = await look_at([(pid, file)])
    return found


async def look_at(workers: Iterable[tuple[int, Path | None]]) -> list[ProcessStack]:
    """Several processes, each with its file."""
    turns, until = asyncio.Semaphore(AT_ONCE), asyncio.get_running_loop().time() + TOGETHER
    return list(await asyncio.gather(*(_look(pid, file, turns, until) for pid, file in workers)))


async def _look(pid: int, file: Path | None, turns: asyncio.Semaphore, until: float) -> ProcessStack:
    process = linux.read_process(pid)
    found = ProcessStack(pid, process.state if process else "", _read(pid, "wchan"), _read(pid, "stack"), (), "kernel")
    if process is None or process.dead:
        return found
    stopped = found.state == "T"
    why = f"not within {TOGETHER:g} s for all workers"
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until - LAST), turns:
                still = ("--nonblocking",) if stopped else ()  # it need not be stopped for a moment, nor could it be
                text, why = await _py_spy(pid, PATIENCE, "--json", *still)
                if threads := from_py_spy(text, pid):
                    return replace(found, threads=threads, source="py-spy")
                why = why or "py-spy printed something that is no stack"
        if file is not None and not stopped:
            async with asyncio.timeout_at(until):
                if threads := from_faulthandler(await _faulthandler(pid, file)):
                    return replace(found, threads=threads, source="faulthandler", why=why)
    except TimeoutError:
        pass
    except Exception as error:  # no descriptor or no thread left: who hangs is to be told all the same
        why = f"{why}; {error}"
    return replace(found, why=why)


async def native(pids: Iterable[int]) -> list[str]:
    """Python and native stacks as py-spy prints them, or why there are none; the processes stand still meanwhile."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(pid: int) -> str:
        async with turns:
            text, why = await _py_spy(pid, NATIVE_PATIENCE, "--native")
            return text[:LARGEST] or f"no native stack: {why}"

    return list(await asyncio.gather(*(one(pid) for pid in pids)))


@cache
def py_spy() -> str | None:
    """The program, if there is one."""
    from shutil import which  # costs more than this module, which every agent loads at its start

    return which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


async def _py_spy(pid: int, patience: float, *flags: str) -> tuple[str, str]:
    """What it prints, or why it does not."""
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
        return "", f"py-spy does not start: {error.strerror}"
    try:
        async with asyncio.timeout(patience):
            out, err = await process.communicate()
    except TimeoutError:
        return "", f"py-spy took more than {patience:g} s"
    finally:
        with suppress(ProcessLookupError):  # also when somebody gives up on us
            process.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(BURIAL):
                await process.wait()
    if process.returncode == 0:
        return out.decode(errors="replace"), ""
    words = err.decode(errors="replace").strip().splitlines()
    return "", f"py-spy: {words[0][:200] if words else f'exit code {process.returncode}'}"


async def _faulthandler(pid: int, file: Path) -> str:
    """What the process writes when it is asked to, or nothing."""
    if not linux.catches(pid, SIGNAL):
        return ""
    try:
        before = grown = await run_in_daemon_thread(partial(size, file))
        os.kill(pid, SIGNAL)
        async with asyncio.timeout(PATIENCE):
            while True:  # the end of a dump is not marked, nor announced: it is when nothing more comes
                await asyncio.sleep(SETTLED)
                last, grown = grown, await run_in_daemon_thread(partial(size, file))
                if last == grown > before:
                    break
        return await run_in_daemon_thread(partial(_read_from, file, before))
    except (OSError, TimeoutError):
        return ""


def size(file: Path) -> int:
    """Of a file that may not be there."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _read_from(file: Path, offset: int) -> str:
    with file.open("rb") as dumps:
        dumps.seek(offset)
        return dumps.read(LARGEST).decode(errors="replace")


def _read(pid: int, what: str) -> str:
    try:
        return Path(f"/proc/{pid}/{what}").read_text(errors="replace")[:4096].strip()
    except OSError:
        return ""
