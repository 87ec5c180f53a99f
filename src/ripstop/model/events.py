"""What happens in a job, as typed events: the one truth behind log, event files, metrics and API.  Pure.

An `EventRecord` is an event with its time, who saw it and its number there.  As text it is one line of JSON: the
envelope
(`v`, `seq`, `at`, `node`, `kind`) and the event's own fields.  `node` is empty for what the coordinator saw.

Rules: (1) fields are numbers, words and lists of them, so that a line is flat; (2) a kind is never given another
meaning, and a field never another type: new ones are added; (3) a reader takes kinds and fields that it does not know,
and passes over what is no entry: a file torn by a crash is still read; (4) numbers are finite, integers have 64 bits
and words can be written as UTF-8, so that no entry, whoever wrote it, breaks what is made of it.
"""

import json
import math
from collections.abc import Callable
from enum import StrEnum
from typing import Any, get_args

from msgspec import Struct, to_builtins
from msgspec.structs import fields

VERSION = 1
MAX_TEXT = 1000  # characters of one field
MAX_LINE = 1 << 20  # characters of one entry
MAX_INT = 1 << 63


class RoundEndCause(StrEnum):
    """Why a round ended, as few words as there are remedies."""

    APPLICATION = "application"  # a worker failed
    INFRASTRUCTURE = "infrastructure"  # it was not the workers' fault
    NODE_LOST = "node_lost"
    NODE_LEFT = "node_left"
    NODE_JOINED = "node_joined"
    NODE_UNFIT = "node_unfit"  # it was unhealthy, or in quarantine, and could be spared
    SCALED = "scaled"  # an operator wanted fewer nodes
    OPERATOR = "operator"  # wanted a new round
    COORDINATOR = "coordinator"  # a coordinator that took over could not go on with the round it found


# the coordinator's ----------------------------------------------------------------------------------------------------


class NodeJoined(Struct, frozen=True):
    """A node is part of the job; it may not be ready yet."""

    name: str
    host: str
    slots: int


class NodeRejected(Struct, frozen=True):
    """A node was not let in."""

    name: str
    why: str


class NodeLeaving(Struct, frozen=True):
    """A node is stopping its workers and going."""

    name: str
    why: str


class NodeGone(Struct, frozen=True):
    """A node is no longer part of the job: it left, or was lost."""

    name: str
    why: str
    lost: bool


class NodeUnhealthy(Struct, frozen=True):
    """A node is not to be counted on, and why."""

    name: str
    problems: tuple[str, ...]


class NodeHealthy(Struct, frozen=True):
    """It is again."""

    name: str


class NodeQuarantined(Struct, frozen=True):
    """A node was at fault too often: others take its place for so many seconds, if they can."""

    name: str
    why: str
    seconds: float


class NodeReleased(Struct, frozen=True):
    """Its quarantine is over."""

    name: str


class UnhealthyNodeRetained(Struct, frozen=True):
    """A node that is unhealthy or in quarantine has a place all the same, and why."""

    name: str
    why: str


class RoundFormed(Struct, frozen=True):
    """A round is committed: who is in it, by group rank, and why there is a new one."""

    round: int
    nodes: tuple[str, ...]
    world_size: int
    store: str
    restarts: int
    why: str


class RankRequestDenied(Struct, frozen=True):
    """A node has another group rank than the one it wished for (`--node-rank`), and why."""

    round: int
    name: str
    wish: int
    rank: int
    why: str


class RoundFound(Struct, frozen=True):
    """A coordinator that knew nothing has heard of a round, and waits for its members."""

    round: int
    nodes: int


class RoundResumed(Struct, frozen=True):
    """All of them are back, and nobody's training was disturbed."""

    round: int
    nodes: int


class RoundEnded(Struct, frozen=True):
    """A round is over; another will be formed when it can, not before `delay` seconds.

    `cause` is the kind of reason and `why` the reason itself.
    """

    round: int
    cause: str
    why: str
    delay: float


class BudgetCharged(Struct, frozen=True):
    """A failure was charged: `used` of `limit` are spent, and whether that allows a restart."""

    round: int
    cause: str
    used: int
    limit: int
    allowed: bool
    why: str


class HangDiagnosed(Struct, frozen=True):
    """A round hangs, and all its nodes were looked at: the ranks that the others wait for, and where everybody is."""

    round: int
    odd: tuple[int, ...]
    why: str


class BudgetRefunded(Struct, frozen=True):
    """The last charge was a mistake: what failed was the victim of this node's loss."""

    round: int
    name: str


class ScaleRequested(Struct, frozen=True):
    """An operator wants the job to have so many nodes."""

    nodes: int
    accepted: bool
    why: str


class JobClosing(Struct, frozen=True):
    """The job has failed or is to end; evidence is coming in."""

    outcome: str
    why: str


class JobClosed(Struct, frozen=True):
    """The job is over."""

    outcome: str
    why: str
    rounds: int
    restarts: int


