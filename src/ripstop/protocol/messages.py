"""The messages between agents and the coordinator.

`codec.py` encodes them as JSON.  This module decides nothing.

1. Handshake, started by the coordinator: Challenge → Hello → Welcome | Rejected.
2. The agent then sends `Join`, once for each connection.  After that both sides send at any time.
3. A message about a round has the round's number.
4. A `Join` has the agent's complete state.  So a message that is lost with a connection does no harm, and a coordinator
   that has just started learns the job from its agents.
5. In a job with successors (`election/`), the agent sends `Follow` before its `Join`, and joins after `LeaderElected`.
"""

from enum import StrEnum
from typing import get_args

from msgspec import Struct

from ripstop.model.electorate import Electorate
from ripstop.model.failure import Failure, JobEnd
from ripstop.model.field_types import Int64, Items, RoundNumber
from ripstop.model.job_memory import Memory
from ripstop.model.round import Address, CommitId, Node, Outcome, Place, RankBy

VERSION = 1


class ProtocolMessage(Struct, frozen=True, tag_field="type", tag=True, forbid_unknown_fields=True):
    """Base of all messages: JSON with the class's name as `type`, and no unknown field."""


# the handshake ------------------------------------------------------------------------------------------------------


class Challenge(ProtocolMessage, frozen=True):
    """Coordinator: prove that you have the job's secret."""

    nonce: str


class Hello(ProtocolMessage, frozen=True):
    """Agent: its proof, its name, and a challenge for the coordinator."""

    run_id: str
    node: str
    nonce: str
    proof: str


class Welcome(ProtocolMessage, frozen=True):
    """Coordinator: its proof; `lease` is the heartbeat timeout in seconds, `time` the coordinator's wall clock."""

    proof: str
    lease: float
    time: float


class Rejected(ProtocolMessage, frozen=True):
    """Coordinator: the node is rejected.  If `final`, the agent does not retry."""

    why: str
    final: bool = True


# agent → coordinator ------------------------------------------------------------------------------------------------


class Status(StrEnum):
    """State of an agent's workers in its round."""

    IDLE = "idle"
    RUNNING = "running"
    FAILED = "failed"
    SUCCEEDED = "succeeded"


class Ready(ProtocolMessage, frozen=True):
    """Workers can start at once, and `store_port` listens for the store of a round after round `after`.

    `after` is the highest round the agent knows.  The offer is valid for the connection over which it was sent.
    `replica_port` takes copies of another node's training state; 0: this node takes none.
    """

    store_port: Int64
    after: Int64
    replica_port: Int64 = 0


class Join(ProtocolMessage, frozen=True):
    """The agent joins or rejoins the job, and reports its complete state.

    `min_nodes`, `max_nodes` and `rank_by` are this agent's settings; they must be the same on all nodes.  `newest` is
    the highest round and `restarts` the highest restart count that the agent knows.  `held` is the round whose workers
    run here, or start as soon as older ones have stopped.  `closing` is the last `Closing` received, perhaps from an
    earlier coordinator.  `problems` are the failed health checks, which run every `health_interval` seconds;
    `problems_version` counts their changes.
    """

    node: Node
    min_nodes: Int64
    max_nodes: Int64
    rank_by: RankBy = RankBy.JOIN
    newest: RoundNumber = 0
    restarts: Int64 = 0
    ready: Ready | None = None
    held: Place | None = None
    status: Status = Status.IDLE
    failures: Items[Failure] = ()
    closing: "Closing | None" = None
    problems: Items[str] = ()
    health_interval: float = 30.0
    problems_version: Int64 = 0


class Problems(ProtocolMessage, frozen=True):
    """The health checks that fail now; empty if the node is healthy.  `version` counts the changes."""

    problems: Items[str] = ()
    version: Int64 = 0


class Failed(ProtocolMessage, frozen=True):
    """Workers of this round failed."""

    round: Int64
    failures: Items[Failure]


class Inspected(ProtocolMessage, frozen=True):
    """Reply to `Inspect`: where the workers of this round are; empty if there are none."""

    round: Int64
    failures: Items[Failure] = ()


class PeerLost(ProtocolMessage, frozen=True):
    """A worker that can go on in place has lost its connection to a peer, and waits for the next round."""

    round: Int64


class Succeeded(ProtocolMessage, frozen=True):
    """All workers of this round exited with code 0."""

    round: Int64


class Leaving(ProtocolMessage, frozen=True):
    """The agent was asked to stop and is stopping its workers.  It takes part in no further round.

    `is_planned`: its workers go on until the round has a final commit (`MakeFinalCommit`), or a deadline has passed.
    `is_saved_to_disk`: the nodes write that commit to disk, so that it is of use even if no node goes on.
    """

    why: str
    is_planned: bool = False
    is_saved_to_disk: bool = False


class FinalCommit(Struct, frozen=True, forbid_unknown_fields=True):
    """The final commit of a State in a round; `needs_copies`: it is not known to be equal on all ranks."""

    state: str
    number: Int64
    needs_copies: bool = True


class FinalCommitMade(ProtocolMessage, frozen=True):
    """Reply to `MakeFinalCommit`: all workers of this node wait after the round's final commit; or why they do not."""

    round: Int64
    commits: Items[FinalCommit] = ()
    why_not: str = ""


class StateLost(ProtocolMessage, frozen=True):
    """Workers of this round went on in place, and no commit can be restored: the next round needs new processes."""

    round: Int64
    why: str


class Stopped(ProtocolMessage, frozen=True):
    """Reply to `Closing`: all workers have stopped, with these failures."""

    failures: Items[Failure] = ()


