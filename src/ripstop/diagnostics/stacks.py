"""What stacks say: where a worker is, and which rank is the odd one out.  Pure.

Rules: (1) a worker is where its user's own code is: the innermost frame outside of libraries gives file and line, and
the library function that was called there, if one was, gives the name; (2) it waits for the others when that call is
one of `torch.distributed`; (3) in a round that hangs, who waits for the others is their victim: the odd ones are
those that do not wait; where all wait, or none does, those outside the one place that has more than half of them,
or, if none waits, those that have shown no progress while others have.  A process that was stopped from outside is odd
before all; then those of whom torch's flight recorder says it (`flight.py`); of these, those that do not wait in their
stacks, if there are any.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from ripstop.model.failure import CollectiveProgress, Failure, Hang
from ripstop.model.text import rank_list

MOST_FRAMES = 200
# compiled at their first use: most jobs never need them
_LIBRARY = r"/(?:site|dist)-packages/|/lib(?:64)?/python3[^/]*/|^<(?!stdin>|string>)"
_COLLECTIVE = r"(?:^|/)torch/distributed/(?!elastic/|launcher/|run\.py)"
_WRAPPER = r"<locals>|torch/distributed/c10d_logger\.py:wrapper$"  # faulthandler leaves out in what it was defined
_FAULTHANDLER = r'  File "(.*)", line (\d+) in (.*)$'
_OURS = r"/ripstop/workers/zygote/\w+\.py$"  # a thread that waits to be asked what it waits for
_GROUPS = 4  # of ranks, in one sentence


class Frame(Struct, frozen=True):
    """One call of a Python stack."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


class Spot(Struct, frozen=True):
    """Where a worker is: the call, the user's file and line, and whether it waits for other ranks there."""

    call: str = ""
    where: str = ""
    waits: bool = False


def spot(frames: Sequence[Frame]) -> Spot:
    """Where a worker with this stack, innermost frame first, is."""
    if not frames:
        return Spot()
    inside = next((n for n, frame in enumerate(frames) if not re.search(_LIBRARY, frame.file)), len(frames))
    at = frames[inside] if inside < len(frames) else frames[0]
    called = [frame for frame in frames[:inside] if not re.search(_WRAPPER, f"{frame.file}:{frame.function}")]
    waits = any(re.search(_COLLECTIVE, frame.file) for frame in called)
    call = called[-1].function if called else at.function
    return Spot(call, f"{at.file.rpartition('/')[2]}:{at.line}", waits)


def odd_ones(hangs: Mapping[int, Hang]) -> frozenset[int]:
    """The ranks that the others wait for; empty when nothing tells them apart."""
    if 0 < len(stopped := [rank for rank, hang in hangs.items() if hang.state in ("T", "t")]) < len(hangs):
        return frozenset(stopped)
    if recorded := _recorded(hangs):
        from ripstop.diagnostics import (
            flight_recorder,
        )  # only where something hangs: every agent loads this module at its start

        if odd := flight_recorder.odd_ones(recorded):
            return frozenset(rank for rank in odd if not hangs[rank].waits) or odd
    known = {rank: hang for rank, hang in hangs.items() if hang.where}
    busy = {rank for rank, hang in known.items() if not hang.waits}
    if 0 < len(busy) < len(known):
        return frozenset(busy)
    crowd = max(_groups(known).values(), key=len, default=[])
    if 2 * len(crowd) > len(known):
        return frozenset(known.keys() - set(crowd))
    still = {rank for rank in busy if known[rank].sign}
    return frozenset(still) if len(still) < len(known) else frozenset()


def in_words(hangs: Mapping[int, Hang]) -> str:
    """`ranks 0,1,3 wait in all_reduce (train.py:41); rank 2 is in load_batch (data.py:17)`, and what is recorded."""
    return "; ".join(filter(None, [_by_stacks(hangs), _by_records(hangs)]))


def _by_records(hangs: Mapping[int, Hang]) -> str:
    if not (recorded := _recorded(hangs)):
        return ""
    from ripstop.diagnostics import flight_recorder

    words = flight_recorder.in_words(recorded)
    return f"flight recorder: {words}" if words else ""


def _recorded(hangs: Mapping[int, Hang]) -> dict[int, tuple[CollectiveProgress, ...]]:
    return {rank: hang.standings for rank, hang in hangs.items() if hang.standings is not None}


def _by_stacks(hangs: Mapping[int, Hang]) -> str:
    odd = odd_ones(hangs)
    groups = sorted(_groups(hangs).items(), key=lambda group: (group[1][0] in odd, -len(group[1])))
    if len(groups) > _GROUPS:  # the crowd, and as many of the odd ones as there is room for
        rest = sum(len(ranks) for _, ranks in groups[1 : -_GROUPS + 1])
        groups = [groups[0], *groups[-_GROUPS + 1 :]]
        return f"{'; '.join(_group(*group) for group in groups)}; {rest} more elsewhere"
    return "; ".join(_group(*group) for group in groups)


def hangs_among(failures: Iterable[Failure], round: int) -> dict[int, Hang]:
    """What is known of the hang of this round, by rank."""
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


# what tools print -----------------------------------------------------------------------------------------------------


class Thread(Struct, frozen=True):
    """One thread's stack, innermost frame first."""

    name: str
    frames: tuple[Frame, ...]
    main: bool


def from_py_spy(text: str, pid: int) -> tuple[Thread, ...]:
    """What `py-spy dump --json` prints; empty when it is something else."""
    import json  # the rest of this module is read by every agent at its start

    try:
        threads = json.loads(text)
        return tuple(
            Thread(
                str(thread["thread_name"] or thread["os_thread_id"]),
                tuple(
                    Frame(str(frame["name"]), str(frame["filename"]), int(frame["line"]))
                    for frame in thread["frames"][:MOST_FRAMES]
                ),
                thread["os_thread_id"] == pid,
            )
            for thread in threads
        )
    except (ValueError, TypeError, KeyError):
        return ()


def from_faulthandler(text: str) -> tuple[Thread, ...]:
    """What `faulthandler` writes.  It marks the thread that took the signal, which is a process's main one."""
    threads: list[Thread] = []
    frames: list[Frame] = []
    heading = ""
    for line in [*text.splitlines(), ""]:
        if found := re.match(_FAULTHANDLER, line):
            frames.append(Frame(found[3], found[1], int(found[2])))
            continue
        if heading and frames:
            threads.append(Thread(heading, tuple(frames[:MOST_FRAMES]), heading.startswith("Current thread")))
        heading, frames = line.split(" (")[0].rstrip(":"), []
    return tuple(threads)


def main_frames(threads: Iterable[Thread]) -> tuple[Frame, ...]:
    """The stack of the main thread."""
    return next((thread.frames for thread in threads if thread.main), ())


def as_text(threads: Iterable[Thread]) -> str:
    """For people: the main thread first, and none of ours."""
    lines: list[str] = []
    for thread in sorted(threads, key=lambda thread: not thread.main):
        if thread.frames and not thread.main and re.search(_OURS, thread.frames[-1].file):
            continue
        lines += [f"thread {thread.name}", *(f"  {frame}" for frame in thread.frames)]
    return "\n".join(lines)