class OperatorAction(Struct, frozen=True):
    """Somebody changed the job from outside: what, by whom, and what came of it."""

    action: str
    by: str
    result: str


# an agent's -----------------------------------------------------------------------------------------------------------


class WarmedUp(Struct, frozen=True):
    """Workers can be started: how, what they find imported, and why another way was not taken."""

    start: str
    preloaded: tuple[str, ...]
    seconds: float
    why: str


class WorkersStarted(Struct, frozen=True):
    """The workers of a round run on this node; `pids` by local rank, `pause` since the ones before were in trouble."""

    round: int
    first_rank: int
    world_size: int
    restarts: int
    pids: tuple[int, ...]
    seconds: float
    pause: float
    why: str


class Recovered(Struct, frozen=True):
    """This node's workers run again: how long each phase took, in seconds; 0 where it had no part in one.

    detect: from what went wrong until the agent knew.  decide: until it was told what to do.  stop: until nothing was
    left of the old workers.  start: until the new ones ran.
    """

    round: int
    detect: float
    decide: float
    stop: float
    start: float


class FirstStep(Struct, frozen=True):
    """The first step that a worker of this node reported in a round, so long after the workers were started."""

    round: int
    rank: int
    step: int
    seconds: float


class StepsDone(Struct, frozen=True):
    """What a round's workers on this node reported by its end: the first and last step, and the time between."""

    round: int
    rank: int
    first: int
    last: int
    seconds: float


class CheckpointSaved(Struct, frozen=True):
    """A worker says that its state up to this step is safe."""

    round: int
    rank: int
    step: int
    path: str


class WorkerFailed(Struct, frozen=True):
    """A worker died, or could not be started; the report has the evidence."""

    round: int
    rank: int
    pid: int
    why: str


class TimersMissed(Struct, frozen=True):
    """A worker, or a process of its, did not clear its timers in time: which, and what was done about it."""

    round: int
    rank: int
    pid: int
    why: str


class WorkerHangs(Struct, frozen=True):
    """A worker makes no progress: for how long, how that shows, and where it is."""

    round: int
    rank: int
    pid: int
    seconds: float
    sign: str
    where: str


class WorkersSucceeded(Struct, frozen=True):
    """All workers of this node exited 0."""

    round: int


class WorkersStopping(Struct, frozen=True):
    """This node's workers are being stopped."""

    round: int
    why: str


class WorkersStopped(Struct, frozen=True):
    """Nothing is left of them."""

    round: int
    seconds: float


class AgentMessage(Struct, frozen=True):
    """What else an agent's operator should know."""

    text: str


class AgentEnded(Struct, frozen=True):
    """This node's agent is done, with this exit code."""

    code: int
    why: str


Event = (
    NodeJoined | NodeRejected | NodeLeaving | NodeGone
    | NodeUnhealthy | NodeHealthy | NodeQuarantined | NodeReleased | UnhealthyNodeRetained
    | RoundFormed | RankRequestDenied | RoundFound | RoundResumed | RoundEnded
    | BudgetCharged | HangDiagnosed | BudgetRefunded | ScaleRequested | JobClosing | JobClosed | OperatorAction
    | WarmedUp | WorkersStarted | Recovered | FirstStep | StepsDone | CheckpointSaved
    | WorkerFailed | TimersMissed | WorkerHangs | WorkersSucceeded | WorkersStopping | WorkersStopped
    | AgentMessage | AgentEnded
)  # fmt: skip


class EventRecord(Struct, frozen=True):
    """An event, its number at who saw it (`node`; empty: the coordinator), and the wall-clock time there."""

    seq: int
    at: float
    node: str
    event: Event


Sink = Callable[[EventRecord], None]


# as text --------------------------------------------------------------------------------------------------------------


def kind(event: Event) -> str:
    """Its name in files and in the API: `round_formed`."""
    return _KINDS[type(event)]


def to_json(entry: EventRecord) -> str:
    """One line, without its end."""
    return json.dumps(to_dict(entry), separators=(",", ":"), default=str)


def to_dict(entry: EventRecord) -> dict[str, Any]:
    """The envelope and the event, flat.  Long texts are cut."""
    body = {name: _cut(value) for name, value in to_builtins(entry.event).items()}
    return {"v": VERSION, "seq": entry.seq, "at": entry.at, "node": entry.node, "kind": kind(entry.event)} | body


def from_json(line: str) -> EventRecord | None:
    """The entry in a line; None when it is no entry, or of a kind unknown here."""
    record = parse(line)
    cls = _CLASSES.get(record["kind"]) if record else None
    if record is None or cls is None:
        return None
    body = {field.name: record.get(field.name) for field in fields(cls)}
    for field in fields(cls):
        if (value := _read(field.type, body[field.name])) is None:
            return None
        body[field.name] = value
    return EventRecord(record["seq"], record["at"], record["node"], cls(**body))


