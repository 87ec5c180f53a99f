"""The one configuration, frozen.

Flags, environment variables and API calls become a `RunConfig`; nobody reads settings anywhere else.  How a value is
written is in `spelling.py`; which flags there are and how they go together, in `cli/commands/run.py` and
`cli/options/rendezvous.py`.
"""

from enum import Enum, IntFlag
from pathlib import Path

from msgspec import Struct, field

from ripstop.model.redacted import Redacted
from ripstop.model.round import Address, RankBy

COORDINATOR_PORT = 29400
API_PORT = 29480
ETCD_PORT = 2379
ETCD_PREFIX = "/ripstop"
MASTER_PORT = 29500
MOST_NODES = 100_000
MOST_SLOTS = 4_096


class Script(Struct, frozen=True):
    """`python -u path args…`."""

    path: str
    args: tuple[str, ...] = ()


class Module(Struct, frozen=True):
    """`python -u -m name args…`."""

    name: str
    args: tuple[str, ...] = ()


class Executable(Struct, frozen=True):
    """Any program: `argv[0]` is looked up on PATH."""

    argv: tuple[str, ...]


class Function(Struct, frozen=True):
    """A pickled `(callable, args)` in the file `call`; the pickled return value goes to the file `result`."""

    call: Path
    result: Path


Entrypoint = Script | Module | Executable | Function


class StartMethod(Enum):
    """How workers come to life."""

    ZYGOTE = "zygote"  # forked from a process that has imported what they need
    EXEC = "exec"  # a new interpreter each


class OutputStreams(IntFlag):
    """Which of a worker's output streams; the numbers are torchrun's."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


class StreamMap(Struct, frozen=True):
    """A choice of streams for every local rank, with exceptions."""

    default: OutputStreams = OutputStreams.NONE
    by_rank: tuple[tuple[int, OutputStreams], ...] = ()

    def of(self, local_rank: int) -> OutputStreams:
        return dict(self.by_rank).get(local_rank, self.default)


class Logs(Struct, frozen=True):
    """Where workers' output goes.  `directory` None: a new one below the system's temporary directory.

    A line on its way to the console that holds one of a stream's `*_filters` also goes to a file of such lines.
    """

    directory: Path | None = None
    redirects: StreamMap = field(default_factory=StreamMap)
    tee: StreamMap = field(default_factory=StreamMap)
    shown: frozenset[int] | None = None  # local ranks whose output the console gets; None: all
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    prefix: str = "[${role_name}${local_rank}]:"  # of each line that is teed
    specs: str = ""  # the plugin that says where output goes; "": none
    kept: bool = True  # False: the files are gone with the job, however it ends


class Budget(Struct, frozen=True):
    """How many failures are healed: `max_restarts` in any `window` seconds (0: in the whole run).

    `backoff` is the longest pause before a restart when rounds keep dying young; 0 restarts at once, always.  Hangs are
    counted apart: `max_infra_restarts` of them in any `infra_window` seconds.
    """

    max_restarts: int = 0
    window: float = 0.0
    backoff: float = 30.0
    max_infra_restarts: int = 3
    infra_window: float = 3600.0


class Timing(Struct, frozen=True):
    """Seconds the rendezvous waits, for what."""

    last_call: float = 30.0  # for more nodes before the first round, once the minimum is ready
    join: float = 600.0  # for the minimum, and at first for the coordinator
    lease: float = 3.0  # for a word from a silent peer
    coordinator: float = 600.0  # for a coordinator that has gone away
    shutdown: float = 30.0  # for workers to stop by themselves after SIGTERM


class HealthLimits(Struct, frozen=True):
    """When this node is good enough for the job; looked at before it joins, and then every `interval` seconds.

    `command` is the user's own check, which may take as long as `interval`; none when empty.  0 bytes of disk, 0
    seconds of clock: that check is off.
    """

    command: tuple[str, ...] = ()
    interval: float = 30.0
    min_disk: int = 32 << 20  # bytes free where logs and temporary files go
    max_skew: float = 60.0  # seconds between this node's clock and the coordinator's, when it joins


class QuarantineLimits(Struct, frozen=True):
    """A node at fault `failures` times in `window` seconds is out of the job for `cooldown`; 0 failures: never."""

    failures: int = 3
    window: float = 600.0
    cooldown: float = 600.0


class Tls(Struct, frozen=True):
    """PEM files.  `cert` and `key` go together: what this node shows; `ca` signs the others' (None: the system's do).

    A coordinator with a `ca` wants every agent to show a certificate of it.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None


class Tracing(Struct, frozen=True):
    """The collector of the job's spans, for log lines; OpenTelemetry's SDK reads its own variables.

    `parent` has the ids of the trace and of the span that contain the job, in hexadecimal digits.
    """

    endpoint: str
    parent: tuple[str, str] | None = None


