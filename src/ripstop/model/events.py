"""The events of a job, their JSON and their log lines.  Event files, metrics and the API are made from them.  Pure.

An `EventRecord` is an event with its time, its observer and its sequence number there.  As JSON it is one flat object
on one line: `v`, `seq`, `at`, `node`, `kind`, and the event's own fields.

Rules: (1) fields are numbers, texts, and lists of them; (2) the meaning of a kind and the type of a field never change:
new ones are added; (3) readers skip unknown kinds, unknown fields and damaged lines, so a file that a crash truncated
is still readable; (4) numbers are finite, integers have 64 bits, and texts are valid Unicode.
"""

from collections.abc import Callable
from enum import StrEnum
from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from ripstop.model.field_types import Int64
from ripstop.model.text_formatting import ascii_json, truncate

VERSION = 1
MAX_TEXT = 1000  # characters of one field
MAX_TRACEBACK = 8192  # characters of a field `traceback`
MAX_LINE = 1 << 20  # characters of one record
MAX_LISTED = 5  # names in one line of the log


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
    """A round hangs, and its nodes were inspected.  `odd` lists the suspect ranks, which the others wait for."""

    round: Int64
    odd: tuple[Int64, ...]
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
    """This node's workers run again.  Each field is the seconds that one phase took; 0 if the node skipped the phase.

    `detect`: from the fault until the agent noticed it.  `decide`: until the agent received its next round.  `stop`:
    until all old workers had exited.  `start`: until the new workers ran.
    """

    round: Int64
    detect: float
    decide: float
    stop: float
    start: float


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


# as text --------------------------------------------------------------------------------------------------------------


class _Header(Struct, frozen=True):
    v: Int64
    seq: Int64
    at: Annotated[float, Meta(lt=2.0**63)]
    node: str


_decode_header = msgspec.json.Decoder(_Header).decode


@cache
def _event_decoder() -> msgspec.json.Decoder[Event]:
    return msgspec.json.Decoder(Event)


LOG_LINES: dict[type[Event], str] = {
    NodeJoined: "node={0.name} joined from {0.host} with {0.slots} slots",
    NodeRejected: "node={0.name} rejected: {0.why}",
    NodeLeaving: "node={0.name} is leaving: {0.why}",
    NodeGone: "node={0.name} {0.why}",
    NodeHealthy: "node={0.name} is healthy again",
    NodeQuarantined: "node={0.name} is in quarantine for {0.seconds:g} s: {0.why}",
    NodeReleased: "node={0.name} is out of quarantine",
    UnhealthyNodeRetained: "node={0.name} keeps its place: {0.why}",
    RankRequestDenied: (
        "round={0.round} node={0.name} has node rank {0.rank}, not the requested {0.requested_rank}: {0.why}"
    ),
    RoundFound: "round={0.round} was reported by an agent; waiting for its {0.nodes} nodes",
    RoundResumed: "round={0.round} continues: all {0.nodes} nodes have rejoined",
    HangDiagnosed: "round={0.round} hangs: {0.why}",
    JobClosing: "closing: {0.why}",
    JobClosed: "closed: {0.outcome}: {0.why}",
    StateReplicated: "round={0.round} state={0.state} commit={0.commit} has copies on other nodes",
    OperatorAction: "{0.action} by {0.by}: {0.result}",
    CheckpointSaved: "round={0.round} rank={0.rank} checkpoint step={0.step} path={0.path}",
    StateRestored: "round={0.round} rank={0.rank} restored step={0.step} from={0.source} seconds={0.seconds:.2f}",
    WorkerFailed: "round={0.round} rank={0.rank} pid={0.pid} failed: {0.why}",
    TimersMissed: "round={0.round} rank={0.rank} pid={0.pid} {0.why}",
    WorkersStopping: "round={0.round} stopping: {0.why}",
    StandbyDiscarded: "standby of local_rank={0.local_rank}: {0.why}",
    AgentMessage: "{0.text}",
}


