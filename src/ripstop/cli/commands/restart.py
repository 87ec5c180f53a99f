"""`ripstop restart`: restart all workers."""

from collections.abc import Sequence

from ripstop.cli.job_client import JOB_HELP, find_job, parse_command, post

HELP = f"""\
usage: ripstop restart [FLAGS]

Restarts all workers of a job on the same nodes, as a new round.  Does not count against --max-restarts.
{JOB_HELP}"""


def main(argv: Sequence[str]) -> int:
    command = parse_command("restart", argv, HELP)
    command.print_result(post(find_job(command.args), "/restart"))
    return 0
