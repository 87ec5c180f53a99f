"""What stderr can show: whether it is a terminal, with colours, and how wide it is."""

import os
from collections.abc import Mapping

DEFAULT_WIDTH = 80
DIM, RESET = "\x1b[2m", "\x1b[0m"


def is_terminal(environ: Mapping[str, str]) -> bool:
    """Whether stderr is a terminal that understands escape sequences."""
    return os.isatty(2) and environ.get("TERM", "dumb") != "dumb"


def has_colors(environ: Mapping[str, str]) -> bool:
    """Whether stderr may have colours; see no-color.org."""
    return is_terminal(environ) and not environ.get("NO_COLOR")


def terminal_width() -> int:
    """Of stderr."""
    try:
        return os.get_terminal_size(2).columns or DEFAULT_WIDTH
    except OSError:
        return DEFAULT_WIDTH


def write_stderr(data: bytes) -> None:
    while data:
        data = data[os.write(2, data) :]
