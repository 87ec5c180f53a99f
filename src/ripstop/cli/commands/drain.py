"""`ripstop drain`: remove a node from the job."""

from collections.abc import Sequence

from ripstop.cli.job_client import JOB_HELP, Target, find_job, get, parse_command, post
from ripstop.model.errors import UsageError

HELP = f"""\
usage: ripstop drain NODE [FLAGS]

Removes a node: it stops its workers and leaves the job; the other nodes continue.  NODE is a name that `ripstop status`
shows, or an unambiguous prefix of one.
{JOB_HELP}"""


def main(argv: Sequence[str]) -> int:
    command = parse_command("drain", argv, HELP, max_positional=1)
    if not command.positional:
        raise UsageError("NODE is missing; write ripstop drain NODE; ripstop status lists the nodes")
    target = find_job(command.args)
    command.print_result(post(target, "/drain", node=_full_name(target, command.positional[0])))
    return 0


def _full_name(target: Target, prefix: str) -> str:
    names = [node["name"] for node in get(target, "/members")["members"]]
    matching = [name for name in names if name.startswith(prefix)]
    if len(matching) > 1 and prefix not in names:
        raise UsageError(f"{prefix}: ambiguous: {' or '.join(matching)}; write more of the name")
    return matching[0] if len(matching) == 1 else prefix
