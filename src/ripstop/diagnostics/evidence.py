"""Evidence of a worker's death, gathered before anything else is stopped.

Sources: how it ended, the error file that torch's `@record` writes, the end of its stderr, the kernel's count of OOM
kills.  Rules: (1) gathering never raises and never takes long, whatever a dying worker left behind: every read is
bounded, what cannot be read is said in the message; (2) every text is cut and cleaned here, so that a `Failure` is
small enough to travel and safe to print; (3) the parsing is in pure functions, the reading around them is thin.
"""

import os
import re
import signal
import stat
from itertools import takewhile
from pathlib import Path
from typing import Any

from msgspec import Struct

from ripstop.model.failure import Failure
from ripstop.model.round import Place
from ripstop.model.text import amount, clean, cut, cut_middle
from ripstop.system.linux import is_full

_MESSAGE = 2048
_TRACEBACK = 8192
_TAIL_LINES = 20
_TAIL_WIDTH = 400
_REMARKS = 10  # lines of an exception's message that are kept in the traceback
_READ = 1 << 20  # of an error file
_READ_TAIL = 1 << 16  # of a stderr file
# compiled at their first use: most agents never need them
_EXCEPTION = r"[A-Za-z_][\w.]*(?::|$)"
_HEADER = r"(\[rank\d+\]: ?)?Traceback \(most recent call last\):$"


class Memory(Struct, frozen=True):
    """The kernel's account of memory at one moment; None is what it does not tell.

    `kills` counts the processes that the OOM killer took, in this process's cgroup, or, where there is none
    (`machine`), anywhere.
    """

    kills: int | None = None
    limit: int | None = None
    peak: int | None = None
    machine: bool = False


class TimerKill(Struct, frozen=True):
    """Why ripstop killed a worker, and where that was just before."""

    why: str
    stack: str


class ErrorFile(Struct, frozen=True):
    """What an error file says; `at` is None when it does not say."""

    message: str = ""
    traceback: str = ""
    at: float | None = None


def gather(
    place: Place,
    local_rank: int,
    *,
    host: str,
    at: float,
    pid: int | None,
    returncode: int,
    logs: Path,
    error_file: Path,
    stderr: Path | None,
    before: Memory,
    condemned: TimerKill | None = None,
) -> Failure:
    """Why this worker is dead.

    `returncode` is as subprocess has it, a signal's number negative; `at` is when the worker ended; `before` is the
    memory account of the round's start; `condemned` if ripstop itself killed it.
    """
    said = read_error_file(error_file)
    tail = _read_end(stderr) if stderr else ""
    message, traceback = (said.message, said.traceback) if said else ("", "")
    if not said and returncode == 1:  # as the interpreter exits after an exception; others in the tail were caught
        message, traceback = last_exception(tail)
    oom = oom_verdict(before, read_memory()) if returncode == -signal.SIGKILL and not condemned else ""
    if condemned:
        message = cut(f"{condemned.why}; it said: {message}" if message else condemned.why, _MESSAGE)
        traceback = traceback or cut_middle(clean(condemned.stack), _TRACEBACK)
    return Failure(
        rank=place.first_rank + local_rank,
        local_rank=local_rank,
        round=place.round,
        host=host,
        at=said.at if said and said.at is not None else at,
        pid=pid,
        exitcode=returncode if returncode >= 0 else None,
        signal=signal_name(-returncode) if returncode < 0 else None,
        message=message or oom or _ending_on(logs, returncode),
        traceback=traceback,
        oom=oom,
        log_tail=last_lines(tail),
        error_file=clean(str(error_file)) if said else "",
        logs=clean(str(logs)),
    )


def not_started(place: Place, local_rank: int, *, host: str, at: float, why: str, logs: Path) -> Failure:
    """The failure of a worker that never ran."""
    return Failure(
        rank=place.first_rank + local_rank,
        local_rank=local_rank,
        round=place.round,
        host=host,
        at=at,
        message=cut(clean(f"could not be started: {why}"), _MESSAGE),
        logs=clean(str(logs)),
    )


# how it ended ---------------------------------------------------------------------------------------------------------


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def ending(returncode: int) -> str:
    """A worker's end in words, when nothing else is known of it."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    name = signal_name(-returncode)
    if returncode == -signal.SIGKILL:
        return f"killed by {name}, which was not sent by ripstop"
    try:
        meaning = signal.strsignal(-returncode)
    except ValueError:
        meaning = None
    return f"died of {name} ({meaning.lower()})" if meaning else f"died of {name}"


def _ending_on(logs: Path, returncode: int) -> str:
    """On a full disk a worker's own last words may be missing."""
    full = f"; the disk of {clean(str(logs))} is full" if is_full(logs) else ""
    return ending(returncode) + full


# error files ----------------------------------------------------------------------------------------------------------


