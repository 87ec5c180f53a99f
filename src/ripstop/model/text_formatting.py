"""Prepare text from outside for logs, files and messages: clean, truncate, encode; numbers as texts.  Pure."""

import json
import re
import signal
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

# compiled at their first use: most agents never need them
_ESCAPES = r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b."
_CONTROLS = r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"
_VISIBLE_CONTROLS = {code: "?" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}
MAX_DURATION_S = 1e12  # more is no duration: a broken clock, or a number of another program


def format_clean_text(text: str) -> str:
    """Remove colours and control characters, and replace lone surrogates.  A carriage return becomes a new line."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return without_surrogates(re.sub(_CONTROLS, "", re.sub(_ESCAPES, "", text)))


def without_surrogates(text: str) -> str:
    """Replace lone surrogates, which file names and logs may contain and UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def one_line(text: str) -> str:
    """Replace control characters and indent further lines, so that no text can pose as a line of its own."""
    return text.translate(_VISIBLE_CONTROLS).replace("\n", "\n    ")


def truncate(text: str, max_chars: int) -> str:
    """Keep the beginning."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def truncate_bytes(text: str, max_bytes: int) -> str:
    """Keep the beginning, in at most `max_bytes` of UTF-8."""
    data = text.encode()
    return text if len(data) <= max_bytes else data[: max_bytes - 3].decode("utf-8", "ignore") + "…"


def truncate_middle(text: str, max_bytes: int) -> str:
    """Keep the beginning and, twice as long, the end: a traceback's first frames, and where it was raised."""
    data = text.encode()
    if len(data) <= max_bytes:
        return text
    room = max_bytes - 16
    head, tail = data[: room // 3], data[-(room - room // 3) :]
    return f"{head.decode('utf-8', 'ignore')}\n  …\n{tail.decode('utf-8', 'ignore')}"


def truncate_columns(text: str, width: int) -> str:
    """The beginning of a text on one line, in at most `width` columns."""
    text = one_line(" ".join(text.split()))
    if sum(map(_columns_of_formatted_character, text)) <= width:
        return text
    used = 1  # for the ellipsis
    for end, character in enumerate(text):
        used += _columns_of_formatted_character(character)
        if used > width:
            return f"{text[:end]}…"
    return text


def wrapped_lines(text: str, width: int) -> list[str]:
    """The text in lines of at most `width` characters, at least one line; a longer word stays whole."""
    from textwrap import wrap

    return wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _columns_of_formatted_character(character: str) -> int:
    """At least the columns that a terminal uses for this character; wide ones begin at U+1100."""
    return 2 if character >= "\u1100" and character not in "…–’" else 1


def format_ascii_json(value: Any) -> str:
    """Encode as compact JSON in ASCII.  Lone surrogates are replaced; NaN and infinity become null."""
    try:
        data = msgspec.json.encode(value, enc_hook=str)
    except UnicodeEncodeError:
        data = b""
    if data and data.isascii():
        return data.decode()
    text = without_surrogates(json.dumps(msgspec.to_builtins(value, enc_hook=str), ensure_ascii=False))
    return json.dumps(json.loads(text, parse_constant=lambda _: None), separators=(",", ":"))


def format_bytes(count: int) -> str:
    """A number of bytes with a unit: `1.5 GiB`."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count} bytes"


def format_table(rows: Sequence[Sequence[str]], head: Sequence[str]) -> str:
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def duration(seconds: float) -> str:
    """`38 ms`, `4.2 s`, `3 min 20 s`, `1 h 12 min`, `2 d 3 h`."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 0.0005:
        return "0"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if not seconds < MAX_DURATION_S:
        return f"{seconds:g} s"
    whole = round(seconds)
    for size, unit, smaller, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"


def format_elapsed(seconds: float) -> str:
    """`8 s`, `3 min 20 s`, `1 h 12 min`."""
    return duration(int(seconds)) if seconds >= 10 else f"{int(seconds)} s"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def percent(share: float) -> str:
    """`97.3 %`, and never `100 %` for less."""
    return f"{share:.0%}" if share in (0.0, 1.0) else f"{min(99.9, share * 100):.1f}%"


def rank_list(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0,1,4-7`, from sorted numbers."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranges(ranks)}"


def is_or_are(ranks: Sequence[int]) -> str:
    """The verb after `rank_list`."""
    return "is" if len(ranks) == 1 else "are"


def format_ranges(ranks: Sequence[int]) -> str:
    """`0,1,4-7`, from sorted numbers."""
    runs = consecutive_numbers_to_format(ranks)
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def format_cpu_ranges(numbers: Iterable[int]) -> str:
    """`0-2,4`, as the kernel writes processors and NUMA nodes; `none` for no number."""
    runs = consecutive_numbers_to_format(sorted(numbers))
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"


def consecutive_numbers_to_format(numbers: Sequence[int]) -> list[list[int]]:
    """Sorted numbers, divided into runs without gaps."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"
