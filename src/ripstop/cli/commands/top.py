"""`ripstop top`: show a job live at a terminal."""

import sys

from ripstop.cli.job_client import JOB_FLAGS, JOB_HELP, JobClientCommandLine, JobCommand
from ripstop.model.errors import RipstopError, UsageError

HELP = f"""\
usage: ripstop top [FLAGS]

Shows a job live at a terminal of 80x24 or more: its state, ranks, rounds and events.  Keys show a rank's log and stack,
drain a node and restart the job; `?` lists them.  NO_COLOR turns colours off.

examples
  ripstop top                                             the only job of this user on this machine
  ripstop top --job=job7 --endpoint=head:29400            a job on other machines
{JOB_HELP.replace("  --json                      print JSON" + chr(10), "")}"""
FLAGS = tuple(flag for flag in JOB_FLAGS if flag.name != "--json")


def top(command: JobClientCommandLine) -> None:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("stdin and stdout must be a terminal; use ripstop status and ripstop events -f in a script")
    import curses  # not on every system

    from ripstop.cli.top.job_reader import JobReader
    from ripstop.cli.top.terminal import run_terminal

    reader = JobReader(command.find_job)
    reader.start()
    try:
        run_terminal(reader)
    except curses.error as error:
        raise RipstopError(f"this terminal cannot show it: {error}; set TERM, or use ripstop status") from error


COMMANDS = {"top": JobCommand(top, HELP, FLAGS)}
