"""`ripstop status` and `ripstop metrics`: show the state of a job."""

import re
from typing import Any

from ripstop.cli.job_client import JOB_FLAGS, JOB_HELP, JobClientCommandLine, JobCommand
from ripstop.cli.options.flags import Flag
from ripstop.model.errors import UsageError
from ripstop.model.text_formatting import format_bytes, format_table, one_line, rank_list

NODE_COLUMNS: tuple[str, ...] = ("NODE", "HOST", "STATE", "RANKS", "ROLE")

STATUS_HELP = f"""\
usage: ripstop status [FLAGS]

Shows a job's phase, round, nodes and ranks, and its goodput and the age of its last commit if workers
report them.

examples
  ripstop status                                          the only job of this user on this machine
  ripstop status --job=job7 --endpoint=head:29400         a job on other machines

output
  --markdown                  print it for a chat, a ticket or a notebook
{JOB_HELP}"""
METRICS_HELP = f"""\
usage: ripstop metrics [FLAGS]

Prints a job's metrics in Prometheus' text format: its history, its state, and the resources its workers use.  A
Prometheus server reads the same text from the coordinator's port, at /metrics.

examples
  ripstop metrics | grep goodput
{JOB_HELP}"""


def status_command(command: JobClientCommandLine) -> None:
    if "--markdown" in command.args and command.as_json:
        raise UsageError("--markdown and --json: only one format can be printed; remove one of them")
    reply = command.find_job().get("/status")
    command.print(render_status_markdown(reply) if "--markdown" in command.args else render_status(reply), reply)


def metrics_command(command: JobClientCommandLine) -> None:
    text = command.find_job().metrics()
    command.print(text.removesuffix("\n"), {"metrics": text})


def render_status(status: dict[str, Any]) -> str:
    columns, rows = _status_node_table(status["nodes"])
    nodes_table = format_table(rows, columns)
    about = [f"reason: {status['why']}", *map(_status_text_of_straggler, status.get("stragglers", ()))]
    lines = "\n".join(about)
    return f"job {status['run_id']}: {', '.join(_status_facts(status))}\n{lines}\n\n{nodes_table}"


def render_status_markdown(status: dict[str, Any]) -> str:
    """A heading line, the reason, and the nodes as a table that GitHub, GitLab, Slack canvases and notebooks show."""
    about = (f"reason: {status['why']}", *map(_status_text_of_straggler, status.get("stragglers", ())))
    facts = [f"- {_status_text_as_markdown(fact)}" for fact in (*_status_facts(status), *about)]
    columns, nodes = _status_node_table(status["nodes"])
    rows = [columns, ("---",) * len(columns), *([_status_text_as_markdown(cell) for cell in row] for row in nodes)]
    lines = [
        f"**ripstop job {_status_text_as_markdown(status['run_id'])}**",
        "",
        *facts,
        "",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines)


def _status_text_as_markdown(text: str) -> str:
    """The text as it is: no character of it is markup, and it stays in its cell."""
    text = one_line(text).replace("\n", " ")
    return re.sub(r"([\\`*_\[\]<>|~@&])", r"\\\1", text)


def _status_facts(status: dict[str, Any]) -> tuple[str, ...]:
    nodes = f"{status['min_nodes']}:{status['max_nodes']}"
    if status["target"] != status["max_nodes"]:
        nodes += f", scaled to {status['target']}"
    return (
        f"{status['phase']} for {_status_duration(status['seconds'])}",
        f"round {status['round']}",
        f"world size {status['world_size']}",
        f"restarts {status['charged']} of {status['max_restarts']}",
        f"nodes {nodes}",
        *map(_status_text_of_replication, status.get("replication", ())),
        *([] if status["goodput"] is None else [f"goodput {status['goodput']:.0%}"]),
        *([] if status["commit_age"] is None else [f"last commit {_status_duration(status['commit_age'])} ago"]),
        *([] if status.get("kept") is None else [f"workers kept in place in the last recovery: {status['kept']}"]),
        *([f"state restored from {' and '.join(status['restored_from'])}"] if status["restored_from"] else []),
    )


def _status_node_table(nodes: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The columns and rows of the table of nodes."""
    columns, rows = NODE_COLUMNS, [_status_node_row(node) for node in nodes]
    if any(node["standbys"] for node in nodes):
        columns += ("STANDBYS",)
        rows = [(*row, _status_text_of_standbys(node["standbys"])) for row, node in zip(rows, nodes, strict=True)]
    return columns, rows


def _status_text_of_replication(copies: dict[str, Any]) -> str:
    if copies["commits"] is None:
        return f"state {copies['state']} has no copies on other nodes"
    behind = f"{copies['commits']} commits and {copies['seconds']:.1f} s behind"
    return f"state {copies['state']} is copied to other nodes ({behind})"


def _status_text_of_straggler(found: dict[str, Any]) -> str:
    longer = f"{found['step_time'] / found['median']:.1f} times as long as the others need"
    times = f"a step takes {found['step_time'] * 1e3:.0f} ms, {longer}"
    since = f"for {_status_duration(found['seconds'])}"
    evidence = f"; {found['evidence']}" if found["evidence"] else ""
    return f"straggler {since}: {rank_list(found['ranks'])} on node {found['node']}: {times}{evidence}"


def _status_node_row(node: dict[str, Any]) -> tuple[str, ...]:
    first, last = node["first_rank"], node["first_rank"] + node["slots"] - 1
    ranks = "-" if first < 0 else str(first) if first == last else f"{first}-{last}"
    return node["name"], node["host"], node["state"], ranks, node["role"]


def _status_text_of_standbys(standbys: list[dict[str, Any]]) -> str:
    """Their number and what they hold: `8 (0.1 GiB, GPUs 4.1 GiB)`.

    `8 elastic` or `8, 2 elastic`: all, or two, have run the script and wait at its function with `@train.elastic`.
    """
    if not standbys:
        return "-"
    gpu_memory = sum(each["gpu_memory"] for each in standbys)
    on_gpus = f", GPUs {format_bytes(gpu_memory)}" if gpu_memory else ""
    run_ahead = sum(each["until"] == "elastic" for each in standbys)
    until = "" if not run_ahead else " elastic" if run_ahead == len(standbys) else f", {run_ahead} elastic"
    return f"{len(standbys)}{until} ({format_bytes(sum(each['memory'] for each in standbys))}{on_gpus})"


def _status_duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


COMMANDS = {
    "status": JobCommand(status_command, STATUS_HELP, (*JOB_FLAGS, Flag("--markdown"))),
    "metrics": JobCommand(metrics_command, METRICS_HELP),
}
