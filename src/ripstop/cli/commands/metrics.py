"""`ripstop metrics`: print a job's metrics."""

from collections.abc import Sequence

from ripstop.cli.job_client import JOB_HELP, find_job, get_text, parse_command, print_json

HELP = f"""\
usage: ripstop metrics [FLAGS]

Prints a job's metrics in Prometheus' text format: its history, its state, and the resources its workers use.
{JOB_HELP}"""


def main(argv: Sequence[str]) -> int:
    command = parse_command("metrics", argv, HELP)
    text = get_text(find_job(command.args), "/metrics")
    if command.as_json:
        print_json({"metrics": text})
    else:
        print(text, end="")
    return 0
