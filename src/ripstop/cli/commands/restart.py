"""`ripstop restart`: a new round."""

from collections.abc import Sequence

from ripstop.cli.job_client import ABOUT_JOBS, find, post, read_command

HELP = f"""\
usage: ripstop restart [FLAGS]

Stops a job's workers and starts them again, on the same nodes.  It costs none of the job's restarts.
{ABOUT_JOBS}"""


def main(argv: Sequence[str]) -> int:
    if (asked := read_command("restart", argv, HELP)) is None:
        return 0
    asked.tell(post(find(asked.given), "/restart"))
    return 0
