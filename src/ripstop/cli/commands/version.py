"""`ripstop version`."""

from collections.abc import Sequence

import ripstop
from ripstop.model.errors import UsageError


def main(argv: Sequence[str]) -> int:
    if argv:
        raise UsageError(f"version {argv[0]}: takes no arguments; write ripstop version")
    print(f"ripstop {ripstop.__version__}")
    return 0
