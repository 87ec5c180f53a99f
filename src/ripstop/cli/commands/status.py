"""`ripstop status`: show the state of a job."""

from collections.abc import Sequence
from typing import Any

from ripstop.cli.job_client import JOB_HELP, find_job, get, parse_command, print_json

HELP = f"""\
usage: ripstop status [FLAGS]

Shows a job's phase, round, nodes and ranks, and its goodput if workers report their steps.
{JOB_HELP}"""


def main(argv: Sequence[str]) -> int:
    command = parse_command("status", argv, HELP)
    status = get(find_job(command.args), "/status")
    if command.as_json:
        print_json(status)
    else:
        print(render(status), end="")
    return 0


def render(status: dict[str, Any]) -> str:
    nodes = f"{status['min_nodes']}:{status['max_nodes']}"
    if status["target"] != status["max_nodes"]:
        nodes += f", scaled to {status['target']}"
    facts = (
        f"{status['phase']} for {_duration(status['seconds'])}",
        f"round {status['round']}",
        f"world size {status['world_size']}",
        f"restarts {status['charged']} of {status['max_restarts']}",
        f"nodes {nodes}",
        *([] if status["goodput"] is None else [f"goodput {status['goodput']:.0%}"]),
    )
    rows = [("NODE", "HOST", "STATE", "RANKS", "ROLE"), *(_row(node) for node in status["nodes"])]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    table = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join([f"job {status['run_id']}: {', '.join(facts)}", f"reason: {status['why']}", "", *table]) + "\n"


def _row(node: dict[str, Any]) -> tuple[str, ...]:
    first, last = node["first_rank"], node["first_rank"] + node["slots"] - 1
    ranks = "-" if first < 0 else str(first) if first == last else f"{first}-{last}"
    return node["name"], node["host"], node["state"], ranks, node["role"]


def _duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