def parse(line: str) -> dict[str, Any] | None:
    """The line's JSON object, if it has an entry's envelope, of whatever kind."""
    if len(line) > MAX_LINE:
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    envelope = (("v", int), ("seq", int), ("at", float), ("node", str), ("kind", str))
    if any(_read(expected, record.get(name)) is None for name, expected in envelope):
        return None
    return record


def _cut(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if not _is_text(value):
        value = value.encode("utf-8", "replace").decode()
    return value if len(value) <= MAX_TEXT else value[: MAX_TEXT - 1] + "…"


def _read(expected: Any, value: Any) -> Any:
    """The value, if it is of the expected type; None if not."""
    if expected is float and type(value) is int:
        return float(value) if _fits(value) else None
    if expected in (int, float, str, bool):
        return value if type(value) is expected and _fits(value) else None
    if type(value) is not list:
        return None
    element = get_args(expected)[0]
    return tuple(value) if all(type(item) is element and _fits(item) for item in value) else None


def _fits(value: Any) -> bool:
    """Rule 4."""
    match value:
        case str():
            return _is_text(value)
        case float():
            return math.isfinite(value)
        case _:
            return bool(-MAX_INT <= value < MAX_INT)


def _is_text(value: str) -> bool:
    """Not so for what has half of a pair of surrogates, as JSON and file names may."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


_KINDS: dict[type, str] = {cls: _snake(cls.__name__) for cls in get_args(Event)}
_CLASSES: dict[str, type[Any]] = {name: cls for cls, name in _KINDS.items()}


# in words -------------------------------------------------------------------------------------------------------------


def words(event: Event) -> str:
    """The event as an operator's log line, `key=value` where it can be; empty when another event's line says it."""
    match event:
        case NodeJoined(name, host, slots):
            return f"node={name} joined from {host} with {slots} slots"
        case NodeRejected(name, why):
            return f"node={name} rejected: {why}"
        case NodeLeaving(name, why):
            return f"node={name} is leaving: {why}"
        case NodeGone(name, why):
            return f"node={name} {why}"
        case NodeUnhealthy(name, problems):
            return f"node={name} is unhealthy: {'; '.join(problems)}"
        case NodeHealthy(name):
            return f"node={name} is healthy again"
        case NodeQuarantined(name, why, seconds):
            return f"node={name} is in quarantine for {seconds:g} s: {why}"
        case NodeReleased(name):
            return f"node={name} is out of quarantine"
        case UnhealthyNodeRetained(name, why):
            return f"node={name} keeps its place: {why}"
        case RoundFormed(round, nodes, world, store, _, why):
            return f"round={round} nodes={len(nodes)} world={world} store={store} why={why!r}"
        case RankRequestDenied(round, name, wish, rank, why):
            return f"round={round} node={name} has node rank {rank}, not the {wish} it wished for: {why}"
        case RoundFound(round, nodes):
            return f"round={round} is known to its members; waiting for {nodes} nodes"
        case RoundResumed(round, nodes):
            return f"round={round} goes on: all {nodes} nodes are back"
        case HangDiagnosed(round, why=why):
            return f"round={round} hangs: {why}"
        case ScaleRequested(nodes, accepted, why):
            return f"scale to {nodes} nodes" + ("" if accepted else f" refused: {why}")
        case JobClosing(_, why):
            return f"closing: {why}"
        case JobClosed(outcome, why):
            return f"closed: {outcome}: {why}"
        case OperatorAction(action, by, result):
            return f"{action} by {by}: {result}"
        case WarmedUp(start, preloaded, seconds, why):
            what = f" preloaded={','.join(preloaded)}" if preloaded else ""
            return f"start={start}{what} seconds={seconds:.2f}" + (f" why={why!r}" if why else "")
        case WorkersStarted(round, first, world, restarts, pids, seconds, pause, why):
            ranks = f"ranks={first}-{first + len(pids) - 1} world={world} restarts={restarts}"
            paused = f" pause_ms={pause * 1e3:.0f}" if pause else ""
            return f"round={round} {ranks} spawn_ms={seconds * 1e3:.0f}{paused} why={why!r}"
        case CheckpointSaved(round, rank, step, path):
            return f"round={round} rank={rank} checkpoint step={step} path={path}"
        case WorkerFailed(round, rank, pid, why):
            return f"round={round} rank={rank} pid={pid} failed: {why}"
        case TimersMissed(round, rank, pid, why):
            return f"round={round} rank={rank} pid={pid} {why}"
        case WorkerHangs(round, rank, pid, seconds, sign, where):
            return f"round={round} rank={rank} pid={pid} hangs: {sign} for {seconds:.0f} s" + (
                f", {where}" if where else ""
            )
        case WorkersStopping(round, why):
            return f"round={round} stopping: {why}"
        case AgentMessage(text):
            return text
        case _:
            return ""
