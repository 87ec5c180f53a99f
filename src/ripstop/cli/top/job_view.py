"""What `ripstop top` shows of a job, from the API's replies: the ranks with their states, and whether the job is fine.

Pure.  The rules are those of the page (`api/page/model.js`).
"""

from enum import StrEnum
from typing import Any

from msgspec import Struct

SILENT_S = 15.0  # without a heartbeat, or SILENT_STEPS step times if that is longer
SILENT_STEPS = 10
STRAGGLER = 1.5  # times the median step time


class RankState(StrEnum):
    """State of a rank, the worst first."""

    FAILED = "failed"
    HANGS = "hangs"
    SILENT = "silent"
    STRAGGLER = "straggler"
    STARTING = "starting"
    RUNNING = "running"
    DONE = "done"


PROBLEMS = (RankState.FAILED, RankState.HANGS, RankState.SILENT, RankState.STRAGGLER)
UNFIT = ("unhealthy", "quarantined", "absent")
SEVERITY = {state: level for level, state in enumerate(RankState)}


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"


class Rank(Struct, frozen=True):
    """One worker; None means not reported."""

    rank: int
    node: str
    host: str
    pid: int | None
    state: RankState
    step: int | None = None
    step_time: float | None = None
    own_time: float | None = None  # without waiting for others
    age: float | None = None
    memory: int | None = None


class JobView(Struct, frozen=True):
    """A job at one time.  `status` and `usage` are the API's replies; `rounds` are causes of the latest rounds."""

    status: dict[str, Any]
    ranks: tuple[Rank, ...] = ()
    median: float | None = None  # step time
    checkpoint: tuple[int, float] | None = None  # its step, and its age in seconds
    problem: str = ""  # the job cannot be reached
    outcome: str = ""  # it has ended
    rounds: tuple[str, ...] = ()
    events: tuple[str, ...] = ()


def job_view(status: dict[str, Any], usage: dict[str, Any] | None, flags: dict[int, RankState], **more: Any) -> JobView:
    """Combine the replies; `flags` are the states of ranks that events of this round report."""
    columns = usage["ranks"] if usage is not None and usage["round"] == status["round"] else None
    at = {rank: index for index, rank in enumerate(columns["rank"])} if columns else {}
    times = sorted(time for time in columns["step_time"] if time is not None) if columns else []
    median = times[len(times) // 2] if times else None
    slow = {rank for found in status["stragglers"] for rank in found["ranks"]}
    ranks = []
    for node in status["nodes"]:
        for local in range(node["slots"] if node["first_rank"] >= 0 else 0):
            rank = node["first_rank"] + local
            index = at.get(rank)
            names = ("step", "step_time", "own_time", "age", "memory")
            used = {name: columns[name][index] for name in names} if columns and index is not None else {}
            pid = node["pids"][local] if local < len(node["pids"]) else None
            state = flags.get(rank) or _job_view_rank_state(node["state"], pid, used, median, is_slow=rank in slow)
            ranks.append(Rank(rank, node["name"], node["host"], pid, state, **used))
    saved = None
    if usage is not None and usage["checkpoint_at"] is not None:
        saved = usage["checkpoint_step"], max(0.0, usage["at"] - usage["checkpoint_at"])
    return JobView(status, tuple(sorted(ranks, key=lambda rank: rank.rank)), median, saved, **more)


def _job_view_rank_state(
    node: str, pid: int | None, used: dict[str, Any], median: float | None, *, is_slow: bool
) -> RankState:
    if node == "done":
        return RankState.DONE
    if pid is None:
        return RankState.STARTING
    age, step_time = used.get("age"), used.get("step_time")
    if age is not None and age > max(SILENT_S, SILENT_STEPS * (median or 0.0)):
        return RankState.SILENT
    if is_slow or (median and step_time is not None and step_time > STRAGGLER * median):
        return RankState.STRAGGLER
    return RankState.RUNNING


def job_view_verdict(job: JobView) -> tuple[Level, str]:
    """Whether the job is fine, in one line."""
    status = job.status
    if job.outcome:
        return (Level.OK if job.outcome.startswith("succeeded") else Level.BAD), f"ended: {job.outcome}"
    if job.problem:
        return Level.BAD, f"no connection: {job.problem}"
    if status["phase"] != "running":
        return (Level.BAD if status["phase"] == "closing" else Level.WARN), f"{status['phase']}: {status['why']}"
    found = []
    for state in PROBLEMS:
        concerned = [rank.rank for rank in job.ranks if rank.state is state]
        if concerned:
            who = f"rank {concerned[0]}" if len(concerned) == 1 else f"{len(concerned)} ranks"
            found.append(f"{who} {state}" if state is RankState.HANGS else f"{who}: {state}")
    bad = any(rank.state in PROBLEMS[:3] for rank in job.ranks)
    unfit = [node for node in status["nodes"] if node["unfit"] or node["state"] in UNFIT]
    found += [f"node {node['name']}: {node['unfit'] or node['state']}" for node in unfit]
    if 0 < status["max_restarts"] <= status["charged"]:
        found.append("the restart budget is spent")
    if found:
        return (Level.BAD if bad else Level.WARN), "; ".join(found)
    return Level.OK, "running fine"
