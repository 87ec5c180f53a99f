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
MAX_LINE = 1 << 20  # characters of one record


def _snake_case(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


class _Event(Struct, frozen=True, tag_field="kind", tag=_snake_case):
    """Base of all events: JSON with the class's name in snake case as `kind`."""


class RoundEndCause(StrEnum):
    """Why a round ended."""

    APPLICATION = "application"  # a worker failed
    INFRASTRUCTURE = "infrastructure"  # not a fault of the workers
    NODE_LOST = "node_lost"
    NODE_LEFT = "node_left"
    NODE_JOINED = "node_joined"
    NODE_UNFIT = "node_unfit"  # an unhealthy or quarantined node was replaced
    SCALED = "scaled"  # an operator reduced the number of nodes
    OPERATOR = "operator"  # an operator requested a new round
    COORDINATOR = "coordinator"  # a new coordinator could not continue the round it found


# the coordinator's ----------------------------------------------------------------------------------------------------


class NodeJoined(_Event, frozen=True):
    """A node joined the job; it may not be ready yet."""

    name: str
    host: str
    slots: Int64


class NodeRejected(_Event, frozen=True):
    """A node was rejected."""

    name: str
    why: str


class NodeLeaving(_Event, frozen=True):
    """A node is stopping its workers and leaves the job."""

    name: str
    why: str


class NodeGone(_Event, frozen=True):
    """A node is no longer part of the job: it left, or was lost."""

    name: str
    why: str
    lost: bool


class NodeUnhealthy(_Event, frozen=True):
    """Health checks of a node fail."""

    name: str
    problems: tuple[str, ...]


class NodeHealthy(_Event, frozen=True):
    """A node is healthy again."""

    name: str


class NodeQuarantined(_Event, frozen=True):
    """A node failed too often: for `seconds`, other nodes replace it where possible."""

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
    """A round is committed; `nodes` are sorted by group rank, `store` is the address of the round's store."""

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
    """A new coordinator found a running round, and waits for its nodes to rejoin."""

    round: Int64
    nodes: Int64


class RoundResumed(_Event, frozen=True):
    """All nodes of the round that was found have rejoined; training was not interrupted."""

    round: Int64
    nodes: Int64


class RoundEnded(_Event, frozen=True):
    """A round is over.  The next one is formed as soon as possible, but not before `delay` seconds."""

    round: Int64
    cause: str
    why: str
    delay: float


class BudgetCharged(_Event, frozen=True):
    """A failure was charged to the restart budget: `used` of `limit` are spent; `allowed`: the job restarts."""

    round: Int64
    cause: str
    used: Int64
    limit: Int64
    allowed: bool
    why: str


class HangDiagnosed(_Event, frozen=True):
    """A round hangs and all its nodes were inspected: `odd` are the ranks that the others wait for."""

    round: Int64
    odd: tuple[Int64, ...]
    why: str


class BudgetRefunded(_Event, frozen=True):
    """The last charge is taken back: the failure was caused by the loss of this node."""

    round: Int64
    name: str


class ScaleRequested(_Event, frozen=True):
    """An operator requested this number of nodes."""

    nodes: Int64
    accepted: bool
    why: str


class JobClosing(_Event, frozen=True):
    """The job has failed or is ending; agents stop their workers and send evidence."""

    outcome: str
    why: str


class JobClosed(_Event, frozen=True):
    """The job is over."""

    outcome: str
    why: str
    rounds: Int64
    restarts: Int64


class OperatorAction(_Event, frozen=True):
    """An operator's command: who sent it, and the result."""

    action: str
    by: str
    result: str


# an agent's -----------------------------------------------------------------------------------------------------------


class WarmedUp(_Event, frozen=True):
    """Workers can be started: by which method, with which modules preloaded, and why another method is not used."""

    start: str
    preloaded: tuple[str, ...]
    seconds: float
    why: str


class WorkersStarted(_Event, frozen=True):
    """The workers of a round run on this node; `pids` by local rank, `pause` seconds after the earlier ones failed."""

    round: Int64
    first_rank: Int64
    world_size: Int64
    restarts: Int64
    pids: tuple[Int64, ...]
    seconds: float
    pause: float
    why: str


class Recovered(_Event, frozen=True):
    """This node's workers run again: the seconds that each phase took; 0 for a phase without this node.

    detect: from the fault until the agent noticed it.  decide: until the agent received its next round.  stop: until
    all old workers had exited.  start: until the new workers ran.
    """

    round: Int64
    detect: float
    decide: float
    stop: float
    start: float


class FirstStep(_Event, frozen=True):
    """The first step that a worker of this node reported in a round, `seconds` after the workers were started."""

    round: Int64
    rank: Int64
    step: Int64
    seconds: float


class StepsDone(_Event, frozen=True):
    """A round ended on this node: the first and last step that its workers reported, and the time between."""

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


class TimersMissed(_Event, frozen=True):
    """A worker, or one of its child processes, missed the deadline of a timer."""

    round: Int64
    rank: Int64
    pid: Int64
    why: str


class WorkerHangs(_Event, frozen=True):
    """A worker made no progress for `seconds`: `sign` is the symptom, `where` its position in the code."""

    round: Int64
    rank: Int64
    pid: Int64
    seconds: float
    sign: str
    where: str


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
    NodeJoined | NodeRejected | NodeLeaving | NodeGone
    | NodeUnhealthy | NodeHealthy | NodeQuarantined | NodeReleased | UnhealthyNodeRetained
    | RoundFormed | RankRequestDenied | RoundFound | RoundResumed | RoundEnded
    | BudgetCharged | HangDiagnosed | BudgetRefunded | ScaleRequested | JobClosing | JobClosed | OperatorAction
    | WarmedUp | WorkersStarted | Recovered | FirstStep | StepsDone | CheckpointSaved | StateRestored
    | WorkerFailed | TimersMissed | WorkerHangs | WorkersSucceeded | WorkersStopping | WorkersStopped
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
    OperatorAction: "{0.action} by {0.by}: {0.result}",
    CheckpointSaved: "round={0.round} rank={0.rank} checkpoint step={0.step} path={0.path}",
    StateRestored: "round={0.round} rank={0.rank} restored step={0.step} from={0.source} seconds={0.seconds:.2f}",
    WorkerFailed: "round={0.round} rank={0.rank} pid={0.pid} failed: {0.why}",
    TimersMissed: "round={0.round} rank={0.rank} pid={0.pid} {0.why}",
    WorkersStopping: "round={0.round} stopping: {0.why}",
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
        case WarmedUp(start, preloaded, seconds, why):
            what = f" preloaded={','.join(preloaded)}" if preloaded else ""
            return f"start={start}{what} seconds={seconds:.2f}" + (f" why={why!r}" if why else "")
        case WorkersStarted(round, first, world, restarts, pids, seconds, pause, why):
            ranks = f"ranks={first}-{first + len(pids) - 1} world={world} restarts={restarts}"
            paused = f" pause_ms={pause * 1e3:.0f}" if pause else ""
            return f"round={round} {ranks} spawn_ms={seconds * 1e3:.0f}{paused} why={why!r}"
        case WorkerHangs(round, rank, pid, seconds, sign, where):
            at = f", {where}" if where else ""
            return f"round={round} rank={rank} pid={pid} hangs: {sign} for {seconds:.0f} s{at}"
    return LOG_LINES.get(type(event), "").format(event)


def kind(event: Event) -> str:
    """The event's name in files and in the API: `round_formed`."""
    return str(event.__struct_config__.tag)


def to_json(record: EventRecord) -> str:
    """One line, without its end.  Long texts are truncated."""
    header = ascii_json(_Header(VERSION, record.seq, record.at, record.node))
    body = ascii_json(record.event)
    if len(body) > MAX_TEXT:
        texts = {name: value for name, value in asdict(record.event).items() if isinstance(value, str)}
        body = ascii_json(replace(record.event, **{name: truncate(text, MAX_TEXT) for name, text in texts.items()}))
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
