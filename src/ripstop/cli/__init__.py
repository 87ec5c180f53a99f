"""The `ripstop` command: one file a subcommand, imported when it is asked for.

A wrong command line is one line on stderr and exit code 2, before anything is started.
"""

import sys
from collections.abc import Sequence

from ripstop.errors import RipstopError, UsageError

USAGE = """\
ripstop launches, supervises, heals and resizes distributed PyTorch jobs.

  ripstop run [FLAGS] train.py [ARGS]   run this node's part of a job; takes torchrun's flags
  ripstop coordinator [FLAGS]           run a job's coordinator by itself, without workers
  ripstop version                       print the version

`ripstop run --help` and `ripstop coordinator --help` say more.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return the exit code."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    known = name in ("run", "coordinator")  # a wrong name is in the message already
    try:
        return _dispatch(name, rest)
    except RipstopError as error:
        line = " ".join(str(error).splitlines())
        print(f"ripstop {name}: error: {line}" if known else f"ripstop: error: {line}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # before there was anything to stop, or after all of it was
        return 130


def _dispatch(name: str, rest: Sequence[str]) -> int:
    if sys.platform == "win32":
        raise UsageError("Windows has no fork and no POSIX signals, and ripstop lives by them; use Linux or WSL")
    match name:
        case "run":
            from ripstop.cli import run

            return run.main(rest)
        case "coordinator":
            from ripstop.cli import coordinator

            return coordinator.main(rest)
        case "version" | "--version":
            from ripstop.cli import version

            return version.main(rest)
        case "--help" | "-h" | "help":
            print(USAGE, end="")
            return 0
    remedy = f"ripstop run {name} …" if name.endswith(".py") else "ripstop run, ripstop coordinator or ripstop version"
    raise UsageError(f"{name}: there is no such command; write {remedy}")
