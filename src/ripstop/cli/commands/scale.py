"""`ripstop scale`: change the number of nodes."""

from collections.abc import Sequence

from ripstop.cli.job_client import JOB_HELP, find_job, parse_command, post
from ripstop.model.config import MAX_NODES
from ripstop.model.errors import UsageError
from ripstop.model.parsers import integer

HELP = f"""\
usage: ripstop scale N [FLAGS]

Sets the number of nodes the job runs on, within its --nnodes=MIN:MAX.  Surplus nodes become spares.  To grow, the job
takes spares and new nodes.
{JOB_HELP}"""


def main(argv: Sequence[str]) -> int:
    command = parse_command("scale", argv, HELP, max_positional=1)
    if not command.positional:
        raise UsageError("N, the number of nodes, is missing; write ripstop scale N")
    nodes = integer("N", command.positional[0], minimum=1, maximum=MAX_NODES)
    command.print_result(post(find_job(command.args), "/scale", nodes=nodes))
    return 0
