"""Collects evidence of a worker's death, before anything else is stopped.

Sources: the exit status, the error file that torch's `@record` writes, the end of stderr, and the kernel's count of OOM
kills.  Rules: (1) collecting never raises and takes little time: every read is bounded, and the message names files
that cannot be read; (2) every text is cleaned and truncated here, so that a `Failure` is small enough to send and safe
to print; (3) parsing is in pure functions.
"""

import os
import re
import signal
import stat
from itertools import takewhile
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ripstop.model.failure import Failure, exit_reason
from ripstop.model.round import Place
from ripstop.model.text_formatting import clean, format_bytes, signal_name, truncate_bytes, truncate_middle
from ripstop.system.cgroup_memory import ROOT, machine_oom_kills, memory_cgroups
from ripstop.system.disk_space import is_disk_full

_MAX_MESSAGE_CHARS = 2048
_MAX_TRACEBACK_CHARS = 8192
_TAIL_LINES = 20
_MAX_TAIL_LINE_CHARS = 400
_MAX_EXCEPTION_LINES = 10  # of an exception's message in the traceback
_MAX_ERROR_FILE_BYTES = 1 << 20
_MAX_STDERR_BYTES = 1 << 16
# compiled at first use: most agents never need them
_EXCEPTION = r"[A-Za-z_][\w.]*(?::|$)"
_TRACEBACK_HEADER = r"(\[rank\d+\]: ?)?Traceback \(most recent call last\):$"


class MemoryEvidence(Struct, frozen=True):
    """Memory data of the kernel at one time; None: not available.

    `kills` counts the processes that the OOM killer has killed in this process's cgroup; without a cgroup (`machine`),
    on the whole machine.
    """

    kills: int | None = None
    limit: int | None = None
    peak: int | None = None
    machine: bool = False


class TimerKill(Struct, frozen=True):
    """Why ripstop killed a worker, and its stack just before."""

    why: str
    stack: str


class ErrorFileEvidence(Struct, frozen=True):
    """The content of an error file; `at` is None if it has no time."""

    message: str = ""
    traceback: str = ""
    at: float | None = None


def gather_evidence(
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
    before: MemoryEvidence,
    timer_kill: TimerKill | None = None,
) -> Failure:
    """The failure of a worker that has ended.

    `returncode` is negative for a signal, as in `subprocess`.  `at` is when the worker ended.  `before` is the memory
    data at the start of the round.  `timer_kill` is set if ripstop killed the worker because of an expired timer.
    """
    reported = error_file_evidence(error_file)
    tail = _read_stderr_evidence(stderr) if stderr else ""
    message, traceback = (reported.message, reported.traceback) if reported else ("", "")
    if not reported and returncode == 1:  # Python's exit code after an exception; with another code it was handled
        message, traceback = exception_evidence(tail)
    oom = oom_evidence(before, memory_evidence()) if returncode == -signal.SIGKILL and not timer_kill else ""
    if timer_kill:
        why = f"{timer_kill.why}; its error: {message}" if message else timer_kill.why
        message = truncate_bytes(why, _MAX_MESSAGE_CHARS)
        traceback = traceback or truncate_middle(clean(timer_kill.stack), _MAX_TRACEBACK_CHARS)
    if not message and not oom:
        full = f"; the disk of {clean(str(logs))} is full" if is_disk_full(logs) else ""  # its message may be missing
        message = exit_reason(returncode) + full
    return Failure(
        rank=place.first_rank + local_rank,
        local_rank=local_rank,
        round=place.round,
        host=host,
        at=reported.at if reported and reported.at is not None else at,
        pid=pid,
        exitcode=returncode if returncode >= 0 else None,
        signal=signal_name(-returncode) if returncode < 0 else None,
        message=message or oom,
        traceback=traceback,
        oom=oom,
        log_tail=tail_evidence(tail),
        error_file=clean(str(error_file)) if reported else "",
        logs=clean(str(logs)),
    )


def evidence_of_failed_start(place: Place, local_rank: int, *, host: str, at: float, why: str, logs: Path) -> Failure:
    """The failure of a worker that could not be started."""
    return Failure(
        rank=place.first_rank + local_rank,
        local_rank=local_rank,
        round=place.round,
        host=host,
        at=at,
        message=truncate_bytes(clean(f"could not be started: {why}"), _MAX_MESSAGE_CHARS),
        logs=clean(str(logs)),
    )


# error files ----------------------------------------------------------------------------------------------------------


