"""Fit the text of a help to the width of the terminal.  Pure.

The texts are written for 120 columns.  The form of a line says what it is: (1) lines without indentation are a
paragraph, or a heading; (2) `  TERM   text` is an entry, and lines that begin below its text continue it; (3) other
indented lines, such as commands, are kept as they are.
"""

import re
from collections.abc import Iterator, Sequence

MAX_WIDTH = 120
MIN_WIDTH = 60
TERM_WIDTH = 30  # where an entry's text begins, if its own column is too far to the right
_ENTRY = re.compile(r"(  +\S+(?: \S+)*)   *(?=\S)")
_USAGE = "usage: "


def fit_help_text(text: str, columns: int) -> str:
    width = min(max(columns - 1, MIN_WIDTH), MAX_WIDTH)  # some terminals wrap a line that fills the last column
    return "".join(f"{line}\n" for line in _fitted_help_text(text.splitlines(), width))


def _fitted_help_text(lines: Sequence[str], width: int) -> Iterator[str]:
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if not line or line.startswith(_USAGE):
            yield from _filled_help_text("", line.split(), width, len(_USAGE)) if line else [""]
        elif not line.startswith(" "):
            words = line.split()
            while at < len(lines) and lines[at] and not lines[at].startswith(" "):
                words += lines[at].split()
                at += 1
            yield from _filled_help_text("", words, width, 0)
        elif found := _ENTRY.match(line):
            column = found.end()
            words = line[column:].split()
            while at < len(lines) and lines[at].startswith(" " * column) and lines[at][column] != " ":
                words += lines[at].split()
                at += 1
            yield from _filled_help_text(found[1], words, width, column if column <= width // 2 else TERM_WIDTH)
        else:
            yield line


def _filled_help_text(start: str, words: Sequence[str], width: int, column: int) -> Iterator[str]:
    """Lines of at most `width` characters: `start`, then words from `column` on."""
    line = start
    if start and len(start) + 2 > column:
        yield line
        line = ""
    line = line.ljust(column) if start else line
    is_empty = True
    for word in words:
        if not is_empty and len(line) + 1 + len(word) > width:
            yield line
            line, is_empty = " " * column, True
        line += word if is_empty else f" {word}"
        is_empty = False
    yield line
