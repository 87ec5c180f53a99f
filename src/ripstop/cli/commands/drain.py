"""`ripstop drain`: a node leaves."""

from collections.abc import Sequence

from ripstop.cli.job_client import ABOUT_JOBS, Target, find, get, post, read_command
from ripstop.model.errors import UsageError

HELP = f"""\
usage: ripstop drain NODE [FLAGS]

Has a node stop its workers and leave the job; the others go on without it.  NODE is a name that `ripstop status` shows,
or a beginning of one that fits no other.
{ABOUT_JOBS}"""


def main(argv: Sequence[str]) -> int:
    if (asked := read_command("drain", argv, HELP, most=1)) is None:
        return 0
    if not asked.words:
        raise UsageError("which node? write ripstop drain NODE; ripstop status lists them")
    target = find(asked.given)
    asked.tell(post(target, "/drain", node=_full(target, asked.words[0])))
    return 0


def _full(target: Target, beginning: str) -> str:
    names = [node["name"] for node in get(target, "/members")["members"]]
    fitting = [name for name in names if name.startswith(beginning)]
    if len(fitting) > 1 and beginning not in names:
        raise UsageError(f"{beginning}: could be {' or '.join(fitting)}; write more of it")
    return fitting[0] if len(fitting) == 1 else beginning
