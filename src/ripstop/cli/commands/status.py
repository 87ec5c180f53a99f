"""`ripstop status`: what a job is at this moment."""

from collections.abc import Sequence
from typing import Any

from ripstop.cli.job_client import ABOUT_JOBS, find, get, read_command, show_json

HELP = f"""\
usage: ripstop status [FLAGS]

Says what a job is at this moment: its phase, its round, its nodes and their ranks, and its goodput where workers
report their steps.
{ABOUT_JOBS}"""


def main(argv: Sequence[str]) -> int:
    if (asked := read_command("status", argv, HELP)) is None:
        return 0
    status = get(find(asked.given), "/status")
    if asked.as_json:
        show_json(status)
    else:
        print(render(status), end="")
    return 0


def render(status: dict[str, Any]) -> str:
    """For people."""
    nodes = f"{status['min_nodes']}:{status['max_nodes']}"
    if status["target"] != status["max_nodes"]:
        nodes += f", scaled to {status['target']}"
    facts = (
        f"{status['phase']} for {_time(status['seconds'])}",
        f"round {status['round']}",
        f"world {status['world_size']}",
        f"restarts {status['charged']} of {status['max_restarts']}",
        f"nodes {nodes}",
        *([] if status["goodput"] is None else [f"goodput {status['goodput']:.0%}"]),
    )
    rows = [("NODE", "HOST", "STATE", "RANKS", "ROLE"), *(_row(node) for node in status["nodes"])]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    table = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join([f"job {status['run_id']}: {', '.join(facts)}", f"why: {status['why']}", "", *table]) + "\n"


def _row(node: dict[str, Any]) -> tuple[str, ...]:
    first, last = node["first_rank"], node["first_rank"] + node["slots"] - 1
    ranks = "-" if first < 0 else str(first) if first == last else f"{first}-{last}"
    return node["name"], node["host"], node["state"], ranks, node["role"]


def _time(seconds: float) -> str:
    whole = int(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
