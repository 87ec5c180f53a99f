"""`ripstop metrics`: a job in numbers."""

from collections.abc import Sequence

from ripstop.cli.job_client import ABOUT_JOBS, find, page, read_command, show_json

HELP = f"""\
usage: ripstop metrics [FLAGS]

Prints the page that Prometheus reads: what happened in a job, what it is doing, and what its workers use.
{ABOUT_JOBS}"""


def main(argv: Sequence[str]) -> int:
    if (asked := read_command("metrics", argv, HELP)) is None:
        return 0
    text = page(find(asked.given), "/metrics")
    if asked.as_json:
        show_json({"metrics": text})
    else:
        print(text, end="")
    return 0
