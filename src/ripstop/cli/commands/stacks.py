"""`ripstop stacks`: where workers are in their code, and in which collectives."""

from collections.abc import Sequence
from typing import Any

from ripstop.cli.job_client import ABOUT_JOBS, find, get, read_command, show_json
from ripstop.diagnostics.flight_recorder import in_words, position
from ripstop.model.failure import CollectiveProgress
from ripstop.model.parsers import integer
from ripstop.model.text import rank_list

HELP = f"""\
usage: ripstop stacks [RANK] [FLAGS]

Shows where workers are in their code at this moment, one or all; they go on.
With --hang-timeout, also in which collectives they are.
{ABOUT_JOBS}"""


def main(argv: Sequence[str]) -> int:
    if (asked := read_command("stacks", argv, HELP, most=1)) is None:
        return 0
    rank = integer("RANK", asked.words[0], minimum=0, maximum=2**31) if asked.words else None
    answer = get(find(asked.given), "/stacks", rank=rank)
    if asked.as_json:
        show_json(answer)
    else:
        print("\n".join(render(answer)))
    return 0


def render(answer: dict[str, Any]) -> list[str]:
    """For people."""
    found: list[str] = []
    recorded: dict[int, list[CollectiveProgress]] = {}
    unrecorded: dict[str, list[int]] = {}  # why, and the ranks: it is often the same of all
    for stack in sorted(answer["stacks"], key=lambda stack: int(stack["rank"])):
        facts = [f"{name}={stack[name]}" for name in ("pid", "state", "wchan", "source") if stack.get(name)]
        found.append(" ".join([f"rank {stack['rank']} on {stack['node']}", *facts]))
        found += [f"  {line}" for line in str(stack.get("stack", "")).splitlines()]
        if "standings" in stack:
            recorded[int(stack["rank"])] = standings = [
                CollectiveProgress(**standing) for standing in stack["standings"]
            ]
            found.append(f"  flight recorder: {position(standings)}")
        elif "recorder" in stack:
            unrecorded.setdefault(str(stack["recorder"]), []).append(int(stack["rank"]))
    if len(recorded) > 1 and (words := in_words(recorded)):
        found.append(f"flight recorder: {words}")
    found += [f"flight recorder of {rank_list(ranks)}: {why}" for why, ranks in unrecorded.items()]
    found += [f"node {silent['node']} did not answer: {silent['why']}" for silent in answer["unanswered"]]
    return found
