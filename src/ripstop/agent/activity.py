"""What this node does now, as one line for people: what it waits for, since when, and what ends the wait.  Pure."""

from collections.abc import Mapping
from enum import Enum

from msgspec import Struct

from ripstop.diagnostics.progress import WorkerProgress
from ripstop.model.text_formatting import duration

FIRST_LINE_S = 30.0  # after which an activity is logged where there is no live line; then at twice the time
MAX_INTERVAL_S = 600.0  # between two of these lines


class ActivityKind(Enum):
    """The kinds of activities, as people read them."""

    WARMING_UP = "warming up"
    CONNECTING = "waiting for the coordinator"
    UNHEALTHY = "unhealthy"
    WAITING = "without a place"
    GATHERING = "waiting"  # for nodes; the coordinator in this process says for which
    TRAINING = "training"
    STOPPING = "stopping the workers"
    CLOSING = "ending"


FIRST_LINES_S = {ActivityKind.WARMING_UP: 10.0, ActivityKind.STOPPING: 5.0}  # other kinds: FIRST_LINE_S


class Activity(Struct, frozen=True):
    """What this node does.  `limit` is after how many seconds it ends by itself."""

    kind: ActivityKind
    detail: str = ""
    limit: float | None = None
    round: int = 0


def describe(activity: Activity, seconds: float) -> str:
    """The line of an activity that began `seconds` ago; empty if there is nothing to say."""
    kind, detail = activity.kind, activity.detail
    time = elapsed(seconds) + (f" of {elapsed(activity.limit)}" if activity.limit is not None else "")
    match kind:
        case ActivityKind.TRAINING:
            return f"round {activity.round}, {time}: {detail}" if detail else ""  # the script reports no steps
        case ActivityKind.WAITING:
            return f"{detail or kind.value}; {time} so far"  # the coordinator's message
    return f"{kind.value}, {time}" + (f": {detail}" if detail else "")


def next_line_after(kind: ActivityKind, seconds: float) -> float:
    """After how many seconds of an activity its next log line is due, if `seconds` have passed."""
    due = FIRST_LINES_S.get(kind, FIRST_LINE_S)
    while due <= seconds and due < MAX_INTERVAL_S:
        due *= 2
    return due if due > seconds else due + ((seconds - due) // MAX_INTERVAL_S + 1) * MAX_INTERVAL_S


def progress_text(workers: Mapping[int, WorkerProgress]) -> str:
    """The steps of this node's workers; empty if they report none."""
    steps = [worker for worker in workers.values() if worker.step is not None]
    if not steps:
        return ""
    slowest = min(steps, key=lambda worker: worker.step or 0)
    rates = [worker.rate for worker in steps if worker.rate]
    parts = [f"step {slowest.step}"]
    if rates:
        rate = sum(rates) / len(rates)
        parts.append(f"{rate:.1f} steps/s" if rate >= 1 else f"{1 / rate:.1f} s/step")
    ages = [worker.commit_age for worker in steps if worker.commit_age is not None]
    if ages:
        parts.append(f"last commit {elapsed(max(ages))} ago")
    silent = max(worker.step_age or 0.0 for worker in steps)
    if silent > max(10.0, 10 / (min(rates) if rates else 1.0)):
        parts.append(f"no step for {elapsed(silent)}")
    return ", ".join(parts)


def elapsed(seconds: float) -> str:
    """`8 s`, `3 min 20 s`, `1 h 12 min`."""
    return duration(int(seconds)) if seconds >= 10 else f"{int(seconds)} s"
