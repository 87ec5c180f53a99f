"""Parses stacks that py-spy or faulthandler printed, and finds where a worker is in the user's code.  Pure.

Rules: (1) the location of a worker is the innermost frame of the user's code: its file and line, and the name of the
library function that it called there, if it called one; (2) a worker waits for other ranks if that call is in
`torch.distributed`.
"""

import re
from collections.abc import Iterable, Sequence

from msgspec import Struct

MAX_FRAMES = 200
# compiled at first use: most jobs never need them
_LIBRARY = r"/(?:site|dist)-packages/|/lib(?:64)?/python3[^/]*/|^<(?!stdin>|string>)"
_COLLECTIVE = r"(?:^|/)torch/distributed/(?!elastic/|launcher/|run\.py)"
_WRAPPER = r"<locals>|torch/distributed/c10d_logger\.py:wrapper$"  # faulthandler omits the enclosing function
_FAULTHANDLER = r'  File "(.*)", line (\d+) in (.*)$'
_RIPSTOP = r"/ripstop/workers/zygote/\w+\.py$"  # the thread that answers queries for the flight recorder


class Frame(Struct, frozen=True):
    """One call of a Python stack."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


class CodeLocation(Struct, frozen=True):
    """The call, the user's file and line, and whether the worker waits for other ranks there (rules 1 and 2)."""

    call: str = ""
    where: str = ""
    waits: bool = False


def stack_location(frames: Sequence[Frame]) -> CodeLocation:
    """The location of a worker with this stack, innermost frame first."""
    if not frames:
        return CodeLocation()
    inside = next((n for n, frame in enumerate(frames) if not re.search(_LIBRARY, frame.file)), len(frames))
    at = frames[inside] if inside < len(frames) else frames[0]
    called = [frame for frame in frames[:inside] if not re.search(_WRAPPER, f"{frame.file}:{frame.function}")]
    waits = any(re.search(_COLLECTIVE, frame.file) for frame in called)
    call = called[-1].function if called else at.function
    return CodeLocation(call, f"{at.file.rpartition('/')[2]}:{at.line}", waits)


class Thread(Struct, frozen=True):
    """One thread's stack, innermost frame first."""

    name: str
    frames: tuple[Frame, ...]
    main: bool


def from_py_spy(text: str, pid: int) -> tuple[Thread, ...]:
    """Parse the output of `py-spy dump --json`; empty if it is not that."""
    import json  # every agent loads this module at its start

    try:
        threads = json.loads(text)
        return tuple(
            Thread(
                str(thread["thread_name"] or thread["os_thread_id"]),
                tuple(
                    Frame(str(frame["name"]), str(frame["filename"]), int(frame["line"]))
                    for frame in thread["frames"][:MAX_FRAMES]
                ),
                thread["os_thread_id"] == pid,
            )
            for thread in threads
        )
    except (ValueError, TypeError, KeyError):
        return ()


def from_faulthandler(text: str) -> tuple[Thread, ...]:
    """Parse a dump of `faulthandler`.  It marks the thread that got the signal, which is the main thread."""
    threads: list[Thread] = []
    frames: list[Frame] = []
    heading = ""
    for line in [*text.splitlines(), ""]:
        if found := re.match(_FAULTHANDLER, line):
            frames.append(Frame(found[3], found[1], int(found[2])))
            continue
        if heading and frames:
            threads.append(Thread(heading, tuple(frames[:MAX_FRAMES]), heading.startswith("Current thread")))
        heading, frames = line.split(" (")[0].rstrip(":"), []
    return tuple(threads)


def main_frames(threads: Iterable[Thread]) -> tuple[Frame, ...]:
    """The stack of the main thread."""
    return next((thread.frames for thread in threads if thread.main), ())


def parsed_stacks_text(threads: Iterable[Thread]) -> str:
    """The main thread first; threads of ripstop are left out."""
    lines: list[str] = []
    for thread in sorted(threads, key=lambda thread: not thread.main):
        if thread.frames and not thread.main and re.search(_RIPSTOP, thread.frames[-1].file):
            continue
        lines += [f"thread {thread.name}", *(f"  {frame}" for frame in thread.frames)]
    return "\n".join(lines)
