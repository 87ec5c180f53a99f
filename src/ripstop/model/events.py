"""The events of a job.  Event files, log lines, metrics, the API and the report are made from them.  Pure.

The coordinator's events are in `job_events.py`, the agents' events are here; other modules import both from here.  An
`EventRecord` is an event with its time, its observer and its sequence number there.

Rules: (1) fields are numbers, texts, and lists of them; (2) the meaning of a kind and the type of a field never change:
new ones are added.
"""

from collections.abc import Callable

from msgspec import Struct

from ripstop.model.event_base import MAX_TEXT, MAX_TRACEBACK, EventBase, RoundEndCause, event_kind, max_event_base_chars
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
    "RECOVERY_PHASES",
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
    "event_kind",
    "max_event_base_chars",
]


# an agent's -----------------------------------------------------------------------------------------------------------


class AgentStarted(EventBase, frozen=True):
    """An agent has started.  `program` is its command line without secrets.

    `settings` are the settings that differ from the defaults.
    """

    run_id: str
    version: str
    python: str
    torch: str
    kernel: str
    host: str
    program: str
    settings: tuple[str, ...]


class WarmedUp(EventBase, frozen=True):
    """The node can start workers.  `start` is the start method, and `preloaded` are the preloaded packages.

    `why` is the reason if the requested start method cannot be used.  `left_out` are the packages that are not
    preloaded, with the reasons.
    """

    start: str
    preloaded: tuple[str, ...]
    seconds: float
    why: str
    left_out: tuple[str, ...] = ()


class WorkersStarted(EventBase, frozen=True):
    """The workers of a round run on this node.

    `pids` are in the order of local ranks.  `seconds` is the time that the start took.  `pause` is the time since the
    fault; 0 if there was none.  `standbys` is the number of workers that were standbys.  `ahead` is the number of these
    that were run-ahead standbys, which had run the script up to its function with `@train.elastic`.
    """

    round: Int64
    first_rank: Int64
    world_size: Int64
    restarts: Int64
    pids: tuple[Int64, ...]
    seconds: float
    pause: float
    why: str
    standbys: Int64 = 0
    ahead: Int64 = 0


class StandbysReady(EventBase, frozen=True):
    """Standbys have warmed up.  The lists have all standbys that are ready now, and their memory in bytes.

    `until` says where each standby waits: `script` (before the script) or `elastic` (before the function with
    `@train.elastic`).
    """

    local_ranks: tuple[Int64, ...]
    memory: tuple[Int64, ...]
    gpu_memory: tuple[Int64, ...]
    seconds: float
    until: tuple[str, ...] = ()


class StandbyDiscarded(EventBase, frozen=True):
    """A standby could not be used, or could not be made.  The zygote forks the worker instead."""

    local_rank: Int64
    why: str


RECOVERY_PHASES = ("detect", "decide", "stop", "wait", "start")  # fields of `Recovered`, in the order of time


class Recovered(EventBase, frozen=True):
    """This node's workers run again.  `kept` is the number of workers that kept their process (in-place recovery).

    The five phases are in seconds; a phase that was skipped is 0.  `detect`: from the fault (the death of a worker, or
    the last progress of a worker that hangs) until the agent noticed it.  `decide`: until the agent received the
    coordinator's decision.  `stop`: until all old workers and their child processes had ended; an in-place recovery
    skips this phase.  `wait`: until the agent received the next round.  `start`: until all workers of this round ran.
    """

    round: Int64
    detect: float
    decide: float
    stop: float
    start: float
    kept: Int64 = 0
    wait: float = 0.0


class FirstStep(EventBase, frozen=True):
    """A worker of this node reported the first step of the round, `seconds` after the workers were started."""

    round: Int64
    rank: Int64
    step: Int64
    seconds: float


class StepsDone(EventBase, frozen=True):
    """A round ended on this node.  In this round, a worker reported the steps from `first` to `last`.

    `seconds` is the time between these two reports.
    """

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
    """A worker restored a commit of `train.State`.  `source` is memory, peer or disk.

    In each round, a node records one such event for each source.
    """

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
    """Evidence of a worker that failed, or of a worker in a round that hangs.

    In each round, a node records at most 8 of these events for failures, and at most 8 for a hang.  `failed_at` is the
    time of the exception, of the exit or of the last progress.  `exitcode` is -1 if there is no exit code.  `oom` says
    whether the kernel killed the worker because memory ran out.  `files` are the log directory, the error file and the
    file of stacks, if they exist.

    If the round hangs, `hangs` is true, and `traceback` is the stack of the worker.  `sign` is the symptom of this
    worker; it is empty if this worker does not hang itself.  `seconds` is the time without progress.  `call` is the
    function that the worker is in, and `where` its file and line; `waits` says whether it waits there for other ranks.
    `state` is the kernel's letter for the state of the process.  `collectives` is the worker's position according to
    torch's flight recorder.
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
    """A worker, or one of its child processes, missed the deadline of a timer (`timer.expires`)."""

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
    """`ripstop chaos` injects a fault into a worker or into a node.  For a node, `rank` is -1.

    `pid` is the process id of the worker or of the agent.  The agent undoes the fault after `seconds`.  If `seconds` is
    0, there is nothing to undo.
    """

    id: str
    fault: str
    round: Int64
    rank: Int64
    pid: Int64
    seconds: float


class FaultEnded(EventBase, frozen=True):
    """An injected fault is over: it is done, or the agent has undone it.

    `why` says whether the fault ended early, or could not be injected completely.
    """

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
    """All workers of this node and their child processes have ended."""

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
