"""The events of a job.  Event files, log lines, metrics, the API and the report are made from them.  Pure.

The coordinator's events are in `job_events.py`, the agents' events are here; other modules import both from here.  An
`EventRecord` is an event with its time, its observer and its sequence number there.

Rules: (1) fields are numbers, texts, and lists of them; (2) the meaning of a kind and the type of a field never change:
new ones are added.
"""

from collections.abc import Callable

from msgspec import Struct

from ripstop.model.event_base import MAX_TEXT, MAX_TRACEBACK, EventBase, RoundEndCause
from ripstop.model.field_types import Int64
from ripstop.model.job_events import (
    BudgetCharged,
    BudgetRefunded,
    HangDiagnosed,
    JobClosed,
    JobClosing,
    JobStarted,
    NodeGone,
    NodeHealthy,
    NodeJoined,
    NodeLeaving,
    NodeQuarantined,
    NodeRejected,
    NodeReleased,
    NodeUnhealthy,
    OperatorAction,
    RankRequestDenied,
    RoundEnded,
    RoundFormed,
    RoundFound,
    RoundResumed,
    ScaleRequested,
    StateReplicated,
    StragglerDetected,
    StragglerEnded,
    UnhealthyNodeRetained,
)

__all__ = [
    "MAX_TEXT",
    "MAX_TRACEBACK",
    "RESTORE_SOURCES",
    "AgentEnded",
    "AgentMessage",
    "AgentStarted",
    "BudgetCharged",
    "BudgetRefunded",
    "CheckpointSaved",
    "Event",
    "EventRecord",
    "FaultEnded",
    "FaultInjected",
    "FirstStep",
    "HangDiagnosed",
    "JobClosed",
    "JobClosing",
    "JobStarted",
    "NodeGone",
    "NodeHealthy",
    "NodeJoined",
    "NodeLeaving",
    "NodeQuarantined",
    "NodeRejected",
    "NodeReleased",
    "NodeUnhealthy",
    "OperatorAction",
    "RankRequestDenied",
    "Recovered",
    "RoundEndCause",
    "RoundEnded",
    "RoundFormed",
    "RoundFound",
    "RoundResumed",
    "ScaleRequested",
    "Sink",
    "StandbyDiscarded",
    "StandbysReady",
    "StateReplicated",
    "StateRestored",
    "StepsDone",
    "StragglerDetected",
    "StragglerEnded",
    "TimersMissed",
    "UnhealthyNodeRetained",
    "WarmedUp",
    "WorkerEvidence",
    "WorkerFailed",
    "WorkerHangs",
    "WorkersStarted",
    "WorkersStopped",
    "WorkersStopping",
    "WorkersSucceeded",
    "kind",
    "max_chars",
]


# an agent's -----------------------------------------------------------------------------------------------------------


class AgentStarted(EventBase, frozen=True):
    """An agent began: its versions, its program without secrets, and its settings that differ from the defaults."""

    run_id: str
    version: str
    python: str
    torch: str
    kernel: str
    host: str
    program: str
    settings: tuple[str, ...]


class WarmedUp(EventBase, frozen=True):
    """Workers can be started: by which method, with which packages preloaded, and why another method is not used.

    `left_out` are imports of the script that every worker does itself, and why.
    """

    start: str
    preloaded: tuple[str, ...]
    seconds: float
    why: str
    left_out: tuple[str, ...] = ()


class WorkersStarted(EventBase, frozen=True):
    """The workers of a round run on this node.

    `pids` are in the order of local ranks; `pause` is the time in seconds since the earlier workers failed.
    """

    round: Int64
    first_rank: Int64
    world_size: Int64
    restarts: Int64
    pids: tuple[Int64, ...]
    seconds: float
    pause: float
    why: str
    standbys: Int64 = 0  # of the workers, how many were standbys


class StandbysReady(EventBase, frozen=True):
    """Standbys have warmed up: all that are ready now, by local rank, and their memory in bytes."""

    local_ranks: tuple[Int64, ...]
    memory: tuple[Int64, ...]
    gpu_memory: tuple[Int64, ...]
    seconds: float


class StandbyDiscarded(EventBase, frozen=True):
    """A standby was not made, or was ended; workers are forked instead."""

    local_rank: Int64
    why: str


class Recovered(EventBase, frozen=True):
    """This node's workers run again; `kept` of them went on in place.  A phase is in seconds, 0 if it was skipped.

    `detect`: from the fault until the agent noticed it.  `decide`: until the agent received its next round.  `stop`:
    until all old workers had exited.  `start`: until the new workers ran.
    """

    round: Int64
    detect: float
    decide: float
    stop: float
    start: float
    kept: Int64 = 0


class FirstStep(EventBase, frozen=True):
    """A worker of this node reported the first step of the round, `seconds` after the workers were started."""

    round: Int64
    rank: Int64
    step: Int64
    seconds: float