class Left(ProtocolMessage, frozen=True):
    """The agent leaves the job.  This is its last message."""

    why: str


class Events(ProtocolMessage, frozen=True):
    """Event records of this node as lines of JSON (`model/events.py`).  Some may have been sent before."""

    lines: Items[str]


class Reply(ProtocolMessage, frozen=True):
    """Reply to the `Query` with this number: JSON, or the reason why there is none."""

    number: Int64
    body: str = ""
    error: str = ""


class Replicated(ProtocolMessage, frozen=True):
    """The commits of a `train.State` on this node: the newest, and the set of this round that its partner has copied.

    0: none.  `missed` is the set that the workers passed before they learned that they must keep it.  `size` is how
    many bytes were copied for the set.
    """

    round: Int64
    state: str
    newest: Int64
    copied: Int64 = 0
    missed: Int64 = 0
    size: Int64 = 0


class Remember(ProtocolMessage, frozen=True):
    """Coordinator: keep this.  Agent, before its `Join`: this is what a coordinator sent `age` seconds ago."""

    memory: Memory
    age: float = 0.0


class Heartbeat(ProtocolMessage, frozen=True):
    """The sender is alive.  An agent asks for an answer with all or some of its heartbeats."""

    wants_answer: bool = True


# succession: agent → candidate or coordinator -------------------------------------------------------------------------


class Follow(ProtocolMessage, frozen=True):
    """The agent looks for a coordinator.

    `epoch` is the highest that it has promised, and `candidate` the node to which.  `electorate` is the newest that it
    knows, and `listed_address` the address of `--rdzv-endpoint` at which it listens, if any.
    """

    epoch: Int64
    candidate: str
    electorate: Electorate
    listed_address: str = ""


class Promise(ProtocolMessage, frozen=True):
    """Reply to `RequestPromise`: the agent will never follow a lower epoch, and for one lease no other candidate.

    `former` is the coordinator that it followed before; `is_lost`: that process has ended, or sent nothing for a lease.
    """

    epoch: Int64
    number: Int64
    electorate: Electorate
    former: str = ""
    is_lost: bool = False


class Renewed(ProtocolMessage, frozen=True):
    """Reply to `Renew`: for one lease, the agent promises no other candidate.  It keeps the electorate."""

    epoch: Int64
    number: Int64


# coordinator → agent ------------------------------------------------------------------------------------------------


class Assign(ProtocolMessage, frozen=True):
    """A round is committed and this is the node's place in it.  The agent stops workers of older rounds."""

    place: Place
    why: str


class StandBy(ProtocolMessage, frozen=True):
    """The node has no place now.  The agent stops workers of this round and of older ones, and waits."""

    round: Int64
    why: str


class Drain(ProtocolMessage, frozen=True):
    """An operator drains the node: the agent stops its workers and leaves."""

    why: str


class MakeFinalCommit(ProtocolMessage, frozen=True):
    """A node leaves this round: its ranks make one more commit, after the same step, and wait for the round's end."""

    round: Int64


class Inspect(ProtocolMessage, frozen=True):
    """This round hangs on another node: report where this node's workers are, before they are stopped."""

    round: Int64


class Query(ProtocolMessage, frozen=True):
    """An operator's query.  The agent sends a `Reply` with the same number.

    A query changes nothing.  The exception is a fault to inject (`agent/fault_injector.py`).
    """

    number: Int64
    name: str
    argument: str = ""


class Replicate(ProtocolMessage, frozen=True):
    """Copy commit `number` of this round to the partner, and keep it until a newer set is complete.

    `complete` is the newest commit that every node of its round has copied.  It is kept; older
    ones can be freed.  None: the coordinator knows of none, and nothing is freed.
    """

    round: Int64
    state: str
    number: Int64
    complete: CommitId | None = None


class Closing(ProtocolMessage, frozen=True):
    """The job has failed or is ending: the agent stops its workers and sends `Stopped`."""

    why: str
    outcome: Outcome = Outcome.FAILED


class Closed(ProtocolMessage, frozen=True):
    """The job is over."""

    report: JobEnd


# succession: candidate or coordinator → agent -------------------------------------------------------------------------


class RequestPromise(ProtocolMessage, frozen=True):
    """This node wants to be the coordinator in this epoch.  The reply has the same number."""

    epoch: Int64
    number: Int64
    node: str


class LeaderElected(ProtocolMessage, frozen=True):
    """This node is the coordinator in this epoch: the agent sends its `Join`."""

    epoch: Int64
    node: str


class Redirect(ProtocolMessage, frozen=True):
    """The coordinator is at this address, which must be one of `--rdzv-endpoint`."""

    address: Address


class Renew(ProtocolMessage, frozen=True):
    """The coordinator asks a voter to renew its promise.  None: the voter has the electorate."""

    epoch: Int64
    number: Int64
    electorate: Electorate | None = None


Handshake = Challenge | Hello | Welcome | Rejected
FromAgent = (
    Join | Ready | Problems | Failed | PeerLost | Inspected | Succeeded | Leaving | Stopped | Left | Events | Reply
    | Replicated | FinalCommitMade | StateLost | Heartbeat | Remember | Follow | Promise | Renewed
)  # fmt: skip
FromCoordinator = (
    Assign | StandBy | Drain | MakeFinalCommit | Inspect | Query | Replicate | Closing | Closed | Rejected | Heartbeat
    | Remember | RequestPromise | LeaderElected | Redirect | Renew
)  # fmt: skip
Message = Handshake | FromAgent | FromCoordinator

FROM_AGENT: tuple[type[FromAgent], ...] = get_args(FromAgent)
FROM_COORDINATOR: tuple[type[FromCoordinator], ...] = get_args(FromCoordinator)