class Backend(Enum):
    """Where the coordinator is."""

    LOCAL = "local"  # in this process and for this node alone
    COORDINATOR = "c10d"  # at the endpoint, in whichever agent could bind it
    STATIC = "static"  # the same, with ranks and node count fixed by the user
    ETCD = "etcd"  # in whichever agent etcd has elected
    HANDLER = "handler"  # nowhere: nodes meet through a handler of another package


class Etcd(Redacted, frozen=True):
    """How to reach the etcd that elects the coordinator; a job's keys are below `PREFIX/RUN_ID/`.

    `ca` None: the system's authorities.  `cert` and `key` are this client's own, for an etcd that asks for them.
    `port` is where this node listens if it is elected; 0: any that is free.
    """

    endpoints: tuple[Address, ...]
    prefix: str
    tls: bool = False
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    user: str = ""
    password: str = ""
    port: int = 0


class Handler(Struct, frozen=True):
    """A rendezvous handler of torch's kind, by the name of its entry point, with what it is given."""

    name: str
    endpoint: str = ""
    conf: tuple[tuple[str, str], ...] = ()


LEAVING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # the signals that mean it, unless others are named


class Numa(Enum):
    """Which processors a worker is bound to; all are near the GPU that has the worker's local rank for its number."""

    NODE = "node"  # all of the GPU's NUMA node
    SOCKET = "socket"  # all of the GPU's socket
    EXCLUSIVE = "exclusive"  # a share of the node's cores that no other GPU's worker has
    CORE_COMPLEX = "core-complex"  # cores of the node that share a last-level cache


class Binding(Struct, frozen=True):
    """Where one worker runs: on these processors, with memory from this NUMA node first (None: wherever it is)."""

    cpus: tuple[int, ...]
    memory: int | None = None


class RunConfig(Redacted, frozen=True):
    """All of `ripstop run`."""

    entry: Entrypoint
    run_id: str
    min_nodes: int = 1
    max_nodes: int = 1
    target: int | None = None  # nodes to have at first; None: as many as there may be
    slots: int = 1
    role: str = "default"
    backend: Backend = Backend.LOCAL
    endpoint: Address | None = None
    etcd: Etcd | None = None
    handler: Handler | None = None
    is_host: bool | None = None  # None: whoever can bind the endpoint
    local_addr: str | None = None
    node_rank: int | None = None
    rank_by: RankBy = RankBy.JOIN
    node_number: int | None = None  # with rank_by=slot
    node_label: str = ""  # with rank_by=label
    store_port: int = 0  # 0: a new free port every round
    budget: Budget = field(default_factory=Budget)
    timing: Timing = field(default_factory=Timing)
    health: HealthLimits = field(default_factory=HealthLimits)
    quarantine: QuarantineLimits = field(default_factory=QuarantineLimits)
    hang_timeout: float = 0.0  # seconds without progress after which a worker is taken to hang; 0: never
    start: StartMethod = StartMethod.ZYGOTE
    preload: tuple[str, ...] | None = None  # None: what the script imports
    logs: Logs = field(default_factory=Logs)
    bindings: tuple[Binding, ...] = ()  # one for each local rank, or none at all
    virtual_local_rank: bool = False  # every worker is local rank 0, and its GPU is the only one that it sees
    signals: tuple[str, ...] = LEAVING
    event_handler: str = ""  # of torch's kind; "": none
    timer_pipe: Path | None = None  # on which workers set timers; None: they cannot
    tracing: Tracing | None = None  # None: no spans
    token: str = ""
    tls: Tls | None = None
    api: Address | None = None  # where a job on one node is steered over the network; None: nowhere
    probe_port: int | None = None  # where probes are answered; None: nowhere
    termination_log: Path | None = None  # the file for this agent's last word
    linger: bool = False  # stay when the job is over, until a signal comes
    notes: tuple[str, ...] = ()  # said once at the start: what was assumed, what has no effect


class CoordinatorConfig(Redacted, frozen=True):
    """All of `ripstop coordinator`: a coordinator of its own, without workers."""

    run_id: str
    endpoint: Address
    min_nodes: int = 1
    max_nodes: int = 1
    target: int | None = None
    rank_by: RankBy = RankBy.JOIN
    budget: Budget = field(default_factory=Budget)
    timing: Timing = field(default_factory=Timing)
    quarantine: QuarantineLimits = field(default_factory=QuarantineLimits)
    log_dir: Path | None = None  # for the job's events; None: they are not written
    tracing: Tracing | None = None
    token: str = ""
    tls: Tls | None = None
    notes: tuple[str, ...] = ()