def error_file_evidence(path: Path) -> ErrorFileEvidence | None:
    """None if the worker wrote none."""
    try:
        data, status = _read_evidence(path, _MAX_ERROR_FILE_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        return ErrorFileEvidence(f"error file {path} cannot be read: {error.strerror}")
    if not stat.S_ISREG(status.st_mode):
        return ErrorFileEvidence(f"error file {path} is not a file")
    if not data:
        return ErrorFileEvidence(at=status.st_mtime)
    parsed = parse_error_evidence(data, status.st_size)
    # torch writes whole seconds: the file's time is more precise if both agree
    at = status.st_mtime if parsed.at is None or 0 <= status.st_mtime - parsed.at < 2 else parsed.at
    return replace(parsed, at=at)


def _read_evidence(path: Path, max_bytes: int, *, from_end: bool = False) -> tuple[bytes, os.stat_result]:
    """The start or the end of a file; nothing of a pipe, a device or a directory."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        start = max(0, status.st_size - max_bytes) if from_end else 0
        return os.pread(fd, max_bytes, start) if stat.S_ISREG(status.st_mode) else b"", status
    finally:
        os.close(fd)


def parse_error_evidence(data: bytes, size: int) -> ErrorFileEvidence:
    """Parse torch's format: `message` is a text, or a dict with `message` and `extraInfo`."""
    import json

    text = data.decode("utf-8", "replace")
    try:
        top = json.loads(text)
        problem = "" if isinstance(top, dict) and "message" in top else "has no message"
    except (ValueError, RecursionError):
        problem = f"is too long ({format_bytes(size)})" if size > len(data) else "is not JSON, or was cut off"
    if problem:
        message = f"the error file {problem}; it begins: {clean(text[:500])}"
        return ErrorFileEvidence(truncate_bytes(message, _MAX_MESSAGE_CHARS))
    inner, extra = top["message"], top
    while isinstance(inner, dict):
        extra = inner["extraInfo"] if isinstance(inner.get("extraInfo"), dict) else extra
        inner = inner.get("message", "")
    message = clean(inner if isinstance(inner, str) else json.dumps(inner))
    stack = extra.get("py_callstack")
    traceback = truncate_middle(clean(stack.rstrip()), _MAX_TRACEBACK_CHARS) if isinstance(stack, str) else ""
    return ErrorFileEvidence(
        truncate_bytes(message, _MAX_MESSAGE_CHARS), traceback, _evidence_time(extra.get("timestamp"))
    )


def _evidence_time(value: Any) -> float | None:
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return seconds if 0 < seconds < 1e11 else None  # neither NaN nor milliseconds


# stderr ---------------------------------------------------------------------------------------------------------------


def _read_stderr_evidence(path: Path) -> str:
    try:
        data, _ = _read_evidence(path, _MAX_STDERR_BYTES, from_end=True)
    except OSError:
        return ""
    return clean(data.decode("utf-8", "replace"))


def tail_evidence(stderr: str) -> tuple[str, ...]:
    """The last non-empty lines."""
    lines = [line.rstrip() for line in stderr.split("\n")]
    return tuple(truncate_bytes(line, _MAX_TAIL_LINE_CHARS) for line in [line for line in lines if line][-_TAIL_LINES:])


def exception_evidence(stderr: str) -> tuple[str, str]:
    """The message and the traceback of the last Python exception, for scripts without `@record`.

    In a process group, torch adds the rank as a prefix to each line.
    """
    lines = stderr.split("\n")
    headers = [(index, found) for index, line in enumerate(lines) if (found := re.match(_TRACEBACK_HEADER, line))]
    if not headers:
        return "", ""
    start, prefix = headers[-1][0], headers[-1][1][1] or ""
    block = [line[len(prefix) :] for line in takewhile(lambda line: line.startswith(prefix.rstrip()), lines[start:])]
    for index, line in enumerate(block[1:], start=1):
        if re.match(_EXCEPTION, line):
            traceback = "\n".join(block[: index + _MAX_EXCEPTION_LINES]).rstrip()
            return truncate_bytes(line, _MAX_MESSAGE_CHARS), truncate_middle(traceback, _MAX_TRACEBACK_CHARS)
    return "", ""


# memory ---------------------------------------------------------------------------------------------------------------


def memory_evidence(root: Path = ROOT) -> MemoryEvidence:
    """Memory data of this process's cgroup, which contains its workers, or else of the machine."""
    for group in memory_cgroups(root):
        if group.oom_kills is not None:
            return MemoryEvidence(group.oom_kills, group.limit, group.peak)
    return MemoryEvidence(kills=machine_oom_kills(root), machine=True)


def oom_evidence(before: MemoryEvidence, after: MemoryEvidence) -> str:
    """The reason of a SIGKILL that ripstop did not send; empty if the OOM killer did not send it either."""
    if before.kills is None or after.kills is None or before.machine != after.machine or after.kills <= before.kills:
        return ""
    if after.machine:
        return "killed by the kernel's OOM killer (the machine ran out of memory)"
    facts = [
        f"{name} {format_bytes(value)}"
        for name, value in (("cgroup limit", after.limit), ("peak", after.peak))
        if value is not None
    ]
    return "killed by the kernel's OOM killer" + (f" ({', '.join(facts)})" if facts else "")
