"""The data of a report.  Its JSON has the same fields.  Times are seconds since 1970, durations are seconds.

Rules: new fields are added, and the meaning of a field never changes.  Lists are bounded: `omitted` in `Report` counts
what was left out.
"""

from enum import StrEnum

from msgspec import Struct

FORMAT = 1


class JobResult(StrEnum):
    """How a job ended, as far as its events say."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"  # by an operator
    INTERRUPTED = "interrupted"  # the coordinator's node left, for example because it was preempted
    UNFINISHED = "unfinished"  # the events have no end: the job runs, or its coordinator was killed


class Summary(Struct, frozen=True):
    """The job in short.  `cause` is the root cause of an end that is no success.

    `goodput` and the fields about steps are None if no worker reported a step.
    """

    run_id: str
    result: JobResult
    why: str
    cause: str
    began: float
    ended: float
    seconds: float
    rounds: int
    restarts: int  # new rounds that nobody planned
    charged: int  # failures that the restart budget counted at last
    max_restarts: int | None
    worker_failures: int
    nodes: int
    nodes_lost: int
    world_size: int
    goodput: float | None = None
    last_step: int | None = None
    seconds_per_step: float | None = None
    checkpoints: int = 0
    checkpoint_step: int | None = None
    checkpoint_at: float | None = None


class Phases(Struct, frozen=True):
    """The downtime before a round, by phase, on the node that had no training for longest.

    `wait` is the time in none of the other phases: for nodes, or for the delay before a restart.
    """

    detect: float = 0.0
    decide: float = 0.0
    stop: float = 0.0
    wait: float = 0.0
    start: float = 0.0
    first_step: float = 0.0

    @property
    def total(self) -> float:
        return self.detect + self.decide + self.stop + self.wait + self.start + self.first_step


class Loss(Struct, frozen=True):
    """Time lost to one cause: the downtime after `count` ends of rounds, and the repeated steps."""

    cause: str
    count: int
    phases: Phases
    repeated: float
    repeated_steps: int
    total: float


class TimeSpent(Struct, frozen=True):
    """The time of the job.  `in_steps` and `repeated` are None if no worker reported a step.

    `running` is the time in which workers ran, without their first step: steps, and what a script does besides.
    """

    total: float
    startup: float
    running: float
    downtime: float
    in_steps: float | None
    repeated: float | None
    repeated_steps: int
    losses: tuple[Loss, ...]


class RoundReport(Struct, frozen=True):
    """One round.  `cause` and `why_ended` are empty while it runs; `phases` are the downtime before it.

    `running_at` is its first step, or the start of its workers.  `trained_until` is the fault that ended it, and
    `ended_at` the time at which the coordinator ended it.
    """

    number: int
    formed_at: float
    running_at: float
    trained_until: float
    ended_at: float | None
    nodes: int
    world_size: int
    why: str
    cause: str
    why_ended: str
    phases: Phases
    first_step: int | None = None
    last_step: int | None = None
    seconds_per_step: float | None = None
    repeated: float = 0.0
    repeated_steps: int = 0


class WorkerReport(Struct, frozen=True):
    """A worker that failed or hung.  Texts are empty and numbers None if they are unknown."""

    rank: int
    node: str
    host: str
    at: float
    how: str
    message: str
    pid: int | None = None
    local_rank: int | None = None
    oom: str = ""
    collectives: str = ""
    is_hang: bool = False
    traceback: str = ""
    log_tail: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


class Incident(Struct, frozen=True):
    """A failure, a hang, or the loss of a node: its root cause, and the failures that it explains.

    `root` is None if the cause is a node and not a worker.  `victim_count` includes victims that are left out.
    """

    round: int
    at: float
    cause: str
    title: str
    decision: str
    is_end: bool  # the job ended with it
    node: str
    root: WorkerReport | None
    victims: tuple[WorkerReport, ...]
    victim_count: int
    downtime: float
    repeated: float
    repeated_steps: int


class NodeReport(Struct, frozen=True):
    """One node, and how often it failed; `problems` are the latest failed health checks."""

    name: str
    host: str
    slots: int
    joined_at: float
    gone_at: float | None = None
    is_lost: bool = False
    why_gone: str = ""
    rounds: int = 0
    worker_failures: int = 0
    root_causes: int = 0
    unhealthy: int = 0
    problems: tuple[str, ...] = ()
    quarantines: int = 0
    version: str = ""
    python: str = ""
    torch: str = ""
    kernel: str = ""


class StragglerReport(Struct, frozen=True):
    """Ranks of one node that the others waited for.  `ended_at` is None if the events have no end of it.

    A step took `step_time`; it would have taken `median` if these ranks had been like the median one.
    """

    round: int
    node: str
    ranks: tuple[int, ...]
    at: float
    step_time: float
    median: float
    why: str
    ended_at: float | None = None


class Action(Struct, frozen=True):
    """An operator's command, or another event that changes the job."""

    at: float
    kind: str
    text: str


class Setting(Struct, frozen=True):
    """A setting that differs from its default, and on how many nodes."""

    name: str
    value: str
    nodes: int


class Report(Struct, frozen=True):
    """The whole report; `notes` say what the events do not contain."""

    summary: Summary
    time: TimeSpent
    incidents: tuple[Incident, ...]
    rounds: tuple[RoundReport, ...]
    nodes: tuple[NodeReport, ...]
    actions: tuple[Action, ...]
    programs: tuple[str, ...]
    settings: tuple[Setting, ...]
    versions: tuple[Setting, ...]
    notes: tuple[str, ...]
    omitted: dict[str, int]
    events: int
    format: int = FORMAT
    stragglers: tuple[StragglerReport, ...] = ()
