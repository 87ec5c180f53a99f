"""The text of a help at the width of a terminal."""

import pytest

from ripstop.cli.help_text import fit_help_text

TEXT = """\
usage: ripstop sew [FLAGS]

Sews two pieces of cloth.  The thread is strong,
and the needle is long.

examples
  ripstop sew --thread=blue \\
      --needle=9

flags
  --thread COLOUR             which thread to use for
                              the seam (red)
  --with-a-very-long-name WORD,…         also sew this
"""


def test_paragraphs_and_entries_are_filled_and_commands_are_kept() -> None:
    assert fit_help_text(TEXT, 80).splitlines() == [
        "usage: ripstop sew [FLAGS]",
        "",
        "Sews two pieces of cloth. The thread is strong, and the needle is long.",
        "",
        "examples",
        "  ripstop sew --thread=blue \\",
        "      --needle=9",
        "",
        "flags",
        "  --thread COLOUR             which thread to use for the seam (red)",
        "  --with-a-very-long-name WORD,…",
        "                              also sew this",
    ]


@pytest.mark.parametrize("columns", [0, 20, 61, 80, 100, 200, 10**6])
def test_no_word_is_lost_at_any_width(columns: int) -> None:
    fitted = fit_help_text(TEXT, columns)
    assert fitted.split() == TEXT.split()
    assert max(map(len, fitted.splitlines())) <= min(max(columns - 1, 60), 120)
