"""What this node does now, as one line for people: what it waits for, since when, and what ends the wait.  Pure."""

from enum import Enum
from typing import TYPE_CHECKING

from msgspec import Struct

from ripstop.agent.machine_state import WorkersState
from ripstop.model.text_formatting import format_elapsed

if TYPE_CHECKING:
    from ripstop.agent.machine import Agent

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


def node_activity(agent: "Agent") -> Activity:
    """What this node does, as far as the machine knows it."""
    round, timing = agent.place.round if agent.place else 0, agent.settings.timing
    match agent.state:
        case WorkersState.RUNNING:
            return Activity(ActivityKind.TRAINING, round=round)
        case WorkersState.STOPPING:
            return Activity(ActivityKind.STOPPING, limit=timing.shutdown, round=round)
        case WorkersState.FAILED:
            return Activity(ActivityKind.CLOSING, f"a worker of round {round} failed; the coordinator decides")
        case WorkersState.SUCCEEDED:
            return Activity(ActivityKind.CLOSING, "all workers of this node exited 0; other nodes still train")
    if agent.is_leaving() or agent.state is WorkersState.OVER:
        return Activity(ActivityKind.CLOSING, "the workers of this node have stopped; waiting for the report")
    if not agent.is_warm:
        return Activity(ActivityKind.WARMING_UP, "importing the modules of the script")
    if not agent.is_connected:
        return Activity(ActivityKind.CONNECTING, agent.connection_error, agent.coordinator_timeout())
    if problems := agent.problem_texts():
        limit = None if agent.passed_health_check else timing.join
        return Activity(ActivityKind.UNHEALTHY, "; ".join(problems), limit)
    return Activity(ActivityKind.WAITING, agent.notice)


def describe_activity(activity: Activity, seconds: float) -> str:
    """The line of an activity that began `seconds` ago; empty if there is nothing to say."""
    kind, detail = activity.kind, activity.detail
    time = format_elapsed(seconds) + (f" of {format_elapsed(activity.limit)}" if activity.limit is not None else "")
    match kind:
        case ActivityKind.TRAINING:
            return f"round {activity.round}, {time}: {detail}" if detail else ""  # the script reports no steps
        case ActivityKind.WAITING:
            return f"{detail or kind.value}; {time} so far"  # the coordinator's message
    return f"{kind.value}, {time}" + (f": {detail}" if detail else "")


def next_activity_line_after(kind: ActivityKind, seconds: float) -> float:
    """After how many seconds of an activity its next log line is due, if `seconds` have passed."""
    due = FIRST_LINES_S.get(kind, FIRST_LINE_S)
    while due <= seconds and due < MAX_INTERVAL_S:
        due *= 2
    return due if due > seconds else due + ((seconds - due) // MAX_INTERVAL_S + 1) * MAX_INTERVAL_S
