"""The events of a job.  Event files, log lines, metrics, the API and the report are made from them.  Pure.

An `EventRecord` is an event with its time, its observer and its sequence number there.

Rules: (1) fields are numbers, texts, and lists of them; (2) the meaning of a kind and the type of a field never change:
new ones are added.
"""

from collections.abc import Callable
from enum import StrEnum

from msgspec import Struct

from ripstop.model.field_types import Int64

MAX_TEXT = 1000  # characters of one field
MAX_TRACEBACK = 8192  # characters of a field `traceback`


def _snake_case(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


class _Event(Struct, frozen=True, tag_field="kind", tag=_snake_case):
    """Base of all events: JSON with the class's name in snake case as `kind`."""


class RoundEndCause(StrEnum):
    """Why a round ended."""

    APPLICATION = "application"  # a worker failed
    INFRASTRUCTURE = "infrastructure"  # a worker hung
    NODE_LOST = "node_lost"  # a node was lost
    NODE_LEFT = "node_left"  # a node left the job
    NODE_JOINED = "node_joined"  # a new node joined
    NODE_UNFIT = "node_unfit"  # an unhealthy or quarantined node lost its place
    SCALED = "scaled"  # an operator reduced the number of nodes
    OPERATOR = "operator"  # an operator requested a new round
    COORDINATOR = "coordinator"  # a new coordinator could not continue the round that it found


# the coordinator's ----------------------------------------------------------------------------------------------------


class JobStarted(_Event, frozen=True):
    """A coordinator began to lead the job: its version, the node that runs it (empty: none), and the job's limits."""

    run_id: str
    version: str
    coordinator_node: str
    min_nodes: Int64
    max_nodes: Int64
    max_restarts: Int64


class NodeJoined(_Event, frozen=True):
    """A node joined the job.  It may not be ready yet."""

    name: str
    host: str
    slots: Int64


class NodeRejected(_Event, frozen=True):
    """The coordinator rejected a node."""

    name: str
    why: str


class NodeLeaving(_Event, frozen=True):
    """A node stops its workers and leaves the job."""

    name: str
    why: str


class NodeGone(_Event, frozen=True):
    """A node is no longer part of the job.  `lost`: it was lost; otherwise it left."""

    name: str
    why: str
    lost: bool


class NodeUnhealthy(_Event, frozen=True):
    """A node became unhealthy."""

    name: str
    problems: tuple[str, ...]


class NodeHealthy(_Event, frozen=True):
    """A node is healthy again."""

    name: str


class NodeQuarantined(_Event, frozen=True):
    """A node failed too often and is in quarantine for `seconds`."""

    name: str
    why: str
    seconds: float


class NodeReleased(_Event, frozen=True):
    """A node's quarantine is over."""

    name: str


class UnhealthyNodeRetained(_Event, frozen=True):
    """An unhealthy or quarantined node keeps its place in the round."""

    name: str
    why: str


class RoundFormed(_Event, frozen=True):
    """A new round starts.  `nodes` are in the order of group ranks; `store` is the address of the round's store."""

    round: Int64
    nodes: tuple[str, ...]
    world_size: Int64
    store: str
    restarts: Int64
    why: str


class RankRequestDenied(_Event, frozen=True):
    """A node did not get the group rank that it requested (`--node-rank`)."""

    round: Int64
    name: str
    requested_rank: Int64
    rank: Int64
    why: str


class RoundFound(_Event, frozen=True):
    """A new coordinator found a running round of this many nodes, and waits until they rejoin."""

    round: Int64
    nodes: Int64


class RoundResumed(_Event, frozen=True):
    """All nodes of the round that a new coordinator found have rejoined.  Training was not interrupted."""

    round: Int64
    nodes: Int64


class RoundEnded(_Event, frozen=True):
    """A round is over.  The next one starts as soon as possible, but not before `delay` seconds have passed."""

    round: Int64
    cause: str
    why: str
    delay: float


class BudgetCharged(_Event, frozen=True):
    """A failure or a hang needs a restart.

    `used` of `limit` restarts of its budget are spent.  If not `allowed`, the budget was spent before, and the job
    fails.
    """

    round: Int64
    cause: str
    used: Int64
    limit: Int64
    allowed: bool
    why: str


class HangDiagnosed(_Event, frozen=True):
    """A round hangs, and its nodes were inspected.  `suspects` are the ranks that the others wait for."""

    round: Int64
    suspects: tuple[Int64, ...]
    why: str


class BudgetRefunded(_Event, frozen=True):
    """The last charge is taken back, because the loss of this node caused the failure."""

    round: Int64
    name: str


class ScaleRequested(_Event, frozen=True):
    """An operator requested this number of nodes."""

    nodes: Int64
    accepted: bool
    why: str


class JobClosing(_Event, frozen=True):
    """The job has failed or an operator stopped it.  Agents stop their workers and send evidence."""

    outcome: str
    why: str


class JobClosed(_Event, frozen=True):
    """The job is over."""

    outcome: str
    why: str
    rounds: Int64
    restarts: Int64


class StateReplicated(_Event, frozen=True):
    """Every node of the round has a copy of this commit on another node: the first such commit of the round."""

    round: Int64
    state: str
    commit: Int64
    bytes: Int64


class OperatorAction(_Event, frozen=True):
    """An operator's command, who sent it, and the result."""

    action: str
    by: str
    result: str


# an agent's -----------------------------------------------------------------------------------------------------------


class AgentStarted(_Event, frozen=True):
    """An agent began: its versions, its program without secrets, and its settings that differ from the defaults."""

    run_id: str
    version: str
    python: str
    torch: str
    kernel: str
    host: str
    program: str
    settings: tuple[str, ...]


class WarmedUp(_Event, frozen=True):
    """Workers can be started: by which method, with which packages preloaded, and why another method is not used.

    `left_out` are imports of the script that every worker does itself, and why.
    """

    start: str
    preloaded: tuple[str, ...]
    seconds: float
    why: str
    left_out: tuple[str, ...] = ()


class WorkersStarted(_Event, frozen=True):
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


class StandbysReady(_Event, frozen=True):
    """Standbys have warmed up: all that are ready now, by local rank, and their memory in bytes."""

    local_ranks: tuple[Int64, ...]
    memory: tuple[Int64, ...]
    gpu_memory: tuple[Int64, ...]
    seconds: float


class StandbyDiscarded(_Event, frozen=True):
    """A standby was not made, or was ended; workers are forked instead."""

    local_rank: Int64
    why: str


class Recovered(_Event, frozen=True):
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


class FirstStep(_Event, frozen=True):
    """A worker of this node reported the first step of the round, `seconds` after the workers were started."""

    round: Int64
    rank: Int64
    step: Int64
    seconds: float


class StepsDone(_Event, frozen=True):
    """A round ended on this node.  A worker reported the steps from `first` to `last`, `seconds` apart."""

    round: Int64
    rank: Int64
    first: Int64
    last: Int64
    seconds: float


class CheckpointSaved(_Event, frozen=True):
    """A worker reported that it saved a checkpoint of this step."""

    round: Int64
    rank: Int64
    step: Int64
    path: str


RESTORE_SOURCES = ("memory", "peer", "disk")


class StateRestored(_Event, frozen=True):
    """A worker restored a commit of `train.State`.  A node records the first one of each source."""

    round: Int64
    rank: Int64
    source: str
    step: Int64
    seconds: float


class WorkerFailed(_Event, frozen=True):
    """A worker failed, or could not be started; the failure report has the evidence."""

    round: Int64
    rank: Int64
    pid: Int64
    why: str


class WorkerEvidence(_Event, frozen=True):
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


class TimersMissed(_Event, frozen=True):
    """A worker, or one of its child processes, missed the deadline of a timer."""

    round: Int64
    rank: Int64
    pid: Int64
    why: str


class WorkerHangs(_Event, frozen=True):
    """A worker made no progress for `seconds`.  `sign` is the symptom, `where` the worker's position in the code."""

    round: Int64
    rank: Int64
    pid: Int64
    seconds: float
    sign: str
    where: str


class FaultInjected(_Event, frozen=True):
    """`ripstop chaos` injects a fault: into the worker of this rank, or into the node (-1).

    `pid` is the worker or the agent.  The agent undoes the fault after `seconds`; 0: there is nothing to undo.
    """

    id: str
    fault: str
    round: Int64
    rank: Int64
    pid: Int64
    seconds: float


class FaultEnded(_Event, frozen=True):
    """An injected fault is over: it is done, or it has been undone.  `why` says if it ended early or fell short."""

    id: str
    fault: str
    why: str


class WorkersSucceeded(_Event, frozen=True):
    """All workers of this node exited with code 0."""

    round: Int64


class WorkersStopping(_Event, frozen=True):
    """This node's workers are being stopped."""

    round: Int64
    why: str


class WorkersStopped(_Event, frozen=True):
    """All worker processes of this node have exited."""

    round: Int64
    seconds: float


class AgentMessage(_Event, frozen=True):
    """Another message for operators."""

    text: str


class AgentEnded(_Event, frozen=True):
    """This node's agent exits with this code."""

    code: Int64
    why: str


Event = (
    JobStarted | NodeJoined | NodeRejected | NodeLeaving | NodeGone
    | NodeUnhealthy | NodeHealthy | NodeQuarantined | NodeReleased | UnhealthyNodeRetained
    | RoundFormed | RankRequestDenied | RoundFound | RoundResumed | RoundEnded
    | BudgetCharged | HangDiagnosed | BudgetRefunded | ScaleRequested | JobClosing | JobClosed | OperatorAction
    | StateReplicated
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
