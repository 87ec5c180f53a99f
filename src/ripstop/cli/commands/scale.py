"""`ripstop scale`: another number of nodes."""

from collections.abc import Sequence

from ripstop.cli.job_client import ABOUT_JOBS, find, post, read_command
from ripstop.model.config import MAX_NODES
from ripstop.model.errors import UsageError
from ripstop.model.parsers import integer

HELP = f"""\
usage: ripstop scale N [FLAGS]

Has a job run on N nodes, between the two numbers of its --nnodes.  Nodes beyond that become spares; a job that is to
grow takes spares and nodes that come.
{ABOUT_JOBS}"""


def main(argv: Sequence[str]) -> int:
    if (asked := read_command("scale", argv, HELP, most=1)) is None:
        return 0
    if not asked.words:
        raise UsageError("to how many nodes? write ripstop scale N")
    asked.tell(post(find(asked.given), "/scale", nodes=integer("N", asked.words[0], minimum=1, maximum=MAX_NODES)))
    return 0
