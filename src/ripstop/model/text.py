"""Words that came from elsewhere, made fit to print and to travel: cleaned, cut, on one line.  Pure."""

import re
from collections.abc import Sequence

# compiled at their first use: most agents never need them
_ESCAPES = r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b."
_CONTROLS = r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"
_SHOWN_AS_SUCH = {code: "?" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


def clean(text: str) -> str:
    """Without colours, control characters and what cannot be encoded; a carriage return is a new line."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return re.sub(_CONTROLS, "", re.sub(_ESCAPES, "", text)).encode("utf-8", "replace").decode()


def one_line(text: str) -> str:
    """A text that can only be itself: with its control characters shown as such, and further lines indented."""
    return text.translate(_SHOWN_AS_SUCH).replace("\n", "\n    ")


def cut(text: str, size: int) -> str:
    """The beginning, in at most `size` bytes of UTF-8."""
    data = text.encode()
    return text if len(data) <= size else data[: size - 3].decode("utf-8", "ignore") + "…"


def cut_middle(text: str, size: int) -> str:
    """The beginning and, twice as much, the end: of a traceback, where it started and where it broke."""
    data = text.encode()
    if len(data) <= size:
        return text
    room = size - 16
    head, tail = data[: room // 3], data[-(room - room // 3) :]
    return f"{head.decode('utf-8', 'ignore')}\n  …\n{tail.decode('utf-8', 'ignore')}"


def amount(count: int) -> str:
    """So many bytes, as people say it."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count} bytes"


def named(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0,1,4-7`, of numbers in order."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranges(ranks)}"


def ranges(ranks: Sequence[int]) -> str:
    """`0,1,4-7`, of numbers in order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
