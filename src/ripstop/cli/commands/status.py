"""`ripstop status` and `ripstop metrics`: show the state of a job."""

from typing import Any

from ripstop.cli.job_client import JOB_HELP, JobCommand, ParsedCommand, table
from ripstop.model.text_formatting import format_bytes

STATUS_HELP = f"""\
usage: ripstop status [FLAGS]

Shows a job's phase, round, nodes and ranks, and its goodput if workers report their steps.
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
    )
    columns: tuple[str, ...] = ("NODE", "HOST", "STATE", "RANKS", "ROLE")
    rows = [_row(node) for node in status["nodes"]]
    if any(node["standbys"] for node in status["nodes"]):
        columns += ("STANDBYS",)
        rows = [(*row, _standbys(node["standbys"])) for row, node in zip(rows, status["nodes"], strict=True)]
    nodes_table = table(rows, columns)
    return f"job {status['run_id']}: {', '.join(facts)}\nreason: {status['why']}\n\n{nodes_table}"


def _row(node: dict[str, Any]) -> tuple[str, ...]:
    first, last = node["first_rank"], node["first_rank"] + node["slots"] - 1
    ranks = "-" if first < 0 else str(first) if first == last else f"{first}-{last}"
    return node["name"], node["host"], node["state"], ranks, node["role"]


def _standbys(standbys: list[dict[str, Any]]) -> str:
    """Their number and what they hold: `8 (0.1 GiB, GPUs 4.1 GiB)`."""
    if not standbys:
        return "-"
    gpu_memory = sum(each["gpu_memory"] for each in standbys)
    on_gpus = f", GPUs {format_bytes(gpu_memory)}" if gpu_memory else ""
    return f"{len(standbys)} ({format_bytes(sum(each['memory'] for each in standbys))}{on_gpus})"


def _duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


COMMANDS = {"status": JobCommand(status, STATUS_HELP), "metrics": JobCommand(metrics, METRICS_HELP)}
