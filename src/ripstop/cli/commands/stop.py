"""`ripstop stop`: end a job."""

from collections.abc import Sequence

from ripstop.cli.job_client import JOB_FLAGS, JOB_HELP, find_job, parse_command, post
from ripstop.cli.options.flags import Flag

HELP = f"""\
usage: ripstop stop [--why TEXT] [FLAGS]

Ends a job on all its nodes.  Workers get SIGTERM and their --shutdown-timeout; agents print a report and exit with
code 1.

  --why TEXT                  the reason, for the report
{JOB_HELP}"""
FLAGS = (*JOB_FLAGS, Flag("--why", "TEXT", from_environment=False))


def main(argv: Sequence[str]) -> int:
    command = parse_command("stop", argv, HELP, FLAGS)
    command.print_result(post(find_job(command.args), "/stop", why=command.args.text("--why")))
    return 0