def log_line(event: Event) -> str:
    """The event's log line, with `key=value` where possible; empty if the line of another event covers it."""
    match event:
        case NodeUnhealthy(name, problems):
            return f"node={name} is unhealthy: {'; '.join(problems)}"
        case RoundFormed(round, nodes, world, store, _, why):
            return f"round={round} nodes={len(nodes)} world={world} store={store} why={why!r}"
        case ScaleRequested(nodes, accepted, why):
            return f"scale to {nodes} nodes" + ("" if accepted else f" rejected: {why}")
        case WarmedUp(start, preloaded, seconds, why, left_out):
            what = f" preloaded={_first_few(preloaded, ',')}" if preloaded else ""
            without = f" left_out={_first_few(left_out, '; ')!r}" if left_out else ""
            return f"start={start}{what} seconds={seconds:.2f}{without}" + (f" why={why!r}" if why else "")
        case StandbysReady(ready, memory, gpu_memory, seconds):
            used = f"memory={sum(memory) >> 20}M gpu_memory={sum(gpu_memory) >> 20}M"
            return f"standbys={len(ready)} ready seconds={seconds:.2f} {used}"
        case WorkersStarted(round, first, world, restarts, pids, seconds, pause, why, standbys):
            ranks = f"ranks={first}-{first + len(pids) - 1} world={world} restarts={restarts}"
            paused = f" pause_ms={pause * 1e3:.0f}" if pause else ""
            taken = f" standbys={standbys}" if standbys else ""
            return f"round={round} {ranks} spawn_ms={seconds * 1e3:.0f}{taken}{paused} why={why!r}"
        case FaultInjected(_, fault, round, rank, pid, seconds):
            target = f"rank={rank} pid={pid}" if rank >= 0 else f"agent pid={pid}"
            return f"round={round} {target} injected fault={fault}" + (f" for {seconds:g} s" if seconds else "")
        case FaultEnded(_, fault, why):
            return f"injected fault={fault} is over" + (f": {why}" if why else "")
        case WorkerHangs(round, rank, pid, seconds, sign, where):
            at = f", {where}" if where else ""
            return f"round={round} rank={rank} pid={pid} hangs: {sign} for {seconds:.0f} s{at}"
    return LOG_LINES.get(type(event), "").format(event)


def kind(event: Event) -> str:
    """The event's name in files and in the API: `round_formed`."""
    return str(event.__struct_config__.tag)


def max_chars(field: str) -> int:
    """How long a text in this field can be."""
    return MAX_TRACEBACK if field == "traceback" else MAX_TEXT


def to_json(record: EventRecord) -> str:
    """One line, without its end.  Long texts are truncated."""
    header = ascii_json(_Header(VERSION, record.seq, record.at, record.node))
    body = ascii_json(record.event)
    if len(body) > MAX_TEXT:
        texts = {name: value for name, value in asdict(record.event).items() if isinstance(value, str)}
        short = {name: truncate(text, max_chars(name)) for name, text in texts.items()}
        body = ascii_json(replace(record.event, **short))
    return f"{header[:-1]},{body[1:]}"


def to_dict(record: EventRecord) -> dict[str, Any]:
    """The same, as a flat dictionary."""
    found: dict[str, Any] = msgspec.json.decode(to_json(record))
    return found


def from_json(line: str) -> EventRecord | None:
    """Read one line.  None if it is not an event record, or has an unknown kind."""
    if len(line) > MAX_LINE:
        return None
    try:
        data = line.encode()
        header = _decode_header(data)
        return EventRecord(header.seq, header.at, header.node, _event_decoder().decode(data))
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return None


def _first_few(texts: tuple[str, ...], separator: str) -> str:
    more = len(texts) - MAX_LISTED
    return separator.join((*texts[:MAX_LISTED], *((f"{more} more",) if more > 0 else ())))
