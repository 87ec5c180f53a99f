"""`ripstop stop`: the end of a job."""

from collections.abc import Sequence

from ripstop.cli.job_client import ABOUT_JOBS, COMMON, find, post, read_command
from ripstop.cli.options.flags import Flag

HELP = f"""\
usage: ripstop stop [--why TEXT] [FLAGS]

Ends a job on all its nodes: workers get SIGTERM and their time, and the agents leave with exit code 1 and a report.

  --why TEXT                  for the report
{ABOUT_JOBS}"""
FLAGS = (*COMMON, Flag("--why", "TEXT", from_environment=False))


def main(argv: Sequence[str]) -> int:
    if (asked := read_command("stop", argv, HELP, FLAGS)) is None:
        return 0
    asked.tell(post(find(asked.given), "/stop", why=asked.given.text("--why", "")))
    return 0