def read_error_file(path: Path) -> ErrorFile | None:
    """None when the worker wrote none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        return ErrorFile(f"error file {path} cannot be read: {error.strerror}")
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return ErrorFile(f"error file {path} is not a file")
        data = os.pread(fd, _READ, 0)
    except OSError as error:
        return ErrorFile(f"error file {path} cannot be read: {error.strerror}")
    finally:
        os.close(fd)
    if not data:
        return ErrorFile(at=status.st_mtime)
    said = parse_error_file(data, status.st_size)
    return ErrorFile(said.message, said.traceback, _finer(said.at, status.st_mtime))


def parse_error_file(data: bytes, size: int) -> ErrorFile:
    """torch's format: `message` is a text, or a dict with `message` and `extraInfo` (`py_callstack`, `timestamp`)."""
    import json

    text = data.decode("utf-8", "replace")
    try:
        top = json.loads(text)
    except (ValueError, RecursionError):
        flaw = f"is too long ({amount(size)})" if size > len(data) else "is not JSON, or was cut off"
        return ErrorFile(cut(f"the error file {flaw}; it begins: {clean(text[:500])}", _MESSAGE))
    if not isinstance(top, dict) or "message" not in top:
        return ErrorFile(cut(f"the error file has no message; it begins: {clean(text[:500])}", _MESSAGE))
    inner, extra = top["message"], top
    while isinstance(inner, dict):
        extra = inner["extraInfo"] if isinstance(inner.get("extraInfo"), dict) else extra
        inner = inner.get("message", "")
    traceback = extra.get("py_callstack")
    return ErrorFile(
        message=cut(clean(inner if isinstance(inner, str) else json.dumps(inner)), _MESSAGE),
        traceback=cut_middle(clean(traceback.rstrip()), _TRACEBACK) if isinstance(traceback, str) else "",
        at=_timestamp(extra.get("timestamp")),
    )


def _timestamp(value: Any) -> float | None:
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return seconds if 0 < seconds < 1e11 else None  # not nan, not the milliseconds of another format


def _finer(at: float | None, mtime: float) -> float:
    """torch writes whole seconds; the file's own time is finer, where both clocks agree."""
    return mtime if at is None or 0 <= mtime - at < 2 else at


# stderr ---------------------------------------------------------------------------------------------------------------


def _read_end(path: Path) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        start = max(0, os.fstat(fd).st_size - _READ_TAIL)
        return clean(os.pread(fd, _READ_TAIL, start).decode("utf-8", "replace"))
    except OSError:
        return ""
    finally:
        os.close(fd)


def last_lines(text: str) -> tuple[str, ...]:
    """The last lines that are not empty."""
    lines = [line.rstrip() for line in text.split("\n")]
    return tuple(cut(line, _TAIL_WIDTH) for line in [line for line in lines if line][-_TAIL_LINES:])


def last_exception(text: str) -> tuple[str, str]:
    """The message and the traceback of the last Python exception in a text, for scripts without `@record`.

    torch prefixes such lines with the rank once a process group exists.
    """
    lines = text.split("\n")
    headers = [(index, found[1] or "") for index, line in enumerate(lines) if (found := re.match(_HEADER, line))]
    if not headers:
        return "", ""
    start, prefix = headers[-1]
    block = [line[len(prefix) :] for line in takewhile(lambda line: line.startswith(prefix.rstrip()), lines[start:])]
    for index, line in enumerate(block[1:], start=1):
        if re.match(_EXCEPTION, line):
            return cut(line, _MESSAGE), cut_middle("\n".join(block[: index + _REMARKS]).rstrip(), _TRACEBACK)
    return "", ""


# memory ---------------------------------------------------------------------------------------------------------------


def read_memory() -> Memory:
    """The account of this process's cgroup, in which its workers are too, or else the machine's."""
    version, group = memory_cgroup(_text("/proc/self/cgroup"))
    match version:
        case 2:
            roots, counter, limit, peak = "/sys/fs/cgroup", "memory.events", "memory.max", "memory.peak"
        case 1:
            roots, counter = "/sys/fs/cgroup/memory", "memory.oom_control"
            limit, peak = "memory.limit_in_bytes", "memory.max_usage_in_bytes"
        case _:
            return Memory(kills=counted(_text("/proc/vmstat"), "oom_kill"), machine=True)
    for root in (f"{roots}{group}", roots):  # in a container the path is often the host's and the mount our own
        kills = counted(_text(f"{root}/{counter}"), "oom_kill")
        if kills is not None:
            return Memory(kills, _number(_text(f"{root}/{limit}")), _number(_text(f"{root}/{peak}")))
    return Memory(kills=counted(_text("/proc/vmstat"), "oom_kill"), machine=True)


def memory_cgroup(text: str) -> tuple[int, str]:
    """From `/proc/self/cgroup`, the version of the memory controller (0: none) and the path of the group."""
    version, path = 0, ""
    for line in text.splitlines():
        match line.split(":", 2):
            case [_, controllers, group] if "memory" in controllers.split(","):
                return 1, group.rstrip("/")
            case ["0", "", group]:
                version, path = 2, group.rstrip("/")
    return version, path


def counted(text: str, name: str) -> int | None:
    """The value of a `name value` line."""
    for line in text.splitlines():
        match line.split():
            case [key, value] if key == name:
                return _number(value)
    return None


def oom_verdict(before: Memory, after: Memory) -> str:
    """What to say of a worker killed by SIGKILL that nobody here sent; empty when it was not for memory."""
    if before.kills is None or after.kills is None or before.machine != after.machine or after.kills <= before.kills:
        return ""
    if after.machine:
        return "killed by the kernel's OOM killer (the machine ran out of memory)"
    facts = [
        f"{name} {amount(value)}"
        for name, value in (("cgroup limit", after.limit), ("peak", after.peak))
        if value is not None and value < 1 << 60  # v1 writes "no limit" as a very large number
    ]
    return "killed by the kernel's OOM killer" + (f" ({', '.join(facts)})" if facts else "")


def _text(path: str) -> str:
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            return file.read(_READ)
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None
