"""Interprets stacks: where a worker is, and which ranks the others wait for.  Pure.

Rules:

1. The location of a worker is the innermost frame of the user's code: its file and line, and the name of the library
   function that it called there, if it called one.
2. A worker waits for other ranks if that call is in `torch.distributed`.
3. In a round that hangs, workers that wait for others are victims.  The odd ranks, which caused the hang, are the first
   of these that exist and are not all ranks: (a) processes stopped by a signal; (b) ranks that torch's flight recorder
   shows as odd (`flight_recorder.py`), and of these the ones that do not wait by their stacks, if any; (c) ranks that
   do not wait; (d) ranks outside the one location that more than half of the ranks share; (e) if no rank waits, ranks
   that made no progress while others did.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from ripstop.model.failure import CollectiveProgress, Failure, Hang
from ripstop.model.text_formatting import rank_list

MAX_FRAMES = 200
# compiled at first use: most jobs never need them
_LIBRARY = r"/(?:site|dist)-packages/|/lib(?:64)?/python3[^/]*/|^<(?!stdin>|string>)"
_COLLECTIVE = r"(?:^|/)torch/distributed/(?!elastic/|launcher/|run\.py)"
_WRAPPER = r"<locals>|torch/distributed/c10d_logger\.py:wrapper$"  # faulthandler omits the enclosing function
_FAULTHANDLER = r'  File "(.*)", line (\d+) in (.*)$'
_RIPSTOP = r"/ripstop/workers/zygote/\w+\.py$"  # the thread that answers queries for the flight recorder
_MAX_GROUPS = 4  # of ranks in one message


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


def code_location(frames: Sequence[Frame]) -> CodeLocation:
    """The location of a worker with this stack, innermost frame first."""
    if not frames:
        return CodeLocation()
    inside = next((n for n, frame in enumerate(frames) if not re.search(_LIBRARY, frame.file)), len(frames))
    at = frames[inside] if inside < len(frames) else frames[0]
    called = [frame for frame in frames[:inside] if not re.search(_WRAPPER, f"{frame.file}:{frame.function}")]
    waits = any(re.search(_COLLECTIVE, frame.file) for frame in called)
    call = called[-1].function if called else at.function
    return CodeLocation(call, f"{at.file.rpartition('/')[2]}:{at.line}", waits)


def odd_ones(hangs: Mapping[int, Hang]) -> frozenset[int]:
    """The ranks that the others wait for (rule 3); empty if nothing distinguishes them."""
    if 0 < len(stopped := [rank for rank, hang in hangs.items() if hang.state in ("T", "t")]) < len(hangs):
        return frozenset(stopped)
    if recorded := _recorded(hangs):
        from ripstop.diagnostics import flight_recorder  # only if a worker hangs: every agent loads this module

        if odd := flight_recorder.odd_ones(recorded):
            return frozenset(rank for rank in odd if not hangs[rank].waits) or odd
    known = {rank: hang for rank, hang in hangs.items() if hang.where}
    not_waiting = {rank for rank, hang in known.items() if not hang.waits}
    if 0 < len(not_waiting) < len(known):
        return frozenset(not_waiting)
    majority = max(_groups(known).values(), key=len, default=[])
    if 2 * len(majority) > len(known):
        return frozenset(known.keys() - set(majority))
    hung = {rank for rank in not_waiting if known[rank].sign}
    return frozenset(hung) if len(hung) < len(known) else frozenset()


def in_words(hangs: Mapping[int, Hang]) -> str:
    """`ranks 0,1,3 wait in all_reduce (train.py:41); rank 2 is in load_batch (data.py:17); flight recorder: …`."""
    return "; ".join(filter(None, [_stacks_in_words(hangs), _recorder_in_words(hangs)]))


def _recorder_in_words(hangs: Mapping[int, Hang]) -> str:
    if not (recorded := _recorded(hangs)):
        return ""
    from ripstop.diagnostics import flight_recorder

    text = flight_recorder.in_words(recorded)
    return f"flight recorder: {text}" if text else ""


def _recorded(hangs: Mapping[int, Hang]) -> dict[int, tuple[CollectiveProgress, ...]]:
    return {rank: hang.standings for rank, hang in hangs.items() if hang.standings is not None}


def _stacks_in_words(hangs: Mapping[int, Hang]) -> str:
    odd = odd_ones(hangs)
    groups = sorted(_groups(hangs).items(), key=lambda group: (group[1][0] in odd, -len(group[1])))
    if len(groups) > _MAX_GROUPS:  # the majority, and as many of the odd groups as fit
        rest = sum(len(ranks) for _, ranks in groups[1 : -_MAX_GROUPS + 1])
        groups = [groups[0], *groups[-_MAX_GROUPS + 1 :]]
        return f"{'; '.join(_group(*group) for group in groups)}; {rest} more elsewhere"
    return "; ".join(_group(*group) for group in groups)


def hangs_among(failures: Iterable[Failure], round: int) -> dict[int, Hang]:
    """The hangs of this round, by rank."""
    return {failure.rank: failure.hang for failure in failures if failure.hang and failure.round == round}


def _groups(hangs: Mapping[int, Hang]) -> dict[tuple[str, str, bool, bool], list[int]]:
    groups: dict[tuple[str, str, bool, bool], list[int]] = {}
    for rank, hang in sorted(hangs.items()):
        groups.setdefault((hang.call, hang.where, hang.waits, hang.state in ("T", "t")), []).append(rank)
    return groups


def _group(key: tuple[str, str, bool, bool], ranks: list[int]) -> str:
    call, where, waits, stopped = key
    one = len(ranks) == 1
    verb = ("waits" if one else "wait") if waits else ("is" if one else "are")
    doing = f"{verb} in {call} ({where})" if where else f"{'does' if one else 'do'} not show where"
    return f"{rank_list(ranks)} {doing}" + (", stopped by a signal" if stopped else "")


# output of tools ------------------------------------------------------------------------------------------------------


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


def as_text(threads: Iterable[Thread]) -> str:
    """The main thread first; threads of ripstop are left out."""
    lines: list[str] = []
    for thread in sorted(threads, key=lambda thread: not thread.main):
        if thread.frames and not thread.main and re.search(_RIPSTOP, thread.frames[-1].file):
            continue
        lines += [f"thread {thread.name}", *(f"  {frame}" for frame in thread.frames)]
    return "\n".join(lines)
