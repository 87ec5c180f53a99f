"""`ripstop status` and `ripstop metrics`: show the state of a job."""

from typing import Any

from ripstop.cli.job_client import JOB_HELP, JobCommand, ParsedCommand, table

STATUS_HELP = f"""\
usage: ripstop status [FLAGS]

Shows a job's phase, round, nodes and ranks, and its goodput and the age of its last commit if workers report them.
{JOB_HELP}"""
METRICS_HELP = f"""\
usage: ripstop metrics [FLAGS]

Prints a job's metrics in Prometheus' text format: its history, its state, and the resources its workers use.
{JOB_HELP}"""


def status(command: ParsedCommand) -> None:
    reply = command.find_job().get("/status")
    command.print(render(reply), reply)


def metrics(command: ParsedCommand) -> None:
    text = command.find_job().metrics()
    command.print(text.removesuffix("\n"), {"metrics": text})


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
        *([] if status["commit_age"] is None else [f"last commit {_duration(status['commit_age'])} ago"]),
        *([f"state restored from {' and '.join(status['restored_from'])}"] if status["restored_from"] else []),
    )
    nodes_table = table([_row(node) for node in status["nodes"]], ("NODE", "HOST", "STATE", "RANKS", "ROLE"))
    return f"job {status['run_id']}: {', '.join(facts)}\nreason: {status['why']}\n\n{nodes_table}"


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


COMMANDS = {"status": JobCommand(status, STATUS_HELP), "metrics": JobCommand(metrics, METRICS_HELP)}