class StepsDone(EventBase, frozen=True):
    """A round ended on this node.  A worker reported the steps from `first` to `last`, `seconds` apart."""

    round: Int64
    rank: Int64
    first: Int64
    last: Int64
    seconds: float


class CheckpointSaved(EventBase, frozen=True):
    """A worker reported that it saved a checkpoint of this step."""

    round: Int64
    rank: Int64
    step: Int64
    path: str


RESTORE_SOURCES = ("memory", "peer", "disk")


class StateRestored(EventBase, frozen=True):
    """A worker restored a commit of `train.State`.  A node records the first one of each source."""

    round: Int64
    rank: Int64
    source: str
    step: Int64
    seconds: float


class WorkerFailed(EventBase, frozen=True):
    """A worker failed, or could not be started; the failure report has the evidence."""

    round: Int64
    rank: Int64
    pid: Int64
    why: str


class WorkerEvidence(EventBase, frozen=True):
    """Evidence of a worker that failed or hangs, for the first workers of a node in a round.

    `failed_at` is the time of the exception, the exit or the last progress; `exitcode` is -1 if there is none.  For a
    worker of a round that hangs, `traceback` is its stack, `sign` the symptom (empty: it waits for others), and
    `collectives` its position according to torch's flight recorder.  `files` are the log directory, the error file and
    the file of stacks, if they exist.
    """

    round: Int64
    rank: Int64
    local_rank: Int64
    pid: Int64
    host: str
    failed_at: float
    exitcode: Int64
    signal: str
    message: str
    traceback: str
    oom: str
    log_tail: tuple[str, ...]
    files: tuple[str, ...]
    hangs: bool
    sign: str
    seconds: float
    call: str
    where: str
    waits: bool
    state: str
    collectives: str


class TimersMissed(EventBase, frozen=True):
    """A worker, or one of its child processes, missed the deadline of a timer."""

    round: Int64
    rank: Int64
    pid: Int64
    why: str


class WorkerHangs(EventBase, frozen=True):
    """A worker made no progress for `seconds`.  `sign` is the symptom, `where` the worker's position in the code."""

    round: Int64
    rank: Int64
    pid: Int64
    seconds: float
    sign: str
    where: str


class FaultInjected(EventBase, frozen=True):
    """`ripstop chaos` injects a fault: into the worker of this rank, or into the node (-1).

    `pid` is the worker or the agent.  The agent undoes the fault after `seconds`; 0: there is nothing to undo.
    """

    id: str
    fault: str
    round: Int64
    rank: Int64
    pid: Int64
    seconds: float


class FaultEnded(EventBase, frozen=True):
    """An injected fault is over: it is done, or it has been undone.  `why` says if it ended early or fell short."""

    id: str
    fault: str
    why: str


class WorkersSucceeded(EventBase, frozen=True):
    """All workers of this node exited with code 0."""

    round: Int64


class WorkersStopping(EventBase, frozen=True):
    """This node's workers are being stopped."""

    round: Int64
    why: str


class WorkersStopped(EventBase, frozen=True):
    """All worker processes of this node have exited."""

    round: Int64
    seconds: float


class AgentMessage(EventBase, frozen=True):
    """Another message for operators."""

    text: str


class AgentEnded(EventBase, frozen=True):
    """This node's agent exits with this code."""

    code: Int64
    why: str


Event = (
    JobStarted | NodeJoined | NodeRejected | NodeLeaving | NodeGone
    | NodeUnhealthy | NodeHealthy | NodeQuarantined | NodeReleased | UnhealthyNodeRetained
    | RoundFormed | RankRequestDenied | RoundFound | RoundResumed | RoundEnded
    | BudgetCharged | HangDiagnosed | BudgetRefunded | ScaleRequested | JobClosing | JobClosed | OperatorAction
    | StateReplicated | StragglerDetected | StragglerEnded
    | AgentStarted | WarmedUp | StandbysReady | StandbyDiscarded | WorkersStarted | Recovered | FirstStep | StepsDone
    | CheckpointSaved | StateRestored | WorkerFailed | WorkerEvidence | TimersMissed | WorkerHangs | WorkersSucceeded
    | WorkersStopping | WorkersStopped | FaultInjected | FaultEnded
    | AgentMessage | AgentEnded
)  # fmt: skip


class EventRecord(Struct, frozen=True):
    """An event, its observer (`node`; empty: the coordinator), and the observer's sequence number and wall clock."""

    seq: int
    at: float
    node: str
    event: Event


Sink = Callable[[EventRecord], None]


def kind(event: Event) -> str:
    return str(event.__struct_config__.tag)  # the event's name in files and in the API: `round_formed`


def max_chars(field: str) -> int:
    """How long a text in this field can be."""
    return MAX_TRACEBACK if field == "traceback" else MAX_TEXT
