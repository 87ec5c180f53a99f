"""`ripstop stacks`: show workers' stacks, and the collectives they are in."""

from typing import Any

from ripstop.cli.job_client import JOB_HELP, JobClientCommandLine, JobCommand
from ripstop.diagnostics.hang_analysis import describe_hang_position, describe_hung_collectives
from ripstop.model.failure import CollectiveProgress
from ripstop.model.text_formatting import rank_list

HELP = f"""\
usage: ripstop stacks [RANK] [FLAGS]

Shows the current stack of one worker or of all.  The workers continue.  With --hang-timeout, also shows the collectives
they are in.

examples
  ripstop stacks              of all workers
  ripstop stacks 3            of rank 3
{JOB_HELP}"""


def stacks(command: JobClientCommandLine) -> None:
    rank = command.rank()
    reply = command.find_job().get("/stacks", rank=rank)
    command.print("\n".join(render_stacks(reply)), reply)


def render_stacks(reply: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    recorded: dict[int, list[CollectiveProgress]] = {}
    unrecorded: dict[str, list[int]] = {}  # ranks by reason: it is often the same for all
    for stack in sorted(reply["stacks"], key=lambda stack: int(stack["rank"])):
        rank = int(stack["rank"])
        facts = [f"{name}={stack[name]}" for name in ("pid", "state", "wchan", "source") if stack.get(name)]
        lines.append(" ".join([f"rank {rank} on {stack['node']}", *facts]))
        lines += [f"  {line}" for line in str(stack.get("stack", "")).splitlines()]
        if "collectives" in stack:
            recorded[rank] = [CollectiveProgress(**progress) for progress in stack["collectives"]]
            lines.append(f"  flight recorder: {describe_hang_position(recorded[rank])}")
        elif "recorder" in stack:
            unrecorded.setdefault(str(stack["recorder"]), []).append(rank)
    if len(recorded) > 1 and (difference := describe_hung_collectives(recorded)):
        lines.append(f"flight recorder: {difference}")
    lines += [f"flight recorder of {rank_list(ranks)}: {why}" for why, ranks in unrecorded.items()]
    lines += [f"node {node['node']} did not reply: {node['why']}" for node in reply["unanswered"]]
    return lines


COMMANDS = {"stacks": JobCommand(stacks, HELP, max_positional=1)}
