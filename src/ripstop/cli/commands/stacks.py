"""`ripstop stacks`: show workers' stacks, and the collectives they are in."""

from collections.abc import Sequence
from typing import Any

from ripstop.cli.job_client import JOB_HELP, find_job, get, parse_command, print_json
from ripstop.diagnostics.hang_analysis import describe_collectives, describe_position
from ripstop.model.failure import CollectiveProgress
from ripstop.model.parsers import integer
from ripstop.model.text_formatting import rank_list

HELP = f"""\
usage: ripstop stacks [RANK] [FLAGS]

Shows the current stack of one worker or of all.  The workers continue.  With --hang-timeout, also shows the collectives
they are in.
{JOB_HELP}"""


def main(argv: Sequence[str]) -> int:
    command = parse_command("stacks", argv, HELP, max_positional=1)
    rank = integer("RANK", command.positional[0], minimum=0, maximum=2**31) if command.positional else None
    reply = get(find_job(command.args), "/stacks", rank=rank)
    if command.as_json:
        print_json(reply)
    else:
        print("\n".join(render(reply)))
    return 0


def render(reply: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    recorded: dict[int, list[CollectiveProgress]] = {}
    unrecorded: dict[str, list[int]] = {}  # ranks by reason: it is often the same for all
    for stack in sorted(reply["stacks"], key=lambda stack: int(stack["rank"])):
        rank = int(stack["rank"])
        facts = [f"{name}={stack[name]}" for name in ("pid", "state", "wchan", "source") if stack.get(name)]
        lines.append(" ".join([f"rank {rank} on {stack['node']}", *facts]))
        lines += [f"  {line}" for line in str(stack.get("stack", "")).splitlines()]
        if "standings" in stack:
            recorded[rank] = [CollectiveProgress(**progress) for progress in stack["standings"]]
            lines.append(f"  flight recorder: {describe_position(recorded[rank])}")
        elif "recorder" in stack:
            unrecorded.setdefault(str(stack["recorder"]), []).append(rank)
    if len(recorded) > 1 and (difference := describe_collectives(recorded)):
        lines.append(f"flight recorder: {difference}")
    lines += [f"flight recorder of {rank_list(ranks)}: {why}" for why, ranks in unrecorded.items()]
    lines += [f"node {node['node']} did not reply: {node['why']}" for node in reply["unanswered"]]
    return lines
